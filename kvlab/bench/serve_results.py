"""What `kvlab bench serve` measures, as data; reading a recorded run needs neither torch nor SGLang."""

from typing import Any

import msgspec

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
