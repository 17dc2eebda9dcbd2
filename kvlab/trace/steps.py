"""Where does one forward step end and the next begin?

In order of trust: SGLang's own `step[…]` annotations, ProfilerStep, replays of a CUDA graph, Python frames
of the model runner, kernels that come once a step. Annotations are looked up on the GPU where the profiler
projected them, otherwise by the first kernel launched under them.
"""

import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

from kvlab.trace.classes import classify
from kvlab.trace.store import FRAME, GPU_NOTE, NOTE, RUNTIME, Rank, Trace

DECODE, PREFILL, OTHER, UNKNOWN = "decode", "prefill", "other", "unknown"
_SGLANG = re.compile(r"step\[(\w+)(?: bs=(\d+))?")
_PROFILER = re.compile(r"ProfilerStep#?\d*")
_FORWARD = re.compile(r"model_runner\.py\(\d+\): forward$")
_EXTEND = re.compile(r"\): forward_extend$")
_MODES = {
    "DECODE": DECODE,
    "TARGET_VERIFY": DECODE,
    "EXTEND": PREFILL,
    "MIXED": PREFILL,
    "SPLIT_PREFILL": PREFILL,
}
# Fewer kernels between two that recur are a loop inside a step, not a step.
_LEAST_KERNELS = 8
# A graph replay of a whole model has hundreds of nodes; below this many kernels it is no step.
_GRAPH_KERNELS = 8
_REPLAYS = "CUDA graph replays"


@dataclass(slots=True)
class Step:
    """Kernels [lo, hi) of a rank, from `start` to `end` (microseconds, GPU time)."""

    lo: int
    hi: int
    start: float
    end: float
    phase: str
    label: str
    batch: int | None
    graphs: list[tuple[float, float]]
    """(start, end) of the CUDA graphs replayed in it."""
    period: float | None = None
    """Microseconds to the start of the step that follows directly, None where none does."""


@dataclass(slots=True)
class Steps:
    """The steps of a rank, what told them apart, and the GPU events that belong to none."""

    steps: list[Step]
    how: str
    outside: int

    def decode(self) -> list[Step]:
        """The decode steps; steps of which the phase cannot be told count as decode."""
        return [s for s in self.steps if s.phase in (DECODE, UNKNOWN)]


def attention_names(trace: Trace, rank: Rank) -> set[int]:
    """Names of the attention kernels proper: not the combine, not the plan."""
    return {i for i in set(rank.kernels.name) if classify(trace.names[i]).role == "attention"}


def by_name(rank: Rank, steps: Iterable[Step]) -> dict[int, tuple[float, int]]:
    """Microseconds and launches of each kernel name in the steps together."""
    time: dict[int, float] = defaultdict(float)
    count: Counter[int] = Counter()
    for step in steps:
        names = rank.kernels.name[step.lo : step.hi]
        count.update(names)
        for name, dur in zip(names, rank.kernels.dur[step.lo : step.hi], strict=True):
            time[name] += dur
    return {name: (us, count[name]) for name, us in time.items()}


def find(trace: Trace, rank: Rank) -> Steps:
    """The steps of one rank, in order."""
    if not len(rank.kernels):
        return Steps([], "no kernels", 0)
    attention = attention_names(trace, rank)
    graphs = _graphs(trace, rank)
    ways: tuple[tuple[str, Callable[[], list[Anchor]]], ...] = (
        ("SGLang's step annotations", lambda: _annotated(trace, rank, _SGLANG)),
        ("ProfilerStep", lambda: _annotated(trace, rank, _PROFILER)),
        (_REPLAYS, lambda: _replays(rank, graphs, attention)),
        ("Python frames of the model runner", lambda: _frames(trace, rank)),
        ("kernels that run once a step", lambda: _recurring(rank)),
    )
    for how, look in ways:
        if anchors := look():
            return _cut(trace, rank, anchors, how, graphs, attention)
    return _cut(
        trace, rank, [(rank.kernels.start[0], "", None)], "the whole trace is one step", graphs, attention
    )


