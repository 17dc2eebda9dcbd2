"""Which query tokens and which rows of the pool are a request's? Read from its tables on the device.

Device code of the decode kernels.
"""

import triton
import triton.language as tl


@triton.jit
def extent(r, bounds, q_indptr, limit, PAGED: tl.constexpr, RAGGED_Q: tl.constexpr, mask):
    """Of request(s) r: first table entry (ragged), tokens, first query token, query tokens."""
    if PAGED:
        begin = r * 0
        length = tl.load(bounds + r, mask=mask, other=0)
    else:
        begin = tl.load(bounds + r, mask=mask, other=0)
        length = tl.load(bounds + r + 1, mask=mask, other=0) - begin
    length = tl.maximum(tl.minimum(length, limit - begin), 0)
    if RAGGED_Q:
        q_first = tl.load(q_indptr + r, mask=mask, other=0)
        q_count = tl.maximum(tl.load(q_indptr + r + 1, mask=mask, other=0) - q_first, 0)
    else:
        q_first = r
        q_count = r * 0 + 1
    return begin, length, q_first, q_count


@triton.jit
def slots(table, r, begin, position, table_stride, num_slots, PAGE_SIZE: tl.constexpr):
    """Slots at these positions of a request, uint32, and which are real. PAGE_SIZE 0: token-level.

    Callers hold positions within the request, so nothing here is masked: a row past its end would be a
    repeated one, whose loads cost less than a mask carried through the pipeline for every row and thread.
    Comparisons are unsigned: one tells both a negative entry and one past the pool.
    """
    if PAGE_SIZE == 0:
        entry = tl.load(table + begin + position)
        if entry.dtype == tl.int64:
            is_slot = entry.to(tl.uint64) < num_slots.to(tl.uint64)
        else:
            is_slot = entry.to(tl.uint32) < num_slots.to(tl.uint32)
        slot = entry.to(tl.uint32)
    else:
        page = tl.load(table + r.to(tl.int64) * table_stride + position // PAGE_SIZE).to(tl.uint32)
        slot = page * PAGE_SIZE + (position % PAGE_SIZE).to(tl.uint32)
        is_slot = page <= ((num_slots - 1) // PAGE_SIZE).to(tl.uint32)
        if PAGE_SIZE > 1:
            is_slot &= slot < num_slots.to(tl.uint32)
    return slot, is_slot
