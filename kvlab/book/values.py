"""Where does this number come from? A value carries unit and origin, and refuses to exist without one."""

import math
from dataclasses import dataclass, field
from typing import Any

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
        return Value(abs(self._number()), self.unit, computed_from(f"|{self.label}|", self))


def describe(value: Value) -> str:
    """The origin in a line, for a tooltip."""
    leaves = "; ".join(s.text for s in value.origin.sources if s.text != value.origin.how)
    how = value.origin.how if value.origin.kind in ("computed", "measured") else ""
    if value.origin.kind == "measured":
        return f"measured while this page ran: {how}"
    return f"{value.origin.kind}: " + (f"{how}; from {leaves}" if how and leaves else how or leaves)


def computed_from(how: str, *inputs: Value, kind: str = "computed", atomic: bool = False) -> Origin:
    sources = dict.fromkeys(s for v in inputs for s in v.origin.sources)
    return Origin(kind, how, tuple(sources), atomic)


def _operand(x: object, beside: str) -> Value:
    if isinstance(x, Value):
        return x
    if isinstance(x, int) and not isinstance(x, bool) and x in _PLAIN:
        return Value(x, None, Origin("computed", str(x)))
    raise BadInput(f"{x!r} beside {beside}: a bare number has no origin; take it from {_MAKERS}")


def _pair(left: object, right: object) -> tuple[Value, Value]:
    known = left if isinstance(left, Value) else right
    return _operand(left, known.label), _operand(right, known.label)


def _sum(left: object, right: object, op: str) -> Value:
    a, c = _pair(left, right)
    unit = a.unit if isinstance(left, Value) else c.unit
    x = units.convert(a._number(), a.unit, unit)
    y = units.convert(c._number(), c.unit, unit)
    right_term = c._term() if op == "-" else c.label
    return Value(x + y if op == "+" else x - y, unit, computed_from(f"{a.label} {op} {right_term}", a, c))


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
    return Value(number, unit, computed_from(f"{a._term()} {'*' if sign > 0 else '/'} {c._term()}", a, c))
