"""Cast the rows of an MLA pool that one attention call reads, to their own places in one wide layer.

The indices, the plan and the page tables stay as they are. The slots are read on the device, so the launch
can be captured into a CUDA graph. One buffer serves all layers; it is zeroed once, so rows that nobody cast
are finite.
"""

from typing import Optional

import torch
import triton
import triton.language as tl

_shadows: dict[tuple, torch.Tensor] = {}


@triton.jit
def _cast_rows(
    rows,
    out,
    table,
    bounds,
    row_stride,
    out_stride,
    table_stride,
    num_slots,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGED: tl.constexpr,
):
    b = tl.program_id(0)
    if PAGED:
        start, length = 0, tl.load(bounds + b)
        table += b.to(tl.int64) * table_stride
    else:
        start = tl.load(bounds + b)
        length = tl.load(bounds + b + 1) - start
    column = tl.arange(0, BLOCK)
    for i in range(tl.program_id(1), length, tl.num_programs(1)):
        entry = tl.load(table + start + i // PAGE_SIZE).to(tl.int64)
        slot = entry * PAGE_SIZE + i % PAGE_SIZE
        inside = (column < WIDTH) & (entry >= 0) & (slot < num_slots)
        x = tl.load(rows + slot * row_stride + column, mask=inside)
        tl.store(out + slot * out_stride + column, x.to(out.dtype.element_ty), mask=inside)


def cast_active_rows(
    rows: torch.Tensor,
    dtype: torch.dtype,
    table: torch.Tensor,
    bounds: torch.Tensor,
    page_size: Optional[int] = None,
) -> torch.Tensor:
    """What `rows.to(dtype)` is to a kernel that reads `table`.

    rows [slots, 1, width]. Without `page_size`: table = kv_indices, bounds = kv_indptr [bs + 1]; with it:
    table = page_table [bs, pages], bounds = the lengths [bs].
    """
    if rows.dtype == dtype:
        return rows
    slots, width = rows.shape[0], rows.shape[-1]
    key = (rows.device, slots, width, dtype)
    if key not in _shadows:
        _shadows[key] = torch.zeros(rows.shape, dtype=dtype, device=rows.device)
    out = _shadows[key]
    paged = page_size is not None
    batch = bounds.numel() - (0 if paged else 1)
    if batch > 0:
        _cast_rows[(batch, 64)](
            rows,
            out,
            table,
            bounds,
            rows.stride(0),
            out.stride(0),
            table.stride(0) if paged else 0,
            slots,
            WIDTH=width,
            BLOCK=triton.next_power_of_2(width),
            PAGE_SIZE=page_size or 1,
            PAGED=paged,
        )
    return out
