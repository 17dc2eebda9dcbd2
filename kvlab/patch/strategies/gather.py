"""Distinct active rows to a compact wide buffer; attention reads it through new indices, the plan stays.

The plan fixes how many tokens each request has, not where they are: swapping the index buffer is enough, and
a prefix that many requests share is cast once. The map of slots is found once a step and serves all layers.
"""

import weakref
from dataclasses import dataclass
from typing import Any

import torch

from kvlab.kernels.active import ActiveSlots
from kvlab.patch import casts
from kvlab.patch.policy import Facts
from kvlab.patch.scratch import clear_unread
from kvlab.patch.strategies.base import Call


@dataclass
class _Step:
    """The map of one pass through the layers, and what tells the next pass apart."""

    generation: int
    metadata: Any
    is_capturing: bool
    last_layer: int
    found: casts.Map


class Gather:
    name = "gather"
    is_exact = True

    def __init__(self) -> None:
        self._steps: weakref.WeakKeyDictionary[Any, dict[str, _Step]] = weakref.WeakKeyDictionary()
        # Captured graphs refill these: they live as long as the process.
        self._captured: list[casts.Map] = []

    def refusal(self, facts: Facts) -> str | None:
        return None

    def enter(self, call: Call) -> None:
        if len(call.reads.tables) > 1:
            return
        call.undo.append(call.adapter.swap(call.backend, call.kind, self._map(call).new_indices).undo)

    def cast(self, call: Call, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if len(call.reads.tables) > 1:
            raise RuntimeError("a second table reads the same buffer")
        found = self._steps[call.backend][call.kind].found
        page_size = found.active.page_size
        count = max(found.rows, page_size)
        compact = call.scratch.rows(rows.device, call.lane, count, rows.shape[-1], dtype, lasts=call.lasts)
        if not call.lasts:
            clear_unread(compact, _renamed(found))
        return casts.gather(rows, compact, found)

    def _map(self, call: Call) -> casts.Map:
        """This pass's map: found again whenever the pass may be another one."""
        of_backend = self._steps.setdefault(call.backend, {})
        step = of_backend.get(call.kind)
        layer = call.layer.layer_id
        metadata = call.backend.forward_metadata
        is_same_pass = (
            step is not None
            and step.generation == call.generation
            and step.metadata is metadata
            and step.is_capturing == call.is_capturing
            and layer > step.last_layer
        )
        if is_same_pass:
            step.last_layer = layer
            return step.found
        found = casts.slot_map(call.reads.tables[0], call.facts.slots, step.found if step else None)
        if call.is_capturing:
            self._captured.append(found)
        of_backend[call.kind] = _Step(call.generation, metadata, call.is_capturing, layer, found)
        return found


def _renamed(found: casts.Map) -> ActiveSlots:
    """The active tokens under their new indices."""
    a = found.active
    return ActiveSlots(found.new_indices, a.bounds, a.page_size, a.is_paged)
