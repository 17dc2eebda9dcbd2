"""What the trace shows, in words: the full-pool cast, its cousins, and what to do about each."""

import re
import tomllib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import msgspec

from kvlab.trace.classes import classify, short
from kvlab.trace.diagnose import KvCast
from kvlab.trace.steps import Step, attention_names
from kvlab.trace.store import Rank, Trace

FOUND, NOT_FOUND, CANNOT_TELL = "found", "not found", "cannot tell"
CAST = "full-pool KV cast"
WRITE = "per-layer conversion chain of the FP8 KV write"
FP4 = "whole-pool FP4 dequantisation"
PATCH = "kvlab patch"


class Finding(msgspec.Struct, kw_only=True, frozen=True):
    """One answer: `verdict` is found, not found, or cannot tell; `do` is what to do about it."""

    what: str
    verdict: str
    text: str
    do: str = ""


def findings(
    trace: Trace,
    rank: Rank,
    steps: Sequence[Step],
    cast: KvCast | None,
    predicted_ms: float | None,
    step_ms: float | None,
    *,
    layers: int | None,
    names: Mapping[int, tuple[float, int]],
    sglang: str | None = None,
) -> list[Finding]:
    """The findings of one rank's decode steps.

    `layers` and `names`: what `layer_count` and `by_name` say of them. `sglang`: the release, None where it
    is not known.
    """
    if not steps:
        text = "There is no decode step in this trace, so whether one casts its pool cannot be told."
        do = "Record while the server decodes: `python -m kvlab trace record`."
        return [Finding(what=CAST, verdict=CANNOT_TELL, text=text, do=do)]
    time, count = _by_role(trace, names, len(steps))
    return [
        _cast(trace, rank, steps, cast, predicted_ms, step_ms, sglang),
        *_patch(trace, rank, steps),
        _write(time["to_fp8"], count["to_fp8"], count["store"], layers),
        _fp4(cast, bool(count["fp4"])),
    ]


