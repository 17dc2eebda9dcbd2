"""What must each part of a decode step cost? Bytes, operations, launches and messages over rates."""

from fractions import Fraction

import msgspec

from kvlab.gpus import Gpu
from kvlab.models import MlaGeometry, rank
from kvlab.suspects.shapes import MLP_PARTS, PARTS, Linear, linears
from kvlab.weights import FORMATS

SUSPECTS: dict[str, str] = {
    "gemm": "GEMM: projections, dense MLPs, router, head",
    "experts": "GEMM of the routed experts",
    "routing": "MoE routing",
    "communication": "all-reduce",
    "attention": "attention",
    "elementwise": "norms and activations",
    "kv_write": "KV write",
    "launches": "launches, gaps between kernels",
    "other": "sampling and the rest",
    "cast": "cast of the KV cache",
}
"""Every suspect, in the order in which they are asked."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of one step: what runs, on which card, and what is assumed about the host.

    `mlp` and `other` are formats (kvlab.weights.FORMATS): of experts and dense MLPs, and of all else.
    `launches` has the kernels of a step by suspect, `kernel_us` what one takes at least, `gap_us` what the
    GPU may wait between two, and `host_ms` what a step may wait for the host (without CUDA graphs). Times are
    microseconds where the name says so; bandwidths bytes a second.
    """

    name: str
    geometry: MlaGeometry
    gpu: Gpu
    tp: int
    batch: int
    context: int
    slots: int
    mlp: str
    other: str
    bandwidth: float
    launches: dict[str, float]
    kernel_us: float
    gap_us: float
    row_bytes: int
    casts: bool = True
    host_ms: float = 0.0
    algorithm: str = "ring"
    link_bandwidth: float = 0.0
    link_base_us: float = 0.0
    link_hop_us: float = 0.0


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """The least that one suspect can cost in a step; `by` says what binds."""

    ms: float
    by: str
    bytes: int = 0
    flops: int = 0
    launches: float = 0
    expected_ms: float = 0.0
    """What it took in the recorded H200 step, for the one suspect that nothing bounds: the launches."""
    parts: dict[str, float] = {}
    """Milliseconds by part, where a suspect has several."""


def bounds(case: Case) -> dict[str, Bound]:
    """The bound of every suspect (SUSPECTS), for the work that a step must do.

    The cast's is that of the active rows. Raises BadInput where the shape does not say enough.
    """
    gemms = linears(case.geometry, tp=case.tp, batch=case.batch)
    parts = {part: _linear(case, part, [x for x in gemms if x.part == part]) for part in PARTS}
    dense = [p for p in PARTS if p != "experts"]
    return {
        "gemm": _sum([parts[p] for p in dense], dense, case.launches.get("gemm", 0)),
        "experts": msgspec.structs.replace(parts["experts"], launches=case.launches.get("experts", 0)),
        "routing": _launched(case, "routing"),
        "communication": _communication(case),
        "attention": _attention(case),
        "elementwise": _elementwise(case),
        "kv_write": _launched(case, "kv_write"),
        "launches": Bound(
            ms=0.0,
            by="the host" if case.host_ms else "nothing",
            launches=sum(case.launches.values()),
            expected_ms=sum(case.launches.values()) * case.gap_us / 1e3 + case.host_ms,
        ),
        "other": _launched(case, "other"),
        "cast": _cast(case, case.batch * case.context),
    }


def full_cast_ms(case: Case) -> float:
    """What casting the whole pool, in every layer, costs at the card's bandwidth."""
    return _cast(case, case.slots).ms


def weight_bytes(case: Case, part: str, weights: float) -> int:
    """Bytes of that many weights in the part's format, scales included."""
    fmt = case.mlp if part in MLP_PARTS else case.other
    return int(FORMATS[fmt] * Fraction(weights) / 8)


def peak(case: Case, part: str) -> int | None:
    """flop/s of the part's format, BF16's where the card lacks it; None: not on the sheet."""
    fmt = case.mlp if part in MLP_PARTS else case.other
    return case.gpu.tensor.get(fmt, case.gpu.tensor.get("bf16"))


