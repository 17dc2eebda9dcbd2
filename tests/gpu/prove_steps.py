"""What does a decode step cost, strategy against strategy, over the very same weights? A process, by hand.

    python tests/gpu/prove_steps.py turns OUT.json --order control_bf16 exact fast control_bf16 exact fast …
    python tests/gpu/prove_steps.py pairs OUT.json --order control_bf16 exact fast stock --points 1x100:24 …
    python tests/gpu/prove_steps.py pairs OUT.json --order exact@65536 exact@495552 / stock@65536 stock@495552

Two processes of one strategy differ by some parts in a hundred. `turns` serves one strategy after the other
in one process. `pairs` keeps several alive at once (those before a `/`, then those behind it) and lets them
take short turns, a few waited steps each, forwards and backwards in turn, the patch taken out for those that
serve without; the thread that drives them keeps a few cores to itself as far as it can. What changes the
machine's pace meanwhile changes it for all. Where the patch was put in right before a turn, its steps took
the host some 0.1 ms longer than where it was in already (rounds forwards against rounds backwards): `--warm`
steps of another request go first. Both write a run of `kvlab bench step`; `pairs` says each round.
"""

import argparse
import contextlib
import gc
import itertools
import json
import os
import resource
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from prove_pace import meter
from prove_patch import loaded, rank_arguments, say

# Tokens of the request whose steps warm a turn.
WARM_CONTEXT = 100

# Waited steps of a turn within a round: not counted, timed, and with their graph between two events; replays.
SETTLE, EVENTS, REPLAYS = 2, 4, 4
# Rounds after which every strategy starts its batch anew. Contexts grow by a step each meanwhile: of 100 to
# 128 tokens, the edge of the next tile of an attention kernel.
SESSION = 2


def main() -> int:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("turns", "pairs"):
        one = commands.add_parser(name)
        one.add_argument("out", type=Path)
        one.add_argument("--order", nargs="+", required=True, help="STRATEGY or STRATEGY@POOL")
        rank_arguments(one)
        one.add_argument("--control-pool", type=int, default=132_608)
    turns = commands.choices["turns"]
    turns.add_argument("--contexts", type=int, nargs="+", required=True)
    turns.add_argument("--batches", type=int, nargs="+", required=True)
    turns.add_argument("--steps", type=int, default=32)
    turns.add_argument("--stock-steps", type=int, default=12)
    pairs = commands.choices["pairs"]
    pairs.add_argument("--points", nargs="+", required=True, help="BATCHxCONTEXT:ROUNDS")
    pairs.add_argument("--steps", type=int, default=8, help="timed steps of a turn within a round")
    pairs.add_argument("--stock-steps", type=int, default=3)
    pairs.add_argument("--stock-rounds", type=int, default=2, help="where nothing but stock is alive")
    pairs.add_argument("--warm", type=int, default=56, help="steps of another request before a turn")
    pairs.add_argument("--no-graphs", action="store_true")
    pairs.add_argument("--cores", type=int, default=2, help="physical cores to keep to")
    pairs.add_argument("--trace", nargs="*", default=[], help="strategies: a trace of two steps, 1 x 100")
    asked = parser.parse_args()
    asked.burn = 0
    return {"turns": take_turns, "pairs": in_pairs}[asked.command](asked)


def ordered(asked: argparse.Namespace, order: list[str]) -> list[tuple[str, int]]:
    """Strategies and their pools, as `--order` has them."""
    found = []
    for one in order:
        strategy, _, pool = one.partition("@")
        usual = asked.control_pool if strategy == "control_bf16" else asked.pool
        found.append((strategy, int(pool or usual)))
    return found


def child_of(asked: argparse.Namespace, strategy: str, slots: int, *, graphs: bool = True) -> Any:
    from kvlab.bench.step import Child

    return Child(
        model=asked.model,
        folder="",
        strategy=strategy,
        pool=slots,
        backend=asked.backend,
        page_size=asked.page_size,
        cuda_graphs=graphs,
        points=(),
        tp=asked.tp,
        steps=asked.stock_steps if strategy == "stock" else asked.steps,
        out="",
    )


def process_of(rank: Any, strategy: str) -> Any:
    """This process as it serves now: each turn has a KVLAB_PATCH of its own."""
    import msgspec

    from kvlab import provenance
    from kvlab.bench.step_child import process

    known = provenance.collect(env=["KVLAB_PATCH"])
    return msgspec.structs.replace(process(rank, strategy), provenance=known, memory={})


