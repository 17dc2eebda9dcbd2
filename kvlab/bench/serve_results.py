"""What `kvlab bench serve` measures, as data and files; reading a run needs neither torch nor SGLang."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvlab import outputs
from kvlab.errors import BadInput
from kvlab.provenance import Provenance


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """One load on one server. Milliseconds; a request's time per output token leaves out its first one."""

    concurrency: int
    requests: int
    completed: int
    input_tokens: int
    """Of each request."""
    output_tokens: int
    """Of each request."""
    seconds: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_ms_median: float
    ttft_ms_p99: float
    tpot_ms_median: float
    tpot_ms_p99: float
    itl_ms_median: float
    itl_ms_p99: float


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """One server. `same_tokens`: does it answer verify's prompts as the first server of its run did; None if
    first.
    """

    strategy: str
    ready_s: float | None = None
    step_ms: float | None = None
    """`kvlab patch verify`'s: the mean time of a token after the first, one request at a time."""
    provenance: Provenance | None = None
    """Where it is not the run's: of a server that joined from a run of other code."""
    same_tokens: bool | None = None
    tokens: list[list[int]] = []
    gpu_peak_bytes: int | None = None
    """Most that the whole GPU had in use while this server was up; its own where it is alone there."""
    memory: dict[str, Any] = {}
    """The server's own `memory_usage`, in its units (GiB, and slots for token_capacity)."""
    patch: dict[str, Any] | None = None
    """What its first scheduler said of the patch at the end; None where none is applied."""
    log_lines: list[str] = []
    loads: list[Load] = []
    error: str | None = None


class ServeRun(msgspec.Struct, frozen=True, kw_only=True):
    """Servers one after another on the same GPUs, under the same load."""

    provenance: Provenance
    model: str
    server_args: list[str]
    seeded_dummy_weights: bool
    servers: list[Served]


def joined(paths: Sequence[Path]) -> ServeRun:
    """One run of several that measured some servers each, on GPUs of one kind. Provenance is the first one's.

    Answers are compared across runs of the same code; a run of other code keeps its own comparison, and its
    servers their provenance. Raises BadInput where they did not serve the same model in the same way with the
    same versions.
    """
    runs = []
    for path in paths:
        try:
            runs.append(msgspec.json.decode(path.read_bytes(), type=ServeRun))
        except (OSError, msgspec.DecodeError) as e:
            raise BadInput(f"--join: {path}: not a run of bench serve ({e})") from None
    first = runs[0]
    for path, run in zip(paths, runs, strict=True):
        for name, a, b in (
            ("model", first.model, run.model),
            ("server arguments", first.server_args, run.server_args),
            ("versions", first.provenance.versions, run.provenance.versions),
            ("GPUs", set(first.provenance.gpus), set(run.provenance.gpus)),
        ):
            if a != b:
                raise BadInput(f"--join: {path}: other {name} than {paths[0]}: {b} against {a}")
    change, servers = msgspec.structs.replace, []
    tokens = next((s.tokens for run in runs for s in run.servers if s.tokens), None)
    for run in runs:
        for s in run.servers:
            if run.provenance.commit != first.provenance.commit:
                servers.append(change(s, provenance=run.provenance))
            else:
                same = s.tokens == tokens if servers and s.tokens else None
                servers.append(change(s, same_tokens=same))
    return change(first, servers=servers)


def compared(runs: Sequence[ServeRun]) -> ServeRun:
    """The first run and, of the others of the same model and arguments, those with a server that it lacks.

    Each is taken whole, and its servers keep its provenance: what was measured side by side is to be read so.
    """
    first, change = runs[0], msgspec.structs.replace
    servers = list(first.servers)
    for run in runs[1:]:
        alike = change(run, provenance=first.provenance, servers=first.servers) == first
        if alike and not {s.strategy for s in run.servers} <= {s.strategy for s in servers}:
            servers += (change(s, provenance=s.provenance or run.provenance) for s in run.servers)
    return change(first, servers=servers)


def write(path: Path, run: ServeRun) -> None:
    """Write whole or not at all. Raises BadInput."""
    outputs.write_json("--out", path, run)
