"""What `kvlab suspects --live` measures, as data; reading a recorded run needs no torch."""

import msgspec

from kvlab.provenance import Provenance


class Product(msgspec.Struct, frozen=True, kw_only=True):
    """One matrix product at its decode shape, `times` a step.

    `us` is one product with the weights out of the L2 cache, `bytes` those it reads; `us` is None where this
    card cannot run the format, and `reason` says why.
    """

    name: str
    part: str
    format: str
    m: int
    n: int
    k: int
    groups: int
    times: int
    bytes: int
    us: float | None
    reason: str | None = None


class Small(msgspec.Struct, frozen=True, kw_only=True):
    """A small kernel or chain of them, `times` a step; `suspect` is whose it is."""

    name: str
    suspect: str
    times: int
    us: float


class Reduce(msgspec.Struct, frozen=True, kw_only=True):
    """One all-reduce of `bytes` on each of `ranks` ranks, BF16; `graph`: replayed from a CUDA graph."""

    ranks: int
    bytes: int
    us: float
    backend: str
    graph: bool
    correct: bool


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Everything timed at one batch."""

    batch: int
    products: list[Product]
    small: list[Small]


class LiveRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run: `tp` divides the model's shape; `reduces` has every number of ranks that the host could run.

    `copy_bandwidth` is a device copy's, bytes a second; `kernel_us` one tiny kernel of a CUDA graph.
    """

    provenance: Provenance
    device: str
    model: str
    tp: int
    copy_bandwidth: float
    kernel_us: float
    shapes: list[Shape]
    reduces: list[Reduce]
    reduces_skipped: list[str]


def step_ms(run: LiveRun, suspect: str, *, batch: int, fmt: str) -> float | None:
    """Milliseconds a step of one suspect, its parts run alone; None where the run did not measure it."""
    shape = next((s for s in run.shapes if s.batch == batch), None)
    if shape is None:
        return None
    if suspect in ("gemm", "experts"):
        found = [
            p for p in shape.products if (p.part == "experts") == (suspect == "experts") and p.format == fmt
        ]
        if not found or any(p.us is None for p in found):
            return None
        return sum(p.times * (p.us or 0.0) for p in found) / 1e3
    small = [s for s in shape.small if s.suspect == suspect]
    return sum(s.times * s.us for s in small) / 1e3 if small else None


def reduce_us(run: LiveRun, ranks: int, size: int) -> float | None:
    """The measured all-reduce of exactly that size, None without one."""
    for found in run.reduces:
        if (found.ranks, found.bytes) == (ranks, size) and found.correct:
            return found.us
    return None