Anchor = tuple[float, str, float | None]
"""GPU time at which a step starts, its label, and the time at which it ends where that is known."""


def _annotated(trace: Trace, rank: Rank, pattern: re.Pattern[str]) -> list[Anchor]:
    host = rank.host
    wanted = {i for i in set(host.name) if pattern.match(trace.names[i])}
    wanted = {i for i in wanted if not trace.names[i].startswith("step[DRAFT")}
    if not wanted:
        return []
    # A step has one projection on each stream it used, with the annotation's id: the longest is the step
    # itself, the others may reach into its neighbours (copies that run ahead).
    longest: dict[object, int] = {}
    for i in range(len(host)):
        if host.kind[i] == GPU_NOTE and host.name[i] in wanted:
            key: object = host.corr[i] if host.corr[i] >= 0 else ("of its own", i)
            if key not in longest or host.dur[i] > host.dur[longest[key]]:
                longest[key] = i
    if longest:
        return sorted(
            (host.start[i], trace.names[host.name[i]], host.start[i] + host.dur[i]) for i in longest.values()
        )
    notes = [i for i in range(len(host)) if host.kind[i] == NOTE and host.name[i] in wanted]
    return _by_launch(trace, rank, notes)


def _by_launch(trace: Trace, rank: Rank, spans: Iterable[int]) -> list[Anchor]:
    """Anchors for host events: the first kernel whose launch lies inside each."""
    host, kernels = rank.host, rank.kernels
    wanted: dict[int, tuple[int, str]] = {}
    for order, i in enumerate(spans):
        end = host.start[i] + host.dur[i]
        for j in range(i, len(host)):
            if host.start[j] > end:
                break
            if host.kind[j] == RUNTIME and host.corr[j] > 0:
                wanted.setdefault(host.corr[j], (order, trace.names[host.name[i]]))
    first: dict[int, Anchor] = {}
    for start, corr in zip(kernels.start, kernels.corr, strict=True):
        if corr in wanted:
            order, label = wanted[corr]
            first.setdefault(order, (start, label, None))
    return sorted(first.values())


def _graphs(trace: Trace, rank: Rank) -> list[tuple[float, float, int]]:
    """(start, end, correlation) of each graph replay: all its kernels carry the id of one launch."""
    kernels = rank.kernels
    many = {c for c, n in Counter(kernels.corr).items() if n >= _GRAPH_KERNELS and c > 0}
    if not many:
        return []
    host = rank.host
    launched = {host.corr[i] for i in range(len(host)) if host.kind[i] == RUNTIME and host.corr[i] in many}
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for start, dur, corr in zip(kernels.start, kernels.dur, kernels.corr, strict=True):
        if corr in many:
            end = start + dur
            if corr not in first:  # ordered by start
                first[corr], last[corr] = start, end
            elif end > last[corr]:
                last[corr] = end
    # Without host events a shared id is all there is to go by.
    return sorted((a, last[c], c) for c, a in first.items() if not launched or c in launched)


def _replays(rank: Rank, graphs: list[tuple[float, float, int]], attention: set[int]) -> list[Anchor]:
    if not graphs:
        return []
    inside = {c for _, _, c in graphs}
    kernels = rank.kernels
    size = Counter({corr: n for corr, n in Counter(kernels.corr).items() if corr in inside})
    heads = Counter(corr for name, corr in zip(kernels.name, kernels.corr, strict=True) if name in attention)
    loose = sum(n for corr, n in heads.items() if corr not in inside)
    heads = Counter({corr: n for corr, n in heads.items() if corr in inside})
    weight = heads if any(heads.values()) else size
    if attention and sum(heads.values()) < loose:
        return []  # piecewise graphs: the attention runs between them
    # A whole model against its draft's graphs: the largest ones are the steps.
    top = max(weight.values())
    return [(start, "", None) for start, _, c in graphs if weight[c] * 2 > top]