def _by_role(
    trace: Trace, names: Mapping[int, tuple[float, int]], steps: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds and launches per step by a kernel's role."""
    time: dict[str, float] = defaultdict(float)
    count: dict[str, float] = defaultdict(float)
    for name, (us, launches) in names.items():
        role = classify(trace.names[name]).role
        time[role] += us / 1e3 / steps
        count[role] += launches / steps
    return time, count


def _is_fp4(cast: KvCast | None) -> bool:
    return cast is not None and classify(cast.kernel).role == "fp4"


def _cast(
    trace: Trace,
    rank: Rank,
    steps: Sequence[Step],
    cast: KvCast | None,
    predicted_ms: float | None,
    step_ms: float | None,
    sglang: str | None,
) -> Finding:
    if cast is None or _is_fp4(cast):
        return Finding(what=CAST, verdict=NOT_FOUND, text=_absent(trace, rank, steps))
    text = [
        f"{cast.copies_per_step:.0f} casts a step of {cast.us_per_copy:.1f} us (spread {cast.spread:.2%}), "
        f"{cast.ms_per_step:.1f} ms together: {cast.share:.0%} of the GPU's busy time."
    ]
    if cast.launched_from:
        text.append(f"One is launched from {', '.join(cast.launched_from)}.")
    if cast.pool_rows:
        text.append(
            f"By the {cast.pool_slots_from} each converts {cast.pool_rows:,} rows of {cast.row_bytes} "
            f"({cast.row_bytes_from}): a pool of {cast.pool_slots:,} slots and the padding slot."
        )
    elif cast.pool_slots and cast.bandwidth:
        text.append(
            f"At {cast.bandwidth / 1e12:.3f} TB/s ({cast.bandwidth_from}) each converts about "
            f"{cast.pool_slots:,} rows of {cast.row_bytes} ({cast.row_bytes_from})."
        )
    else:
        text.append(
            "The pool's size is unknown: the trace has neither a launch grid nor recorded shapes for this "
            "kernel, and no bandwidth of this cast on this GPU is on record; give one with --bandwidth."
        )
    if not cast.source_dtype:
        text.append("The kernel's name tells what it writes, not what it reads: FP8 is taken for granted.")
    if predicted_ms and step_ms:
        text.append(f"Without the casts a step would take at least {predicted_ms:.1f} ms, not {step_ms:.1f}.")
    return Finding(what=CAST, verdict=FOUND, text=" ".join(text), do=advice(backend(trace, rank), sglang))


def _absent(trace: Trace, rank: Rank, steps: Sequence[Step]) -> str:
    k = rank.kernels
    time: dict[int, float] = defaultdict(float)
    for step in steps:
        for i in range(step.lo, step.hi):
            if classify(trace.names[k.name[i]]).role == "cast":
                time[k.name[i]] += k.dur[i] / len(steps)
    if not time:
        return "No kernel of a decode step changes a dtype by copying."
    name = max(time, key=time.__getitem__)
    return (
        "No casting kernel runs once a layer, before its attention, on a pool's worth of elements; "
        f"the one that takes longest, {short(trace.names[name])}, takes {time[name]:.1f} us a step."
    )


def _patch(trace: Trace, rank: Rank, steps: Sequence[Step]) -> list[Finding]:
    k = rank.kernels
    ours = {i for i in set(k.name) if classify(trace.names[i]).label.startswith("kvlab")}
    count, us = 0, 0.0
    for step in steps if ours else ():
        for i in range(step.lo, step.hi):
            if k.name[i] in ours:
                count, us = count + 1, us + k.dur[i]
    if not count:
        return []
    text = f"kvlab's kernels run {count / len(steps):.0f} times a step, {us / len(steps) / 1e3:.2f} ms."
    do = "Nothing: this server is patched. `python -m kvlab patch status` says what it does."
    return [Finding(what=PATCH, verdict=FOUND, text=text, do=do)]


def _write(ms: float, convert: float, store: float, layers: int | None) -> Finding:
    if not convert:
        return Finding(what=WRITE, verdict=NOT_FOUND, text="No kernel converts rows to FP8 to store them.")
    each = f", {convert / layers:.0f} a layer" if layers else ""
    text = f"{convert:.0f} conversions to FP8 a step{each}, {ms:.2f} ms, for {store:.0f} stores."
    return Finding(what=WRITE, verdict=FOUND, text=text, do=_texts()["write"]["do"])


def _fp4(cast: KvCast | None, unpacks: bool) -> Finding:
    if cast and _is_fp4(cast):
        text = (
            f"{short(cast.kernel)} unpacks 4-bit codes {cast.copies_per_step:.0f} times a step, "
            f"{cast.ms_per_step:.1f} ms together ({cast.share:.0%} of busy time), equal to "
            f"{cast.spread:.1%}. How many rows it unpacks is not in a compiled kernel's name: that it is the "
            "pool follows from equal durations before every attention call, not from its size."
        )
        return Finding(what=FP4, verdict=FOUND, text=text, do=_texts()["fp4"]["do"])
    if unpacks:
        text = (
            "A compiled kernel unpacks 4-bit codes, but not once a layer before its attention in equal times."
        )
        return Finding(what=FP4, verdict=CANNOT_TELL, text=text, do=_texts()["fp4"]["tell"])
    return Finding(what=FP4, verdict=NOT_FOUND, text="No compiled kernel unpacks 4-bit codes.")


def backend(trace: Trace, rank: Rank) -> str | None:
    """SGLang's name of the attention backend, by its kernels; None where they are not known."""
    names = [trace.names[i] for i in attention_names(trace, rank)]
    for backend, pattern in _texts()["backend"].items():
        if any(re.search(pattern, name) for name in names):
            return backend
    return None


def advice(backend: str | None, sglang: str | None) -> str:
    """What to do about the cast with this backend on this SGLang release (None: not known)."""
    text = _texts()["cast"]
    release = tuple(map(int, re.findall(r"\d+", sglang)[:3])) if sglang else None
    if release and backend in text["sites"]:
        known = text["newer"] if release > tuple(text["newest"]) else text["known"]
        lines = [known.format(sglang=sglang, backend=backend)]
    else:
        lines = [text["unknown"]]
    if release is None:
        lines.append(text["either"])
    else:
        lines.append(text["launcher"] if release < tuple(text["plugins"]) else text["plugin"])
    lines.append(text["without"])
    return " ".join(lines)


def _texts() -> dict[str, Any]:
    return tomllib.loads(resources.files(__package__).joinpath("advice.toml").read_text("utf-8"))