def take_turns(asked: argparse.Namespace) -> int:
    """Step times of several strategies in one process, over the very same weights, one after the other."""
    import msgspec

    from kvlab.bench import step_results
    from kvlab.bench.sglang_rank import again
    from kvlab.bench.step_child import point

    order = ordered(asked, asked.order)
    strategy, slots = order[0]
    first = argparse.Namespace(**{**vars(asked), "strategy": strategy, "pool": slots})
    rank = loaded(first, graphs=True, batches=tuple(sorted(asked.batches)))
    runs: list[Any] = []
    processes: list[Any] = []
    for turn, (strategy, slots) in enumerate(order):
        if turn:
            rank = again(rank, replace(rank.setup, strategy=strategy, pool=slots))
        child = child_of(asked, strategy, rank.slots)
        for context, batch in itertools.product(asked.contexts, asked.batches):
            step = point(rank, child, batch, context)
            runs.append(msgspec.structs.replace(step, process=turn))
            if not step.reason:
                said = f"{step.step_ms:.3f} ms, graph {step.graph_ms:.3f}, replayed {step.replay_ms:.3f}"
                say(f"{strategy} {slots:,} {batch} x {context:,}: {said}, host {step.host_ms:.3f}")
        processes.append(process_of(rank, strategy))
        whole = step_results.StepRun(provenance=processes[0].provenance, runs=runs, processes=processes)
        step_results.write(asked.out, whole)
    return 0


class Turn:
    """One strategy alive: its rank, what served there, and its times at the point being measured."""

    def __init__(self, name: str, number: int, rank: Any, child: Any) -> None:
        self.name, self.number, self.rank, self.child = name, number, rank, child
        self.served: dict[str, str] = {}
        self.batch: Any = None
        self.warm: Any = None
        self.clear()

    def clear(self) -> None:
        self.times: list[float] = []
        self.hosts: list[float] = []
        self.graphs: list[float] = []
        told = ("step_ms", "host_ms", "graph_ms", "replay_ms", "meter_ms")
        self.rounds: dict[str, list[float]] = {what: [] for what in told}

    def activate(self) -> None:
        from kvlab.bench.sglang_rank import activate

        activate(self.rank)

    def start(self, batch: int, context: int, warm: int) -> None:
        """A session's batches: the one that is timed, and a request whose steps warm a turn."""
        self.activate()
        self.batch = self.rank.start_at(batch, context)
        self.warm = self.rank.start_at(1, WARM_CONTEXT, beside=True) if warm else None

    def take(self, meter: Any, warm: int) -> None:
        """One turn of a round. `meter`: a chain of kernels that tells the GPU's pace (prove_pace)."""
        from kvlab.bench import sglang_rank

        self.activate()
        sglang_rank.patched_as(self.rank)
        for _ in range(warm):
            self.rank.decode(self.warm)
        for _ in range(SETTLE):
            self.rank.decode(self.batch)
        times, hosts = sglang_rank.waited(self.rank, self.batch, self.child.steps)
        graphs = sglang_rank.graph_of_steps(self.rank, self.batch, EVENTS)
        graph = sglang_rank.graph_of(self.rank)
        self.times += times
        self.hosts += hosts
        self.graphs += graphs
        self.rounds["step_ms"].append(statistics.median(times))
        self.rounds["host_ms"].append(statistics.median(hosts))
        if graphs:
            self.rounds["graph_ms"].append(statistics.median(graphs))
            count = 1 if self.child.strategy == "stock" else REPLAYS
            self.rounds["replay_ms"].append(sglang_rank.replayed(graph, count))
        self.rounds["meter_ms"].append(sglang_rank.replayed(meter, REPLAYS))

    def step(self, batch: int, context: int) -> Any:
        """The point's times, as a step of `kvlab bench step`."""
        from kvlab.bench.sglang_rank import summary
        from kvlab.bench.step_child import known_of, timed_step

        self.activate()
        replays = self.rounds["replay_ms"]
        middle = statistics.median(replays) if replays else None
        found = summary(self.times, self.hosts, self.graphs, middle)
        known = known_of(self.rank, self.child, batch, context)
        return timed_step(known, found, served=self.served, process=self.number)


