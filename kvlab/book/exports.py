"""Which values does a page's text name? Those that its cells exported, as plain data in the executed page."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvlab.book.values import Origin, Source, Value, describe
from kvlab.errors import BadInput

_exported: dict[str, Value] = {}


def export(**values: Value) -> "Exported":
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
