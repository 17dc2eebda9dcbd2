"""Where does this number come from? Values that carry their origin, and refuse to exist without one."""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvlab import data
from kvlab import units as byte_units
from kvlab.book import units
from kvlab.errors import BadInput

_MAKERS = "recorded(), reported(), compute(), measured() or parameter()"
KINDS = ("recorded", "reported", "computed", "measured", "parameter")
# Exact conversion factors; every other number needs an origin of its own.
_PLAIN = {0, 1, 2} | {getattr(byte_units, n) for n in ("KB", "MB", "GB", "TB", "KIB", "MIB", "GIB")}


@dataclass(frozen=True)
class Source:
    """A leaf of an origin: a recorded file's key, a claim, a parameter, a function of kvlab."""

    kind: str
    text: str


@dataclass(frozen=True)
class Origin:
    """`kind` of KINDS, `how` (an expression or a call, in words) and the leaves that it rests on."""

    kind: str
    how: str
    sources: tuple[Source, ...] = ()
    atomic: bool = True


@dataclass(frozen=True, eq=False)
class Value:
    """A number (or a name) with its unit and origin, from recorded, reported, compute, measured, parameter.

    Arithmetic gives computed Values that remember their inputs; a bare number other than 0, 1, 2 and the byte
    factors of kvlab.units is refused with BadInput, as is adding bytes to seconds.
    """

    value: units.Scalar
    unit: str | None = None
    origin: Origin = field(default=None)
    name: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.origin, Origin):
            raise BadInput(f"{self.value!r} has no origin: take it from {_MAKERS}")
        if not isinstance(self.value, int | float | str | bool):
            raise BadInput(
                f"{self.origin.how}: {type(self.value).__name__} is no number, name or truth value"
            )
        if isinstance(self.value, float) and not math.isfinite(self.value):
            raise BadInput(f"{self.origin.how} is {self.value}, which is no figure to print")

    def with_unit(self, unit: str) -> "Value":
        """The same value, its unit stated where it has none; `1/s` may become `tok/s`, bytes never ms."""
        if self.unit is not None and units.parse(self.unit) != units.parse(unit):
            raise BadInput(f"{self.label} is in {self.unit}, not {unit}; to() converts")
        return Value(self.value, unit, self.origin, self.name)

    def to(self, unit: str) -> "Value":
        """The same quantity in another unit of its dimension."""
        return Value(units.convert(self._number(), self.unit, unit), unit, self.origin, self.name)

    @property
    def label(self) -> str:
        return self.name or self.origin.how

    def _term(self) -> str:
        return self.label if self.name or self.origin.atomic else f"({self.label})"

    def _number(self) -> int | float:
        if isinstance(self.value, str | bool):
            raise BadInput(f"{self.label} is {self.value!r}, not a number")
        return self.value

    def __format__(self, spec: str) -> str:
        return units.write(self.value, self.unit, spec)

    def __str__(self) -> str:
        return format(self)

    def __repr__(self) -> str:
        return f"<{format(self)}: {self.origin.how}>"

    def _repr_html_(self) -> str:
        from html import escape

        return f'<span class="kv-n" title="{escape(describe(self))}">{escape(format(self))}</span>'

    def __float__(self) -> float:
        return float(self._number())

    def __int__(self) -> int:
        return int(self._number())

    def __index__(self) -> int:
        if not isinstance(self.value, int):
            raise TypeError(f"{self.label} is {self.value!r}, not an integer")
        return self.value

    def __bool__(self) -> bool:
        return bool(self.value)

    def __hash__(self) -> int:
        return hash((self.value, self.unit))

    def _compare(self, other: object) -> tuple[Any, Any]:
        if isinstance(other, Value):
            if isinstance(self.value, str) or isinstance(other.value, str):
                return self.value, other.value
            return self.value, units.convert(other._number(), other.unit, self.unit)
        return self.value, other

    def __eq__(self, other: object) -> bool:
        a, c = self._compare(other)
        return bool(a == c)

    def __lt__(self, other: object) -> bool:
        a, c = self._compare(other)
        return a < c

    def __le__(self, other: object) -> bool:
        a, c = self._compare(other)
        return a <= c

    def __gt__(self, other: object) -> bool:
        a, c = self._compare(other)
        return a > c

    def __ge__(self, other: object) -> bool:
        a, c = self._compare(other)
        return a >= c

    def __add__(self, other: object) -> "Value":
        return _sum(self, other, "+")

    def __radd__(self, other: object) -> "Value":
        return self if isinstance(other, int) and other == 0 else _sum(other, self, "+")

    def __sub__(self, other: object) -> "Value":
        return _sum(self, other, "-")

    def __rsub__(self, other: object) -> "Value":
        return _sum(other, self, "-")

    def __mul__(self, other: object) -> "Value":
        return _product(self, other, 1)

    def __rmul__(self, other: object) -> "Value":
        return _product(other, self, 1)

    def __truediv__(self, other: object) -> "Value":
        return _product(self, other, -1)

    def __rtruediv__(self, other: object) -> "Value":
        return _product(other, self, -1)

    def __neg__(self) -> "Value":
        return _sum(0, self, "-")

    def __abs__(self) -> "Value":
        return Value(abs(self._number()), self.unit, _computed(f"|{self.label}|", self))


