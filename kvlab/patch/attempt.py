"""One call of a site: what it reads, which strategy has it, and what became of that."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from kvlab.kernels.checks import FP8_DTYPES
from kvlab.patch import write
from kvlab.patch.reads import ADAPTERS, Adapter, Reads, Stock
from kvlab.patch.saying import one_line
from kvlab.patch.sites import Site
from kvlab.patch.standing import Standing, standing
from kvlab.patch.strategies import Restart, Strategy, TakeOver, Unfit

if TYPE_CHECKING:
    from kvlab.patch.policy import Facts
    from kvlab.patch.runtime import BackendState, Runtime
    from kvlab.patch.scratch import Scratch
    from kvlab.patch.write import NewRows


class Attempt:
    """One call: what it reads, which strategy has it, and what became of that; a strategy's `Call`. Made anew
    for every layer of every pass: what may be the last call's is in `standing`.

    `strategy`: None where stock has the call, from the start or since something went wrong.
    """

    __slots__ = (
        *("runtime", "state", "site", "graph", "standing", "strategy", "strategy_name", "served"),
        *("slots", "row_bytes", "tokens", "kind", "adapter", "backend", "layer", "forward_batch", "q"),
        *("q_rope", "reads", "facts", "scratch", "lane", "lasts", "is_capturing", "generation"),
        *("is_direct", "kept", "undo", "pending", "is_apart", "_waits"),
    )
    # Set where a strategy has the call.
    adapter: Adapter
    reads: Reads
    facts: Facts
    scratch: Scratch
    lane: str
    lasts: bool
    generation: int
    is_direct: bool
    kept: dict[str, Any]

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
        self.kind, self.graph, self.is_capturing = site.kind, graph, is_capturing
        self.standing: Standing | None = None
        self.strategy: Strategy | None = None
        self.strategy_name = "stock"
        self.served: str | None = None
        self.slots = self.row_bytes = 0
        self.tokens: int | None = None
        self.undo: list[Any] = []
        self.pending: NewRows | None = None
        self.is_apart = False
        # What stock would write in place of what waits for the cast: a pool and its arguments.
        self._waits: tuple[Any, ...] | None = None

    def enter(self, pool: Any) -> None:
        """Decide; put in place what the strategy needs before SGLang's method reads its metadata."""
        site, state, backend, batch = self.site, self.state, self.backend, self.forward_batch
        try:
            its = standing(self.runtime, state, site, backend, self.layer, self.q, pool)
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
            self.adapter = ADAPTERS[site.family]
            reads = self.adapter.reads(backend, site.kind, self.layer, batch, its.reads)
            if isinstance(reads, Stock):
                self.fell_back(reads.reason)
                return
            its.reads = self.reads = reads
            self.facts, self.lane, self.kept = its.facts, its.lane, its.kept
            self.scratch, self.generation = self.runtime.scratch, state.generation
            self.lasts = lasts = state.graphs or self.is_capturing
            # Cached tokens of the batch, if the host knows.
            tokens = getattr(batch, "seq_lens_sum", None)
            self.tokens = tokens if isinstance(tokens, int) else None
            self.is_direct = not lasts and is_direct(self.tokens, its.facts.slots)
            self.strategy = strategy
            if its.enters:
                strategy.enter(self)
        except Unfit as e:
            self.leave()
            self.fell_back(str(e))
            self.strategy = None
        except Exception as e:
            self._give_up(e)

    def cast(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What SGLang's method gets for `rows.to(dtype)`."""
        its = self.standing
        shape = rows.shape
        self.slots, self.row_bytes = shape[0], shape[-1]
        if its is not None and its.unserved:
            self.fell_back(its.unserved)
        if rows.dtype not in FP8_DTYPES:
            self.served = None
            self._to_stock()
            return rows.to(dtype)
        if self.strategy is not None and self.slots != self.facts.slots:
            self.fell_back("a buffer that is not the pool's layer")
            # Also writes what waits.
            self._to_stock()
        if self.strategy is None:
            self.served = "stock"
            return rows.to(dtype)
        if self.pending is not None and self.pending.buffer.data_ptr() != rows.data_ptr():
            # New rows may wait no longer where this cast is not of their buffer.
            self.settle()
        wide = None
        try:
            try:
                wide = self.strategy.cast(self, rows, dtype)
            except Unfit as e:
                wide = self._by_another(e, rows, dtype)
        except Exception as e:
            self.settle()
            self._give_up(e)
        except TakeOver:
            self.served = self.strategy_name
            raise
        if wide is None:
            # Behind the handler: the error's traceback holds a wide layer, and two may not fit.
            if its is not None and its.enters:
                raise Restart
            self.served = "stock"
            return rows.to(dtype)
        if self._waits is not None:
            self._waits = None
            self._wrote("one launch" if self.is_apart else "with the cast")
        self.served = self.strategy_name
        return wide

    def _by_another(self, unfit: Unfit, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """What every table names, or None: stock's. Other calls stay the strategy's."""
        self.settle()
        if self.runtime.trust.refusal("shadow", self.facts) is not None:
            self.fell_back(str(unfit))
            self.strategy = None
            return None
        self.strategy_name, self.strategy = "shadow", self.runtime.strategies["shadow"]
        return self.strategy.cast(self, rows, dtype)

    def passed_by(self) -> None:
        """The rows become something that no strategy makes: stock's indices with stock's rows."""
        self.fell_back("rows asked for another cast than to BF16 or FP16")
        self._to_stock()

    def _to_stock(self) -> None:
        """Stock has the call from here on: anew, where its method may have read tables that were swapped."""
        is_swapped = bool(self.undo)
        self.leave()
        self.strategy = None
        if is_swapped:
            raise Restart

    def write(self, pool: Any, layer: Any, loc: Any, nope: Any, rope: Any, *args: Any, **kwargs: Any) -> None:
        """The KV write: one launch where that is known to give the same bytes, else the pool's own."""
        if self._waits is not None:
            self.settle()
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
                if runtime.trust.write_refusal(pool, its.facts, self.state.write_refusal) is None:
                    new = write.new_rows(pool, layer, loc, nope, rope, its.layout)
                    if new is not None:
                        its.layout = new.layout
                        if (
                            self.strategy is not None
                            and self.pending is None
                            and self.strategy.waits(self, new, runtime.trust.joint_refusal)
                        ):
                            self.pending = new
                            self._waits = pool, layer, loc, nope, rope
                            return
                        new.write()
                        self._wrote("one launch")
                        return
            except Exception as e:
                self._write_failed(pool, e)
        self._stock_write(pool, layer, loc, nope, rope, *args, **kwargs)

    def settle(self, clear: torch.Tensor | None = None) -> bool:
        """Write now what waits for the cast: somebody is about to read the pool. True where the same launch
        zeroed slot 0 of `clear`.
        """
        waits = self._waits
        if waits is None:
            return False
        self._waits = None
        new, self.pending = self.pending, None
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
            self.settle()
        while self.undo:
            self.undo.pop()()

    def end(self) -> None:
        """After the call: put back, count, and serve no longer who still holds one of its views."""
        if self._waits is not None or self.undo:
            self.leave()
        if self.served is not None:
            self.runtime.counters.call(
                self.site.name, self.served, self.slots, self.row_bytes, self.tokens, self.graph
            )
        self.strategy = None

    def fell_back(self, reason: str) -> None:
        self.served = "stock"
        self.runtime.counters.fallback(reason, graph=self.graph)

    def _give_up(self, error: Exception) -> None:
        self.leave()
        if self.standing is None:
            # Not a strategy's failure: what the call is was not found out.
            self.fell_back("not understood")
            self.runtime.say(f"calls of {self.site.name} are left to stock: {one_line(error)}")
            return
        self.strategy = None
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
