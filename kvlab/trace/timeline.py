"""Busy, idle and exposed time of a step."""

from collections.abc import Sequence
from dataclasses import dataclass, field

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
    ends = list(map(float.__add__, k.start[step.lo : step.hi], k.dur[step.lo : step.hi]))
    streams: dict[int, float] = {}
    by_stream: dict[int, float] = {}
    by_class: dict[tuple[int, str], float] = {}
    total: dict[str, float] = {}
    launches: dict[str, int] = {}
    edges: list[tuple[float, int, str]] = []
    loose: list[tuple[float, float]] = []
    for i, end in zip(range(step.lo, step.hi), ends, strict=True):
        start, track = k.start[i], k.track[i]
        cls = kinds[k.name[i]].cls  # type: ignore[union-attr]
        until = streams.get(track, start)
        if end > until:
            by_stream[track] = by_stream.get(track, 0.0) + end - max(start, until)
            streams[track] = end
        seen = by_class.get((track, cls), start)
        if end > seen:
            total[cls] = total.get(cls, 0.0) + end - max(start, seen)
            by_class[track, cls] = end
        launches[cls] = launches.get(cls, 0) + 1
        if end > start:
            edges.append((start, 1, cls))
            edges.append((end, -1, cls))
        if step.graphs and not any(a <= start <= b for a, b in step.graphs):
            loose.append((start, end))
    active, exposed = _sweep(edges)
    span = step.end - step.start
    device = united(step.graphs) + united(loose) if step.graphs else span
    return Measure(span, device, sum(by_stream.values()), active, total, exposed, launches)


def _sweep(edges: list[tuple[float, int, str]]) -> tuple[float, dict[str, float]]:
    edges.sort()
    running: dict[str, int] = {}
    exposed: dict[str, float] = {}
    active, before = 0.0, 0.0
    for time, change, cls in edges:
        if running:
            active += time - before
            if len(running) == 1:
                alone = next(iter(running))
                exposed[alone] = exposed.get(alone, 0.0) + time - before
        before = time
        count = running.get(cls, 0) + change
        if count:
            running[cls] = count
        else:
            del running[cls]
    return active, exposed
