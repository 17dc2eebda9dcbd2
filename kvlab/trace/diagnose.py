"""Is it the full-pool KV cast? Answered from the trace alone.

The signature: a copy that changes the dtype, launched once a layer just before the attention kernel, each launch of
the same shape and duration, and far larger than anything a decode step has to convert.
"""

import re
import statistics
import tomllib
from collections import Counter, defaultdict
from collections.abc import Sequence
from importlib import resources
from typing import Any

import msgspec

from kvlab.trace.classes import Kind, classify, short
from kvlab.trace.steps import Step, attention_names
from kvlab.trace.store import Rank, Trace

# MLA's latent and rotary part in the models served so: assumed only where the trace does not give the row.
MLA_ROW = 512 + 64
# A decode step converts a row of activations per request; this is 1,024 KV rows.
_LEAST_ELEMENTS = 1024 * MLA_ROW
_LEAST_US = 5.0
# Launches of one shape that take the same time: the recorded casts scatter by 0.1 %.
_EQUAL = 0.10
_SGLANG_PAD = 1


class KvCast(msgspec.Struct, kw_only=True, frozen=True):
    """The full-pool cast of one rank's decode steps. None where the trace does not tell."""

    kernel: str
    copies_per_step: float
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
    """Read and written: one FP8 byte in, two BF16 bytes out, per element."""
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
    """Bytes per second that the size was derived from or is checked against."""
    bandwidth_from: str | None
    pool_slots_by_duration: int | None
    """The pool that the duration implies at that bandwidth: an estimate independent of the launch grid."""
    achieved_bandwidth: float | None
    """bytes_per_copy over the duration."""


class Finding(msgspec.Struct, kw_only=True, frozen=True):
    """One answer: `verdict` is found, not found, or cannot tell."""

    what: str
    verdict: str
    text: str
    do: str = ""


def kv_cast(
    trace: Trace,
    rank: Rank,
    steps: Sequence[Step],
    *,
    busy_us: float,
    exposed_share: float = 1.0,
    bandwidth: tuple[float, str] | None = None,
) -> KvCast | None:
    """The cast in `steps`, or None. `busy_us`: GPU busy time of all of them; `bandwidth`: bytes/s and its origin."""
    layers = layer_count(trace, rank, steps)
    best: KvCast | None = None
    for name, parts in _candidates(trace, rank, steps, layers).items():
        cast = _describe(trace, rank, steps, name, parts, layers, busy_us, exposed_share, bandwidth)
        if cast and (best is None or cast.ms_per_step > best.ms_per_step):
            best = cast
    return best


def layer_count(trace: Trace, rank: Rank, steps: Sequence[Step]) -> int | None:
    """Launches per step of the attention kernel that takes longest; None where no kernel is known as attention."""
    attention = attention_names(trace, rank)
    time: Counter[int] = Counter()
    count: Counter[int] = Counter()
    for step in steps:
        for i in range(step.lo, step.hi):
            name = rank.kernels.name[i]
            if name in attention:
                time[name] += rank.kernels.dur[i]  # type: ignore[assignment]
                count[name] += 1
    return round(count[max(time, key=time.__getitem__)] / len(steps)) or None if time else None


