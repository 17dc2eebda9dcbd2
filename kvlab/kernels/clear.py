"""What may attention load beside the rows that it attends to, and must therefore be finite?

A kernel that reads whole pages multiplies what lies behind a request's last token by zero: nothing, unless it
is NaN or Inf. A wide layer that lasts is zeroed once; one that is made for a call holds anything.
"""

import torch
import triton
import triton.language as tl

from kvlab.kernels.active import ActiveSlots
from kvlab.kernels.direct import Direct


@triton.jit(do_not_specialize=["table_stride", "num_slots", "pages"])
def kvlab_clear_tails(
    out,
    table,
    lengths,
    out_stride,
    table_stride,
    num_slots,
    pages,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """One row of a request's last page a program, zeroed where it lies behind the request's length."""
    b = tl.program_id(0) // PAGE_SIZE
    offset = tl.program_id(0) % PAGE_SIZE
    length = tl.minimum(tl.load(lengths + b), pages * PAGE_SIZE)
    last = tl.maximum(length - 1, 0) // PAGE_SIZE
    is_tail = (length > 0) & (last * PAGE_SIZE + offset >= length)
    page = tl.load(table + b.to(tl.int64) * table_stride + last, mask=is_tail, other=-1).to(tl.int64)
    slot = page * PAGE_SIZE + offset
    column = tl.arange(0, BLOCK)
    nothing = tl.zeros([BLOCK], tl.float32).to(out.dtype.element_ty)
    is_there = is_tail & (page >= 0) & (slot < num_slots)
    tl.store(out + slot * out_stride + column, nothing, mask=is_there & (column < WIDTH))


_launch = Direct(kvlab_clear_tails)


def clear_tails(shadow: torch.Tensor, active: ActiveSlots) -> None:
    """Zero what lies behind each request in its last page. `shadow` [slots, 1, width] of a wide dtype;
    `active` paged.
    """
    table, lengths, page_size = active.table, active.bounds, active.page_size
    if not active.batch or not table.shape[1]:
        return
    width = shadow.size(-1)
    _launch(
        (shadow.device.index, shadow.dtype, shadow.stride(0), width, page_size, table.dtype, lengths.dtype),
        active.batch * page_size,
        (shadow, table, lengths),
        (shadow.stride(0), table.stride(0), shadow.size(0), table.shape[1]),
        lambda: {
            "WIDTH": width,
            "BLOCK": triton.next_power_of_2(width),
            "PAGE_SIZE": page_size,
            "num_warps": 1,
        },
    )
