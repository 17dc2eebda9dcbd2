"""Which layer does a kernel belong to, without modules to ask?

Every layer launches the same kernels: the first one that runs exactly once a layer marks where each begins.
"""

from collections import Counter
from dataclasses import dataclass

from kvlab.trace.diagnose import layer_count
from kvlab.trace.steps import Step
from kvlab.trace.store import Rank, Trace


@dataclass(slots=True)
class Layers:
    """The layers of one step: layer i starts with kernel `first[i]`; from `tail` on they are over."""

    first: list[int]
    tail: int
    marker: str
    """Name of the kernel that marks a layer's start."""

    def of(self, kernel: int) -> int | None:
        """Layer of a kernel index, None before the first and after the last."""
        from bisect import bisect_right

        at = bisect_right(self.first, kernel) - 1
        return at if at >= 0 and kernel < self.tail else None


def layers(trace: Trace, rank: Rank, step: Step) -> Layers | None:
    """The layers of a step, None where no kernel is known as attention or none runs once a layer."""
    count = layer_count(trace, rank, [step])
    if not count:
        return None
    names = rank.kernels.name[step.lo : step.hi]
    times = Counter(names)
    marker = next((n for n in names if times[n] == count), None)
    if marker is None:
        return None
    first = [step.lo + i for i, n in enumerate(names) if n == marker]
    # What runs in at least half the layers belongs to layers; the step's end (head, sampling) does not.
    last = max(i for i, n in enumerate(names) if times[n] * 2 >= count)
    return Layers(first, step.lo + last + 1, trace.names[marker])
