"""What does an all-reduce cost on this host's cards? One process a rank, NCCL on GPUs and gloo on a CPU."""

import os
import queue as queues
import socket
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from kvlab.suspects.results import Reduce

_CALLS = 50
_ROUNDS = 7
_WAIT_S = 240


def all_reduces(
    device: str, sizes: Sequence[int], *, ranks: Sequence[int] | None = None, large: int = 2**24
) -> tuple[list[Reduce], list[str]]:
    """Median microseconds of an all-reduce of each of `sizes` bytes and of `large`; what was skipped.

    `ranks`: numbers of ranks; None takes 1, 2, 4, … up to the cards there are, and 2 on a CPU.
    """
    cards = torch.cuda.device_count() if device == "cuda" else 2
    wanted = [n for n in (1, 2, 4, 8) if n <= cards] if ranks is None else list(ranks)
    found, skipped = [], []
    for n in wanted:
        if device == "cuda" and n > cards:
            skipped.append(f"{n} ranks: this host has {cards} cards")
            continue
        try:
            found += _run(device, n, sorted({*sizes, large}))
        except RuntimeError as e:
            skipped.append(f"{n} ranks: {' '.join(str(e).split())[:200]}")
    return found, skipped


def _run(device: str, n: int, sizes: list[int]) -> list[Reduce]:
    context = mp.get_context("spawn")
    answers: Any = context.Queue()
    port = _free_port()
    workers = [
        context.Process(target=_worker, args=(rank, n, port, device, sizes, answers), daemon=True)
        for rank in range(n)
    ]
    for worker in workers:
        worker.start()
    try:
        answer = answers.get(timeout=_WAIT_S)
    except queues.Empty:
        raise RuntimeError(f"no answer within {_WAIT_S} s") from None
    finally:
        for worker in workers:
            worker.join(timeout=20)
            if worker.is_alive():
                worker.terminate()
    if isinstance(answer, str):
        raise RuntimeError(answer)
    return answer


def _worker(rank: int, n: int, port: int, device: str, sizes: list[int], answers: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        found = _measure(rank, n, device, sizes)
    except Exception as e:
        answers.put(f"rank {rank}: {e}")
        raise SystemExit(1) from None
    if rank == 0:
        answers.put(found)


def _measure(rank: int, n: int, device: str, sizes: list[int]) -> list[Reduce]:
    backend = "nccl" if device == "cuda" else "gloo"
    where = torch.device("cuda", rank) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(where)
    dist.init_process_group(backend, rank=rank, world_size=n)
    found = []
    try:
        for size in sizes:
            probe = torch.full((size // 2,), rank + 1, dtype=torch.bfloat16, device=where)
            dist.all_reduce(probe)
            correct = bool((probe == n * (n + 1) // 2).all())
            tensor = torch.zeros(size // 2, dtype=torch.bfloat16, device=where)
            us = _graph_us(tensor) if device == "cuda" else _clock_us(tensor)
            found.append(
                Reduce(ranks=n, bytes=size, us=us, backend=backend, graph=device == "cuda", correct=correct)
            )
    finally:
        dist.destroy_process_group()
    return found


def _graph_us(tensor: torch.Tensor) -> float:
    """As a server runs it: many in one captured graph, timed by events on this rank."""
    for _ in range(3):
        dist.all_reduce(tensor)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Thread-local: NCCL's watchdog queries events on a thread of its own while this one captures.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(_CALLS):
            dist.all_reduce(tensor)
    times = []
    for _ in range(_ROUNDS):
        dist.barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / _CALLS)
    return statistics.median(times)


def _clock_us(tensor: torch.Tensor) -> float:
    times = []
    for _ in range(3):
        dist.barrier()
        start = time.perf_counter_ns()
        for _ in range(3):
            dist.all_reduce(tensor)
        times.append((time.perf_counter_ns() - start) / 3e3)
    return statistics.median(times)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
