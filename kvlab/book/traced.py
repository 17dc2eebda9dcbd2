"""How do numbers inside structures, and what functions make of them, keep their origin?"""

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvlab.book.values import Origin, Source, Value, computed_from

_FIELD_UNITS = [
    ("B", r"(^|_)bytes($|_per_)|^bytes_"),
    ("ms", r"(^|_)ms($|_per_)"),
    ("us", r"(^|_)us($|_per_)"),
    ("ns", r"(^|_)ns($|_per_)"),
    ("1/s", r"[^_]_per_s$"),
    ("s", r"(^|_)(s|seconds)($|_per_)"),
]


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
    origin = computed_from(how, *inputs, kind=kind, atomic=True)
    if kind == "measured":
        origin = Origin(
            kind, how, (Source("measured", f"measured while this page ran: {how}"), *origin.sources)
        )
    return wrap(fn(*map(plain_of, args), **plain_of(kwargs)), origin, unit)


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


@functools.cache
def unit_of(name: str) -> str | None:
    """The unit that a field's name states: pool_bytes, step_ms, us_per_call, bytes_per_copy."""
    for unit, pattern in _FIELD_UNITS:
        if re.search(pattern, name):
            return unit
    return None


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
