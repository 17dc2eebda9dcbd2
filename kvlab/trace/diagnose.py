"""Is it the full-pool KV cast? Recognised and sized from the trace alone.

The signature: a copy that changes the dtype, a whole number of times a layer and just before its attention
kernel, each launch of one shape and one duration, and far larger than anything a decode step has to convert.
"""

import re
import statistics
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from kvlab.trace.classes import Kind, classify
from kvlab.trace.steps import Step, attention_names
from kvlab.trace.store import Rank, Trace

# MLA's latent and rotary part in the models served so: assumed only where the trace does not give the row.
MLA_ROW = 512 + 64
# A decode step converts a row of activations per request; this is 1,024 KV rows.
_LEAST_ELEMENTS = 1024 * MLA_ROW
_LEAST_US = 5.0
# Launches of one shape take the same time: the recorded casts scatter by 0.1 %.
_EQUAL = 0.10
# Without an attention kernel to count layers by: fewer launches a step than this are no layers.
_LEAST_LAYERS = 4
# Kernels that may run between the cast and the attention call that needs it.
_NEAR = 6
# SGLang's arena has a padding page beside its slots: one slot where the page size is 1.
PADDING = 1


class KvCast(msgspec.Struct, kw_only=True, frozen=True):
    """The full-pool cast of one rank's decode steps. None where the trace does not tell."""

    kernel: str
    copies_per_step: float
    """One a layer. PyTorch splits a copy of 2^31 bytes and more: those parts count as one."""
    launched_from: list[str]
    """Module, Python frame and operator of one launch; empty under CUDA graphs and without host events."""
    ms_per_step: float
    exposed_ms_per_step: float
    share: float
    """Of the GPU's busy time in the step."""
    us_per_copy: float
    spread: float
    """Standard deviation of the durations over their mean."""
    elements_per_copy: tuple[int, int] | None
    """Bounds, inclusive, from the launch grid or the recorded shapes."""
    bytes_per_copy: int | None
    """Read and written: one byte in and two out per element."""
    pool_rows: int | None
    """Rows of the arena: the slots and the padding page."""
    pool_slots: int | None
    """pool_rows without the padding page, taken as one slot (page size 1)."""
    pool_slots_from: str | None
    row_bytes: int | None
    row_bytes_from: str | None
    source_dtype: str | None
    source_dtype_from: str | None
    bandwidth: float | None
    """Bytes per second of this kernel on this GPU, from elsewhere."""
    bandwidth_from: str | None
    pool_slots_by_duration: int | None
    """What the duration implies at that bandwidth: an estimate that does not use the launch grid."""
    achieved_bandwidth: float | None
    """bytes_per_copy over the duration, where the size is not from the duration."""


def kinds(trace: Trace, rank: Rank) -> list[Kind | None]:
    """Class of every kernel name of a rank, by name id; None for names that are no kernel of it."""
    mine = set(rank.kernels.name)
    return [classify(name) if i in mine else None for i, name in enumerate(trace.names)]


def layer_count(trace: Trace, rank: Rank, steps: Sequence[Step]) -> int | None:
    """Launches per step of the attention kernel that takes longest; None where none is known as attention."""
    attention = attention_names(trace, rank)
    time: dict[int, float] = defaultdict(float)
    count: Counter[int] = Counter()
    for name, dur in _columns(steps, rank.kernels.name, rank.kernels.dur):
        if name in attention:
            time[name] += dur
            count[name] += 1
    return round(count[max(time, key=time.__getitem__)] / len(steps)) or None if time else None


def kv_cast(
    trace: Trace,
    rank: Rank,
    steps: Sequence[Step],
    *,
    layers: int | None,
    busy_us: float,
    exposed_share: float = 1.0,
    bandwidth: tuple[float, str] | None = None,
) -> KvCast | None:
    """The cast in `steps`, or None.

    `layers`: what `layer_count` says of them; `busy_us`: the GPU's busy time in all of them;
    `exposed_share`: of the casts' time, the part in which nothing else runs; `bandwidth`: bytes per second
    of such a cast on this GPU, and where that is from.
    """
    found = []
    for name, parts in _candidates(trace, rank, steps, layers).items():
        cast = _describe(trace, rank, steps, name, parts, layers, busy_us, exposed_share, bandwidth)
        if cast and (layers is None or _before_attention(trace, rank, steps, name, set(parts)) >= 0.9):
            found.append(cast)
    return max(found, key=lambda c: c.ms_per_step, default=None)