def _candidates(
    trace: Trace, rank: Rank, steps: Sequence[Step], layers: int | None
) -> dict[int, dict[int, list[float]]]:
    """Casting kernels that run a whole number of times a layer: name -> launch shape -> durations."""
    k = rank.kernels
    casts = {
        i
        for i in set(k.name)
        if (kind := classify(trace.names[i])).cls == "dtype cast" and not kind.label.startswith("kvlab")
    }
    found: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for step in steps:
        for i in range(step.lo, step.hi):
            if k.name[i] in casts:
                found[k.name[i]][k.config[i]].append(k.dur[i])
    unit = layers or 4
    return {
        name: kept
        for name, by_config in found.items()
        if (
            kept := {
                c: d
                for c, d in by_config.items()
                if len(d) / len(steps) >= unit and (layers is None or len(d) % (layers * len(steps)) == 0)
            }
        )
    }


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
    spreads = [statistics.pstdev(d) / statistics.fmean(d) for d in parts.values() if statistics.fmean(d)]
    if not spreads or max(spreads) > _EQUAL:
        return None
    copies = sum(map(len, parts.values())) / len(steps)
    per_layer = 1 if layers is None else sum(len(d) for d in parts.values()) // (layers * len(steps))
    us = sum(map(sum, parts.values())) / len(steps)
    us_per_pool = us / copies * per_layer
    shape = _shape(trace, rank, steps, name, set(parts))
    elements = shape[0] * shape[1] if shape else None
    bounds = (elements, elements) if elements else _elements(trace, name, parts, layers, len(steps))
    if bounds[1] < _LEAST_ELEMENTS if bounds else us_per_pool < _LEAST_US:
        return None
    row, row_from = (shape[1], "recorded shapes") if shape else _row(trace, rank)
    source, source_from = (shape[2], "recorded shapes") if shape else _source(trace, rank)
    speed, speed_from = bandwidth or (None, None)
    rows = by_duration = None
    if bounds:
        # The last block of a launch may be partly empty: the largest whole number of rows that fits it.
        rows = bounds[1] // row if bounds[1] // row * row >= bounds[0] else round(sum(bounds) / 2 / row)
    if speed:
        by_duration = round(us_per_pool * 1e-6 * speed / 3 / row)
    slots, slots_from = None, None
    if rows:
        slots, slots_from = rows - _SGLANG_PAD, "recorded shapes" if shape else "launch grid"
    elif by_duration:
        slots, slots_from = by_duration, "duration and bandwidth"
    moved = None if not (rows or slots) else 3 * row * (rows or slots or 0)
    return KvCast(
        kernel=trace.names[name],
        copies_per_step=copies / per_layer,
        ms_per_step=us / 1e3,
        exposed_ms_per_step=us * exposed_share / 1e3,
        share=us * len(steps) / busy_us,
        us_per_copy=us_per_pool,
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
        achieved_bandwidth=None if not (moved and rows) else moved / (us_per_pool * 1e-6),
    )


# unrolled_elementwise_kernel<functor, array, N, …>: N elements a thread; elementwise_kernel<threads, N, …> likewise.
# (aten/src/ATen/native/cuda/CUDALoops.cuh: grid = ceil(numel / (threads * N)).) The vectorised kernel's N is not in
# its name.
_UNROLLED = re.compile(r"unrolled_elementwise_kernel<.*?array<char ?\*, \d+(?:u?l)*>, (\d+),")
_LEGACY = re.compile(r"::elementwise_kernel<(\d+), (\d+),")


def _elements(
    trace: Trace, name: int, parts: dict[int, list[float]], layers: int | None, steps: int
) -> tuple[int, int] | None:
    """Bounds of the elements that the launches of one layer convert together, from their grids."""
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
        times = 1 if layers is None else len(durations) // (layers * steps)
        low += times * ((grid[0] - 1) * work + 1)
        high += times * grid[0] * work
    return low, high


_MLA_DIMS = re.compile(r"KernelTraits<(?:false|true), \d+u(?:, (?:false|true))?, (\d+)u, (\d+)u,")


def _row(trace: Trace, rank: Rank) -> tuple[int, str]:
    """Bytes of an FP8 row: flashinfer's MLA kernels carry kv_lora_rank and qk_rope_head_dim in their names."""
    for i in attention_names(trace, rank):
        if found := _MLA_DIMS.search(trace.names[i]):
            return int(found[1]) + int(
                found[2]
            ), f"the attention kernel's head sizes, {found[1]} + {found[2]}"
    return MLA_ROW, "assumed: MLA's 512 + 64"


def _source(trace: Trace, rank: Rank) -> tuple[str | None, str | None]:
    """The kernel's name gives what it writes. That it reads FP8 shows in the rows the step writes."""
    if any(classify(trace.names[i]).label == "convert to FP8" for i in set(rank.kernels.name)):
        return "FP8", "the step converts the rows it stores to FP8"
    return None, None


