"""One call of a site: what it reads, which strategy has it, and what became of that."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from kvlab.kernels.checks import FP8_DTYPES
from kvlab.patch import write
from kvlab.patch.reads import ADAPTERS, Stock
from kvlab.patch.sites import Site
from kvlab.patch.standing import Standing, standing
from kvlab.patch.strategies import Call, TakeOver
from kvlab.patch.strategies.base import nothing_waits

if TYPE_CHECKING:
    from kvlab.patch.runtime import BackendState, Runtime


class Attempt:
    """One call: what it reads, which strategy has it, and what became of that. Made anew for every layer of
    every pass: what may be the last call's is in `standing`.
    """

    __slots__ = (
        *("runtime", "state", "site", "backend", "layer", "forward_batch", "q", "q_rope", "graph"),
        *("is_capturing", "call", "strategy_name", "served", "slots", "row_bytes", "tokens", "standing"),
        "_waits",
    )

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
        self.tokens: int | None = None
        self.standing: Standing | None = None
        # What stock would write in place of what waits for the cast: a pool and its arguments.
        self._waits: tuple[Any, ...] | None = None

    def enter(self, pool: Any) -> None:
        """Decide; put in place what the strategy needs before SGLang's method reads its metadata."""
        site, backend, batch = self.site, self.backend, self.forward_batch
        try:
            its = standing(self.runtime, self.state, site, backend, self.layer, self.q, pool)
            self.standing = its
            if its.outside is not None:
                self.fell_back(its.outside)
                return
            strategy = its.strategy
            if strategy is None:
                return
            self.strategy_name = its.name
            metadata = backend.forward_metadata
            # Extend's ragged path reads no pool and has nothing planned: the cast is not asked for.
            if metadata is None or (
                site.kind == "extend" and site.family == "flashinfer_mla" and metadata.use_ragged
            ):
                return
            adapter = ADAPTERS[site.family]
            reads = adapter.reads(backend, site.kind, self.layer, batch, its.reads)
            if isinstance(reads, Stock):
                self.fell_back(reads.reason)
                return
            its.reads = reads
            lasts = self.state.graphs or self.is_capturing
            self.tokens = _tokens(batch)
            self.call = Call(
                site.name,
                site.kind,
                adapter,
                backend,
                self.layer,
                batch,
                self.q,
                self.q_rope,
                reads,
                its.facts,
                self.runtime.scratch,
                its.lane,
                lasts,
                self.is_capturing,
                self.state.generation,
                not lasts and is_direct(self.tokens, its.facts.slots),
                its.kept,
                settle=self.flush,
            )
            if its.enters:
                strategy.enter(self.call)
        except Exception as e:
            self._give_up(e)

    def cast(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What SGLang's method gets for `rows.to(dtype)`."""
        its, call = self.standing, self.call
        shape = rows.shape
        self.slots, self.row_bytes = shape[0], shape[-1]
        if its is not None and its.unserved:
            self.fell_back(its.unserved)
        if rows.dtype not in FP8_DTYPES:
            self.leave()
            self.call = None
            self.served = None
            return rows.to(dtype)
        if call is not None and self.slots != its.facts.slots:
            # Also writes what waits.
            self.leave()
            self.call = call = None
            self.fell_back("a buffer that is not the pool's layer")
        if call is None:
            self.served = "stock"
            return rows.to(dtype)
        if call.pending is not None and call.pending.buffer.data_ptr() != rows.data_ptr():
            # New rows may wait no longer where this cast is not of their buffer.
            self.flush()
        wide = None
        try:
            wide = its.strategy.cast(call, rows, dtype)
        except Exception as e:
            self.flush()
            self._give_up(e)
        except TakeOver:
            self.served = self.strategy_name
            raise
        if wide is None:
            # Behind the handler: the error's traceback holds a wide layer, and two may not fit.
            self.served = "stock"
            return rows.to(dtype)
        if self._waits is not None:
            self._waits = None
            self._wrote("one launch" if call.is_apart else "with the cast")
        self.served = self.strategy_name
        return wide

    def write(self, pool: Any, layer: Any, loc: Any, nope: Any, rope: Any, *args: Any, **kwargs: Any) -> None:
        """The KV write: one launch where that is known to give the same bytes, else the pool's own."""
        if self._waits is not None:
            self.flush()
        runtime, its = self.runtime, self.standing
        if (
            not args
            and not kwargs
            and its is not None
            and its.facts is not None
            and its.outside is None
            and runtime.asked != "stock"
        ):
            try:
                if runtime.write_refusal(self.state, pool, its.facts) is None:
                    new = write.new_rows(pool, layer, loc, nope, rope)
                    if new is not None:
                        call = self.call
                        if (
                            call is not None
                            and call.pending is None
                            and its.strategy.waits(call, new, runtime.joint_refusal)
                        ):
                            call.pending = new
                            self._waits = pool, layer, loc, nope, rope
                            return
                        new.write()
                        self._wrote("one launch")
                        return
            except Exception as e:
                self._write_failed(pool, e)
        self._stock_write(pool, layer, loc, nope, rope, *args, **kwargs)

    def flush(self, clear: torch.Tensor | None = None) -> bool:
        """Write now what waits for the cast: somebody is about to read the pool. True where the same launch
        zeroed slot 0 of `clear`.
        """
        waits, call = self._waits, self.call
        if waits is None or call is None:
            return False
        self._waits = None
        new, call.pending = call.pending, None
        if new is None:
            return False
        try:
            new.write(clear)
        except Exception as e:
            self._write_failed(waits[0], e)
            self._stock_write(*waits)
            return False
        self._wrote("one launch")
        return clear is not None

    def _write_failed(self, pool: Any, error: Exception) -> None:
        self.state.write_refusal[id(pool)] = weakref.ref(pool), one_line(error)
        self.runtime.say(f"the one-launch KV write failed ({one_line(error)}); stock's is used from now on")

    def _stock_write(self, pool: Any, *args: Any, **kwargs: Any) -> None:
        self._wrote("stock")
        pool.set_mla_kv_buffer(*args, **kwargs)

    def leave(self) -> None:
        """Put back what the strategy swapped; safe to repeat."""
        if self._waits is not None:
            self.flush()
        if self.call is not None:
            while self.call.undo:
                self.call.undo.pop()()

    def end(self) -> None:
        """After the call: put back, count, and let go. What holds itself until Python's collector comes by
        holds a step's tensors too.
        """
        call = self.call
        if self._waits is not None or (call is not None and call.undo):
            self.leave()
        if self.served is not None:
            self.runtime.counters.call(
                self.site.name, self.served, self.slots, self.row_bytes, self.tokens, self.graph
            )
        if call is not None:
            call.settle = nothing_waits
            self.call = None

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


def is_direct(tokens: int | None, slots: int) -> bool:
    """Without graphs: are `tokens` cached tokens cast from the tables as they are, without a list of slots?

    The list, some bytes a slot, would be more memory than stock has. Where requests share so much that they
    name more slots than the pool has, it is worth that.
    """
    return tokens is not None and tokens <= slots


def _tokens(forward_batch: Any) -> int | None:
    """Cached tokens of the batch, if the host knows."""
    total = getattr(forward_batch, "seq_lens_sum", None)
    return int(total) if isinstance(total, int) else None


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}" if text else type(error).__name__
