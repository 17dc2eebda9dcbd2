"""Why does one captured graph take 10.0 ms here and 9.5 there, kernel for kernel the same? By hand, on a GPU.

    python tests/gpu/prove_pace.py tiny OUT.json
    python tests/gpu/prove_pace.py rank OUT.json [--layers 78] [--turns control_bf16 exact]
    python tests/gpu/prove_pace.py states OUT.json

`tiny`: chains of some 1,500 kernels that do next to nothing; `rank`: the decode graphs of a rank of
`prove_patch.py`. Each is replayed back to back while one thing at a time is changed: the graph is
instantiated anew, others are alive, memory is taken and given back, copies run beside it, the CPUs spin,
another process has a context on the GPU. Told is the time a replay, sample by sample, and the GPU's clocks.
`states` takes the chain as a meter: what is followed by the one pace, what by the other?
"""

import argparse
import atexit
import contextlib
import ctypes
import gc
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

KERNELS, REPLAYS, SAMPLES, ANEW, ALIVE = 1500, 8, 5, 12, 60
SERIES = 6.0
SPIN = "while True: pass"
STREAM = "a = bytearray(1 << 28); b = bytearray(1 << 28)\nwhile True: b[:] = a"
GIB = 1 << 30


def main() -> int:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("tiny", "rank", "states"):
        one = commands.add_parser(name)
        one.add_argument("out", type=Path)
    rank = commands.choices["rank"]
    rank.add_argument("--model", default="glm-5")
    rank.add_argument("--layers", type=int)
    rank.add_argument("--tp", type=int, default=8)
    rank.add_argument("--turns", nargs="+", default=["control_bf16", "exact"])
    other = commands.add_parser("other")
    other.add_argument("folder", type=Path)
    other.add_argument("--busy", action="store_true")
    asked = parser.parse_args()
    return {"tiny": tiny, "rank": of_rank, "states": states, "other": be_other}[asked.command](asked)


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


class Kept:
    """In place of torch's class of graphs: makes such as keep what they captured. Others annotate with it."""

    def __init__(self, whole: Any) -> None:
        self.whole = whole

    def __call__(self) -> Any:
        return self.whole(keep_graph=True)

    def __or__(self, other: Any) -> Any:
        return self.whole | other

    def __instancecheck__(self, one: Any) -> bool:
        return isinstance(one, self.whole)


class Exec:
    """One instantiation of a captured graph (kept: `keep_graph=True`), launched through the runtime."""

    def __init__(self, graph: Any) -> None:
        self._lib = _cudart()
        self._exec = ctypes.c_void_p()
        # As torch instantiates: free on launch.
        _ok(
            self._lib.cudaGraphInstantiate(
                ctypes.byref(self._exec), ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_ulonglong(1)
            )
        )

    def replay(self) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        _ok(self._lib.cudaGraphLaunch(self._exec, stream))

    def upload(self) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        _ok(self._lib.cudaGraphUpload(self._exec, stream))

    def destroy(self) -> None:
        torch.cuda.synchronize()
        _ok(self._lib.cudaGraphExecDestroy(self._exec))


def _cudart() -> Any:
    for line in Path("/proc/self/maps").read_text("utf-8").splitlines():
        if "libcudart" in line:
            return ctypes.CDLL(line.split()[-1])
    raise RuntimeError("no libcudart is loaded")


def _ok(code: int) -> None:
    if code:
        raise RuntimeError(f"CUDA runtime error {code}")


