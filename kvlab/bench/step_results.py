"""What `kvlab bench step` measures, as data, how runs are merged and compared; needs no torch."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from kvlab import outputs
from kvlab.errors import BadInput
from kvlab.provenance import Provenance

# Every strategy of the benchmark, and how a process is told to serve it. `stock` patches nothing at all.
STRATEGIES = {
    "stock": "SGLang as it is: nothing patched",
    "shadow": "active rows to their own places in one BF16 layer",
    "gather": "distinct active rows to a compact BF16 buffer",
    "fused": "kvlab's decode over the FP8 rows",
    "exact": "the default policy: bit-identical strategies only",
    "fast": "the other policy: fused where it can",
    "native": "flashinfer's own FP8 path",
    "control_bf16": "a BF16 cache, nothing patched: nothing to cast",
}


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """One process of SGLang: it loads the rank, is patched or not, captures, and serves its points.

    `memory` by stage (weights, captured, decoded, extended, …): bytes as torch's allocator counts them
    (`allocated`, `peak_allocated`, `reserved`, `peak_reserved`) and as the device does (`device_used`).
    `patch` is `kvlab.patch.status()` after serving: sites, strategies that served, counters. `tuned`:
    what Inductor picked for its kernels here (kvlab.bench.tuned); `device`: a digest of the GPU's UUID.
    """

    provenance: Provenance
    strategy: str
    memory: dict[str, dict[str, int]]
    patch: dict[str, Any]
    seconds: dict[str, float] = {}
    server: dict[str, Any] = {}
    tuned: dict[str, str] = {}
    device: str = ""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One decode step. `step_ms`: the median of `steps` steps, each waited for, as SGLang's one_batch times;
    `low_ms` and `high_ms` are their quartiles. `replay_ms`: the step's captured graph alone, replayed back to
    back: the GPU's part, which is all that counts where a server prepares the next step meanwhile.
    `graph_ms`: that graph within waited steps. `host_ms`: until the host had queued the step. None where the
    point was not measured: `reason` says why.

    `context`: tokens of each request before the first decoded one. `process`: index into `processes`.
    """

    strategy: str
    model: str
    backend: str
    cuda_graphs: bool
    batch: int
    context: int
    pool: int
    page_size: int
    layers: int
    heads: int
    tp: int
    step_ms: float | None
    low_ms: float | None = None
    high_ms: float | None = None
    replay_ms: float | None = None
    graph_ms: float | None = None
    host_ms: float | None = None
    steps: int = 0
    served: dict[str, str] = {}
    peak_bytes: int | None = None
    captured_bytes: int | None = None
    reason: str = ""
    process: int = 0

    @property
    def point(self) -> tuple[Any, ...]:
        """What must agree for two strategies to be compared; the control's pool is its own."""
        return (
            self.model,
            self.layers,
            self.heads,
            self.tp,
            self.backend,
            self.page_size,
            self.cuda_graphs,
            self.batch,
            self.context,
        )

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.strategy, self.pool, *self.point)


class StepRun(msgspec.Struct, frozen=True, kw_only=True):
    """What `kvlab bench step` measures. `provenance`: the newest of its processes'."""

    provenance: Provenance
    runs: list[Step]
    processes: list[Process]

    def find(self, strategy: str, batch: int, context: int, **only: Any) -> Step | None:
        """The one measured step of these; `only` narrows by any other field. Raises BadInput if several."""
        found = [
            r
            for r in self.runs
            if (r.strategy, r.batch, r.context) == (strategy, batch, context)
            and r.step_ms is not None
            and all(getattr(r, k) == v for k, v in only.items())
        ]
        if len(found) > 1:
            raise BadInput(
                f"{len(found)} steps of {strategy} at {batch} x {context}: say which pool or backend"
            )
        return found[0] if found else None


def merge(runs: Iterable[StepRun]) -> StepRun:
    """One run of all processes; where a step was measured more than once, the newest counts."""
    runs = sorted(runs, key=lambda r: r.provenance.date)
    if not runs:
        raise BadInput("--merge: no run to merge")
    processes: list[Process] = []
    steps: dict[tuple[Any, ...], Step] = {}
    for run in runs:
        shift = len(processes)
        processes += run.processes
        for step in run.runs:
            old = steps.get(step.key)
            if old is not None and old.step_ms is not None and step.step_ms is None:
                continue
            steps[step.key] = msgspec.structs.replace(step, process=step.process + shift)
    kept = sorted({s.process for s in steps.values()})
    renumbered = {old: new for new, old in enumerate(kept)}
    newest = max((processes[i].provenance for i in kept), key=lambda p: p.date)
    return StepRun(
        provenance=newest,
        runs=[msgspec.structs.replace(s, process=renumbered[s.process]) for s in steps.values()],
        processes=[processes[i] for i in kept],
    )


def read(path: Path) -> StepRun:
    """A run's file. Raises BadInput."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=StepRun)
    except OSError as e:
        raise BadInput(f"{path}: {e.strerror or e}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise BadInput(f"{path}: not a run of kvlab bench step ({e})") from None


def write(path: Path, run: StepRun) -> None:
    """`path` as a whole or not at all. Raises BadInput."""
    outputs.write_json("--out", path, run)
