"""Active rows to their own places in one wide layer: indices, plans and page tables stay as they are."""

import torch

from kvlab.patch import casts
from kvlab.patch.policy import Facts
from kvlab.patch.scratch import clear_unread
from kvlab.patch.strategies.base import Call


class Shadow:
    name = "shadow"
    is_exact = True

    def refusal(self, facts: Facts) -> str | None:
        return None

    def enter(self, call: Call) -> None:
        return

    def cast(self, call: Call, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        slots, width = rows.shape[0], rows.shape[-1]
        out = call.scratch.rows(rows.device, call.lane, slots, width, dtype, lasts=call.lasts)
        for active in call.reads.tables:
            if not call.lasts:
                clear_unread(out, active)
        for active in call.reads.tables:
            casts.shadow(rows, out, active)
        return out
