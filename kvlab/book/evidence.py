"""Which numbers may a page start from? What runs recorded, what reports say, and its own parameters."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvlab import data
from kvlab.book.traced import Traced, unit_of, wrap
from kvlab.book.values import Origin, Source, Value
from kvlab.errors import BadInput


def recorded(
    path: str, key: str = "", *, unit: str | None = None, units_of: Mapping[str, str] | None = None
) -> Any:
    """What a run measured: `recorded("h200-stock/kernels.json", "rows[bs=1,ctx=100].fp8_fa3_us")`.

    `path` is under data/recorded; `key` steps through the JSON by `.name`, `[index]` and `[field=value,…]`
    (the one row that matches). A number comes as a Value, a list or object as a Traced. BadInput says which.
    """
    file = data.recorded(path)
    try:
        raw = json.loads(file.read_text("utf-8"))
    except OSError as e:
        raise BadInput(f"data/recorded/{path}: {e.strerror or e}") from None
    except ValueError as e:
        raise BadInput(f"data/recorded/{path}: not JSON ({e})") from None
    where = f"data/recorded/{path}"
    last = ""
    for step in _steps(key, where):
        raw, last = _follow(raw, step, where, key), step if not step.startswith("[") else last
    dotted = f".{key}" if key and not key.startswith("[") else key
    about = provenance_of(file)
    source = Source("recorded", f"{where}{' (' + about + ')' if about else ''}: {key}" if key else where)
    return wrap(raw, Origin("recorded", f"{path}{dotted}", (source,)), unit or unit_of(last), units_of)


def recorded_file(path: str) -> Traced:
    """A recorded file to hand to a function: `compute(trace.report, recorded_file("run/decode.json.gz"))`."""
    file = data.recorded(path)
    if not file.is_file():
        raise BadInput(f"data/recorded/{path}: no such file")
    about = provenance_of(file)
    text = f"data/recorded/{path}" + (f" ({about})" if about else "")
    return Traced(file, Origin("recorded", path, (Source("recorded", text),)))


def _steps(key: str, where: str) -> list[str]:
    steps = re.findall(r"\[[^\]]*\]|[^.\[\]]+", key)
    if "".join(steps) != key.replace(".", ""):
        raise BadInput(f"{where}: {key!r} is no key; write e.g. rows[what=decode,bs=1].us")
    return steps


def _follow(raw: Any, step: str, where: str, key: str) -> Any:
    if not step.startswith("["):
        if isinstance(raw, Mapping) and step in raw:
            return raw[step]
        has = ", ".join(map(str, raw)) if isinstance(raw, Mapping) else f"a {type(raw).__name__}"
        raise BadInput(f"{where}: no {step!r} in {key!r}; there is {has}")
    inner = step[1:-1]
    if not isinstance(raw, list):
        raise BadInput(f"{where}: {step} in {key!r} wants a list, there is a {type(raw).__name__}")
    if re.fullmatch(r"-?\d+", inner):
        try:
            return raw[int(inner)]
        except IndexError:
            raise BadInput(f"{where}: {step} in {key!r}, but the list has {len(raw)} entries") from None
    wanted = dict(p.split("=", 1) for p in inner.split(",") if "=" in p)
    rows = [r for r in raw if isinstance(r, Mapping) and all(str(r.get(k)) == v for k, v in wanted.items())]
    if len(rows) != 1 or not wanted:
        raise BadInput(f"{where}: {step} in {key!r} matches {len(rows)} rows, not one")
    return rows[0]


def provenance_of(file: Path) -> str:
    """One line about a recorded run: GPU, versions and date from its provenance, else its README's title."""
    for candidate in (file.with_name("provenance.json"), file):
        if candidate.suffix != ".json" or not candidate.is_file():
            continue
        try:
            found = json.loads(candidate.read_text("utf-8"))
        except ValueError:
            continue
        found = (
            found
            if candidate.name == "provenance.json"
            else (found.get("provenance") if isinstance(found, dict) else None)
        )
        if isinstance(found, dict):
            gpus = ", ".join(dict.fromkeys(found.get("gpus") or [])) or "CPU"
            versions = found.get("versions") or {}
            named = [f"{p} {versions[p]}" for p in ("sglang", "flashinfer-python", "torch") if p in versions]
            return ", ".join([gpus, *named, str(found.get("date", ""))[:10]]).rstrip(", ")
    readme = file.with_name("README.md")
    if readme.is_file():
        return readme.read_text("utf-8").splitlines()[0].lstrip("# ").strip()
    return ""


def reported(claim: str, also: str = "") -> Value:
    """What the source text or another public report says, by its id in data/reported/{claims,elsewhere}.yml.

    `also` names a further figure of the same quote or report.
    """
    ledger, reports = claims(), elsewhere()
    entry = ledger.get(claim) or reports.get(claim)
    if entry is None:
        raise BadInput(
            f"data/reported: no claim or report {claim!r}; there are {', '.join([*ledger, *reports])}"
        )
    where = f"data/reported/{'claims' if claim in ledger else 'elsewhere'}.yml"
    value = (entry.get("also") or {}).get(also) if also else entry.get("value")
    if value is None:
        what = f"no further figure {also!r}" if also else "no value"
        raise BadInput(f"{where}: {claim!r} has {what}")
    name = f"{claim}.{also}" if also else claim
    words = f"“{entry['quote']}”" if "quote" in entry else f"{entry['source']}, {entry['quantity']}"
    source = Source("reported", f"{where}, {name}: {words}")
    unit = None if also else _claim_unit(entry.get("unit"))
    return Value(value, unit, Origin("reported", f"reported.{name}", (source,)))


def claims() -> dict[str, dict]:
    """The ledger of the source text, by id."""
    return _entries("claims.yml", "claims")


def elsewhere() -> dict[str, dict]:
    """What public reports of the same fault say, by id."""
    return _entries("elsewhere.yml", "reports")


def _entries(name: str, key: str) -> dict[str, dict]:
    import yaml

    try:
        found = yaml.safe_load(data.reported(name).read_text("utf-8"))
    except OSError as e:
        raise BadInput(f"data/reported/{name}: {e.strerror or e}") from None
    except yaml.YAMLError as e:
        raise BadInput(f"data/reported/{name}: not YAML ({' '.join(str(e).split())})") from None
    entries: Sequence[dict] = found[key] if isinstance(found, dict) else found
    return {str(e["id"]): e for e in entries}


def _claim_unit(unit: str | None) -> str | None:
    return None if unit in (None, "", "1") else unit


def parameter(name: str, *, unit: str | None = None) -> Value:
    """The parameter `name` of this page's `parameters` cell, as papermill set it."""
    scope = _user_namespace()
    if name not in scope:
        raise BadInput(
            f"parameter({name!r}): this page has no such parameter; define it in the parameters cell"
        )
    origin = Origin("parameter", name, (Source("parameter", f"parameter {name} of this page"),))
    return wrap(scope[name], origin, unit)


def _user_namespace() -> Mapping[str, Any]:
    from IPython import get_ipython

    shell = get_ipython()
    if shell is None:
        raise BadInput("parameter() works on a page of the book, not outside Jupyter")
    return shell.user_ns
