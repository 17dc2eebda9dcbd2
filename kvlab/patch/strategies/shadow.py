"""Active rows to their own places in one wide layer: indices, plans and page tables stay as they are.

Under CUDA graphs, where a pass has several layers, its distinct slots are listed once, in the pool's order: a
prefix that many requests share is cast once a layer, not once a request. A draft model's single layer is not
worth the list. A decode step's own new slots are left out of the list: each layer writes them with its cast,
in one launch.
"""

from collections.abc import Callable
from typing import Any

import torch

from kvlab.patch import casts
from kvlab.patch.policy import Facts
from kvlab.patch.scratch import clear_unread
from kvlab.patch.strategies.base import Call, Plain
from kvlab.patch.strategies.passes import Passes
from kvlab.patch.write import NewRows


class Shadow(Plain):
    name = "shadow"
    is_exact = True

    def __init__(self) -> None:
        self._passes = Passes()
        # Captured graphs refill these: they live as long as the process.
        self._captured: list[Any] = []

    def waits(self, call: Call, new: NewRows, joint_refusal: Callable[[Facts], str | None]) -> bool:
        return call.is_direct or (
            call.kind == "decode"
            and len(call.reads.tables) == 1
            and 0 < new.loc.numel() <= casts.most_joint_writes(new.buffer.device)
            and joint_refusal(call.facts) is None
        )

    def cast(self, call: Call, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        slots, width = rows.shape[0], rows.shape[-1]
        out = call.scratch.rows(rows.device, call.lane, slots, width, dtype, lasts=call.lasts)
        if call.is_direct:
            return self._direct(call, rows, out)
        if not call.lasts or call.scratch.unclean:
            clear_unread(out, call.reads.tables)
        its = self._passes.of(call)
        # The first pass of all learns at its second layer that there are several.
        begins = 1 if its.layers_before > 1 else 2
        if its.layers == begins:
            # None, should this be interrupted: what the pass before read is nobody's list.
            last, its.found = its.found, None
            found = casts.slot_list(call.reads.tables, slots, last)
            its.written = call.pending.loc if call.pending is not None else None
            if its.written is not None:
                casts.without(found, its.written)
            its.found = found
            its.is_graph_s = call.is_capturing and found is not last
            if call.is_capturing and all(its.found is not kept for kept in self._captured):
                self._captured.append(its.found)
        is_listed = its.found is not None and its.layers >= begins
        if is_listed and _same(its.written, call.pending):
            if call.pending is None:
                return casts.shadow(rows, out, its.found)
            # The layer that makes the list reads it behind what made it.
            casts.write_shadow(its.found, out, call.pending, early=its.layers > begins)
            call.pending = None
            return out
        call.settle()
        for source in call.reads.tables:
            casts.shadow(rows, out, source)
        return out

    def _direct(self, call: Call, rows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """New rows, if any wait, to the pool; then the tables' rows as they are read."""
        tables, new = call.reads.tables, call.pending
        layers = call.kept.get("write and cast")
        if layers is None and casts.on_device(rows.device):
            layers = call.kept["write and cast"] = casts.kernels("layers").WriteAndCast()
        is_usual = layers is not None and new is not None and len(tables) == 1
        if is_usual:
            if tables[0].page_size > 1:
                casts.clear_tails(out, tables[0])
            if layers.again(new, rows, out, tables[0]):
                call.pending, call.is_apart = None, True
                return out
        is_clear = call.settle(out)
        clear_unread(out, tables, is_clear=is_clear)
        for source in tables:
            casts.shadow(rows, out, source, None if layers is None else layers.tickets)
        if is_usual and is_clear:
            layers.note(new, rows, out, tables[0])
        return out


def _same(written: torch.Tensor | None, pending: NewRows | None) -> bool:
    """Does this layer write the very slots that the list leaves out?"""
    if written is None or pending is None:
        return written is None and pending is None
    return (written.data_ptr(), written.shape) == (pending.loc.data_ptr(), pending.loc.shape)
