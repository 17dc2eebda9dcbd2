"""Which distinct slots does a step read, in the pool's order? Found once a step, for all layers.

A list in the pool's order makes every cast what a copy likes best: a slot that requests share is cast once,
so no sharing costs more than the pool; rows that are neighbours are written one after the other, whatever
the tables' order; and a page table's arithmetic is done once a step, not once a layer.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvlab.errors import BadInput
from kvlab.kernels.active import ActiveSlots
from kvlab.kernels.checks import described, device_of
from kvlab.kernels.chip import chip, early_launch, starts_early
from kvlab.kernels.slot_map import check_table

# What changes with a batch must not make a new kernel: none of it is specialised on.
_RUNTIME = ["table_stride", "batch", "limit", "page_size", "num_slots"]


@triton.jit(do_not_specialize=_RUNTIME)
def kvlab_slot_list_mark(
    table,
    bounds,
    seen,
    table_stride,
    batch,
    limit,
    page_size,
    num_slots,
    BATCH: tl.constexpr,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Set a byte for every slot that the tables name. `limit`: tokens a row of the table holds."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    lane = tl.arange(0, LANES)
    if BATCH:
        request = tl.arange(0, BATCH)
        lengths = tl.load(bounds + request, mask=request < batch, other=0)
        # Bounded before it is rounded up: a stale length near 2^31 must not wrap.
        lengths = tl.minimum(tl.maximum(lengths, 0), limit)
        ends = tl.cumsum((lengths + LANES - 1) // LANES, 0)
        tiles = tl.max(ends, 0)
    else:
        tokens = tl.minimum(tl.load(bounds + batch), limit)
        tiles = (tokens + LANES - 1) // LANES
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        if BATCH:
            b = tl.sum((ends <= tile).to(tl.int64), 0)
            position = (tile - tl.max(tl.where(ends <= tile, ends, 0), 0)) * LANES + lane
            live = position < tl.sum(tl.where(request == b, lengths, 0), 0)
            page = tl.load(table + b * table_stride + position // page_size, mask=live, other=-1)
            slot = page.to(tl.int64) * page_size + position % page_size
        else:
            position = tile * LANES + lane
            live = position < tokens
            slot = tl.load(table + position, mask=live, other=-1).to(tl.int64)
        tl.store(seen + slot, 1, mask=live & (slot >= 0) & (slot < num_slots))


@triton.jit(do_not_specialize=["stretch"])
def kvlab_slot_list_count(seen, partial, stretch, LANES: tl.constexpr, PDL: tl.constexpr):
    """How many marks lie in each program's stretch of the pool?"""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    start = tl.program_id(0).to(tl.int64) * stretch
    found = tl.zeros([LANES], tl.int32)
    for at in range(0, stretch, LANES):
        found += tl.load(seen + start + at + tl.arange(0, LANES)).to(tl.int32)
    tl.store(partial + tl.program_id(0), tl.sum(found, 0))


@triton.jit(do_not_specialize=["stretch"])
def kvlab_slot_list_write(
    seen,
    partial,
    slots,
    count,
    stretch,
    LANES: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PDL: tl.constexpr,
):
    """List the marked slots of each stretch behind those before it, and leave no mark for the next step."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.arange(0, PROGRAMS)
    base = tl.sum(tl.load(partial + program, mask=program < tl.program_id(0), other=0), 0)
    start = tl.program_id(0).to(tl.int64) * stretch
    for at in range(0, stretch, LANES):
        slot = start + at + tl.arange(0, LANES)
        one = tl.load(seen + slot).to(tl.int32)
        place = base + tl.cumsum(one, 0) - one
        tl.store(slots + place, slot.to(tl.int32), mask=one != 0)
        tl.store(seen + slot, tl.zeros([LANES], tl.uint8))
        base += tl.sum(one, 0)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        tl.store(count, base)


@dataclass(frozen=True)
class SlotList:
    """The distinct slots of a step in ascending order; on the device, refilled by each `slot_list`.

    `slots` int32 [num_slots]: the first `count` (int32 [1]) are valid. `seen` uint8 and `partial` int32 are
    `slot_list`'s own; `seen` is zero between calls. Made before capture, kept as long as its graphs.
    """

    slots: torch.Tensor
    count: torch.Tensor
    seen: torch.Tensor
    partial: torch.Tensor
    num_slots: int


def _cut(device: torch.device, num_slots: int) -> tuple[int, int, int]:
    """Programs (a power of two), slots each walks over, and slots at once."""
    if device.type != "cuda":
        return 2, -(-max(num_slots, 1) // 32) * 16, 16
    programs = min(triton.next_power_of_2(chip(device)[1]), 256)
    lanes = 2048
    return programs, -(-max(num_slots, 1) // (programs * lanes)) * lanes, lanes


def list_for(num_slots: int, device: torch.device | str) -> SlotList:
    """Memory for the lists of a pool of `num_slots`, about 5 bytes a slot; tables of any shape share it."""
    if not isinstance(num_slots, int) or isinstance(num_slots, bool) or not 0 <= num_slots < 2**31:
        raise BadInput(f"num_slots: expected the pool's slots, 0 to 2^31 - 1, got {num_slots!r}")
    device = device_of(device)
    programs, stretch, _ = _cut(device, num_slots)
    return SlotList(
        slots=torch.zeros(max(num_slots, 1), dtype=torch.int32, device=device),
        count=torch.zeros(1, dtype=torch.int32, device=device),
        seen=torch.zeros(programs * stretch, dtype=torch.uint8, device=device),
        partial=torch.zeros(programs, dtype=torch.int32, device=device),
        num_slots=num_slots,
    )


def slot_list(active: ActiveSlots, found: SlotList, *more: ActiveSlots) -> SlotList:
    """Refill `found` with the distinct slots that `active`, and `more` tables of the same pool, name.

    Once a step, not once a layer: three small kernels, graph-safe; what they do grows with the tokens, and
    by a byte with each slot of the pool. Entries that are negative or past the pool are left out. Returns
    `found`.
    """
    if not isinstance(found, SlotList):
        raise BadInput(f"found: expected what list_for() returns, got {described(found)}")
    device = found.seen.device
    programs, stretch, lanes = _cut(device, found.num_slots)
    pdl = starts_early(device)
    launch = {"PDL": pdl, "num_warps": 8} | early_launch(pdl)
    for a in (active, *more):
        check_table(a, device)
        if a.is_paged and not a.batch:
            continue
        kvlab_slot_list_mark[(programs,)](
            a.table,
            a.bounds,
            found.seen,
            a.table.stride(0) if a.is_paged else 0,
            a.batch,
            a.table.shape[1] * a.page_size if a.is_paged else a.table.numel(),
            a.page_size,
            found.num_slots,
            BATCH=triton.next_power_of_2(a.batch) if a.is_paged else 0,
            LANES=32 if device.type != "cuda" else 256,
            **launch,
        )
    kvlab_slot_list_count[(programs,)](found.seen, found.partial, stretch, LANES=lanes, **launch)
    kvlab_slot_list_write[(programs,)](
        found.seen, found.partial, found.slots, found.count, stretch, LANES=lanes, PROGRAMS=programs, **launch
    )
    return found