def _operand(x: object, beside: str) -> Value:
    if isinstance(x, Value):
        return x
    if isinstance(x, int) and not isinstance(x, bool) and x in _PLAIN:
        return Value(x, None, Origin("computed", str(x)))
    raise BadInput(f"{x!r} beside {beside}: a bare number has no origin; take it from {_MAKERS}")


def _pair(left: object, right: object) -> tuple[Value, Value]:
    known = left if isinstance(left, Value) else right
    return _operand(left, known.label), _operand(right, known.label)


def _computed(how: str, *inputs: "Value", kind: str = "computed", atomic: bool = False) -> Origin:
    sources = dict.fromkeys(s for v in inputs for s in v.origin.sources)
    return Origin(kind, how, tuple(sources), atomic)


def _sum(left: object, right: object, op: str) -> Value:
    a, c = _pair(left, right)
    unit = a.unit if isinstance(left, Value) else c.unit
    x = units.convert(a._number(), a.unit, unit)
    y = units.convert(c._number(), c.unit, unit)
    right_term = c._term() if op == "-" else c.label
    return Value(x + y if op == "+" else x - y, unit, _computed(f"{a.label} {op} {right_term}", a, c))


def _product(left: object, right: object, sign: int) -> Value:
    a, c = _pair(left, right)
    unit, factor = units.product(a.unit, c.unit, sign)
    x, y = a._number(), c._number()
    if sign < 0 and y == 0:
        raise BadInput(f"{a.label} / {c.label}: the divisor is 0")
    if isinstance(x, int) and isinstance(y, int) and sign > 0:
        number = units.convert(x * y, None, None)
    else:
        number = x * y if sign > 0 else x / y
    if factor != 1:
        number = (
            int(number * factor)
            if isinstance(number, int) and (number * factor).denominator == 1
            else float(number) * factor.numerator / factor.denominator
        )
    return Value(number, unit, _computed(f"{a._term()} {'*' if sign > 0 else '/'} {c._term()}", a, c))


class Traced:
    """A structure (dict, list, struct, object) whose numbers come out as Values with this origin."""

    def __init__(self, raw: object, origin: Origin, units_of: Mapping[str, str] | None = None) -> None:
        self._raw, self._origin, self._units = raw, origin, dict(units_of or {})

    @property
    def raw(self) -> object:
        """The structure itself, its numbers bare."""
        return self._raw

    def _step(self, child: object, step: str, name: str = "") -> Any:
        how = self._origin.how + step
        sources = tuple(
            Source(s.kind, s.text + step) if s.kind == "recorded" and self._origin.kind == "recorded" else s
            for s in self._origin.sources
        )
        return wrap(
            child,
            Origin(self._origin.kind, how, sources),
            self._units.get(name) or unit_of(name),
            self._units,
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raw = self._raw
        if isinstance(raw, Mapping):
            if name in raw:
                return self._step(raw[name], f".{name}", name)
            raise AttributeError(f"{self._origin.how} has no {name!r}; it has {', '.join(map(str, raw))}")
        child = getattr(raw, name)
        if callable(child) and not isinstance(child, type):
            return lambda *a, **k: compute(_named(child, f"{self._origin.how}.{name}"), *a, **k)
        return self._step(child, f".{name}", name)

    def __getitem__(self, key: Any) -> Any:
        plain = plain_of(key)
        step = f".{plain}" if isinstance(plain, str) else f"[{plain}]"
        return self._step(self._raw[plain], step, plain if isinstance(plain, str) else "")

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self._raw, Mapping):
            return iter(self._raw)
        return (self._step(x, f"[{i}]") for i, x in enumerate(self._raw))

    def items(self) -> Iterator[tuple[str, Any]]:
        """Of a mapping: its keys and traced values."""
        return ((k, self[k]) for k in self._raw)

    def __len__(self) -> int:
        return len(self._raw)

    def __contains__(self, key: object) -> bool:
        return plain_of(key) in self._raw

    def __bool__(self) -> bool:
        return bool(self._raw)

    def __repr__(self) -> str:
        return f"<{type(self._raw).__name__}: {self._origin.how}>"