def _columns(steps: Sequence[Step], *columns: array) -> Iterator[tuple[Any, ...]]:
    """The columns' values, kernel by kernel of the steps."""
    for step in steps:
        yield from zip(*(column[step.lo : step.hi] for column in columns), strict=True)


def _candidates(
    trace: Trace, rank: Rank, steps: Sequence[Step], layers: int | None
) -> dict[int, dict[int, list[float]]]:
    """Casting kernels that run a whole number of times a layer: name -> launch shape -> durations."""
    k = rank.kernels
    casts = {i for i in set(k.name) if classify(trace.names[i]).role in ("cast", "fp4")}
    found: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for name, config, dur in _columns(steps, k.name, k.config, k.dur) if casts else ():
        if name in casts:
            found[name][config].append(dur)
    each = (layers or 1) * len(steps)
    least = (layers or _LEAST_LAYERS) * len(steps)
    whole = {
        name: {c: d for c, d in by_config.items() if len(d) >= least and len(d) % each == 0}
        for name, by_config in found.items()
    }
    return {name: parts for name, parts in whole.items() if parts}


def _before_attention(trace: Trace, rank: Rank, steps: Sequence[Step], name: int, configs: set[int]) -> float:
    """The share of the launches that an attention kernel follows closely."""
    k = rank.kernels
    attention = attention_names(trace, rank)
    hit = total = 0
    for step in steps:
        for i in [i for i, n in enumerate(k.name[step.lo : step.hi], step.lo) if n == name]:
            if k.config[i] in configs:
                total += 1
                after = (n for n in k.name[i + 1 : min(i + 1 + 4 * _NEAR, step.hi)] if n != name)
                hit += any(n in attention for n, _ in zip(after, range(_NEAR), strict=False))
    return hit / total if total else 0.0


def _describe(
    trace: Trace,
    rank: Rank,
    steps: Sequence[Step],
    name: int,
    parts: dict[int, list[float]],
    layers: int | None,
    busy_us: float,
    exposed_share: float,
    bandwidth: tuple[float, str] | None,
) -> KvCast | None:
    spreads = [statistics.pstdev(d) / statistics.fmean(d) for d in parts.values() if any(d)]
    if not spreads or max(spreads) > _EQUAL:
        return None
    launches = sum(map(len, parts.values()))
    split = 1 if layers is None else launches // (layers * len(steps))
    us = sum(map(sum, parts.values())) / len(steps)
    copies = launches / len(steps) / split
    fp4 = classify(trace.names[name]).role == "fp4"
    shape = None if fp4 else _shape(trace, rank, steps, name, set(parts))
    elements = shape[0] * shape[1] if shape else None
    bounds = (elements, elements) if elements else _elements(trace, name, parts, copies * len(steps))
    if bounds[1] < _LEAST_ELEMENTS if bounds else us / copies < _LEAST_US:
        return None
    row, row_from = (shape[1], "recorded shapes") if shape else _row(trace, rank)
    speed, speed_from = bandwidth if bandwidth and not fp4 else (None, None)
    rows = by_duration = None
    if bounds:
        # The last block may be partly empty: the largest whole number of rows that the launch can hold.
        rows = bounds[1] // row if bounds[1] // row * row >= bounds[0] else round(sum(bounds) / 2 / row)
    if speed:
        by_duration = round(us / copies * 1e-6 * speed / 3 / row)
    slots, slots_from = None, None
    if rows:
        slots, slots_from = rows - PADDING, "recorded shapes" if shape else "launch grid"
    elif by_duration:
        slots, slots_from = by_duration, "duration and bandwidth"
    moved = 3 * row * (rows or slots or 0) or None
    source, source_from = (shape[2], "recorded shapes") if shape else _source(trace, rank, fp4)
    return KvCast(
        kernel=trace.names[name],
        copies_per_step=copies,
        launched_from=_launched_from(trace, rank, steps, name, set(parts)),
        ms_per_step=us / 1e3,
        exposed_ms_per_step=us * exposed_share / 1e3,
        share=us * len(steps) / busy_us,
        us_per_copy=us / copies,
        spread=max(spreads),
        elements_per_copy=bounds,
        bytes_per_copy=moved,
        pool_rows=rows,
        pool_slots=slots,
        pool_slots_from=slots_from,
        row_bytes=row if slots else None,
        row_bytes_from=row_from if slots else None,
        source_dtype=source,
        source_dtype_from=source_from,
        bandwidth=speed,
        bandwidth_from=speed_from,
        pool_slots_by_duration=by_duration,
        achieved_bandwidth=moved / (us / copies * 1e-6) if moved and rows else None,
    )