def pace(graph: Any, samples: int = SAMPLES) -> list[float]:
    """Milliseconds a replay, of REPLAYS back to back, `samples` times."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    found = []
    for _ in range(samples):
        start.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        found.append(round(start.elapsed_time(end) / REPLAYS, 4))
    return found


def boundaries(graph: Any) -> dict[str, Any]:
    """Of one profiled replay: pauses between kernels that follow each other on one stream, and durations, us.

    `after`: medians by kernel before and behind, for the pairs that occur most.
    """
    graph.replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        graph.replay()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text("utf-8"))["traceEvents"]
    kernels = sorted((e for e in events if e.get("cat") == "kernel"), key=lambda e: e["ts"])
    by_pair: dict[str, list[float]] = {}
    for one, other in itertools.pairwise(kernels):
        if one["args"].get("stream") == other["args"].get("stream"):
            names = " > ".join(e["name"].removeprefix("void ")[:40] for e in (one, other))
            by_pair.setdefault(names, []).append(other["ts"] - one["ts"] - one["dur"])
    pauses = sorted(p for found in by_pair.values() for p in found)
    most = sorted(by_pair, key=lambda n: -len(by_pair[n]))[:12]
    return {
        "kernels": len(kernels),
        "pause_us": [round(pauses[len(pauses) * q // 10], 3) for q in (1, 5, 9)] if pauses else [],
        "duration_us": round(statistics.median(e["dur"] for e in kernels), 3) if kernels else None,
        "after": {n: [len(by_pair[n]), round(statistics.median(by_pair[n]), 3)] for n in most},
    }


class Story:
    """What was measured under which condition, and its file."""

    def __init__(self, out: Path, graphs: dict[str, Any]) -> None:
        import msgspec

        from kvlab import provenance

        self.out, self.graphs = out, graphs
        self.began = time.time()
        self.known = json.loads(msgspec.json.encode(provenance.collect(env=["KVLAB_PATCH"])))
        self.told: list[dict[str, Any]] = []
        self.smi: Any = None
        self.held: Any = None
        self.log = tempfile.NamedTemporaryFile("w+")  # noqa: SIM115 -- lives as long as the process

    def watch(self) -> None:
        """From now on the clocks are asked for."""
        fields = "timestamp,clocks.sm,clocks.mem,clocks.video,pstate,power.draw,temperature.gpu"
        asked = [*("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "-lms", "400"), *_device()]
        with contextlib.suppress(OSError):
            self.smi = subprocess.Popen(asked, stdout=self.log, stderr=subprocess.DEVNULL)

    def measure(self, what: str, graphs: dict[str, Any] | None = None, samples: int = SAMPLES) -> None:
        at = round(time.time() - self.began, 2)
        for name, graph in (graphs or self.graphs).items():
            times = pace(graph, samples)
            self.told.append({"condition": what, "graph": name, "at": at, "ms": times})
            say(f"{what}, {name}: {statistics.median(times):.3f} ms ({min(times):.3f}-{max(times):.3f})")
        self.write()

    def series(self, what: str, seconds: float = SERIES) -> None:
        """All graphs by turns without a break: does their pace change while nothing else does?"""
        at = round(time.time() - self.began, 2)
        times: dict[str, list[float]] = {name: [] for name in self.graphs}
        moments: list[float] = []
        while time.time() - self.began < at + seconds:
            moments.append(round(time.time() - self.began, 2))
            for name, graph in self.graphs.items():
                times[name] += pace(graph, 1)
        self.told.append({"condition": what, "at": at, "moments": moments, "series": times})
        for name, its in times.items():
            say(f"{what}, {name}: {min(its):.3f} to {max(its):.3f} ms, median {statistics.median(its):.3f}")
        self.write()

    def profile(self, what: str, graphs: dict[str, Any]) -> None:
        """Where the time between kernels is. A profiler disturbs: the time is taken around it."""
        for name, graph in graphs.items():
            before, found, after = pace(graph, 2), boundaries(graph), pace(graph, 2)
            self.told.append({"condition": what, "graph": name, "ms": before + after, "profiled": found})
            say(f"{what}, {name}: {before} {after} pauses {found['pause_us']}, lasts {found['duration_us']}")
        self.write()

    def write(self, **more: Any) -> None:
        clocks = Path(self.log.name).read_text("utf-8").splitlines()
        whole = {"provenance": self.known, "measured": self.told, "clocks": clocks, **more}
        self.out.write_text(json.dumps(whole) + "\n", encoding="utf-8")

    def end(self, **more: Any) -> None:
        self.write(**more)
        if self.smi is not None:
            self.smi.terminate()


def _device() -> list[str]:
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return ["-i", seen] if seen.isdigit() else []


@contextlib.contextmanager
def processes(code: str, count: int = 16) -> Iterator[None]:
    """`count` Python processes that run `code` meanwhile."""
    made = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(count)]
    time.sleep(0.5)
    try:
        yield
    finally:
        for one in made:
            one.kill()
        for one in made:
            one.wait()


class Others:
    """Processes with contexts of their own on this GPU: they import at once and wait to be told."""

    def __init__(self, **kinds: bool) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kvlab-pace-"))
        atexit.register(shutil.rmtree, self.folder, ignore_errors=True)
        self.made = {
            name: subprocess.Popen(
                [sys.executable, __file__, "other", str(self.folder / name), *(["--busy"] if busy else [])]
            )
            for name, busy in kinds.items()
        }

    @contextlib.contextmanager
    def there(self, *names: str) -> Iterator[None]:
        for name in names:
            (self.folder / f"{name}.go").touch()
        until = time.monotonic() + 30
        while time.monotonic() < until and not all((self.folder / f"{n}.there").exists() for n in names):
            time.sleep(0.05)
        try:
            yield
        finally:
            for name in names:
                self.made[name].kill()
                self.made[name].wait()


def be_other(asked: argparse.Namespace) -> int:
    """A context, and with --busy a kernel after the other."""
    parent = os.getppid()
    while not asked.folder.with_suffix(".go").exists():
        time.sleep(0.02)
        if os.getppid() != parent:
            return 0
    x = torch.ones(1 << 20, device="cuda")
    torch.cuda.synchronize()
    asked.folder.with_suffix(".there").touch()
    while os.getppid() == parent:
        if asked.busy:
            for _ in range(100):
                x.add_(1)
            torch.cuda.synchronize()
        else:
            time.sleep(0.05)
    return 0


def conditions(story: Story, others: Others, between: Callable[[], None], raw: dict[str, Any]) -> None:
    """One after the other; `between`: eager work, as a prompt is between two points. `raw`: kept graphs."""
    story.measure("calm, nobody asks for the clocks")
    story.watch()
    time.sleep(1)
    story.measure("calm")
    story.series("without a break")
    for number in range(4):
        between()
        story.measure(f"after eager work {number + 1}", samples=3)
    anew: dict[str, list[Exec]] = {name: [] for name in raw}
    for number in range(ANEW):
        for name, graph in raw.items():
            anew[name].append(Exec(graph))
            story.measure(f"instantiated anew {number + 1}", {name: anew[name][-1]}, 3)
    for number in (0, ANEW // 2, ANEW - 1):
        story.measure(f"the same again {number + 1}", {n: made[number] for n, made in anew.items()}, 3)
    for made in anew.values():
        made[0].upload()
    story.measure("uploaded again", {n: made[0] for n, made in anew.items()})
    for name, graph in raw.items():
        anew[name] += [Exec(graph) for _ in range(max(ALIVE // len(raw) - ANEW, 0))]
    story.measure(f"with {sum(map(len, anew.values()))} alive")
    story.measure("the youngest of them", {n: made[-1] for n, made in anew.items()})
    for made in anew.values():
        for one in made:
            one.destroy()
    story.measure("with none but the first alive")
    for number in range(4):
        one = {n: Exec(g) for n, g in raw.items()}
        story.measure(f"in their place {number + 1}", one, 3)
        for made_one in one.values():
            made_one.destroy()
    priority = torch.cuda.Stream(priority=-1)
    for what, stream in (("on a stream of its own", torch.cuda.Stream()), ("with priority", priority)):
        with torch.cuda.stream(stream):
            story.measure(what, samples=3)
    torch.cuda.empty_cache()
    story.measure("after empty_cache")
    taken = torch.empty(max(torch.cuda.mem_get_info()[0] - 4 * GIB, GIB), dtype=torch.uint8, device="cuda")
    story.measure("with memory all but full")
    del taken
    torch.cuda.empty_cache()
    story.measure("and given back")
    there, here = torch.empty(GIB // 4, dtype=torch.uint8, device="cuda"), None
    here = torch.empty(GIB // 4, dtype=torch.uint8, pin_memory=True)
    copies = torch.cuda.Stream()
    for what, (to, of) in {"copies to the GPU": (there, here), "copies to the host": (here, there)}.items():
        with torch.cuda.stream(copies):
            for _ in range(60):
                to.copy_(of, non_blocking=True)
        story.measure(what, samples=2)
        copies.synchronize()
    with processes(SPIN):
        story.measure("16 processes spin")
    with processes(STREAM):
        story.measure("16 processes copy host memory")
    with others.there("idle1"):
        story.measure("another context, idle")
        with others.there("idle2", "idle3"):
            story.measure("three contexts, idle")
    story.measure("alone again")
    with others.there("busy"):
        story.measure("another context, busy")
    story.measure("alone again, after busy")
    story.series("without a break, again")
    last = [{n: Exec(g) for n, g in raw.items()} for _ in range(6)]
    for number, one in enumerate(last):
        story.measure(f"instantiated last {number + 1}", one, 3)
    story.profile("profiled", story.graphs)
    for name in raw:
        its = sorted((one[name] for one in last), key=lambda e: statistics.median(pace(e, 3)))
        story.profile("profiled, the quickest and the slowest", {name: its[0]})
        story.profile("profiled, the quickest and the slowest", {name: its[-1]})
    story.measure("after the profiler")


def meter() -> Any:
    """A captured chain of kernels that do next to nothing: its time is that of what lies between them."""
    small, row = torch.ones(1, device="cuda"), torch.ones(6144, device="cuda")

    def chain() -> None:
        for i in range(KERNELS):
            (small if i % 2 else row).add_(1)

    graph = captured(chain)
    # The graph knows their addresses only.
    graph.reads = small, row
    return graph


def captured(body: Callable[[], None]) -> Any:
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        body()
    graph.instantiate()
    return graph


def tiny(asked: argparse.Namespace) -> int:
    others = Others(idle1=False, idle2=False, idle3=False, busy=True)
    torch.cuda.init()
    small, row = torch.ones(1, device="cuda"), torch.ones(6144, device="cuda")
    wide = torch.ones(16 << 20, device="cuda")
    side = torch.cuda.Stream()

    def forked() -> None:
        for i in range(KERNELS):
            if i % 8 == 0:
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    small.add_(1)
            else:
                row.add_(1)
            if i % 8 == 4:
                torch.cuda.current_stream().wait_stream(side)
        torch.cuda.current_stream().wait_stream(side)

    def streaming() -> None:
        for i in range(KERNELS // 4):
            wide.add_(1) if i % 8 == 0 else (small if i % 2 else row).add_(1)

    kept = {"chain": meter(), "forked": captured(forked), "streaming": captured(streaming)}

    def between() -> None:
        for _ in range(300):
            row.add_(1)
        torch.empty(GIB, dtype=torch.uint8, device="cuda").fill_(0)

    story = Story(asked.out, kept)
    conditions(story, others, between, kept)
    story.end()
    return 0


class Meter:
    """The chain, read again and again; every change of pace is told with what went before."""

    # Milliseconds of a replay: between the two paces seen.
    BETWEEN = 1.5

    def __init__(self, story: Story) -> None:
        self.story, self.chain = story, meter()
        self.reads: list[tuple[float, float]] = []
        self.now = self.read()

    def read(self) -> str:
        """`quick` or `slow`."""
        ms = min(pace(self.chain, 2))
        self.now = "quick" if ms < self.BETWEEN else "slow"
        self.reads.append((round(time.time() - self.story.began, 2), round(ms, 3)))
        return self.now

    def load(self, seconds: float, until: str = "") -> float:
        """Replay for so long, or until that pace; seconds of load that it took."""
        began = time.time()
        while time.time() - began < seconds and self.read() != until:
            before = self.now
            if self.read() != before:
                self.tell("under load", before, time.time() - began)
        return time.time() - began

    def around(self, what: str, action: Callable[[], Any]) -> None:
        """The pace before and behind something."""
        before = self.read()
        action()
        torch.cuda.synchronize()
        self.read()
        self.tell(what, before)

    def tell(self, what: str, before: str, seconds: float | None = None) -> None:
        at = round(time.time() - self.story.began, 3)
        self.story.told.append(
            {"condition": what, "at": at, "before": before, "pace": self.now, "seconds": seconds}
        )
        after = "" if seconds is None else f" after {seconds:.2f} s"
        say(f"{at:7.2f} {what}: {before} -> {self.now}{after}")


def states(asked: argparse.Namespace) -> int:
    """Each thing twice if there is time: idle moments, contexts of others, memory, modules, graphs."""
    others = Others(**{f"idle{n}": False for n in range(8)})
    torch.cuda.init()
    story = Story(asked.out, {})
    gauge = Meter(story)
    story.watch()
    say(f"first: {gauge.now}")
    waiting = [f"idle{n}" for n in range(8)]

    def a_context() -> None:
        name = waiting.pop()
        before = gauge.now
        with others.there(name):
            gauge.read()
            gauge.tell("another context comes", before)
            time.sleep(0.3)

    def hold(gib: int) -> None:
        story.held = torch.empty(gib * GIB, dtype=torch.uint8, device="cuda")

    def give_back() -> None:
        story.held = None
        torch.cuda.empty_cache()

    def module() -> None:
        torch.linalg.qr(torch.randn(64, 64, device="cuda"))

    def graphs() -> None:
        made = [meter() for _ in range(4)]
        for one in made:
            one.replay()
        torch.cuda.synchronize()

    gauge.load(8, until="quick")
    gauge.around("another context, come and gone", a_context)
    for seconds in (0.1, 0.3, 1.0, 2.0, 4.0):
        gauge.load(3, until="quick")
        if gauge.now == "slow":
            gauge.around("another context, come and gone", a_context)
        gauge.around(f"idle for {seconds} s", partial(time.sleep, seconds))
    things = {
        "40 GiB taken": partial(hold, 40),
        "given back": give_back,
        "a module loaded": module,
        "graphs captured and gone": graphs,
        "nvidia-smi": partial(subprocess.run, ["nvidia-smi"], stdout=subprocess.DEVNULL),
        "garbage collected": gc.collect,
    }
    for what, action in things.items():
        if gauge.now == "slow" and waiting:
            gauge.around("another context, come and gone", a_context)
        gauge.around(what, action)
        story.write()
    gauge.load(6)
    story.end(reads=gauge.reads)
    return 0


def of_rank(asked: argparse.Namespace) -> int:
    """The decode graph of batch 1, context 100, of each strategy in turn, over the same weights."""
    from dataclasses import replace

    from prove_patch import loaded

    from kvlab.bench.sglang_rank import again, graph_of

    others = Others(idle1=False, idle2=False, idle3=False, busy=True)
    chain = meter()
    # SGLang's own capture, whose graphs can be instantiated again.
    torch.cuda.CUDAGraph = Kept(torch.cuda.CUDAGraph)
    known = {"burn": 0, "backend": "flashinfer", "page_size": 1, "pool": 132_608}
    served_as = {**vars(asked), **known, "strategy": asked.turns[0]}
    rank = loaded(argparse.Namespace(**served_as), graphs=True, batches=(1,))
    story = Story(asked.out, {})
    for turn, strategy in enumerate(asked.turns):
        if turn:
            rank = again(rank, replace(rank.setup, strategy=strategy, pool=known["pool"]))
        served = rank

        def between() -> None:
            batch = served.start_at(1, 100)  # noqa: B023 -- called in this turn
            for _ in range(4):
                served.decode(batch)  # noqa: B023

        between()
        graph = graph_of(rank)
        name = f"{strategy}, turn {turn + 1}"
        story.graphs = {name: graph, "chain": chain}
        if turn == 0:
            conditions(story, others, between, {name: graph})
            continue
        story.measure("calm")
        story.series("without a break")
        for number in range(3):
            between()
            story.measure(f"after eager work {number + 1}", samples=3)
        made = []
        for number in range(4):
            made.append(Exec(graph))
            story.measure(f"instantiated anew {number + 1}", {name: made[-1], "chain": chain}, 3)
        for one in made:
            one.destroy()
    story.end(layers=rank.runner.model_config.num_hidden_layers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