def in_pairs(asked: argparse.Namespace) -> int:
    """Several strategies alive at once, by short turns."""
    from kvlab.bench import step_child

    points = [tuple(int(n) for n in p.replace(":", "x").split("x")) for p in asked.points]
    groups = [list(g) for is_cut, g in itertools.groupby(asked.order, "/".__eq__) if not is_cut]
    batches = tuple(sorted({b for b, *_ in points}))
    pairs = Pairs(asked)
    rank = None
    for group in groups:
        turns = []
        for (strategy, slots), asked_as in zip(ordered(asked, group), group, strict=True):
            if strategy == "native":
                raise SystemExit("native: its plan asks the patch at each step; use turns")
            rank = served(asked, rank, strategy, slots, batches, keep=bool(turns))
            turn = Turn(
                asked_as, pairs.count, rank, child_of(asked, strategy, slots, graphs=not asked.no_graphs)
            )
            # What it says of itself while it is the one that is patched in.
            rank.decode(rank.start_at(batches[0], 100))
            turn.served = step_child.served()
            pairs.add(process_of(rank, strategy))
            turns.append(turn)
        pairs.settle_down()
        only_stock = all(t.child.strategy == "stock" for t in turns)
        for batch, context, rounds in points:
            pairs.measure(turns, batch, context, min(rounds, asked.stock_rounds) if only_stock else rounds)
        for turn in turns:
            if turn.child.strategy in asked.trace:
                pairs.trace(turn)
        # The next group's pools need the room.
        for turn in turns:
            turn.rank.held, turn.batch = {}, None
    return 0


def served(
    asked: argparse.Namespace, rank: Any, strategy: str, slots: int, batches: tuple[int, ...], *, keep: bool
) -> Any:
    """The strategy, alive: the first in this process, or over the weights of `rank`."""
    from kvlab.bench.sglang_rank import again

    if rank is None:
        # A copy: the pool that was asked for is still that of the others.
        first = argparse.Namespace(**{**vars(asked), "strategy": strategy, "pool": slots})
        return loaded(first, graphs=not asked.no_graphs, batches=batches)
    return again(rank, replace(rank.setup, strategy=strategy, pool=slots), keep=keep)


