"""One process of `kvlab bench step`: load the rank under one strategy, time its points, write as it goes."""

import functools
import hashlib
import sys
from pathlib import Path
from typing import Any

import msgspec

from kvlab import provenance
from kvlab.bench import step_results, tuned
from kvlab.bench.step import GRAPH_STEPS, WARM_UP, Child
from kvlab.bench.step_results import Process, Step, StepRun
from kvlab.provenance import Provenance


def main() -> int:
    child = msgspec.json.decode(sys.argv[1], type=Child)
    from kvlab.bench.sglang_rank import Setup, load

    batches = tuple(sorted({b for b, _ in child.points}))
    setup = Setup(
        folder=child.folder,
        strategy=child.strategy,
        pool=child.pool,
        batches=batches,
        backend=child.backend,
        page_size=child.page_size,
        cuda_graphs=child.cuda_graphs,
    )
    rank = load(setup)
    steps: list[Step] = []
    for batch, context in child.points:
        steps.append(point(rank, child, batch, context))
        shown = steps[-1].reason or f"{steps[-1].step_ms:.3f} ms, {steps[-1].replay_ms or 0:.3f} replayed"
        print(f"{batch} x {context:,}: {shown}", flush=True)
        step_results.write(Path(child.out), run(rank, child, steps))
    if child.trace:
        from kvlab.bench.sglang_rank import profile

        smallest = min(child.points, key=lambda p: p[0] * p[1])
        profile(rank, rank.start_at(*smallest), child.trace)
    rank.snapshot("served")
    step_results.write(Path(child.out), run(rank, child, steps))
    return 0


def point(rank: Any, child: Child, batch: int, context: int) -> Step:
    """One point: its time, or the reason that it has none."""
    import torch

    from kvlab.bench.sglang_rank import timed

    known = known_of(rank, child, batch, context)
    reason = rank.fits(batch, context, WARM_UP + child.steps + GRAPH_STEPS)
    if reason:
        return Step(**known, reason=reason)
    try:
        torch.cuda.reset_peak_memory_stats()
        found = timed(rank, rank.start_at(batch, context), steps=child.steps, warm_up=WARM_UP)
    except torch.OutOfMemoryError as e:
        torch.cuda.empty_cache()
        return Step(**known, reason=f"out of memory: {str(e)[:80]}")
    peak = torch.cuda.max_memory_allocated()
    return timed_step(known, found, served=served(), peak_bytes=peak)


def known_of(rank: Any, child: Child, batch: int, context: int) -> dict[str, Any]:
    """What is known of a point before it is timed."""
    config = rank.runner.model_config
    return {
        "strategy": child.strategy,
        "model": child.model,
        "backend": child.backend,
        "cuda_graphs": child.cuda_graphs,
        "batch": batch,
        "context": context,
        "pool": rank.slots,
        "page_size": child.page_size,
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "tp": child.tp,
        "step_ms": None,
        "captured_bytes": rank.memory["captured"]["device_used"],
    }


def timed_step(known: dict[str, Any], found: Any, **more: Any) -> Step:
    """A point with its times, kvlab.bench.sglang_rank.Timed."""
    times = {
        "step_ms": found.median,
        "low_ms": found.low,
        "high_ms": found.high,
        "replay_ms": found.replay,
        "graph_ms": found.graph,
        "host_ms": found.host,
        "steps": found.steps,
    }
    return Step(**{**known, **times, **more})


def served() -> dict[str, str]:
    """Which strategy serves which site here."""
    from kvlab import patch

    return {site: choice["strategy"] for site, choice in patch.status()["chosen"].items()}


def run(rank: Any, child: Child, steps: list[Step]) -> StepRun:
    """What this process has measured so far."""
    made = process(rank, child.strategy, child_command(child) if child.out else None)
    return StepRun(provenance=made.provenance, runs=steps, processes=[made])


def child_command(child: Child) -> list[str]:
    """What to type for this process alone."""
    batches, contexts = (dict.fromkeys(str(p[i]) for p in child.points) for i in (0, 1))
    return [
        *("python", "-m", "kvlab", "bench", "step", "--model", child.model, "--tp", str(child.tp)),
        *("--strategies", child.strategy, "--pools", str(child.pool), "--backend", child.backend),
        *("--page-size", str(child.page_size), "--steps", str(child.steps)),
        *("--batches", ",".join(batches), "--contexts", ",".join(contexts)),
        *([] if child.cuda_graphs else ["--no-cuda-graphs"]),
    ]


@functools.cache
def _provenance(command: tuple[str, ...] | None) -> Provenance:
    """Asked once: it runs nvidia-smi."""
    return provenance.collect(command, env=["KVLAB_PATCH"])


def process(rank: Any, strategy: str, command: list[str] | None = None) -> Process:
    """What this process is, and what its patch says of itself."""
    from kvlab import patch

    return Process(
        provenance=_provenance(tuple(command) if command else None),
        strategy=strategy,
        memory=rank.memory,
        patch=patch.status(),
        seconds=rank.seconds,
        server=_server(rank),
        tuned=tuned.picks(),
        device=_device(),
    )


@functools.cache
def _device() -> str:
    import torch

    uuid = str(getattr(torch.cuda.get_device_properties(0), "uuid", ""))
    return hashlib.sha256(uuid.encode()).hexdigest()[:12] if uuid else ""


def _server(rank: Any) -> dict[str, Any]:
    from kvlab.bench.sglang_rank import server_args

    return {k: v for k, v in server_args(rank.setup).items() if k != "model_path"}


if __name__ == "__main__":
    sys.exit(main())
