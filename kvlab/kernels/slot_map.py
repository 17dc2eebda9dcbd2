"""Which distinct slots does a step read, and where do they stand in compact rows? Found once a step."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvlab.errors import BadInput
from kvlab.kernels.active import ActiveSlots, expect_active
from kvlab.kernels.checks import described, expect

_NEVER = 2**31 - 1
# What changes with a batch must not make a new kernel: none of it is specialised on.
_RUNTIME = ["table_stride", "new_stride", "batch", "limit", "page_size", "units", "room"]


@triton.jit
def _walk(bounds, batch, limit, page_size, BATCH: tl.constexpr, LANES: tl.constexpr):
    """How many tiles of `LANES` table entries there are; a tile never spans two requests of a page table."""
    if BATCH:
        request = tl.arange(0, BATCH)
        lengths = tl.load(bounds + request, mask=request < batch, other=0)
        # Bounded before it is rounded up: a stale length near 2^31 must not wrap.
        lengths = tl.minimum(tl.maximum(lengths, 0), limit * page_size)
        pages = (lengths + page_size - 1) // page_size
        return tl.sum((pages + LANES - 1) // LANES, 0)
    return (tl.minimum(tl.load(bounds + batch), limit) + LANES - 1) // LANES


@triton.jit
def _entries(
    table,
    bounds,
    table_stride,
    batch,
    limit,
    page_size,
    units,
    tile,
    BATCH: tl.constexpr,
    LANES: tl.constexpr,
):
    """One tile of the table: (entry, its request, its place there, valid, names one of `units`, tokens used).

    A ragged table counts as one request.
    """
    lane = tl.arange(0, LANES)
    if BATCH:
        request = tl.arange(0, BATCH)
        lengths = tl.load(bounds + request, mask=request < batch, other=0)
        lengths = tl.minimum(tl.maximum(lengths, 0), limit * page_size)
        pages = (lengths + page_size - 1) // page_size
        ends = tl.cumsum((pages + LANES - 1) // LANES, 0)
        b = tl.sum((ends <= tile).to(tl.int64), 0)
        at = (tile - tl.max(tl.where(ends <= tile, ends, 0), 0)) * LANES + lane
        valid = at < tl.sum(tl.where(request == b, pages, 0), 0)
        used = tl.minimum(tl.sum(tl.where(request == b, lengths, 0), 0) - at * page_size, page_size)
    else:
        b = tl.full([], 0, tl.int64)
        at = tile * LANES + lane
        valid = at < tl.minimum(tl.load(bounds + batch), limit)
        used = tl.full([LANES], 1, tl.int32)
    entry = tl.load(table + b * table_stride + at, mask=valid, other=-1).to(tl.int64)
    return entry, b, at, valid, (entry >= 0) & (entry < units), used


@triton.jit(do_not_specialize=_RUNTIME)
def kvlab_slot_map_mark(
    table,
    bounds,
    first,
    filled,
    table_stride,
    batch,
    limit,
    page_size,
    units,
    BATCH: tl.constexpr,
    LANES: tl.constexpr,
):
    """Where is each slot or page first used, and how many of a page's tokens are used at most?"""
    for tile in range(
        tl.program_id(0), _walk(bounds, batch, limit, page_size, BATCH, LANES), tl.num_programs(0)
    ):
        entry, _, _, _, named, used = _entries(
            table, bounds, table_stride, batch, limit, page_size, units, tile, BATCH, LANES
        )
        tl.atomic_min(first + entry, tile * LANES + tl.arange(0, LANES), mask=named, sem="relaxed")
        if BATCH:
            tl.atomic_max(filled + entry, used, mask=named, sem="relaxed")


@triton.jit(do_not_specialize=_RUNTIME)
def kvlab_slot_map_count(
    table,
    bounds,
    first,
    partial,
    table_stride,
    batch,
    limit,
    page_size,
    units,
    BATCH: tl.constexpr,
    LANES: tl.constexpr,
):
    """How many first uses lie in each program's stretch of the table?"""
    tiles = _walk(bounds, batch, limit, page_size, BATCH, LANES)
    stretch = (tiles + tl.num_programs(0) - 1) // tl.num_programs(0)
    start = tl.program_id(0) * stretch
    found = tl.zeros([LANES], tl.int32)
    for tile in range(start, tl.minimum(start + stretch, tiles)):
        entry, _, _, _, named, _ = _entries(
            table, bounds, table_stride, batch, limit, page_size, units, tile, BATCH, LANES
        )
        key = tile * LANES + tl.arange(0, LANES)
        found += (named & (tl.load(first + entry, mask=named, other=0) == key)).to(tl.int32)
    tl.store(partial + tl.program_id(0), tl.sum(found, 0))


