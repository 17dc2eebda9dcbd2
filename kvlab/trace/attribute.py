"""Which operator, module and Python frames launched a kernel?

Without CUDA graphs a kernel's correlation id names its launch on the host, and what encloses the launch on
that thread is its origin. Under graph replay there is one launch for all kernels and nothing to correlate.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from kvlab.trace.steps import Step
from kvlab.trace.store import FRAME, OP, RUNTIME, Rank, Trace

_MODULE = "nn.Module: "


class Origin(NamedTuple):
    """From the outside in; empty where the trace does not say."""

    modules: tuple[str, ...]
    frames: tuple[str, ...]
    operators: tuple[str, ...]


def launches(rank: Rank, corrs: set[int]) -> dict[int, int]:
    """Host event index of the launch of each correlation id."""
    host = rank.host
    return {host.corr[i]: i for i in range(len(host)) if host.kind[i] == RUNTIME and host.corr[i] in corrs}


def enclosing(rank: Rank, event: int) -> list[int]:
    """Indices of the host events on the same thread that contain `event`, outermost first."""
    host = rank.host
    at, until, track = host.start[event], host.start[event] + host.dur[event], host.track[event]
    found = []
    for i in range(bisect_right(host.start, at) - 1, -1, -1):
        if i != event and host.track[i] == track and host.start[i] + host.dur[i] >= until:
            found.append(i)
    return found[::-1]


def origins(trace: Trace, rank: Rank, kernels: Sequence[int]) -> dict[int, Origin]:
    """The origin of each kernel index, in one pass over the host events; without a launch it is left out."""
    k, host = rank.kernels, rank.host
    launched = launches(rank, {k.corr[i] for i in kernels if k.corr[i] > 0})
    shared = Counter(k.corr) if launched else Counter()
    wanted = {e for c, e in launched.items() if shared[c] == 1}
    if not wanted:
        return {}
    stacks: dict[int, list[int]] = {}
    at: dict[int, Origin] = {}
    for i in range(len(host)):
        stack = stacks.setdefault(host.track[i], [])
        while stack and host.start[stack[-1]] + host.dur[stack[-1]] < host.start[i]:
            stack.pop()
        if i in wanted:
            at[i] = _origin(trace, rank, stack)
        elif host.kind[i] in (OP, FRAME):
            stack.append(i)
    return {i: at[e] for i in kernels if (e := launched.get(k.corr[i])) in at and e is not None}


def _origin(trace: Trace, rank: Rank, stack: list[int]) -> Origin:
    frames = [trace.names[rank.host.name[i]] for i in stack if rank.host.kind[i] == FRAME]
    return Origin(
        tuple(n.removeprefix(_MODULE) for n in frames if n.startswith(_MODULE)),
        tuple(n for n in frames if not n.startswith(_MODULE)),
        tuple(trace.names[rank.host.name[i]] for i in stack if rank.host.kind[i] == OP),
    )


def operators(
    trace: Trace, rank: Rank, steps: Sequence[Step], name: int, configs: set[int]
) -> Iterator[tuple[Any, Any]]:
    """(Input Dims, Input type) of the copy operators behind the kernels of this name and these shapes."""
    if not rank.host.shapes:
        return
    k = rank.kernels
    some = [i for s in steps for i in range(s.lo, s.hi) if k.name[i] == name and k.config[i] in configs][:8]
    for event in launches(rank, {k.corr[i] for i in some if k.corr[i] > 0}).values():
        for op in reversed(enclosing(rank, event)):
            if op in rank.host.shapes:
                yield rank.host.shapes[op]
