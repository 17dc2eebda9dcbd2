"""One tensor-parallel rank of SGLang in this process: loaded, patched or not, captured, stepped by hand.

SGLang's own ModelRunner, pools, allocator, batches and graphs, as its one_batch benchmark drives them; no
scheduler, so a batch is what the caller says. Weights are seeded (kvlab.dummy). A long context is not
prefilled: its slots come from SGLang's allocator, their rows are seeded random ones, and the request says
that it has them already (`prefix_indices`), as with a radix-cache hit.
"""

import gc
import gzip
import importlib
import importlib.util
import logging
import os
import statistics
import tempfile
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvlab.bench.step import GRAPH_STEPS
from kvlab.errors import BadInput
from kvlab.trace.thin import shorten_paths

# Rows filled at a time: 19 MB of BF16.
_CHUNK = 16_384
# Tokens of a request that are really extended after its prefix.
TAIL = 4
UNPATCHED = ("stock", "control_bf16")
# SGLang's arguments in which two ranks over the same weights differ.
_POOL_ARGS = ("kv_cache_dtype", "max_total_tokens")


@dataclass(frozen=True)
class Setup:
    """How the process serves. `pool` in slots; `batches`: those captured."""

    folder: str
    strategy: str
    pool: int
    batches: tuple[int, ...]
    backend: str = "flashinfer"
    page_size: int = 1
    cuda_graphs: bool = True

    @property
    def kv_cache_dtype(self) -> str:
        return "auto" if self.strategy == "control_bf16" else "fp8_e4m3"


@dataclass
class Batch:
    """Requests in flight: SGLang's batch, the tokens that it will read next, the last step's logits."""

    batch: Any
    token: torch.Tensor
    logits: torch.Tensor
    reqs: list[Any]


