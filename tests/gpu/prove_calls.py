"""What does a call of attention cost the host with CUDA graphs off? Strategy against strategy, by hand.

    python tests/gpu/prove_calls.py OUT.json --order stock exact fast control_bf16 \\
        --points decode:1x100 decode:64x100 extend:16x1024 [--rounds 12] [--profile exact]

Several strategies are alive at once over the very same weights in one process and take short turns, forwards
and backwards in turn. `call_us`: the host's time in the backend's `forward_decode` or `forward_extend`, a
layer: KV write, cast and attention are queued there, and nothing waits for them. `host_ms` and `step_ms`: the
whole step until it is queued, and until it is done. An extend is of BATCH prompts of 16 tokens, each behind
CONTEXT cached ones: without those SGLang reads no pool.
"""

import argparse
import cProfile
import gc
import io
import itertools
import json
import pstats
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from prove_patch import prompts, rank_arguments, say
from prove_steps import ordered, served

# Steps of a turn: not counted, and counted.
SETTLE, STEPS = 2, 4
# New tokens of each prompt of an extend.
TAIL = 16


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--order", nargs="+", default=["stock", "exact", "fast", "control_bf16"])
    parser.add_argument("--points", nargs="+", default=["decode:1x100", "decode:64x100", "extend:16x1024"])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--profile", nargs="*", default=[], help="strategies whose calls are profiled, after")
    rank_arguments(parser)
    parser.add_argument("--control-pool", type=int, default=132_608)
    asked = parser.parse_args()
    asked.burn, asked.no_graphs = 0, True
    points = [Point(p) for p in asked.points]
    batches = tuple(sorted({p.batch for p in points}))
    turns: list[Turn] = []
    rank = None
    for strategy, slots in ordered(asked, asked.order):
        rank = served(asked, rank, strategy, slots, batches, keep=bool(turns))
        turns.append(Turn(strategy, rank))
    found: list[dict[str, Any]] = []
    for point in points:
        for turn in turns:
            turn.clear()
        for number in range(asked.rounds):
            for turn in turns if number % 2 == 0 else reversed(turns):
                turn.take(point)
        found.append(told(point, turns))
        write(asked.out, turns, found)
    for turn, point in itertools.product(turns, points):
        if turn.name in asked.profile:
            text = turn.profiled(point)
            asked.out.with_name(f"{turn.name}-{point.name}.profile.txt").write_text(text, encoding="utf-8")
    return 0


class Point:
    """`decode:BATCHxCONTEXT` or `extend:BATCHxTOKENS`."""

    def __init__(self, text: str) -> None:
        self.kind, _, shape = text.partition(":")
        batch, _, context = shape.partition("x")
        self.batch, self.context = int(batch), int(context)

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.batch}x{self.context}"


class Turn:
    """One strategy alive, and its times at the point being measured: of each step."""

    def __init__(self, name: str, rank: Any) -> None:
        self.name, self.rank = name, rank
        self.patch: dict[str, Any] = {}
        self.clear()

    def clear(self) -> None:
        self.batch: Any = None
        self.prefixes: list[Any] = []
        self.calls: list[float] = []
        self.hosts: list[float] = []
        self.steps: list[float] = []

    def take(self, point: Point) -> None:
        """One turn of a round."""
        from kvlab import patch
        from kvlab.bench.sglang_rank import activate, patched_as

        activate(self.rank)
        patched_as(self.rank)
        self.begin(point)
        gc.collect()
        gc.disable()
        try:
            with Clock(self.rank.runner.attn_backend, point.kind) as clock:
                for number in range(SETTLE + STEPS):
                    self.step(point, clock, is_counted=number >= SETTLE)
        finally:
            gc.enable()
        said = patch.status()
        # Anew at each turn: what served this one.
        self.patch = {"strategy": said["strategy"], **said["counters"]}

    def begin(self, point: Point) -> None:
        if point.kind == "decode":
            self.batch = self.rank.start_at(point.batch, point.context)
            return
        self.rank.clear()
        self.prefixes = list(self.rank.prefix(point.batch * point.context).split(point.context))

    def step(self, point: Point, clock: Any, *, is_counted: bool) -> None:
        import torch

        # Each extend is of new requests, behind the same prefixes.
        if point.kind == "extend":
            self.rank.runner.req_to_token_pool.clear()
        torch.cuda.synchronize()
        clock.seconds, clock.count = 0.0, 0
        start = time.perf_counter()
        if point.kind == "decode":
            self.rank.decode(self.batch)
            queued = self.rank.queued
        else:
            self.batch = self.rank.start(prompts([TAIL] * point.batch), self.prefixes)
            queued = time.perf_counter()
            torch.cuda.synchronize()
        if is_counted:
            self.calls.append(clock.seconds / max(clock.count, 1) * 1e6)
            self.hosts.append((queued - start) * 1e3)
            self.steps.append((time.perf_counter() - start) * 1e3)

    def profiled(self, point: Point) -> str:
        """Where the host's time in these calls goes, of a few steps; cProfile makes each dearer."""
        from kvlab.bench.sglang_rank import activate, patched_as

        activate(self.rank)
        patched_as(self.rank)
        self.begin(point)
        profile = cProfile.Profile()
        with Clock(self.rank.runner.attn_backend, point.kind, profile) as clock:
            for _ in range(SETTLE + STEPS):
                self.step(point, clock, is_counted=False)
        text = io.StringIO()
        pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(60)
        return text.getvalue()


class Clock:
    """Inside, the time that the host spends in one method of this backend object."""

    def __init__(self, backend: Any, kind: str, profile: cProfile.Profile | None = None) -> None:
        self.backend, self.name, self.profile = backend, f"forward_{kind}", profile
        self.seconds, self.count = 0.0, 0

    def __enter__(self) -> "Clock":
        method, profile = getattr(self.backend, self.name), self.profile

        def timed(*args: Any, **kwargs: Any) -> Any:
            if profile is not None:
                return profile.runcall(method, *args, **kwargs)
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start
                self.count += 1

        setattr(self.backend, self.name, timed)
        return self

    def __exit__(self, *_: object) -> None:
        delattr(self.backend, self.name)


def told(point: Point, turns: list[Turn]) -> dict[str, Any]:
    """The point's figures: middles, and lower quartiles, which a crowded host disturbs least."""
    its = {}
    for turn in turns:
        of = {"call_us": turn.calls, "host_ms": turn.hosts, "step_ms": turn.steps}
        its[turn.name] = {k: [round(x, 3) for x in v] for k, v in of.items()} | {"patch": turn.patch}
        shown = [f"{k} {statistics.median(v):.3f} ({sorted(v)[len(v) // 4]:.3f})" for k, v in of.items()]
        say(f"{point.name} {turn.name}: {', '.join(shown)}")
    return {"kind": point.kind, "batch": point.batch, "context": point.context, "of": its}


def write(path: Path, turns: list[Turn], found: list[dict[str, Any]]) -> None:
    import msgspec

    from kvlab.bench.step_child import process

    made = json.loads(msgspec.json.encode(process(turns[0].rank, turns[0].name)))
    config = turns[0].rank.runner.model_config
    whole = {
        "provenance": made["provenance"],
        "device": made["device"],
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "pools": {t.name: t.rank.setup.pool for t in turns},
        "points": found,
    }
    path.write_text(json.dumps(whole) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