def _named(fn: Callable, name: str) -> Callable:
    def call(*a: Any, **k: Any) -> Any:
        return fn(*a, **k)

    call.__qualname__, call.__module__ = name, ""
    return call


def unit_of(name: str) -> str | None:
    """The unit that a field's name states: pool_bytes, step_ms, us_per_call, bytes_per_copy."""
    for unit, pattern in _FIELD_UNITS:
        if re.search(pattern, name):
            return unit
    return None


_FIELD_UNITS = [
    ("B", r"(^|_)bytes($|_per_)|^bytes_"),
    ("ms", r"(^|_)ms($|_per_)"),
    ("us", r"(^|_)us($|_per_)"),
    ("ns", r"(^|_)ns($|_per_)"),
    ("1/s", r"[^_]_per_s$"),
    ("s", r"(^|_)(s|seconds)($|_per_)"),
]


def wrap(
    raw: object, origin: Origin, unit: str | None = None, units_of: Mapping[str, str] | None = None
) -> Any:
    """A Value for a number or name, None for None, a Traced for anything with parts."""
    if raw is None or isinstance(raw, Value | Traced):
        return raw
    if hasattr(raw, "item") and getattr(raw, "ndim", None) == 0:
        raw = raw.item()
    if isinstance(raw, bool | int | float | str):
        return Value(raw, None if isinstance(raw, bool | str) else unit, origin)
    return Traced(raw, origin, units_of)


def plain_of(x: Any) -> Any:
    """The bare object inside Values, Traced structures and lists, tuples or dicts of them."""
    if isinstance(x, Value):
        return x.value
    if isinstance(x, Traced):
        return x.raw
    if isinstance(x, list | tuple) and not hasattr(x, "_fields"):
        return type(x)(plain_of(y) for y in x)
    if isinstance(x, dict):
        return {k: plain_of(v) for k, v in x.items()}
    return x


def _inputs(x: Any) -> Iterator[Value]:
    if isinstance(x, Value):
        yield x
    elif isinstance(x, Traced):
        yield Value(0, None, x._origin)
    elif isinstance(x, list | tuple):
        for y in x:
            yield from _inputs(y)
    elif isinstance(x, dict):
        for y in x.values():
            yield from _inputs(y)


def _call(fn: Callable, args: tuple, kwargs: dict) -> str:
    name = ".".join(p for p in (getattr(fn, "__module__", ""), getattr(fn, "__qualname__", "")) if p)
    name = (
        (name or repr(fn))
        .replace("builtins.", "")
        .replace("__main__.", "")
        .replace("<lambda>", "a formula of the page")
    )

    def arg(x: Any) -> str:
        if isinstance(x, Value):
            return x.label
        if isinstance(x, Traced):
            return x._origin.how
        if isinstance(x, list | tuple) and len(x) > 3:
            return f"{len(x)} values"
        if isinstance(x, list | tuple):
            return "[" + ", ".join(map(arg, x)) + "]"
        if isinstance(x, Path):
            return x.name
        text = repr(x)
        return text if len(text) <= 60 else type(x).__name__

    parts = [arg(a) for a in args] + [f"{k}={arg(v)}" for k, v in kwargs.items()]
    return f"{name}({', '.join(parts)})"


def compute(fn: Callable, *args: Any, unit: str | None = None, **kwargs: Any) -> Any:
    """`fn(*args, **kwargs)` with its result traced: a Value for a number, a Traced for a structure.

    Values among the arguments are handed over bare and remembered as inputs.
    """
    return _traced_call("computed", fn, args, kwargs, unit)


def measured(fn: Callable, *args: Any, unit: str | None = None, **kwargs: Any) -> Any:
    """As compute, for a function that measures on this host while the page runs."""
    return _traced_call("measured", fn, args, kwargs, unit)