class Pairs:
    """What was measured so far, and its file."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked = asked
        self.runs: list[Any] = []
        self.processes: list[Any] = []
        self.rounds: list[dict[str, Any]] = []
        self.cpus: dict[str, Any] = {}
        self.meter: Any = None

    @property
    def count(self) -> int:
        return len(self.processes)

    def add(self, process: Any) -> None:
        self.processes.append(process)

    def stolen(self) -> float:
        """Seconds that the host of this virtual machine took from the cores that we run on, so far."""
        ticks = _ticks()
        return sum(ticks[cpu][7] for cpu in self.cpus["runs_on"]) / os.sysconf("SC_CLK_TCK")

    def settle_down(self) -> None:
        """Once everything is loaded: a meter of the GPU's pace, and cores of its own for this thread."""
        if not self.cpus:
            self.meter = meter()
            self.cpus = keep_to(quiet_cores(self.asked.cores))
            say(f"on {self.cpus}")

    def measure(self, turns: list[Turn], batch: int, context: int, rounds: int) -> None:
        from kvlab import patch

        is_slow = self.asked.no_graphs or all(t.child.strategy == "stock" for t in turns)
        warm = 0 if is_slow else self.asked.warm
        warmed = -(-(WARM_CONTEXT + SESSION * warm) // batch)
        for turn in turns:
            turn.clear()
            turn.activate()
            if turn.rank.fits(batch, context, SESSION * (SETTLE + turn.child.steps + EVENTS) + 1 + warmed):
                return
        gc.collect()
        started, switched = time.perf_counter(), resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw
        stolen = self.stolen()
        for number in range(rounds):
            if number % SESSION == 0:
                # Prompts are nobody's turn: stock serves them, and no patch checks itself anew for one.
                patch.apply("off")
                for turn in turns:
                    turn.start(batch, context, warm)
            for turn in turns if number % 2 == 0 else reversed(turns):
                turn.take(self.meter, warm)
        switched = resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw - switched
        self.runs += [turn.step(batch, context) for turn in turns]
        self.rounds.append(
            {
                "batch": batch,
                "context": context,
                **{k: getattr(self.asked, k) for k in ("model", "backend", "page_size")},
                "cuda_graphs": not self.asked.no_graphs,
                "seconds": round(time.perf_counter() - started, 2),
                "warm": warm,
                "switched_out": switched,
                "stolen_s": round(self.stolen() - stolen, 2),
                "load": os.getloadavg()[0],
                "of": {t.name: {k: [round(x, 4) for x in v] for k, v in t.rounds.items()} for t in turns},
            }
        )
        self.tell(turns)
        self.write()

    def tell(self, turns: list[Turn]) -> None:
        from kvlab.bench.paired import ratio

        last = self.rounds[-1]
        where = f"{last['batch']} x {last['context']:,}"
        say(f"{where}: {last['seconds']} s, switched out {last['switched_out']} times")
        base = last["of"][turns[0].name]
        for turn in turns:
            its = last["of"][turn.name]
            parts = [turn.name]
            for what in (w for w in its if its[w]):
                r = ratio(its[what], base[what])
                middle = f"{what} {statistics.median(its[what]):.3f}"
                parts.append(f"{middle} = {r.median:.4f} ({r.low:.4f}-{r.high:.4f})")
            say("   " + "; ".join(parts))

    def trace(self, turn: Turn) -> None:
        from kvlab.bench.sglang_rank import patched_as, profile

        turn.activate()
        patched_as(turn.rank)
        path = self.asked.out.with_name(f"{turn.child.strategy}.trace.json.gz")
        profile(turn.rank, turn.rank.start_at(1, 100), str(path))
        say(f"trace {path.name}")

    def write(self) -> None:
        import msgspec

        from kvlab.bench import step_results

        newest = self.processes[-1].provenance
        run = step_results.StepRun(provenance=newest, runs=self.runs, processes=self.processes)
        whole = {**json.loads(msgspec.json.encode(run)), "pairs": self.rounds, "cpus": self.cpus}
        self.asked.out.write_text(json.dumps(whole) + "\n", encoding="utf-8")


def quiet_cores(count: int) -> list[list[int]]:
    """`count` physical cores of the GPU's NUMA node, the idlest, each as its threads (its logical CPUs)."""
    allowed = os.sched_getaffinity(0)
    near = allowed & _near() or allowed
    before = _busy()
    time.sleep(0.5)
    busy = {cpu: ticks - before.get(cpu, 0) for cpu, ticks in _busy().items()}
    cores = {tuple(sorted(_siblings(cpu) & allowed)) for cpu in near}
    order = sorted(cores, key=lambda c: (sum(busy.get(cpu, 0) for cpu in c), c))
    return [list(core) for core in order[:count]]


def keep_to(cores: list[list[int]]) -> dict[str, Any]:
    """Let this thread run on the first thread of each of `cores` only, before all others."""
    mine = [core[0] for core in cores]
    os.sched_setaffinity(0, mine)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -20)
    return {
        "cores": cores,
        "runs_on": mine,
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "near_gpu": bool(_near()),
    }


def _near() -> set[int]:
    """Logical CPUs of the GPU's NUMA node; empty where the system does not say."""
    import torch

    found = torch.cuda.get_device_properties(0)
    bus = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    try:
        return _cpus(Path(f"/sys/bus/pci/devices/{bus}/local_cpulist").read_text("utf-8"))
    except OSError:
        return set()


def _siblings(cpu: int) -> set[int]:
    try:
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        return _cpus(path.read_text("utf-8"))
    except OSError:
        return {cpu}


def _cpus(text: str) -> set[int]:
    """`0-3,8` as numbers."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _busy() -> dict[int, int]:
    """Ticks that each logical CPU was not idle."""
    return {cpu: sum(ticks) - ticks[3] - ticks[4] for cpu, ticks in _ticks().items()}


def _ticks() -> dict[int, list[int]]:
    """Each logical CPU's line of /proc/stat: user, nice, system, idle, iowait, irq, softirq, steal, …"""
    found = {}
    for line in Path("/proc/stat").read_text("utf-8").splitlines():
        name, *ticks = line.split()
        if name.startswith("cpu") and name != "cpu":
            found[int(name[3:])] = [int(t) for t in ticks]
    return found


if __name__ == "__main__":
    sys.exit(main())