# In aten/src/ATen/native/cuda/CUDALoops.cuh a launch has ceil(numel / (threads * N)) blocks:
# unrolled_elementwise_kernel<functor, array, N, …> and elementwise_kernel<threads, N, …> carry N in their
# names, the vectorised kernel does not.
_UNROLLED = re.compile(r"unrolled_elementwise_kernel<.*?array<char ?\*, \d+(?:u?l)*>, (\d+),")
_LEGACY = re.compile(r"::elementwise_kernel<(\d+), (\d+),")


def _elements(
    trace: Trace, name: int, parts: dict[int, list[float]], copies: float
) -> tuple[int, int] | None:
    """Bounds of the elements that one layer's launches convert together, from their grids."""
    low = high = 0
    for config, durations in parts.items():
        grid, block = trace.configs[config]
        if not grid or not block:
            return None
        if found := _UNROLLED.search(trace.names[name]):
            work = int(found[1]) * block[0]
        elif found := _LEGACY.search(trace.names[name]):
            work = int(found[1]) * int(found[2])
        else:
            return None
        times = round(len(durations) / copies)
        low += times * ((grid[0] - 1) * work + 1)
        high += times * grid[0] * work
    return low, high


# flashinfer's traits: causal, stages, (QK_SHARD of the fa2 one,) kv_lora_rank, qk_rope_head_dim, …
_MLA_DIMS = re.compile(r"KernelTraits<(?:false|true), \d+u(?:, (?:false|true))?, (\d+)u, (\d+)u,")


def _row(trace: Trace, rank: Rank) -> tuple[int, str]:
    """Bytes of an FP8 row, from the head sizes in the name of flashinfer's MLA kernels."""
    for i in attention_names(trace, rank):
        if found := _MLA_DIMS.search(trace.names[i]):
            return int(found[1]) + int(
                found[2]
            ), f"the attention kernel's head sizes, {found[1]} + {found[2]}"
    return MLA_ROW, "assumed: MLA's 512 + 64"


def _source(trace: Trace, rank: Rank, fp4: bool) -> tuple[str | None, str | None]:
    """The kernel's name gives what it writes. That it reads FP8 shows in the rows the step stores."""
    if fp4:
        return "FP4", "the kernel's name"
    if any(classify(trace.names[i]).role == "to_fp8" for i in set(rank.kernels.name)):
        return "FP8", "the step converts the rows it stores to FP8"
    return None, None


def _launched_from(
    trace: Trace, rank: Rank, steps: Sequence[Step], name: int, configs: set[int]
) -> list[str]:
    from kvlab.trace.attribute import origins

    k = rank.kernels
    every = (i for step in steps for i in range(step.lo, step.hi))
    some = next((i for i in every if k.name[i] == name and k.config[i] in configs), None)
    found = origins(trace, rank, [some]) if some is not None else {}
    if not found:
        return []
    origin = next(iter(found.values()))
    # The innermost frame of SGLang's own code says more than the one of the operator's Python wrapper.
    frames = [f for f in origin.frames if "sglang" in f] or list(origin.frames)
    return [*origin.modules[-1:], *frames[-1:], *origin.operators[-1:]]


def _shape(
    trace: Trace, rank: Rank, steps: Sequence[Step], name: int, configs: set[int]
) -> tuple[int, int, str] | None:
    """(rows, row width, source dtype) of the operator that launched the cast, where shapes were recorded."""
    from kvlab.trace.attribute import operators

    for dims, types in operators(trace, rank, steps, name, configs):
        if not (isinstance(dims, list) and isinstance(types, list)):
            continue
        # aten::copy_(self, src, …) and aten::_to_copy(self, …): the pool as the backend sees it,
        # [slots, 1, row].
        for source, dtype in zip(dims, types, strict=False):
            if isinstance(source, list) and len(source) >= 2 and "Float8" in str(dtype):
                rows = 1
                for n in source[:-1]:
                    rows *= n
                return rows, source[-1], str(dtype).removeprefix("c10::")
    return None
