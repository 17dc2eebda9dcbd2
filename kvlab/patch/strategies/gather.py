"""Distinct active rows to a compact wide buffer; attention reads it through new indices, the plan stays.

The plan fixes how many tokens each request has, not where they are: swapping the index buffer is enough, and
a prefix that many requests share is cast once. The map of slots is found once a step and serves all layers.
"""

import torch

from kvlab.kernels.active import ActiveSlots
from kvlab.patch import casts
from kvlab.patch.scratch import clear_unread
from kvlab.patch.strategies.base import Call, Plain, Unfit
from kvlab.patch.strategies.passes import Passes


class Gather(Plain):
    name = "gather"
    is_exact = True

    def __init__(self) -> None:
        self._passes = Passes()
        # Captured graphs refill these: they live as long as the process.
        self._captured: list[casts.Map] = []

    def enter(self, call: Call) -> None:
        if len(call.reads.tables) > 1:
            return
        call.undo.append(call.adapter.swap(call.backend, call.kind, self._map(call).new_indices).undo)

    def cast(self, call: Call, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if len(call.reads.tables) > 1:
            raise Unfit("cascade attention reads the buffer by a second table")
        found = self._passes.latest(call).found
        page_size = found.active.page_size
        count = max(found.rows, page_size)
        compact = call.scratch.rows(rows.device, call.lane, count, rows.shape[-1], dtype, lasts=call.lasts)
        if not call.lasts or call.scratch.unclean:
            clear_unread(compact, [_renamed(found)])
        return casts.gather(rows, compact, found)

    def _map(self, call: Call) -> casts.Map:
        """This pass's map: found again whenever the pass may be another one."""
        its = self._passes.of(call)
        if its.layers == 1:
            # None, should this be interrupted: what the pass before read is nobody's map.
            last, its.found = its.found, None
            its.found = casts.slot_map(call.reads.tables[0], call.facts.slots, last)
            if call.is_capturing:
                is_last_s = last is not None and its.found.workspace is last.workspace
                its.is_graph_s = not is_last_s
                self._captured.append(its.found)
        return its.found


def _renamed(found: casts.Map) -> ActiveSlots:
    """The active tokens under their new indices."""
    a = found.active
    return ActiveSlots(found.new_indices, a.bounds, a.page_size, a.is_paged)
