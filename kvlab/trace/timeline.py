"""Busy, idle and exposed time of a step."""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, compress, pairwise

from kvlab.trace.classes import Kind
from kvlab.trace.steps import Step
from kvlab.trace.store import Rank


def united(intervals: Sequence[tuple[float, float]]) -> float:
    """Length of the union of (start, end) intervals."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        if end > until:
            total += end - max(start, until)
            until = end
    return total


@dataclass(slots=True)
class Measure:
    """One step in microseconds."""

    span: float
    """From its first GPU event to the end of its last."""
    device: float
    """The time the GPU needs: its CUDA graphs from start to end, and what runs outside them without the gaps
    in which the GPU waits for the host. Without graphs the span."""
    busy: float
    """Sum over streams of the united time of each."""
    active: float
    """Time in which at least one stream works."""
    total: dict[str, float] = field(default_factory=dict)
    """Per class: united per stream, summed over streams."""
    exposed: dict[str, float] = field(default_factory=dict)
    """Per class: time in which nothing of another class runs."""
    launches: dict[str, int] = field(default_factory=dict)


def measure(rank: Rank, step: Step, kinds: Sequence[Kind | None]) -> Measure:
    """Sweep the step's kernels once. `kinds`: by name id."""
    k = rank.kernels
    starts, tracks = k.start[step.lo : step.hi], k.track[step.lo : step.hi]
    ends = list(map(float.__add__, starts, k.dur[step.lo : step.hi]))
    classes = [kinds[name].cls for name in k.name[step.lo : step.hi]]  # type: ignore[union-attr]
    total: dict[str, float] = defaultdict(float)
    exposed: dict[str, float] = defaultdict(float)
    busy = active = 0.0
    # Where nothing of before is still running all sums start anew; most kernels run alone.
    until = accumulate(ends, max)
    anew = (i for i, (start, end) in enumerate(zip(starts[1:], until, strict=False), 1) if start >= end)
    for lo, hi in pairwise((0, *anew, len(ends))):
        if hi - lo == 1:
            took = ends[lo] - starts[lo]
            total[classes[lo]] += took
            exposed[classes[lo]] += took
            busy += took
            active += took
            continue
        group = list(zip(starts[lo:hi], ends[lo:hi], tracks[lo:hi], classes[lo:hi], strict=True))
        busy += _streams(group, total)
        active += _sweep(group, exposed)
    span = step.end - step.start
    device = span
    if step.graphs:
        loose = bytearray(b"\1") * len(starts)
        for a, b in step.graphs:
            lo, hi = bisect_left(starts, a), bisect_right(starts, b)
            loose[lo:hi] = bytes(hi - lo)
        device = united(step.graphs) + united(list(compress(zip(starts, ends, strict=True), loose)))
    return Measure(span, device, busy, active, dict(total), dict(exposed), dict(Counter(classes)))


Group = Sequence[tuple[float, float, int, str]]
"""(start, end, track, class) of kernels, ordered by start."""


def _streams(group: Group, total: dict[str, float]) -> float:
    """The united time of each stream, summed; to `total` is added each class's on each stream."""
    busy = 0.0
    streams: dict[int, float] = {}
    classes: dict[tuple[int, str], float] = {}
    for start, end, track, cls in group:
        until = streams.get(track, start)
        if end > until:
            busy += end - (until if until > start else start)
            streams[track] = end
        until = classes.get((track, cls), start)
        if end > until:
            total[cls] += end - (until if until > start else start)
            classes[track, cls] = end
    return busy


def _sweep(group: Group, exposed: dict[str, float]) -> float:
    """The time in which something runs; to `exposed` is added in which one class runs alone."""
    edges = [(a, 1, cls) for a, b, _, cls in group if b > a]
    edges += [(b, -1, cls) for a, b, _, cls in group if b > a]
    edges.sort()
    running: dict[str, int] = {}
    active, before = 0.0, 0.0
    for time, change, cls in edges:
        if running:
            active += time - before
            if len(running) == 1:
                exposed[next(iter(running))] += time - before
        before = time
        count = running.get(cls, 0) + change
        if count:
            running[cls] = count
        else:
            del running[cls]
    return active