@dataclass
class Rank:
    """A loaded rank. `memory` and `seconds` by stage; `burn`: slots that somebody holds before each batch;
    `queued`: when the host had handed the last step to the GPU; `held`: the runner, while another serves.
    """

    setup: Setup
    runner: Any
    burn: int = 0
    others: int = 0
    queued: float = 0.0
    held: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, dict[str, int]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def allocator(self) -> Any:
        return self.runner.token_to_kv_pool_allocator

    @property
    def pool(self) -> Any:
        return self.runner.token_to_kv_pool

    @property
    def slots(self) -> int:
        return int(self.runner.max_total_num_tokens)

    def clear(self) -> None:
        """Nobody holds a slot any more, but those of `burn`: the lowest ones."""
        self.runner.req_to_token_pool.clear()
        self.allocator.clear()
        if self.burn:
            self.allocator.alloc(self.burn)

    def snapshot(self, stage: str) -> None:
        """Memory now, and its peak since the last snapshot. `device_used`: what the device has given this
        process since it was its turn.
        """
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        self.memory[stage] = {
            "allocated": torch.cuda.memory_allocated(),
            "peak_allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
            "peak_reserved": torch.cuda.max_memory_reserved(),
            "device_used": total - free - self.others,
        }
        torch.cuda.reset_peak_memory_stats()

    def prefix(self, tokens: int, *, seed: int = 0) -> torch.Tensor:
        """Slots of SGLang's allocator, int64 [tokens], whose rows in every layer are seeded random ones."""
        slots = self.allocator.alloc(tokens)
        if slots is None:
            raise MemoryError(f"the pool has no {tokens:,} free slots")
        fill(self.pool.kv_buffer, slots, self.pool.dtype, seed=seed)
        return slots.to(torch.int64)

    def start(
        self, prompts: Sequence[Sequence[int]], prefixes: Sequence[torch.Tensor] | None = None
    ) -> Batch:
        """Extend a batch: request i has `prefixes[i]` cached, and its prompt after that."""
        from sglang.benchmark import one_batch

        reqs = requests(prompts, prefixes)
        token, logits, batch = one_batch.extend(reqs, self.runner)
        return Batch(batch, token, logits, reqs)

    def decode(self, batch: Batch) -> None:
        """One step: prepare, replay (or run), sample greedily, and wait for the token, as a server does.

        Without waiting the host runs ahead and flashinfer's next plan overwrites the pinned memory that an
        earlier one is still to be copied from: steps then read plans of later steps.
        """
        from sglang.benchmark import one_batch

        batch.token, batch.logits = one_batch.decode(batch.token, batch.batch, self.runner)
        self.queued = time.perf_counter()
        torch.cuda.synchronize()

    def start_at(self, batch: int, context: int, *, beside: bool = False) -> Batch:
        """`batch` requests of `context` tokens each, all but the last few of them cached already; `beside`
        what runs, or in its place.
        """
        if not beside:
            self.clear()
        page = self.setup.page_size
        cached = max((context - TAIL) // page * page, 0)
        prompts = [prompt(context - cached, row) for row in range(batch)]
        if not cached:
            return self.start(prompts)
        return self.start(prompts, list(self.prefix(batch * cached).split(cached)))

    def fits(self, batch: int, context: int, steps: int) -> str:
        """Why such a batch does not fit the pool, or nothing."""
        page = self.setup.page_size
        need = batch * -(-(context + steps + 1) // page) * page
        if need > self.slots - self.burn:
            return f"needs {need:,} slots of a pool of {self.slots:,}"
        return ""


def load(setup: Setup) -> Rank:
    """Load, patch unless the strategy says not to, capture. Sets KVLAB_PATCH, which provenance records."""
    started = time.perf_counter()
    asked = "off" if setup.strategy in UNPATCHED else setup.strategy
    os.environ["KVLAB_PATCH"] = asked
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    if importlib.util.find_spec("sglang.benchmark") is None:
        raise BadInput("bench step: this SGLang has no sglang.benchmark.one_batch; use 0.5.15.post1")
    from sglang.benchmark import one_batch
    from sglang.srt.server_args import PortArgs, ServerArgs

    from kvlab import patch
    from kvlab.dummy import seeded_dummy_weights

    # This way of serving loads no plugins.
    patch.apply(asked)
    args = ServerArgs(**server_args(setup))
    one_batch._set_envs_and_config(args)
    for name in ("initialize_moe_config", "initialize_fp8_gemm_config", "initialize_fp4_gemm_config"):
        getattr(one_batch, name)(args)
    importlib.import_module("sglang.srt.models.registry")
    seconds = {"imported": time.perf_counter() - started}
    _wait_for_turn()
    started = time.perf_counter() - seconds["imported"]
    free, total = torch.cuda.mem_get_info()
    with seeded_dummy_weights():
        runner = one_batch.ModelRunner(
            model_config=one_batch.ModelConfig.from_server_args(args),
            mem_fraction_static=args.mem_fraction_static,
            gpu_id=0,
            tp_rank=0,
            tp_size=1,
            moe_ep_rank=0,
            moe_ep_size=1,
            pp_rank=0,
            pp_size=1,
            nccl_port=PortArgs.init_new(args).nccl_port,
            server_args=args,
        )
    rank = Rank(setup, runner, others=total - free, seconds=seconds)
    rank.snapshot("weights")
    seconds["weights"] = time.perf_counter() - started
    _serve(rank, started)
    return rank


def again(rank: Rank, setup: Setup, *, keep: bool = False) -> Rank:
    """The same weights, where they lie, served by another strategy: pools, backends and graphs anew.

    For comparisons closer than two processes repeat each other. Memory is not comparable afterwards: what
    captured graphs used stays. `rank` serves no longer; with `keep`, `activate` lets it serve again.
    """
    started = time.perf_counter()
    runner = rank.runner
    if keep:
        rank.held = dict(vars(runner))
    for name in (
        *("decode_cuda_graph_runner", "prefill_cuda_graph_runner", "eager_runner", "graph_shared_output"),
        *("attn_backend", "decode_attn_backend"),
        *("token_to_kv_pool", "token_to_kv_pool_allocator", "req_to_token_pool"),
    ):
        setattr(runner, name, None)
    gc.collect()
    torch.cuda.empty_cache()
    fresh = Rank(setup, runner, others=rank.others)
    patched_as(fresh)
    for name in _POOL_ARGS:
        setattr(runner.server_args, name, server_args(setup)[name])
    runner.configure_kv_cache_dtype()
    _serve(fresh, started)
    if keep:
        fresh.held = dict(vars(runner))
    return fresh


def activate(rank: Rank) -> None:
    """Let a kept rank serve again. The patch stays as it was applied last: captured graphs have their own."""
    vars(rank.runner).update(rank.held)
    for name in _POOL_ARGS:
        setattr(rank.runner.server_args, name, server_args(rank.setup)[name])


def patched_as(rank: Rank) -> None:
    """Apply the patch as `rank` serves, or take it out. Sets KVLAB_PATCH, which provenance records."""
    from kvlab import patch

    asked = "off" if rank.setup.strategy in UNPATCHED else rank.setup.strategy
    os.environ["KVLAB_PATCH"] = asked
    patch.apply(asked)


def _serve(rank: Rank, started: float) -> None:
    """Pools, backends and graphs of a rank whose weights are there."""
    runner = rank.runner
    stages = {
        "pool": runner.alloc_memory_pool,
        "backend": runner.init_attention_backends,
        "captured": runner.init_cuda_graphs,
    }
    for stage, action in stages.items():
        action()
        rank.snapshot(stage)
        rank.seconds[stage] = time.perf_counter() - started
        used = rank.memory[stage]["device_used"]
        print(f"{stage}: {rank.seconds[stage]:.1f} s, {used / 1e9:.2f} GB on the device", flush=True)


def _wait_for_turn() -> None:
    """Imports take longer than a short run: they may overlap another process's run, what follows may not.

    $KVLAB_BENCH_TURN names a file; whoever started this process makes it when the GPU is free.
    """
    marker = os.environ.get("KVLAB_BENCH_TURN")
    while marker and not os.path.exists(marker):
        time.sleep(0.05)


def server_args(setup: Setup) -> dict[str, Any]:
    """SGLang's own arguments. A cached prefix is attended in the latent space, where the pool is cast."""
    return {
        "model_path": setup.folder,
        "load_format": "dummy",
        "attention_backend": setup.backend,
        "kv_cache_dtype": setup.kv_cache_dtype,
        "max_total_tokens": setup.pool,
        "page_size": setup.page_size,
        # One more than a step's largest batch: a request may run beside it.
        "max_running_requests": max(*setup.batches, 16) + 1,
        "cuda_graph_bs_decode": sorted(setup.batches),
        "disable_cuda_graph": not setup.cuda_graphs,
        "disable_prefill_cuda_graph": True,
        "disable_chunked_prefix_cache": True,
        "mem_fraction_static": 0.88,
        "random_seed": 0,
    }


def requests(prompts: Sequence[Sequence[int]], prefixes: Sequence[torch.Tensor] | None = None) -> list[Any]:
    """SGLang's requests, greedy. The ids of cached tokens matter to nobody: their rows are there."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    reqs = []
    for i, ids in enumerate(prompts):
        cached = prefixes[i] if prefixes is not None else None
        count = 0 if cached is None else cached.numel()
        req = Req(
            rid=i,
            origin_input_text="",
            origin_input_ids=array("q", [*([3] * count), *ids]),
            sampling_params=SamplingParams(temperature=0, max_new_tokens=1 << 20),
        )
        req.full_untruncated_fill_ids = req.origin_input_ids
        if cached is not None:
            req.prefix_indices = cached
        req.logprob_start_len = -1
        req.set_extend_range(count, len(req.origin_input_ids))
        reqs.append(req)
    return reqs


def prompt(length: int, row: int = 0) -> list[int]:
    """Token ids that differ by position and row."""
    return [100 + (row * 7 + i * 17 + i * i) % 9000 for i in range(length)]


def fill(buffers: Sequence[torch.Tensor], slots: torch.Tensor, dtype: torch.dtype, *, seed: int) -> None:
    """Rows N(0, 1) of `dtype` into `slots` of every layer's buffer, as a normalised latent has them."""
    with torch.inference_mode():
        for layer, buffer in enumerate(buffers):
            generator = torch.Generator(device=buffer.device)
            generator.manual_seed(seed * 1_000 + layer)
            for part in slots.split(_CHUNK):
                shape = (part.numel(), *buffer.shape[1:])
                rows = torch.randn(shape, generator=generator, device=buffer.device, dtype=torch.bfloat16)
                buffer[part] = rows.to(dtype).view(buffer.dtype)


@dataclass(frozen=True)
class Timed:
    """Milliseconds a step. Of its captured graph, None where there is none: `graph` within waited steps,
    `replay` back to back. `host`: until the host had queued the step.
    """

    median: float
    low: float
    high: float
    graph: float | None
    replay: float | None
    host: float
    steps: int


def timed(rank: Rank, batch: Batch, *, steps: int = 32, warm_up: int = 8) -> Timed:
    """`steps` decode steps of `batch`, each waited for, after `warm_up` that are not timed."""
    for _ in range(warm_up):
        rank.decode(batch)
    gc.collect()
    times, hosts = waited(rank, batch, steps)
    graphs = graph_of_steps(rank, batch, GRAPH_STEPS)
    return summary(times, hosts, graphs, _replayed(rank))


def summary(times: list[float], hosts: list[float], graphs: list[float], replay: float | None) -> Timed:
    """Medians and quartiles of a point's steps, milliseconds; `graphs` is empty without captured graphs."""
    times = sorted(times)
    quarter = len(times) // 4
    host, middle = statistics.median(hosts), statistics.median(times)
    graph = statistics.median(graphs) if graphs else None
    return Timed(middle, times[quarter], times[-1 - quarter], graph, replay, host, len(times))


def waited(rank: Rank, batch: Batch, steps: int) -> tuple[list[float], list[float]]:
    """Milliseconds of each of `steps` decode steps, waited for, and until the host had queued it."""
    times, hosts = [], []
    gc.disable()
    try:
        for _ in range(steps):
            start = time.perf_counter()
            rank.decode(batch)
            times.append((time.perf_counter() - start) * 1e3)
            hosts.append((rank.queued - start) * 1e3)
    finally:
        gc.enable()
    return times, hosts


def graph_of_steps(rank: Rank, batch: Batch, steps: int) -> list[float]:
    """Of `steps` more waited steps: milliseconds of the captured graph, between two events. None: empty."""
    backend = getattr(getattr(rank.runner, "decode_cuda_graph_runner", None), "backend", None)
    if not getattr(backend, "_graphs", None):
        return []
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    replay = backend.replay

    def between(*args: Any, **kwargs: Any) -> Any:
        start.record()
        result = replay(*args, **kwargs)
        end.record()
        return result

    times = []
    backend.replay = between
    try:
        for _ in range(steps):
            rank.decode(batch)
            times.append(start.elapsed_time(end))
    finally:
        del backend.replay
    return times


def graph_of(rank: Rank) -> Any:
    """The captured graph of the last step, None where there is none."""
    runner = getattr(rank.runner, "decode_cuda_graph_runner", None)
    graphs = getattr(getattr(runner, "backend", None), "_graphs", {})
    return graphs.get(getattr(runner, "_replay_graph_key", None))


def _replayed(rank: Rank, times: int = 16) -> float | None:
    """The last step's graph again and again: the GPU's part of a step, without the host's."""
    graph = graph_of(rank)
    return None if graph is None else replayed(graph, times)


def replayed(graph: Any, times: int) -> float:
    """Milliseconds a replay, of `times` back to back.

    A step's graph writes the same rows to the same slots and reads the same plan, so nothing changes.
    """
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / times


def profile(rank: Rank, batch: Batch, path: str, *, steps: int = 2) -> None:
    """A torch.profiler trace of `steps` decode steps, the host's paths shortened; gzip if `path` ends so."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    for _ in range(3):
        rank.decode(batch)
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        for _ in range(steps):
            rank.decode(batch)
    export(profiler, Path(path))


def export(profiler: Any, path: Path) -> None:
    """The trace as `path`, whole or not at all, with no path of this host in it."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".kvlab-trace-") as folder:
        raw, short = Path(folder) / path.name.removesuffix(".gz"), Path(folder) / "short"
        profiler.export_chrome_trace(str(raw))
        shorten_paths(raw, short)
        if path.suffix != ".gz":
            short.write_bytes(gzip.decompress(short.read_bytes()))
        short.replace(path)
