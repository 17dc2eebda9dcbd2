"""What was measured: a trace's kernels by suspect, microbenchmarks, and what others report of all-reduces."""

import functools
import itertools
import math
import tomllib
from pathlib import Path

import msgspec

from kvlab import data
from kvlab.bench import recorded_steps
from kvlab.errors import BadInput
from kvlab.suspects.results import LiveRun
from kvlab.trace import Report, read, report

_BY_CLASS = {
    "GEMM": "gemm",
    "attention": "attention",
    "norm/activation": "elementwise",
    "communication": "communication",
    "KV write": "kv_write",
}
_ROUTING = "routing and alignment"


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """One suspect's kernels in a step: milliseconds and launches."""

    ms: float = 0.0
    launches: float = 0.0


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A traced decode step by suspect; `launches` among them is the time in which no kernel runs.

    `kernel_us` is the mean duration of the shortest kernel, `gap_us` the wait between two.
    """

    source: str
    ms: float
    layers: int
    graphs: bool
    shares: dict[str, Share]
    kernel_us: float
    gap_us: float
    pool_slots: int | None

    @property
    def launches(self) -> dict[str, float]:
        """Kernels of a step by suspect, without the cast."""
        return {n: s.launches for n, s in self.shares.items() if n not in ("cast", "launches")}


def by_suspect(found: Report) -> Step:
    """A report's kernels by suspect. Raises BadInput where it has no decode step or no layer count."""
    if found.step_ms is None or found.active_ms is None or not found.layers:
        raise BadInput(f"{found.file}: no decode step whose layers can be told; give a trace of decode steps")
    cast = found.kv_cast
    shares: dict[str, Share] = {}

    def add(name: str, ms: float, launches: float) -> None:
        before = shares.get(name, Share())
        shares[name] = Share(ms=before.ms + ms, launches=before.launches + launches)

    for kernel in found.kernels:
        if kernel.category == "MoE":
            name = "routing" if kernel.label == _ROUTING else "experts"
        else:
            name = _BY_CLASS.get(kernel.category, "other")
        if cast is not None and kernel.name == cast.kernel and kernel.category == "dtype cast":
            if "cast" in shares:
                continue
            add("cast", cast.ms_per_step, cast.copies_per_step)
            continue
        add(name, kernel.ms_per_step, kernel.launches)
    total = sum(s.launches for s in shares.values())
    gaps = max(found.step_ms - found.active_ms, 0.0)
    add("launches", gaps, total)
    kernels = [k for k in found.kernels if k.launches and not k.name.startswith("Mem")]
    return Step(
        source=Path(found.file).name,
        ms=found.step_ms,
        layers=found.layers,
        graphs=found.cuda_graphs,
        shares=shares,
        kernel_us=min(1e3 * k.ms_per_step / k.launches for k in kernels),
        gap_us=1e3 * gaps / total,
        pool_slots=cast.pool_slots if cast else None,
    )


def h200_trace() -> Path:
    """The recorded H200 step's trace."""
    return data.recorded("h200-stock") / "decode.trace.json.gz"


@functools.cache
def traced(path: Path) -> Step:
    """The steps of a trace by suspect. Raises BadInput for what is no trace of decode steps."""
    return by_suspect(report(read(path)))


def h200_step() -> Step:
    """The recorded H200 step."""
    return traced(h200_trace())


def host_ms() -> float:
    """What the recorded step waits for its host with CUDA graphs off: eager less graphs."""
    readme = data.recorded("h200-stock") / "README.md"
    return recorded_steps.step(readme, "stock", cuda_graphs=False) - recorded_steps.step(readme, "stock")


def newest_run() -> tuple[str, LiveRun] | None:
    """The folder and content of the newest recorded microbenchmarks, None while there are none."""
    if not list(data.recorded().glob("*/suspects.json")):
        return None
    from kvlab.bench.recorded import newest

    path, run = newest("suspects.json", LiveRun)
    return path.parent.name, run


class AllReduce(msgspec.Struct, frozen=True, kw_only=True):
    """What someone reports of all-reduces: microseconds by the bytes of one rank's message."""

    gpu: str
    ranks: int
    source: str
    url: str
    on_like: str
    points: list[dict[str, float]]


@functools.cache
def reports() -> list[AllReduce]:
    """data/reported/all-reduce.toml."""
    text = data.reported("all-reduce.toml").read_text("utf-8")
    return msgspec.convert(tomllib.loads(text)["report"], list[AllReduce])


def reported_us(gpu: str, ranks: int, size: int) -> tuple[float, AllReduce] | None:
    """An all-reduce of `size` bytes by the report for that card and number of ranks, None without one.

    Between two reported sizes by the line through their logarithms; None outside them.
    """
    for found in reports():
        if (found.gpu, found.ranks) != (gpu, ranks):
            continue
        points = sorted((p["bytes"], p["us"]) for p in found.points)
        for (small, fast), (large, slow) in itertools.pairwise(points):
            if small <= size <= large:
                part = math.log(size / small) / math.log(large / small)
                return fast * (slow / fast) ** part, found
    return None
