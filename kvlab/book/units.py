"""How a value with a unit is converted and written: `64.6 ms`, `22.26 GB`, `67.6 %`, `4,956×`."""

import functools
import re
from fractions import Fraction
from typing import NamedTuple

from kvlab import units as b
from kvlab.errors import BadInput

NBSP = "\u00a0"
Scalar = int | float | str | bool


class Unit(NamedTuple):
    """A factor to base units and the exponents of (bytes, seconds); counts are pure numbers."""

    factor: Fraction
    dims: tuple[int, int]


_ONE = Unit(Fraction(1), (0, 0))
_KNOWN = {
    **{name: Unit(Fraction(n), (1, 0)) for name, n in [("B", 1), ("KB", b.KB), ("MB", b.MB), ("GB", b.GB)]},
    **{name: Unit(Fraction(n), (1, 0)) for name, n in [("TB", b.TB), ("KiB", b.KIB), ("MiB", b.MIB)]},
    "kB": Unit(Fraction(b.KB), (1, 0)),
    "GiB": Unit(Fraction(b.GIB), (1, 0)),
    "TiB": Unit(Fraction(2**40), (1, 0)),
    "s": Unit(Fraction(1), (0, 1)),
    "ms": Unit(Fraction(1, 10**3), (0, 1)),
    "us": Unit(Fraction(1, 10**6), (0, 1)),
    "ns": Unit(Fraction(1, 10**9), (0, 1)),
    "min": Unit(Fraction(60), (0, 1)),
    "h": Unit(Fraction(3600), (0, 1)),
    "%": Unit(Fraction(1, 100), (0, 0)),
    "x": _ONE,
    "1": _ONE,
}
_ALIASES = {"µs": "us", "μs": "us", "×": "x", "bytes": "B", "byte": "B", "percent": "%"}
_CANONICAL = {
    (0, 0): None,
    (1, 0): "B",
    (0, 1): "s",
    (1, -1): "B/s",
    (0, -1): "1/s",
    (-1, 0): "1/B",
    (-1, 1): "s/B",
}


@functools.cache
def parse(unit: str | None) -> Unit:
    """The unit's factor and dimension. A word that is no unit of bytes or time (`slots`) counts things."""
    found = _ONE
    for i, part in enumerate((unit or "1").split("/")):
        part = part.strip()
        one = _KNOWN.get(_ALIASES.get(part, part), _ONE)
        sign = -1 if i else 1
        found = Unit(
            found.factor * one.factor**sign,
            tuple(d + sign * e for d, e in zip(found.dims, one.dims, strict=True)),
        )
    return found


def convert(value: int | float, unit: str | None, to: str | None) -> int | float:
    """`value` in another unit of the same dimension; an integer stays one where the result is whole."""
    have, want = parse(unit), parse(to)
    if have.dims != want.dims:
        raise BadInput(f"a value in {unit or 'no unit'} cannot be written in {to or 'no unit'}")
    ratio = have.factor / want.factor
    if isinstance(value, int):
        exact = value * ratio
        return int(exact) if exact.denominator == 1 else float(exact)
    return value * ratio.numerator / ratio.denominator


def product(left: str | None, right: str | None, sign: int) -> tuple[str | None, Fraction]:
    """The unit of left * right (sign 1) or left / right (sign -1), and the factor the number takes with it.

    A count or a plain number leaves the other side's unit as it is: 576 B * 78 layers is in B.
    """
    a, c = parse(left), parse(right)
    dims = tuple(x + sign * y for x, y in zip(a.dims, c.dims, strict=True))
    if c.dims == (0, 0):
        if a.dims == (0, 0):
            return None, a.factor * c.factor**sign
        return left, c.factor**sign
    if a.dims == (0, 0) and sign == 1:
        return right, a.factor
    if dims not in _CANONICAL:
        raise BadInput(f"{left} {'*' if sign > 0 else '/'} {right}: a unit this book has no name for")
    return _CANONICAL[dims], a.factor * c.factor**sign


_NUMBER = re.compile(r"\+?,?(?:\.\d+)?[defg]?")


def split_spec(spec: str) -> tuple[str, str]:
    """A format `,.1f ms` as (number format, unit); either may be missing."""
    spec = spec.strip()
    head, _, rest = spec.partition(" ")
    if rest:
        if not _NUMBER.fullmatch(head):
            raise BadInput(f"format {spec!r}: {head!r} is no number format; write e.g. '.1f ms'")
        return head, rest.strip()
    return (spec, "") if _NUMBER.fullmatch(spec) else ("", spec)


def write(value: Scalar, unit: str | None, spec: str = "") -> str:
    """The value for a reader. `spec` is `[number format] [unit]`: `.1f ms`, `,`, `GiB`, `.1f %`, `both`.

    `both` gives `44.53 GB = 41.47 GiB`; the unit `-` leaves the unit out. Without a number format an integer
    is written in full, any other number to three significant digits.
    """
    number, wanted = split_spec(spec)
    if isinstance(value, str | bool):
        if number or wanted:
            raise BadInput(f"format {spec!r} asks {value!r} for a number")
        return str(value)
    if wanted == "both":
        if parse(unit).dims != (1, 0):
            raise BadInput(f"format 'both' is for bytes, this value is in {unit or 'no unit'}")
        return " = ".join(write(value, unit, f"{number or '.2f'} {u}") for u in ("GB", "GiB"))
    bare = wanted == "-"
    shown = unit if bare or not wanted else wanted
    n = convert(value, unit, shown)
    return _digits(n, number) + ("" if bare else _suffix(shown))


def _digits(n: int | float, number: str) -> str:
    if isinstance(n, float) and n.is_integer() and number in ("", ","):
        n = int(n)
    if number:
        return format(n, number).replace("-", "\u2212")
    if isinstance(n, int):
        return format(n, ",").replace("-", "\u2212")
    if n == 0 or abs(n) >= 1000:
        return format(n, ",.0f").replace("-", "\u2212")
    # Three significant digits, never an exponent.
    places = max(0, 2 - int(f"{abs(n):.2e}".partition("e")[2]))
    return format(n, f".{places}f").replace("-", "\u2212")


def _suffix(unit: str | None) -> str:
    if unit in (None, "1"):
        return ""
    if unit in ("x", "×"):
        return "×"
    return NBSP + ("µs" if unit == "us" else unit)


def to_tex(shown: str, *, words: bool = False) -> str:
    """What `write` gave, for math: `856.3\\,\\mathrm{MB}`."""
    if words:
        return f"\\text{{{shown}}}"
    out = []
    for part in shown.split(" = "):
        number, _, unit = part.partition(NBSP)
        number = number.replace(",", "{,}").replace("\u2212", "-").replace("×", "\\times ")
        unit = unit.replace("%", "\\%").replace("µ", "\\mu ")
        out.append(number + (f"\\,\\mathrm{{{unit}}}" if unit else ""))
    return " = ".join(out)
