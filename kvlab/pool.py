"""Where do the bytes move? The fault in small, on a CPU: a paged uint8 pool, a decode loop, a profiler.

`LatentPool` keeps what SGLang's `MLATokenToKVPool` keeps: uint8 rows of `size + page_size` slots a layer,
viewed as FP8 by `get_key_buffer`. `Loop` runs attention over it as flashinfer_mla does, with one strategy for
the cast; `profile` reports what torch.profiler saw. The casts and the attention are
`kvlab.kernels.reference`.
"""

import hashlib
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import msgspec
import torch

from kvlab.errors import BadInput
from kvlab.kernels.active import ActiveSlots
from kvlab.kernels.checks import FP8_DTYPES
from kvlab.kernels.reference import full_cast, gather_cast, mla_attention, shadow_cast

Strategy = Literal["stock", "shadow", "gather"]
STRATEGIES: tuple[Strategy, ...] = ("stock", "shadow", "gather")
# The profiler ranges that a step opens, in the order of a layer.
STAGES = ("write", "view", "cast", "attention")


class LatentPool:
    """An MLA KV pool of `layers` layers: slots of `kv_lora_rank + qk_rope_head_dim` FP8 values kept as uint8.

    `size` usable slots and a page of padding, slot 0 among it, as in SGLang; allocated zeroed.
    """

    def __init__(
        self,
        size: int,
        *,
        layers: int = 1,
        page_size: int = 1,
        kv_lora_rank: int = 512,
        qk_rope_head_dim: int = 64,
        dtype: torch.dtype = torch.float8_e4m3fn,
        device: str = "cpu",
    ) -> None:
        _at_least(1, slots=size, layers=layers, page_size=page_size, kv_lora_rank=kv_lora_rank)
        _at_least(0, qk_rope_head_dim=qk_rope_head_dim)
        if dtype not in FP8_DTYPES:
            raise BadInput(f"dtype: expected {' or '.join(map(str, FP8_DTYPES))}, got {dtype}")
        self.size, self.page_size, self.dtype, self.store_dtype = size, page_size, dtype, torch.uint8
        self.kv_lora_rank, self.qk_rope_head_dim = kv_lora_rank, qk_rope_head_dim
        shape = (size + page_size, 1, kv_lora_rank + qk_rope_head_dim)
        self.kv_buffer = [torch.zeros(shape, dtype=self.store_dtype, device=device) for _ in range(layers)]
        # Slots are handed out in order; slot 0 takes what padded tokens write.
        self._next = page_size

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """[slots, 1, row] as FP8: a view of the same bytes, nothing moves."""
        return self.kv_buffer[layer_id].view(self.dtype)

    def set_mla_kv_buffer(self, layer_id: int, slots: torch.Tensor, latent: torch.Tensor) -> None:
        """Write `latent` [tokens, row] of any float dtype to `slots`, cast to FP8 without a scale."""
        self.kv_buffer[layer_id][slots] = latent.to(self.dtype)[:, None].view(self.store_dtype)

    def alloc(self, tokens: int) -> torch.Tensor:
        """The next `tokens` slots, int64."""
        _at_least(0, tokens=tokens)
        if self._next + tokens > self.size + self.page_size:
            left = self.size + self.page_size - self._next
            raise BadInput(f"pool: {tokens} slots asked for, {left} of {self.size} are free")
        first, self._next = self._next, self._next + tokens
        return torch.arange(first, self._next)

    @property
    def slots(self) -> int:
        """Slots that a cast of the whole pool touches, the padding included."""
        return self.size + self.page_size


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of a layer's decode as profiled: median `us`, and the `allocated` bytes that it kept.

    `bytes` is arithmetic: what the stage must read and write in the pool and in what it is cast to.
    """

    name: str
    us: float
    allocated: int
    bytes: int


class Operator(msgspec.Struct, frozen=True, kw_only=True):
    """One operator as torch.profiler totalled it over the profiled steps: its own time and allocations."""

    name: str
    calls: int
    self_us: float
    allocated: int


class Decode(msgspec.Struct, frozen=True, kw_only=True):
    """One profiled decode loop. `tokens`: the slots that its last step read, over all requests.

    `bits` digests the attention outputs of all steps, bit for bit: equal digests, equal tokens.
    """

    strategy: Strategy
    pool_slots: int
    tokens: int
    batch: int
    layers: int
    steps: int
    heads: int
    row: int
    dtype: str
    step_us: float
    stages: list[Stage]
    operators: list[Operator]
    view_shares_storage: bool
    bits: str

    def stage(self, name: str) -> Stage:
        """One of STAGES by its name."""
        return next(s for s in self.stages if s.name == name)

    @property
    def cast_share(self) -> float:
        """The cast's part of a layer's profiled time."""
        return self.stage("cast").us / sum(s.us for s in self.stages)


class Loop:
    """A decode loop over a pool of its own; the same seed gives every strategy the same cache and queries."""

    def __init__(
        self,
        strategy: Strategy,
        *,
        slots: int,
        context: int,
        batch: int = 1,
        layers: int = 2,
        heads: int = 8,
        kv_lora_rank: int = 512,
        qk_rope_head_dim: int = 64,
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
    ) -> None:
        if strategy not in STRATEGIES:
            raise BadInput(f"strategy: expected {', '.join(STRATEGIES)}, got {strategy!r}")
        _at_least(1, batch=batch, heads=heads)
        self.strategy, self.heads, self.dtype = strategy, heads, dtype
        self.draw = torch.Generator().manual_seed(seed)
        self.pool = LatentPool(
            slots, layers=layers, kv_lora_rank=kv_lora_rank, qk_rope_head_dim=qk_rope_head_dim
        )
        self.row = kv_lora_rank + qk_rope_head_dim
        self.requests = [self.pool.alloc(context) for _ in range(batch)]
        for layer in range(layers):
            for own in self.requests:
                latent = torch.randn(context, self.row, generator=self.draw)
                self.pool.set_mla_kv_buffer(layer, own, latent)
        # One layer that all layers share, as stock's cast has under CUDA graphs.
        shape = (self.pool.slots, 1, self.row)
        self.shadow = torch.zeros(shape, dtype=dtype) if strategy == "shadow" else None
        self.digest = hashlib.sha256()

    def active(self) -> ActiveSlots:
        """What the step reads, as flashinfer_mla gets it: token-level kv_indices and kv_indptr."""
        lengths = torch.tensor([0, *(r.numel() for r in self.requests)], dtype=torch.int32)
        indices = torch.cat(self.requests).to(torch.int32)
        return ActiveSlots.ragged(indices, lengths.cumsum(0, dtype=torch.int32))

    def step(self) -> None:
        """One token for each request, through every layer."""
        self.requests = [torch.cat([r, self.pool.alloc(1)]) for r in self.requests]
        active = self.active()
        for layer in range(len(self.pool.kv_buffer)):
            latent = torch.randn(len(self.requests), self.row, generator=self.draw)
            q = torch.randn(len(self.requests), self.heads, self.row, generator=self.draw).to(self.dtype)
            out = self._layer(layer, active, latent, q)
            self.digest.update(out.view(torch.int32).numpy().tobytes())

    def _layer(self, layer: int, active: ActiveSlots, latent: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        rank = self.pool.kv_lora_rank
        stage = torch.profiler.record_function
        with stage("write"):
            self.pool.set_mla_kv_buffer(layer, torch.stack([r[-1] for r in self.requests]), latent)
        with stage("view"):
            rows = self.pool.get_key_buffer(layer)
        with stage("cast"):
            if self.shadow is not None:
                k_buffer = shadow_cast(rows, self.shadow, active)
            elif self.strategy == "gather":
                k_buffer, indices = gather_cast(rows, active, self.dtype)
                active = ActiveSlots.ragged(indices, active.bounds)
            else:
                k_buffer = full_cast(rows, self.dtype)
        with stage("attention"):
            q_pe = q[..., rank:] if self.row > rank else None
            return mla_attention(q[..., :rank], q_pe, k_buffer, active, sm_scale=self.row**-0.5)[0]


def profile(
    strategy: Strategy,
    *,
    slots: int,
    context: int,
    batch: int = 1,
    layers: int = 2,
    steps: int = 4,
    heads: int = 8,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Decode:
    """Profile `steps` decode steps of `batch` requests of `context` tokens over `slots`, on one thread.

    One step goes before, unprofiled. Raises BadInput for an unknown strategy, a pool too small and counts
    that are none.
    """
    _at_least(1, steps=steps)
    with _one_thread(), _kineto_quiet():
        loop = Loop(
            strategy,
            slots=slots,
            context=context,
            batch=batch,
            layers=layers,
            heads=heads,
            dtype=dtype,
            seed=seed,
        )
        loop.step()
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
        ) as seen:
            started = time.perf_counter()
            for _ in range(steps):
                loop.step()
            step_us = 1e6 * (time.perf_counter() - started) / steps
    tokens = sum(r.numel() for r in loop.requests)
    wide = loop.dtype.itemsize
    moved = {
        "write": batch * loop.row,
        "view": 0,
        "cast": (loop.pool.slots if strategy == "stock" else tokens) * loop.row * (1 + wide),
        "attention": tokens * loop.row * wide,
    }
    events = {name: [e for e in seen.events() if e.name == name] for name in STAGES}
    view = loop.pool.get_key_buffer(0)
    return Decode(
        strategy=strategy,
        pool_slots=loop.pool.slots,
        tokens=tokens,
        batch=batch,
        layers=layers,
        steps=steps,
        heads=heads,
        row=loop.row,
        dtype=str(dtype).removeprefix("torch."),
        step_us=step_us,
        stages=[
            Stage(
                name=name,
                us=statistics.median(e.cpu_time_total for e in found),
                allocated=int(statistics.median(e.cpu_memory_usage for e in found)),
                bytes=moved[name],
            )
            for name, found in events.items()
        ],
        operators=sorted(
            (
                Operator(
                    name=e.key,
                    calls=e.count,
                    self_us=e.self_cpu_time_total,
                    allocated=e.self_cpu_memory_usage,
                )
                for e in seen.key_averages()
                if e.key.startswith("aten::")
            ),
            key=lambda o: -o.self_us,
        ),
        view_shares_storage=view.untyped_storage().data_ptr()
        == loop.pool.kv_buffer[0].untyped_storage().data_ptr(),
        bits=loop.digest.hexdigest(),
    )


def _at_least(least: int, **counts: int) -> None:
    """Raises BadInput for the first of `counts` that is no whole number of `least` or more."""
    for name, n in counts.items():
        if not isinstance(n, int) or isinstance(n, bool) or n < least:
            raise BadInput(f"pool: expected {name} of {least} or more, a whole number, got {n!r}")


@contextmanager
def _one_thread() -> Iterator[None]:
    """Times that do not depend on what else runs on the host's other cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _kineto_quiet() -> Iterator[None]:
    """Kineto announces each start and stop on file descriptor 2, which a notebook would show."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
