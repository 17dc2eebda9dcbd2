"""How long does a call take inside a replayed CUDA graph?"""

import statistics
from collections.abc import Callable, Sequence

import torch


def flusher(device: torch.device) -> Callable[[], object]:
    """A call that leaves nothing of what came before in the L2 cache: it writes four times its size."""
    size = torch.cuda.get_device_properties(device).L2_cache_size
    spare = torch.empty(4 * size, dtype=torch.uint8, device=device)
    return spare.zero_


def graph_us(
    calls: Sequence[Callable[[], object]],
    *,
    flush: Callable[[], object] | None = None,
    replays: int = 11,
    warm_up: int = 2,
) -> float:
    """Median over `replays` of one graph that holds all `calls`, in microseconds a call.

    `flush` runs before each replay, outside the timed part. For a cold figure let each call read other
    memory, as the layers of a model do; one graph of many calls keeps the events' own cost out.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return replay_us(graph, flush=flush, replays=replays, warm_up=warm_up) / len(calls)


def replay_us(
    graph: torch.cuda.CUDAGraph,
    *,
    flush: Callable[[], object] | None = None,
    replays: int = 11,
    warm_up: int = 2,
) -> float:
    """Median microseconds of one replay."""
    times = []
    for i in range(warm_up + replays):
        if flush is not None:
            flush()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= warm_up:
            times.append(1000 * start.elapsed_time(end))
    return statistics.median(times)
