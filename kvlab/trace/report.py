"""Where does a decode step's time go? Numbers of one rank, and of several compared."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvlab.errors import BadInput
from kvlab.trace import diagnose
from kvlab.trace.classes import ORDER, OTHER, short
from kvlab.trace.diagnose import KvCast
from kvlab.trace.findings import Finding, backend, findings
from kvlab.trace.steps import Steps, by_name, find
from kvlab.trace.store import RUNTIME, Rank, Trace, check_not_empty
from kvlab.trace.timeline import Measure, measure, united


class Category(msgspec.Struct, kw_only=True, frozen=True):
    """One class of kernels, per step."""

    ms_per_step: float
    """United on each stream, summed over streams."""
    share: float
    """Of the GPU's busy time."""
    exposed_ms: float
    """Time in which nothing of another class runs."""
    launches: float


class Kernel(msgspec.Struct, kw_only=True, frozen=True):
    """One kernel name, per step."""

    name: str
    short: str
    category: str
    label: str
    ms_per_step: float
    launches: float


class Report(msgspec.Struct, kw_only=True, frozen=True):
    """One rank's decode steps. Milliseconds per step are means; step_ms and wall_ms are medians."""

    file: str
    rank: str
    device: str | None
    backend: str | None
    layers: int | None
    steps: int
    """Decode steps."""
    other_steps: dict[str, int]
    """Steps of other phases (prefill, …), which the numbers leave out."""
    steps_found_by: str
    cuda_graphs: bool
    batch: list[int]
    step_ms: float | None
    """The GPU's time for a step: CUDA graphs from start to end and what runs outside them, without the gaps
    in which the GPU waits for a host that the profiler slows. Without graphs the time from step to step."""
    wall_ms: float | None
    """From the start of a step to the next one's, or to its own end where none follows."""
    busy_ms: float | None
    active_ms: float | None
    """At least one stream works; busy_ms counts streams that work at once twice."""
    idle_ms: float | None
    host_ms: float | None
    """Without CUDA graphs, from the first launch of a step to the end of its last, less what waits for the
    GPU; as slow as the profiler makes the host. None with graphs (one launch) or without host events."""
    categories: dict[str, Category]
    kernels: list[Kernel]
    unclassified: list[str]
    """Names that no rule knows: they are in `other`."""
    kv_cast: KvCast | None
    predicted_step_ms: float | None
    """A step without the casts, None without casts: see predicted_from."""
    predicted_from: str | None
    diagnosis: list[Finding]
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Plain types, as `--json` prints them."""
        return msgspec.to_builtins(self)


ASSUMES = (
    "step time less the time in which only the casts run; assumes that nothing takes their place, that the "
    "other kernels take as long as recorded, and that the host keeps up"
)


def report(
    trace: Trace,
    rank: str | None = None,
    *,
    bandwidth: float | None = None,
    sglang: str | None = None,
) -> Report:
    """The report of one rank (by key; the slowest where None).

    `bandwidth`: bytes per second of the cast kernel on this GPU, to size the pool where the trace has no
    launch grid; None takes a recorded one of the same GPU. `sglang`: the release, for the advice. Raises
    BadInput for a trace without GPU kernels or an unknown rank.
    """
    if rank is None:
        return slowest(reports(trace, bandwidth=bandwidth, sglang=sglang))
    check_not_empty(trace)
    for one in trace.ranks:
        if one.key == rank:
            return _report(trace, one, bandwidth, sglang)
    raise BadInput(
        f"rank: {rank!r} is not in {trace.path}; there are {', '.join(r.key for r in trace.ranks)}"
    )


def reports(trace: Trace, *, bandwidth: float | None = None, sglang: str | None = None) -> list[Report]:
    """The report of every rank that has GPU kernels."""
    check_not_empty(trace)
    return [_report(trace, r, bandwidth, sglang) for r in trace.ranks if len(r.kernels)]


def slowest(found: Sequence[Report]) -> Report:
    """The rank whose step takes longest."""
    return max(found, key=lambda r: r.step_ms or 0.0)


def spread(found: Sequence[Report]) -> float | None:
    """(slowest - fastest) / fastest step of several ranks, None for one."""
    times = [r.step_ms for r in found if r.step_ms]
    return (max(times) - min(times)) / min(times) if len(times) > 1 else None


def _report(trace: Trace, rank: Rank, bandwidth: float | None, sglang: str | None) -> Report:
    steps = find(trace, rank)
    decode = steps.decode()
    kinds = diagnose.kinds(trace, rank)
    measures = [measure(rank, step, kinds) for step in decode]
    count = len(decode)
    busy = sum(m.busy for m in measures)
    categories = _categories(measures, busy)
    names = by_name(rank, decode)
    kernels = _kernels(trace, names, count, kinds)
    layers = diagnose.layer_count(trace, rank, decode) if count else None
    graphs = bool(decode) and all(s.graphs for s in decode)
    periods = [s.period for s in decode if s.period is not None]
    wall = statistics.median(periods or [m.span for m in measures]) / 1e3 if count else None
    device = statistics.median(m.device for m in measures) / 1e3 if count else None
    step_ms = device if graphs else wall
    cast_class = categories.get("dtype cast")
    exposed = cast_class.exposed_ms / cast_class.ms_per_step if cast_class and cast_class.ms_per_step else 1.0
    cast = None
    if count:
        speed = _bandwidth(rank.device, bandwidth)
        exposed = min(exposed, 1.0)
        cast = diagnose.kv_cast(
            trace, rank, decode, layers=layers, busy_us=busy, exposed_share=exposed, bandwidth=speed
        )
    host = None if graphs else _host_ms(trace.names, rank, steps)
    predicted, basis = _predicted(step_ms, cast, host)
    other: Counter[str] = Counter(s.phase for s in steps.steps if s not in decode)
    notes = list(trace.notes)
    if steps.outside:
        notes.append(f"{steps.outside} GPU events belong to no step")
    if count and decode[0].phase == "unknown":
        notes.append("nothing says whether these steps are decode; they are counted as decode")
    return Report(
        file=trace.path,
        rank=rank.key,
        device=rank.device,
        backend=backend(trace, rank),
        layers=layers,
        steps=count,
        other_steps=dict(other),
        steps_found_by=steps.how,
        cuda_graphs=graphs,
        batch=sorted({s.batch for s in decode if s.batch is not None}),
        step_ms=step_ms,
        wall_ms=wall,
        busy_ms=busy / count / 1e3 if count else None,
        active_ms=sum(m.active for m in measures) / count / 1e3 if count else None,
        idle_ms=sum(m.span - m.active for m in measures) / count / 1e3 if count else None,
        host_ms=host,
        categories=categories,
        kernels=kernels,
        unclassified=sorted({k.name for k in kernels if k.category == OTHER and k.label == "no rule"}),
        kv_cast=cast,
        predicted_step_ms=predicted,
        predicted_from=basis,
        diagnosis=findings(
            trace, rank, decode, cast, predicted, step_ms, layers=layers, names=names, sglang=sglang
        ),
        notes=notes,
    )


def _categories(measures: Sequence[Measure], busy: float) -> dict[str, Category]:
    count = len(measures)
    total: dict[str, float] = {}
    exposed: dict[str, float] = {}
    launches: dict[str, int] = {}
    for m in measures:
        for into, of in ((total, m.total), (exposed, m.exposed), (launches, m.launches)):
            for cls, value in of.items():
                into[cls] = into.get(cls, 0) + value  # type: ignore[index]
    made = {
        cls: Category(
            ms_per_step=total.get(cls, 0.0) / count / 1e3,
            share=total.get(cls, 0.0) / busy if busy else 0.0,
            exposed_ms=exposed.get(cls, 0.0) / count / 1e3,
            launches=launches[cls] / count,
        )
        for cls in launches
    }
    if count and OTHER not in made:
        # Never hidden: also when it is nothing.
        made[OTHER] = Category(ms_per_step=0.0, share=0.0, exposed_ms=0.0, launches=0.0)
    return dict(sorted(made.items(), key=lambda item: (-item[1].ms_per_step, ORDER.index(item[0]))))


def _kernels(
    trace: Trace, names: Mapping[int, tuple[float, int]], steps: int, kinds: Sequence[Any]
) -> list[Kernel]:
    return [
        Kernel(
            name=trace.names[i],
            short=short(trace.names[i]),
            category=kinds[i].cls,
            label=kinds[i].label,
            ms_per_step=us / steps / 1e3,
            launches=launches / steps,
        )
        for i, (us, launches) in sorted(names.items(), key=lambda item: -item[1][0])
    ]


def _bandwidth(device: str | None, given: float | None) -> tuple[float, str] | None:
    """Bytes per second of the cast kernel: the one given, or that of a recorded run on the same GPU."""
    if given is not None:
        return given, "--bandwidth"
    from kvlab.data import recorded

    for path in sorted(recorded().glob("*/kernels.json")) if device else ():
        try:
            run = msgspec.json.decode(path.read_bytes())
        except (OSError, msgspec.DecodeError):
            continue
        if isinstance(run, dict) and run.get("gpu") == device:
            for row in run.get("rows", []):
                if row.get("what") == "cast full pool" and row.get("TBs"):
                    return row[
                        "TBs"
                    ] * 1e12, f"this cast alone on an {device.removeprefix('NVIDIA ')}, {path.parent.name}"
    return None


def _host_ms(names: Sequence[str], rank: Rank, steps: Steps) -> float | None:
    """Median time a step's launches take on the host: a step cannot be shorter than its launches."""
    k, host = rank.kernels, rank.host
    first: dict[int, int] = {}
    for order, step in enumerate(steps.decode()):
        for corr in k.corr[step.lo : step.hi]:
            if corr > 0:
                first.setdefault(corr, order)
    spans: dict[int, tuple[float, float]] = {}
    waits = []
    for i in range(len(host)):
        if host.kind[i] != RUNTIME:
            continue
        start, end = host.start[i], host.start[i] + host.dur[i]
        if (order := first.get(host.corr[i])) is not None:
            old = spans.get(order, (start, end))
            spans[order] = (min(old[0], start), max(old[1], end))
        elif "Synchronize" in names[host.name[i]]:
            waits.append((start, end))
    if not spans:
        return None
    return statistics.median(b - a - _inside(waits, a, b) for a, b in spans.values()) / 1e3


def _inside(intervals: Sequence[tuple[float, float]], start: float, end: float) -> float:
    return united([(max(a, start), min(b, end)) for a, b in intervals if a < end and b > start])


def _predicted(
    step_ms: float | None, cast: KvCast | None, host_ms: float | None
) -> tuple[float | None, str | None]:
    if cast is None or step_ms is None:
        return None, None
    gpu = step_ms - cast.exposed_ms_per_step
    if host_ms is not None and host_ms > gpu:
        return (
            host_ms,
            "the host's launches, as slow as the profiler made them: without the casts it is the slower side",
        )
    return gpu, ASSUMES