def _traced_call(kind: str, fn: Callable, args: tuple, kwargs: dict, unit: str | None) -> Any:
    how = _call(fn, args, kwargs)
    inputs = [*_inputs(args), *_inputs(kwargs)]
    origin = _computed(how, *inputs, kind=kind, atomic=True)
    if kind == "measured":
        origin = Origin(
            kind, how, (Source("measured", f"measured while this page ran: {how}"), *origin.sources)
        )
    return wrap(fn(*map(plain_of, args), **plain_of(kwargs)), origin, unit)


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
    """What the source text or a public report says: the claim of that id in data/reported/claims.yml.

    `also` names a further figure of the same quote.
    """
    entry = claims().get(claim)
    if entry is None:
        raise BadInput(f"data/reported/claims.yml: no claim {claim!r}; there are {', '.join(claims())}")
    value = (entry.get("also") or {}).get(also) if also else entry.get("value")
    if value is None:
        what = f"no further figure {also!r}" if also else "no value"
        raise BadInput(f"data/reported/claims.yml: claim {claim!r} has {what}")
    name = f"{claim}.{also}" if also else claim
    source = Source("reported", f"data/reported/claims.yml, {name}: “{entry.get('quote', '')}”")
    unit = None if also else _claim_unit(entry.get("unit"))
    return Value(value, unit, Origin("reported", f"reported.{name}", (source,)))


def claims() -> dict[str, dict]:
    """The ledger, by id."""
    import yaml

    file = data.reported("claims.yml")
    try:
        ledger = yaml.safe_load(file.read_text("utf-8"))
    except OSError as e:
        raise BadInput(f"data/reported/claims.yml: {e.strerror or e}") from None
    except yaml.YAMLError as e:
        raise BadInput(f"data/reported/claims.yml: not YAML ({' '.join(str(e).split())})") from None
    entries: Sequence[dict] = ledger["claims"] if isinstance(ledger, dict) else ledger
    return {str(e["id"]): e for e in entries}


def _claim_unit(unit: str | None) -> str | None:
    return None if unit in (None, "", "1") else unit


def describe(value: Value) -> str:
    """The origin in a line, for a tooltip."""
    leaves = "; ".join(s.text for s in value.origin.sources if s.text != value.origin.how)
    how = value.origin.how if value.origin.kind in ("computed", "measured") else ""
    if value.origin.kind == "measured":
        return f"measured while this page ran: {how}"
    return f"{value.origin.kind}: " + (f"{how}; from {leaves}" if how and leaves else how or leaves)


_exported: dict[str, Value] = {}


class Exported:
    """What export() shows in a notebook; the page itself does not print it."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict, dict]:
        from html import escape

        rows = "".join(
            "<tr>" + "".join(f"<td>{escape(x)}</td>" for x in (n, str(v), describe(v))) + "</tr>"
            for n, v in ((n, _exported[n]) for n in self.names)
        )
        return {"text/plain": ", ".join(self.names), "text/html": f"<table>{rows}</table>"}, {
            "kvlab": {"export": True}
        }


def export(**values: Value) -> Exported:
    """Name values for the page's text: `export(cast_ms=…)` makes {n}`cast_ms` resolve; no origin, no name."""
    for name, value in values.items():
        if not isinstance(value, Value):
            raise BadInput(f"export({name}=…): {value!r} has no origin")
        before = _exported.get(name)
        if before is not None and (before.value, before.unit, before.origin) != (
            value.value,
            value.unit,
            value.origin,
        ):
            raise BadInput(f"export({name}=…): this page already exports {name} as {before!r}")
        _exported[name] = value
        # Later expressions say `step_ms - cast_ms` instead of spelling both out again.
        object.__setattr__(value, "name", name)
    return Exported(list(values))


def exported() -> dict[str, dict]:
    """Everything this page exported, as plain data."""
    return {name: to_dict(v) for name, v in _exported.items()}


def to_dict(v: Value) -> dict[str, Any]:
    return {
        "value": v.value,
        "unit": v.unit,
        "kind": v.origin.kind,
        "how": v.origin.how,
        "sources": [[s.kind, s.text] for s in v.origin.sources],
        "describe": describe(v),
    }


def from_dict(name: str, d: Mapping[str, Any]) -> Value:
    sources = tuple(Source(*s) for s in d["sources"])
    return Value(d["value"], d["unit"], Origin(d["kind"], d["how"], sources), name)