def _frames(trace: Trace, rank: Rank) -> list[Anchor]:
    host = rank.host
    wanted = {i for i in set(host.name) if _FORWARD.search(trace.names[i])}
    spans, until = [], float("-inf")
    for i in range(len(host)) if wanted else ():
        if host.kind[i] == FRAME and host.name[i] in wanted and host.start[i] >= until:
            spans.append(i)
            until = host.start[i] + host.dur[i]
    return _by_launch(trace, rank, spans)


def _recurring(rank: Rank) -> list[Anchor]:
    """Kernels that run once a step, where there is nothing but kernels: most counts are their multiples."""
    kernels = rank.kernels
    counts = Counter(kernels.name)
    by_count = Counter(counts.values())
    for steps in sorted(n for n, names in by_count.items() if n > 1 and names > 1):
        if sum(names for n, names in by_count.items() if n % steps == 0) < 0.7 * len(counts):
            continue
        once = {i for i, n in counts.items() if n == steps}
        at = [i for i, name in enumerate(kernels.name) if name in once]
        first = kernels.name[at[0]]
        where = [i for i in at if kernels.name[i] == first]
        gaps = [b - a for a, b in pairwise(where)]
        if min(gaps) >= _LEAST_KERNELS and max(gaps) - min(gaps) <= 0.1 * max(gaps):
            return [(kernels.start[i], "", None) for i in where]
    return []


def _cut(
    trace: Trace,
    rank: Rank,
    anchors: list[Anchor],
    how: str,
    graphs: list[tuple[float, float, int]],
    attention: set[int],
) -> Steps:
    kernels = rank.kernels
    bounds = [bisect_left(kernels.start, a[0]) for a in anchors] + [len(kernels)]
    if not any(name in attention for name in kernels.name[: bounds[0]]):
        bounds[0] = 0  # what prepares the first step, not another one
    begins = [a for a, _, _ in graphs]
    steps: list[Step] = []
    before = 0.0
    for (at, label, end), lo, hi in zip(anchors, bounds, bounds[1:], strict=False):
        if lo >= hi:
            continue
        inside = slice(bisect_left(begins, kernels.start[lo]), bisect_right(begins, kernels.start[hi - 1]))
        mine = [(a, b) for a, b, _ in graphs[inside]]
        if how == _REPLAYS:
            end = mine[0][1] if mine else None
        if end is not None:
            # Attention after the end is another step that nothing announced, such as an eager prefill.
            past = bisect_left(kernels.start, end, lo, hi)
            if any(name in attention for name in kernels.name[past:hi]):
                hi = past
        if steps and steps[-1].hi == lo:
            steps[-1].period = at - before
        steps.append(_step(trace, rank, lo, hi, label, mine, attention))
        before = at
    return Steps(steps, how, len(kernels) - sum(s.hi - s.lo for s in steps))


def _step(
    trace: Trace,
    rank: Rank,
    lo: int,
    hi: int,
    label: str,
    graphs: list[tuple[float, float]],
    attention: set[int],
) -> Step:
    kernels = rank.kernels
    start, end = kernels.start[lo], max(map(float.__add__, kernels.start[lo:hi], kernels.dur[lo:hi]))
    found = _SGLANG.match(label)
    if found:
        phase = _MODES.get(found[1], OTHER)
    elif graphs:
        phase = DECODE
    elif any("Ragged" in trace.names[i] for i in set(kernels.name[lo:hi]) & attention):
        phase = PREFILL
    else:
        phase = _phase_by_frames(trace, rank, start, end)
    batch = int(found[2]) if found and found[2] else None
    return Step(lo, hi, start, end, phase, label, batch, graphs)


def _phase_by_frames(trace: Trace, rank: Rank, start: float, end: float) -> str:
    host = rank.host
    for i in range(bisect_left(host.start, start - (end - start)), bisect_left(host.start, end)):
        if host.kind[i] == FRAME:
            name = trace.names[host.name[i]]
            if _EXTEND.search(name):
                return PREFILL
            if name.endswith(": forward_decode"):
                return DECODE
    return UNKNOWN
