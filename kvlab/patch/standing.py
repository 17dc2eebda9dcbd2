"""Is this call one more of those that its backend's last one was decided for?

The layers of a pass differ in nothing that a decision reads. So a decision is kept for the next call of its
backend and kind, together with everything that it was read from, and holds while all of that is the same.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from kvlab.patch.policy import Facts
from kvlab.patch.reads import Reads
from kvlab.patch.sites import Site
from kvlab.patch.strategies import Strategy

if TYPE_CHECKING:
    from kvlab.patch.runtime import BackendState, Runtime


@dataclass(slots=True)
class Basis:
    """What a decision is read from. `rows`, a layer of the pool, is not held: it is not ours.

    What else it depends on ends it where that changes: new metadata, graphs to come, a strategy's failure.
    """

    rows: weakref.ref[torch.Tensor]
    fp8: torch.dtype
    q_dtype: torch.dtype
    head_dim: int
    heads: int | None
    rank: int | None
    page_size: int


@dataclass(slots=True)
class Standing:
    """A decision. `unserved`: why no call of this kind is served, should it ask for a cast; `outside`: what
    the whole server does that leaves it to stock; `enters`: has its strategy something to do before the call;
    `reads`: the tables of the last call, perhaps this one's; `layout`: of the last new rows.
    """

    basis: Basis
    unserved: str = ""
    facts: Facts | None = None
    outside: str | None = None
    name: str = "stock"
    strategy: Strategy | None = None
    enters: bool = False
    lane: str = "shared"
    reads: Reads | None = None
    layout: tuple[Any, ...] | None = None
    # What its strategy keeps for the next layer.
    kept: dict[str, Any] = field(default_factory=dict)


def standing(
    runtime: Runtime, state: BackendState, site: Site, backend: Any, layer: Any, q: torch.Tensor, pool: Any
) -> Standing:
    """What stands for this call: the last decision where it holds, else a new one."""
    rows = a_layer(pool)
    page_size = backend.page_size if site.family == "fa3" else 1
    heads, rank = getattr(layer, "tp_q_head_num", None), getattr(layer, "v_head_dim", None)
    kept = state.standing.get(site.kind)
    if kept is not None:
        b = kept.basis
        if (
            b.rows() is rows
            and b.fp8 is pool.dtype
            and b.q_dtype is q.dtype
            and b.head_dim == layer.head_dim
            and b.heads == heads
            and b.rank == rank
            and b.page_size == page_size
        ):
            return kept
    basis = Basis(
        weakref.ref(rows),
        pool.dtype,
        q.dtype,
        layer.head_dim,
        heads,
        rank,
        page_size,
    )
    fresh = state.standing[site.kind] = runtime.decide(state, site, basis, rows)
    return fresh


def a_layer(pool: Any) -> torch.Tensor:
    """One layer's raw buffer, without `get_key_buffer`, which may wait for a transfer."""
    return getattr(pool, "full_kv_pool", pool).kv_buffer[0]
