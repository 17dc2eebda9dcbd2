"""One call of a site: what it reads, which strategy has it, and what became of that."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

import torch

from kvlab.kernels.checks import FP8_DTYPES, WIDE_DTYPES
from kvlab.patch import casts, write
from kvlab.patch.policy import Facts
from kvlab.patch.reads import ADAPTERS, Stock
from kvlab.patch.sites import Site
from kvlab.patch.strategies import Call, TakeOver
from kvlab.patch.strategies.base import nothing

if TYPE_CHECKING:
    from kvlab.patch.runtime import BackendState, Runtime


class Attempt:
    """One call: what it reads, which strategy has it, and what became of that."""

    def __init__(
        self,
        runtime: Runtime,
        state: BackendState,
        site: Site,
        backend: Any,
        layer: Any,
        forward_batch: Any,
        q: torch.Tensor,
        q_rope: torch.Tensor | None,
        graph: Any,
        is_capturing: bool,
    ) -> None:
        self.runtime, self.state, self.site, self.backend = runtime, state, site, backend
        self.layer, self.forward_batch, self.q, self.q_rope = layer, forward_batch, q, q_rope
        self.graph, self.is_capturing = graph, is_capturing
        self.call: Call | None = None
        self.strategy_name = "stock"
        self.served: str | None = None
        self.slots = self.row_bytes = 0
        self.facts: Facts | None = None
        # Why nothing serves this call, should it ask for a cast.
        self._unserved = ""
        # What the whole server does that leaves this call to stock.
        self._outside: str | None = None
        # How stock writes what waits for the cast.
        self._waits: functools.partial[None] | None = None

    def enter(self, pool: Any) -> None:
        """Decide; put in place what the strategy needs before SGLang's method reads its metadata."""
        try:
            self._enter(pool)
        except Exception as e:
            self._give_up(e)

    def _enter(self, pool: Any) -> None:
        state, site, layer = self.state, self.site, self.layer
        rows = a_layer(pool)
        if rows.shape[-1] != layer.head_dim or self.q.dtype not in WIDE_DTYPES:
            # A prefill that attends to its own wide rows, with heads of another width, asks for no cast.
            self._unserved = f"rows of {rows.shape[-1]}, head_dim {layer.head_dim}, {self.q.dtype} queries"
            return
        self.facts = Facts(
            kind=site.kind,
            device=rows.device,
            slots=rows.shape[0],
            width=rows.shape[-1],
            fp8=pool.dtype,
            q_dtype=self.q.dtype,
            heads=layer.tp_q_head_num,
            rank=layer.v_head_dim,
            page_size=self.backend.page_size if site.family == "fa3" else 1,
            family=site.family,
        )
        self._outside = _outside(state)
        if self._outside is not None:
            self.fell_back(self._outside)
            return
        self.strategy_name = self.runtime.choice(state, self.facts).strategy
        if self.strategy_name == "stock":
            return
        adapter = ADAPTERS[site.family]
        if not _has_metadata(self.backend, site):
            return
        reads = adapter.reads(self.backend, site.kind, layer, self.forward_batch)
        if isinstance(reads, Stock):
            self.fell_back(reads.reason)
            return
        self.call = Call(
            site=site.name,
            kind=site.kind,
            adapter=adapter,
            backend=self.backend,
            layer=layer,
            forward_batch=self.forward_batch,
            q=self.q,
            q_rope=self.q_rope,
            reads=reads,
            facts=self.facts,
            scratch=self.runtime.scratch,
            lane=self.runtime.lane(state, site.kind),
            lasts=state.graphs or self.is_capturing,
            is_capturing=self.is_capturing,
            generation=state.generation,
            settle=self.flush,
        )
        self.runtime.strategies[self.strategy_name].enter(self.call)

    def cast(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What SGLang's method gets for `rows.to(dtype)`."""
        self.slots, self.row_bytes = rows.shape[0], rows.shape[-1]
        if self._unserved:
            self.fell_back(self._unserved)
        if rows.dtype not in FP8_DTYPES:
            self.flush()
            self.call = None
            self.served = None
            return rows.to(dtype)
        if self.call is not None and (self.facts is None or rows.shape[0] != self.facts.slots):
            # Also writes what waits.
            self.leave()
            self.call = None
            self.fell_back("a buffer that is not the pool's layer")
        self._settle(rows)
        if self.call is not None:
            try:
                wide = self.runtime.strategies[self.strategy_name].cast(self.call, rows, dtype)
            except Exception as e:
                self.flush()
                self._give_up(e)
            except TakeOver:
                self.served = self.strategy_name
                raise
            else:
                if self._waits is not None:
                    self._waits = None
                    self._wrote("with the cast")
                self.served = self.strategy_name
                return wide
        self.served = "stock"
        return rows.to(dtype)

    def write(self, pool: Any, layer: Any, loc: Any, nope: Any, rope: Any, *args: Any, **kwargs: Any) -> None:
        """The KV write: one launch where that is known to give the same bytes, else the pool's own."""
        is_ours = not args and not kwargs and self.facts is not None and self.runtime.asked != "stock"
        if is_ours and self._outside is None:
            try:
                why = self.runtime.write_refusal(self.state, pool, self.facts)
                new = write.new_rows(pool, layer, loc, nope, rope) if why is None else None
                if new is not None and self._may_wait(new):
                    self.call.pending = new
                    self._waits = functools.partial(self._stock_write, pool, layer, loc, nope, rope)
                    return
                if new is not None:
                    new.write()
                    self._wrote("one launch")
                    return
            except Exception as e:
                self._write_failed(pool, e)
        self._stock_write(pool, layer, loc, nope, rope, *args, **kwargs)

    def flush(self) -> None:
        """Write now what waits for the cast: somebody is about to read the pool."""
        if self._waits is None or self.call is None:
            return
        by_stock, self._waits = self._waits, None
        new, self.call.pending = self.call.pending, None
        if new is None:
            return
        try:
            new.write()
            self._wrote("one launch")
        except Exception as e:
            self._write_failed(by_stock.args[0], e)
            by_stock()

    def _settle(self, rows: torch.Tensor) -> None:
        """New rows may wait no longer where this cast is not of their buffer."""
        pending = self.call.pending if self.call is not None else None
        if pending is not None and pending.buffer.data_ptr() != rows.data_ptr():
            self.flush()

    def _may_wait(self, new: write.NewRows) -> bool:
        """May the cast write these rows?"""
        return (
            self.call is not None
            and self.call.pending is None
            and self.site.kind == "decode"
            and len(self.call.reads.tables) == 1
            and getattr(self.runtime.strategies[self.strategy_name], "is_joint", False)
            and 0 < new.loc.numel() <= casts.most_joint_writes(new.buffer.device)
            and self.runtime.joint_refusal(self.facts) is None
        )

    def _write_failed(self, pool: Any, error: Exception) -> None:
        self.state.write_refusal[id(pool)] = one_line(error)
        self.runtime.say(f"the one-launch KV write failed ({one_line(error)}); stock's is used from now on")

    def _stock_write(self, pool: Any, *args: Any, **kwargs: Any) -> None:
        self._wrote("stock")
        pool.set_mla_kv_buffer(*args, **kwargs)

    def leave(self) -> None:
        """Put back what the strategy swapped; safe to repeat."""
        self.flush()
        if self.call is not None:
            while self.call.undo:
                self.call.undo.pop()()

    def end(self) -> None:
        """After the call: put back, count, and let go. What holds itself until Python's collector comes by
        holds a step's tensors too.
        """
        self.leave()
        self.count()
        if self.call is not None:
            self.call.settle = nothing
            self.call = None

    def count(self) -> None:
        if self.served is None:
            return
        self.runtime.counters.call(
            self.site.name,
            self.served,
            slots=self.slots,
            row_bytes=self.row_bytes,
            tokens=_tokens(self.forward_batch),
            graph=self.graph,
        )

    def fell_back(self, reason: str) -> None:
        self.served = "stock"
        self.runtime.counters.fallback(reason, graph=self.graph)

    def _give_up(self, error: Exception) -> None:
        self.leave()
        self.call = None
        if isinstance(error, torch.OutOfMemoryError):
            self.fell_back("out of memory for scratch")
        else:
            self.fell_back(f"{self.strategy_name} failed")
        self.runtime.broke(self.strategy_name, error)

    def _wrote(self, how: str) -> None:
        if self.graph is None:
            self.runtime.counters.writes[how] += 1


def _has_metadata(backend: Any, site: Site) -> bool:
    """Extend's ragged path reads no pool and has nothing planned: the cast is not asked for, so nothing to
    do.
    """
    metadata = backend.forward_metadata
    if metadata is None:
        return False
    return not (site.family == "flashinfer_mla" and site.kind == "extend" and metadata.use_ragged)


def _outside(state: BackendState) -> str | None:
    """What the whole server does that leaves every call to stock."""
    args = state.server_args
    if (getattr(args, "dcp_size", 1) or 1) > 1:
        return "decode context parallelism"
    if not state.graphs and _overlaps_plans():
        # An eager plan's kv_indptr is the backend's own buffer, which the next plan may be rewriting.
        return "plans on a stream of their own, graphs off"
    return None


def _overlaps_plans() -> bool:
    return os.environ.get("SGLANG_ENABLE_OVERLAP_PLAN_STREAM", "0").lower() in ("1", "true", "yes")


def _tokens(forward_batch: Any) -> int | None:
    """Cached tokens of the batch, if the host knows."""
    total = getattr(forward_batch, "seq_lens_sum", None)
    return int(total) if isinstance(total, int) else None


def a_layer(pool: Any) -> torch.Tensor:
    """One layer's raw buffer, without `get_key_buffer`, which may wait for a transfer."""
    inner = getattr(pool, "full_kv_pool", pool)
    return inner.kv_buffer[0]


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}" if text else type(error).__name__