def _shape(
    trace: Trace, rank: Rank, steps: Sequence[Step], name: int, configs: set[int]
) -> tuple[int, int, str] | None:
    """(rows, row width, source dtype) of the operator that launched the cast, where shapes were recorded."""
    from kvlab.trace.attribute import operators

    for dims, types in operators(trace, rank, steps, name, configs):
        if not (isinstance(dims, list) and isinstance(types, list)) or len(dims) < 2 or len(types) < 2:
            continue
        # aten::copy_(self, src): the source is the pool as the backend sees it, [slots, 1, row].
        source = dims[1]
        if isinstance(source, list) and len(source) >= 2 and "Float8" in str(types[1]):
            rows = 1
            for n in source[:-1]:
                rows *= n
            return rows, source[-1], str(types[1]).removeprefix("c10::")
    return None


def findings(
    trace: Trace,
    rank: Rank,
    steps: Sequence[Step],
    cast: KvCast | None,
    predicted_ms: float | None,
    step_ms: float | None,
    *,
    sglang: str | None = None,
) -> list[Finding]:
    """What the trace shows of the cast and of its cousins, each with what to do."""
    if not steps:
        text = "No decode step in this trace, so whether a decode step casts its pool cannot be told."
        return [
            Finding(
                what="full-pool KV cast",
                verdict="cannot tell",
                text=text,
                do="Record while the server decodes: `python -m kvlab trace record`.",
            )
        ]
    found = [_cast_finding(trace, rank, steps, cast, predicted_ms, step_ms, sglang)]
    found += _patch_finding(trace, rank, steps)
    found.append(_write_finding(trace, rank, steps))
    found.append(_fp4_finding(trace, rank, steps, cast))
    return found


def _cast_finding(
    trace: Trace,
    rank: Rank,
    steps: Sequence[Step],
    cast: KvCast | None,
    predicted_ms: float | None,
    step_ms: float | None,
    sglang: str | None,
) -> Finding:
    what = "full-pool KV cast"
    if cast is None or _is_fp4(cast.kernel):
        return Finding(what=what, verdict="not found", text=_absent(trace, rank, steps))
    text = [
        f"{cast.copies_per_step:.0f} casts a step of {cast.us_per_copy:.1f} us (spread {cast.spread:.2%}), "
        f"{cast.ms_per_step:.1f} ms together: {cast.share:.0%} of the GPU's busy time."
    ]
    if cast.pool_slots_from in ("launch grid", "recorded shapes"):
        text.append(
            f"By the {cast.pool_slots_from} each converts {cast.pool_rows:,} rows of {cast.row_bytes} "
            f"({cast.row_bytes_from}): a pool of {cast.pool_slots:,} slots and the padding slot."
        )
    elif cast.pool_slots:
        text.append(
            f"At {cast.bandwidth or 0:.3g} B/s ({cast.bandwidth_from}) each converts about {cast.pool_slots:,} rows "
            f"of {cast.row_bytes} ({cast.row_bytes_from})."
        )
    else:
        text.append(
            "The pool's size is unknown: the trace has neither launch shapes nor recorded shapes for this kernel, "
            "and no cast bandwidth of this GPU is on record; give one with --bandwidth."
        )
    if predicted_ms and step_ms:
        text.append(
            f"Without the casts the step would take at least {predicted_ms:.1f} ms instead of {step_ms:.1f}."
        )
    return Finding(what=what, verdict="found", text=" ".join(text), do=advice(backend(trace, rank), sglang))


def _absent(trace: Trace, rank: Rank, steps: Sequence[Step]) -> str:
    k = rank.kernels
    time: Counter[int] = Counter()
    for step in steps:
        for i in range(step.lo, step.hi):
            if classify(trace.names[k.name[i]]).cls == "dtype cast":
                time[k.name[i]] += k.dur[i]  # type: ignore[assignment]
    if not time:
        return "No kernel of this trace changes a dtype by copying."
    name, us = time.most_common(1)[0]
    return (
        f"No casting kernel runs once a layer on a pool's worth of elements; the largest, {short(trace.names[name])}, "
        f"takes {us / len(steps):.1f} us a step."
    )