def all_reduce_us(
    algorithm: str, ranks: int, size: int, *, bandwidth: float, base_us: float, hop_us: float
) -> float:
    """One all-reduce of `size` bytes a rank, at least.

    `ring`: 2(n-1) hops, each rank sends 2(n-1)/n of the message. `one-shot`: every rank reads all others' in
    one hop. `base_us` is the cost of the call itself.
    """
    if ranks == 1:
        return 0.0
    if algorithm == "ring":
        hops, sent = 2 * (ranks - 1), 2 * (ranks - 1) / ranks * size
    else:
        hops, sent = 1, (ranks - 1) * size
    return base_us + hops * hop_us + 1e6 * sent / bandwidth


def message_bytes(case: Case) -> int:
    """One all-reduce: the hidden states of the batch in BF16."""
    return case.batch * (case.geometry.hidden_size or 0) * 2


def all_reduces(case: Case) -> int:
    """A step's: after attention and after the MLP of each layer, and after the split embedding."""
    return 2 * case.geometry.attention_layers + 1 if case.tp > 1 else 0


def _linear(case: Case, part: str, found: list[Linear]) -> Bound:
    size = weight_bytes(case, part, sum(x.weights for x in found))
    flops = sum(x.flops for x in found)
    rate = peak(case, part)
    return _roof(size, flops, case.bandwidth, rate)


def _roof(size: float, flops: float, bandwidth: float, rate: float | None) -> Bound:
    by_bytes = 1e3 * size / bandwidth
    by_flops = 1e3 * flops / rate if rate else 0.0
    return Bound(
        ms=max(by_bytes, by_flops),
        by="bytes" if by_bytes >= by_flops else "operations",
        bytes=int(size),
        flops=int(flops),
    )


def _sum(found: list[Bound], names: list[str], launches: float) -> Bound:
    widest = max(found, key=lambda b: b.ms)
    return Bound(
        ms=sum(b.ms for b in found),
        by=widest.by,
        bytes=sum(b.bytes for b in found),
        flops=sum(b.flops for b in found),
        launches=launches,
        parts={name: b.ms for name, b in zip(names, found, strict=True)},
    )


def _launched(case: Case, name: str) -> Bound:
    count = case.launches.get(name, 0)
    return Bound(ms=count * case.kernel_us / 1e3, by="launches", launches=count)


def _at_least(bound: Bound, case: Case, name: str) -> Bound:
    """`bound`, or what its launches alone take."""
    launched = _launched(case, name)
    bound = msgspec.structs.replace(bound, launches=launched.launches)
    return bound if bound.ms >= launched.ms else msgspec.structs.replace(bound, ms=launched.ms, by="launches")


def _attention(case: Case) -> Bound:
    g = case.geometry
    rows = case.batch * case.context * g.attention_layers
    heads = rank(g, tp=case.tp).heads
    flops = 2 * rows * heads * (g.latent_dim + g.kv_lora_rank)
    return _at_least(
        _roof(rows * case.row_bytes, flops, case.bandwidth, case.gpu.tensor.get("bf16")), case, "attention"
    )


def _elementwise(case: Case) -> Bound:
    """Two residual adds with a norm a layer: two vectors of the hidden size read, two written."""
    g = case.geometry
    size = 2 * g.attention_layers * 4 * message_bytes(case)
    return _at_least(_roof(size, 0, case.bandwidth, None), case, "elementwise")


def _cast(case: Case, rows: int) -> Bound:
    if not case.casts:
        return Bound(ms=0.0, by="nothing to cast")
    each = case.row_bytes + 2 * case.geometry.latent_dim
    return _roof(rows * each * case.geometry.attention_layers, 0, case.bandwidth, None)


def _communication(case: Case) -> Bound:
    if case.tp == 1:
        return Bound(ms=0.0, by="one rank: none")
    size = message_bytes(case)
    us = all_reduce_us(
        case.algorithm,
        case.tp,
        size,
        bandwidth=case.link_bandwidth,
        base_us=case.link_base_us,
        hop_us=case.link_hop_us,
    )
    count = all_reduces(case)
    return Bound(ms=count * us / 1e3, by="latency and link", bytes=count * size, launches=count)