@triton.jit(do_not_specialize=_RUNTIME)
def kvlab_slot_map_rank(
    table,
    bounds,
    first,
    partial,
    rank,
    filled,
    slots,
    slots_filled,
    count,
    overflow,
    table_stride,
    batch,
    limit,
    page_size,
    units,
    room,
    BATCH: tl.constexpr,
    LANES: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Number the first uses in table order; list what they name; say how many there are."""
    tiles = _walk(bounds, batch, limit, page_size, BATCH, LANES)
    stretch = (tiles + tl.num_programs(0) - 1) // tl.num_programs(0)
    start = tl.program_id(0) * stretch
    program = tl.arange(0, PROGRAMS)
    base = tl.sum(tl.load(partial + program, mask=program < tl.program_id(0), other=0), 0)
    for tile in range(start, tl.minimum(start + stretch, tiles)):
        entry, _, _, _, named, _ = _entries(
            table, bounds, table_stride, batch, limit, page_size, units, tile, BATCH, LANES
        )
        key = tile * LANES + tl.arange(0, LANES)
        is_first = named & (tl.load(first + entry, mask=named, other=0) == key)
        one = is_first.to(tl.int32)
        at = base + tl.cumsum(one, 0) - one
        base += tl.sum(one, 0)
        fits = is_first & (at < room)
        tl.store(rank + entry, tl.where(at < room, at, 0), mask=is_first)
        tl.store(slots + at, entry.to(tl.int32), mask=fits)
        if BATCH:
            tl.store(slots_filled + at, tl.load(filled + entry, mask=fits, other=0), mask=fits)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        tl.store(count, tl.minimum(base, room))
        if base > room:
            tl.store(overflow, base)


@triton.jit(do_not_specialize=_RUNTIME)
def kvlab_slot_map_renumber(
    table,
    bounds,
    first,
    rank,
    filled,
    new_indices,
    table_stride,
    new_stride,
    batch,
    limit,
    page_size,
    units,
    NEVER: tl.constexpr,
    BATCH: tl.constexpr,
    LANES: tl.constexpr,
):
    """Write the new index of every valid entry and leave the marks as they were before the step."""
    for tile in range(
        tl.program_id(0), _walk(bounds, batch, limit, page_size, BATCH, LANES), tl.num_programs(0)
    ):
        entry, b, at, valid, named, _ = _entries(
            table, bounds, table_stride, batch, limit, page_size, units, tile, BATCH, LANES
        )
        new = tl.where(named, tl.load(rank + entry, mask=named, other=0).to(tl.int64), entry)
        if BATCH:
            tl.store(filled + entry, 0, mask=named)
        tl.store(new_indices + b * new_stride + at, new, mask=valid)
        tl.store(first + entry, NEVER, mask=named)


@dataclass(frozen=True)
class MapWorkspace:
    """Device memory of `slot_map`, made before capture and kept as long as its graphs."""

    first: torch.Tensor
    rank: torch.Tensor
    filled: torch.Tensor
    partial: torch.Tensor
    slots: torch.Tensor
    slots_filled: torch.Tensor
    count: torch.Tensor
    overflow: torch.Tensor
    new_indices: torch.Tensor
    num_slots: int
    page_size: int
    is_paged: bool
    rows: int


@dataclass(frozen=True)
class SlotMap:
    """The distinct slots of a step, in order of first use; all on the device, refilled by each `slot_map`.

    `slots` int32 [rows / page_size]: slots, or pages when paged; the first `count` (int32 [1]) are valid.
    `slots_filled` int32: how many tokens of each page are read. `new_indices`: as the table, for compact
    rows. `overflow` int32 [1]: 0, or the number that did not fit; it stays set until the caller zeroes it.
    `rows`: compact rows that the map may name.
    """

    slots: torch.Tensor
    slots_filled: torch.Tensor
    count: torch.Tensor
    new_indices: torch.Tensor
    overflow: torch.Tensor
    num_slots: int
    page_size: int
    is_paged: bool
    rows: int


def compact_rows(active: ActiveSlots, num_slots: int) -> int:
    """Compact rows that every content of `active` fits in: never more than the pool's whole pages."""
    size = active.page_size
    return min(active.table.numel(), num_slots // size) * size


def map_workspace(active: ActiveSlots, num_slots: int, rows: int | None = None) -> MapWorkspace:
    """Allocate what `slot_map` needs for tables shaped as `active`'s and a pool of `num_slots`.

    12 bytes a slot or page of the pool, and the map itself. `rows`: what the compact buffer holds, where the
    caller knows a bound on the distinct slots; by default what always suffices (`compact_rows`).
    """
    check_table(active)
    if not isinstance(num_slots, int) or num_slots < 0:
        raise BadInput(f"num_slots: expected the pool's slots, a whole number, got {num_slots!r}")
    most = compact_rows(active, num_slots)
    rows = most if rows is None else min(rows, most)
    if rows < 0 or rows % active.page_size:
        raise BadInput(f"rows: expected a multiple of page_size {active.page_size}, 0 or more, got {rows}")
    device = active.device
    units = max(num_slots // active.page_size, 1)
    listed = max(rows // active.page_size, 1)

    def zeros(n: int) -> torch.Tensor:
        return torch.zeros(n, dtype=torch.int32, device=device)

    return MapWorkspace(
        first=torch.full((units,), _NEVER, dtype=torch.int32, device=device),
        rank=zeros(units),
        filled=zeros(units if active.is_paged else 1),
        partial=zeros(_programs(device)),
        slots=zeros(listed),
        slots_filled=zeros(listed if active.is_paged else 1),
        count=zeros(1),
        overflow=zeros(1),
        new_indices=torch.zeros(active.table.shape, dtype=active.table.dtype, device=device),
        num_slots=num_slots,
        page_size=active.page_size,
        is_paged=active.is_paged,
        rows=rows,
    )


def _programs(device: torch.device) -> int:
    """Programs of the map's kernels: a power of two, near one an SM; 2 in the interpreter."""
    if device.type != "cuda":
        return 2
    return min(triton.next_power_of_2(torch.cuda.get_device_properties(device).multi_processor_count), 256)


def slot_map(active: ActiveSlots, num_slots: int, workspace: MapWorkspace | None = None) -> SlotMap:
    """Find the distinct slots (pages, when paged) among `active` and their places in compact rows.

    A last page that the pool of `num_slots` holds only in part is no page.

    Once a step, not once a layer: four small kernels, graph-safe with a `workspace` made before capture. The
    order is that of first use, so without duplicates the new indices count up. Where the distinct slots
    outgrow `workspace.rows`, those past it read compact row 0 and `overflow` says so: size the rows by what
    the host knows.
    """
    check_table(active)
    ws = map_workspace(active, num_slots) if workspace is None else workspace
    if not isinstance(ws, MapWorkspace):
        raise BadInput(f"workspace: expected what map_workspace() returns, got {described(ws)}")
    if (ws.num_slots, ws.page_size, ws.is_paged) != (num_slots, active.page_size, active.is_paged):
        kind = "paged" if active.is_paged else "ragged"
        raise BadInput(
            f"workspace: expected one made for {num_slots} slots, {kind}, page_size {active.page_size}; "
            "call map_workspace(active, num_slots)"
        )
    expect(
        "workspace.new_indices",
        ws.new_indices,
        f"{list(active.table.shape)} as the table",
        sizes=tuple(active.table.shape),
        dtypes=(active.table.dtype,),
        device=active.device,
    )
    table, bounds = active.table, active.bounds
    stride, new_stride = (table.stride(0), ws.new_indices.stride(0)) if active.is_paged else (0, 0)
    batch = active.batch
    limit = table.shape[1] if active.is_paged else table.numel()
    page, units = active.page_size, num_slots // active.page_size
    cut = {"BATCH": triton.next_power_of_2(max(batch, 1)) if active.is_paged else 0}
    interpreted = active.device.type != "cuda"
    cut |= {"LANES": 32 if interpreted else 256, "num_warps": 8}
    grid = (ws.partial.numel(),)
    shape = (stride, batch, limit, page, units)
    kvlab_slot_map_mark[grid](table, bounds, ws.first, ws.filled, *shape, **cut)
    kvlab_slot_map_count[grid](table, bounds, ws.first, ws.partial, *shape, **cut)
    kvlab_slot_map_rank[grid](
        table,
        bounds,
        ws.first,
        ws.partial,
        ws.rank,
        ws.filled,
        ws.slots,
        ws.slots_filled,
        ws.count,
        ws.overflow,
        *shape,
        ws.rows // page,
        PROGRAMS=grid[0],
        **cut,
    )
    kvlab_slot_map_renumber[grid](
        table,
        bounds,
        ws.first,
        ws.rank,
        ws.filled,
        ws.new_indices,
        stride,
        new_stride,
        batch,
        limit,
        page,
        units,
        NEVER=_NEVER,
        **cut,
    )
    return SlotMap(
        ws.slots,
        ws.slots_filled,
        ws.count,
        ws.new_indices,
        ws.overflow,
        num_slots,
        page,
        active.is_paged,
        ws.rows,
    )


def check_table(active: ActiveSlots, device: torch.device | None = None, others: str = "") -> None:
    """`expect_active`, and that the kernels can count what the tables name."""
    expect_active(active, device, others)
    if active.table.numel() >= 2**30:
        raise BadInput(f"active: expected fewer than 2^30 entries, got {list(active.table.shape)}")
    if active.is_paged and active.table.shape[1] * active.page_size >= 2**30:
        raise BadInput(
            f"page_table: expected fewer than 2^30 tokens a row, got {active.table.shape[1]} pages of "
            f"{active.page_size}"
        )