def _patch_finding(trace: Trace, rank: Rank, steps: Sequence[Step]) -> list[Finding]:
    k = rank.kernels
    count, us = 0, 0.0
    for step in steps:
        for i in range(step.lo, step.hi):
            if classify(trace.names[k.name[i]]).label.startswith("kvlab"):
                count += 1
                us += k.dur[i]
    if not count:
        return []
    text = f"kvlab's kernels run {count / len(steps):.0f} times a step, {us / len(steps) / 1e3:.2f} ms."
    return [Finding(what="kvlab patch", verdict="found", text=text, do="Nothing: the cast is taken care of.")]


def _write_finding(trace: Trace, rank: Rank, steps: Sequence[Step]) -> Finding:
    what = "per-layer conversion chain of the FP8 KV write"
    k = rank.kernels
    layers = layer_count(trace, rank, steps)
    convert = store = 0
    us = 0.0
    for step in steps:
        for i in range(step.lo, step.hi):
            kind = classify(trace.names[k.name[i]])
            if kind.label == "convert to FP8":
                convert, us = convert + 1, us + k.dur[i]
            elif kind.label == "store rows":
                store += 1
    if not convert:
        return Finding(
            what=what, verdict="not found", text="No kernel converts rows to FP8 before storing them."
        )
    each = f", {convert / len(steps) / layers:.0f} a layer" if layers else ""
    text = (
        f"{convert / len(steps):.0f} conversions to FP8 a step{each}, {us / len(steps) / 1e3:.2f} ms, before "
        f"{store / len(steps):.0f} stores."
    )
    return Finding(what=what, verdict="found", text=text, do=_advice()["write"]["do"])


def _is_fp4(kernel: str) -> bool:
    return classify(kernel).label.startswith("FP4")


def _fp4_finding(trace: Trace, rank: Rank, steps: Sequence[Step], cast: KvCast | None) -> Finding:
    what = "whole-pool FP4 dequantisation"
    if cast and _is_fp4(cast.kernel):
        text = (
            f"{short(cast.kernel)} unpacks 4-bit codes {cast.copies_per_step:.0f} times a step, "
            f"{cast.ms_per_step:.1f} ms together ({cast.share:.0%} of busy time), equal to {cast.spread:.1%}. A compiled "
            "kernel's name does not give its size: that it covers the pool follows from the equal durations only."
        )
        return Finding(what=what, verdict="found", text=text, do=_advice()["fp4"]["do"])
    if any(_is_fp4(trace.names[i]) for i in set(rank.kernels.name)):
        text = "A compiled kernel unpacks 4-bit codes, but not once a layer with equal durations."
        return Finding(what=what, verdict="cannot tell", text=text)
    text = "No compiled kernel that unpacks 4-bit codes."
    return Finding(what=what, verdict="not found", text=text)


def _advice() -> dict[str, Any]:
    return tomllib.loads(resources.files(__package__).joinpath("advice.toml").read_text("utf-8"))


def backend(trace: Trace, rank: Rank) -> str | None:
    """SGLang's name of the attention backend, by its kernels; None where they are not known."""
    names = [trace.names[i] for i in attention_names(trace, rank)]
    for backend, pattern in _advice()["backend"].items():
        if any(re.search(pattern, name) for name in names):
            return backend
    return None


def advice(backend: str | None, sglang: str | None) -> str:
    """What to do about the cast with this backend on this SGLang release (None: not known)."""
    text = _advice()["cast"]
    release = _release(sglang)
    lines = []
    if release and backend in text["sites"]:
        lines.append(text["known"].format(sglang=sglang, backend=backend))
    else:
        lines.append(text["unknown"])
    lines.append(
        text["either"] if not release else text["launcher"] if release < (0, 5, 11) else text["plugin"]
    )
    lines.append(text["without"])
    return " ".join(lines)


def _release(sglang: str | None) -> tuple[int, ...] | None:
    return tuple(map(int, re.findall(r"\d+", sglang)[:3])) if sglang else None


def kinds(trace: Trace, rank: Rank) -> list[Kind | None]:
    """Class of every kernel name of a rank, by name id."""
    mine = set(rank.kernels.name)
    return [classify(name) if i in mine else None for i, name in enumerate(trace.names)]
