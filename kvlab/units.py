"""Bytes for people: GB is 10^9, GiB is 2^30, and where a reader could confuse them both are shown."""

KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12
KIB, MIB, GIB = 2**10, 2**20, 2**30

_SUFFIXES = {
    "B": 1,
    "KB": KB,
    "MB": MB,
    "GB": GB,
    "TB": TB,
    "KIB": KIB,
    "MIB": MIB,
    "GIB": GIB,
    "TIB": 2**40,
}


def parse_bytes(text: str, *, name: str = "size") -> int:
    """Bytes from `61GiB`, `25.5 GB` or `1024`; raises BadInput naming the argument."""
    import re
    from decimal import Decimal

    from kvlab.errors import BadInput

    m = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    factor = _SUFFIXES.get(m[2].upper() or "B") if m else None
    if not m or factor is None:
        raise BadInput(f"{name}: {text!r} is not a size; write bytes or a unit, e.g. 61GiB or 25.5GB")
    # Past any machine's memory; numbers without end are shown by neither JSON nor a table.
    if len(m[1]) > 40 or (size := int(Decimal(m[1]) * factor)) > 10**30:
        raise BadInput(f"{name}: {text[:20]!r}… is no machine's memory; write bytes or a unit, e.g. 61GiB")
    return size


def both(n: int) -> str:
    """`44.53 GB = 41.47 GiB`."""
    return f"{n / GB:.2f} GB = {n / GIB:.2f} GiB"
