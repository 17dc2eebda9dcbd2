"""The source text's own variant: a compact buffer in request order, contiguous indices, a new plan.

Kept to be measured. It needs the lengths on the host (a sync a layer), plans again for every layer, and puts
a prefix that requests share into the buffer once a request, so its rows can outgrow the pool. Eager decode
only: Python does not run when a graph is replayed.
"""

import torch

from kvlab.patch.policy import Facts
from kvlab.patch.reads import FlashInferMLA
from kvlab.patch.strategies.base import Call, Plain


class Replan(Plain):
    name = "replan"
    is_exact = True

    def refusal(self, facts: Facts) -> str | None:
        if facts.family != "flashinfer_mla":
            return "only flashinfer's wrapper has a plan to repeat"
        return "decode only" if facts.kind != "decode" else None

    def cast(self, call: Call, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if call.is_capturing:
            raise RuntimeError("cannot re-plan inside a captured graph")
        active = call.reads.tables[0]
        slots = torch.cat([*active.slots(), active.table.new_empty(0, dtype=torch.long)])
        compact = rows.view(torch.uint8)[slots.clamp(min=0)].view(rows.dtype).to(dtype)
        wrapper = FlashInferMLA.wrapper(call.backend, call.kind)
        was = (
            wrapper._kv_indices_buf,
            wrapper._kv_indptr_buf,
            wrapper._qo_indptr_buf,
            wrapper._kv_len_arr_buf,
        )
        updater = call.backend.indices_updater_decode
        indptr = active.bounds

        def plan(indices: torch.Tensor) -> None:
            wrapper.plan(
                updater.q_indptr[: indptr.numel()],
                indptr,
                indices,
                (indptr[1:] - indptr[:-1]).to(torch.int32),
                updater.num_local_heads,
                updater.kv_lora_rank,
                updater.qk_rope_head_dim,
                1,
                False,
                updater.scaling,
                updater.data_type,
                updater.data_type,
            )

        def back() -> None:
            (
                wrapper._kv_indices_buf,
                wrapper._kv_indptr_buf,
                wrapper._qo_indptr_buf,
                wrapper._kv_len_arr_buf,
            ) = was

        plan(torch.arange(slots.numel(), dtype=torch.int32, device=rows.device))
        call.undo.append(back)
        return compact
