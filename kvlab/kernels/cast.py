"""How do only the active slots of a layer become BF16 or FP16? Two outputs, one kernel.

`shadow_cast` writes each active slot to its own place in a pool-shaped buffer, so indices and page tables
stay; given a `slot_list`, made once a step, it takes each distinct slot once, in the pool's order.
`gather_cast` writes compact rows, each distinct slot once; `slot_map` finds them and the new indices once a
step.

How many slots there are is read on the device and the grid is fixed: a captured CUDA graph does work in
proportion to the lengths it is replayed with. Nothing else is written or, past the index buffers, read. Both
equal `kvlab.kernels.reference`, and `tensor.to()` on the device bit for bit.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from kvlab.errors import BadInput
from kvlab.kernels.active import ActiveSlots
from kvlab.kernels.checks import WIDE_DTYPES, described, expect, rows_2d
from kvlab.kernels.chip import chip
from kvlab.kernels.direct import Direct
from kvlab.kernels.slot_list import SlotList, list_for, slot_list
from kvlab.kernels.slot_map import (
    MapWorkspace,
    SlotMap,
    check_table,
    compact_rows,
    map_workspace,
    slot_map,
)
from kvlab.kernels.widen import widen

__all__ = [
    "MapWorkspace",
    "SlotList",
    "SlotMap",
    "Tuning",
    "compact_rows",
    "gather_cast",
    "list_for",
    "map_workspace",
    "shadow_cast",
    "slot_list",
    "slot_map",
    "tuning",
]


@dataclass(frozen=True)
class Tuning:
    """How the cast is cut: `lanes` x `unit` bytes are read at once by a program of `warps`.

    `grid` programs an SM walk over the work; `native` uses the chip's FP8 conversions rather than integers.
    Few rows are read by twice `least` bytes a lane, even fewer by `least`.
    """

    lanes: int
    unit: int
    warps: int
    grid: int
    native: bool
    least: int = 4


@lru_cache
def tuning(device: torch.device, *, tables: int = 0, page_size: int = 1) -> Tuning:
    """The cut that sweeps on an H200 found best (data/recorded/h200-cast-notes-2); small in the interpreter.

    `tables`: rows of a page table, 0 for a list. The grid is what fits an SM at once: with one program more,
    the last ones run alone. Finding a tile's request among several takes registers, so fewer lanes fit.
    """
    capability, _ = chip(device)
    if not capability:
        return Tuning(lanes=128, unit=16, warps=4, grid=1, native=False)
    lanes, grid = (512, 3) if tables <= 1 else (512, 2) if page_size == 1 else (256, 4)
    return Tuning(lanes=lanes, unit=16, warps=8, grid=grid, native=capability >= 89)


@triton.jit
def _page(
    table,
    lengths,
    ends,
    table_stride,
    tile,
    row,
    PAGE_SIZE: tl.constexpr,
    BATCH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Of each lane: the page, the position in its request, and whether the request is that long."""
    b = tl.sum((ends <= tile).to(tl.int32), 0)
    before = tl.max(tl.where(ends <= tile, ends, 0), 0)
    position = (tile - before) * ROWS + row
    length = tl.sum(tl.where(tl.arange(0, BATCH) == b, lengths, 0), 0)
    live = (row < ROWS) & (position < length)
    page = tl.load(table + b.to(tl.int64) * table_stride + position // PAGE_SIZE, mask=live, other=-1)
    return page, position, live


@triton.jit
def _rows(
    entry,
    position,
    live,
    filled,
    num_slots,
    PAGE_SIZE: tl.constexpr,
    FILLED: tl.constexpr,
    COMPACT: tl.constexpr,
):
    """Of each lane: the slot it reads, the row it writes, and whether it does."""
    offset = position % PAGE_SIZE
    slot = entry.to(tl.int64) * PAGE_SIZE + offset
    live &= (entry >= 0) & (slot < num_slots)
    if FILLED:
        live &= offset < tl.load(filled + position // PAGE_SIZE, mask=live, other=0)
    target = position.to(tl.int64) if COMPACT else slot
    return slot, target, live


@triton.jit
def _tile(LANES: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr):
    """A tile's row and bytes of each lane, and how many whole rows it holds."""
    UNITS: tl.constexpr = WIDTH // UNIT
    ROWS: tl.constexpr = LANES // UNITS
    lane = tl.arange(0, LANES)
    column = (lane % UNITS)[:, None] * UNIT + tl.arange(0, UNIT)[None, :]
    return lane // UNITS, column, ROWS


@triton.jit
def _once(
    rows,
    out,
    entry,
    position,
    live,
    filled,
    row_stride,
    out_stride,
    num_slots,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    LANES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    FILLED: tl.constexpr,
    COMPACT: tl.constexpr,
    E5M2: tl.constexpr,
    BF16: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Few rows: one tile a program, whose entries are there already."""
    _, column, _ = _tile(LANES, WIDTH, UNIT)
    slot, target, live = _rows(entry, position, live, filled, num_slots, PAGE_SIZE, FILLED, COMPACT)
    x = tl.load(rows + slot[:, None] * row_stride + column, mask=live[:, None])
    y = widen(x, E5M2, BF16, NATIVE)
    tl.store(out + target[:, None] * out_stride + column, y, mask=live[:, None])


@triton.jit
def _many(
    rows,
    out,
    table,
    lengths,
    count,
    filled,
    row_stride,
    out_stride,
    table_stride,
    num_slots,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    LANES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BATCH: tl.constexpr,
    FILLED: tl.constexpr,
    COMPACT: tl.constexpr,
    E5M2: tl.constexpr,
    BF16: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Many rows: each program walks over its tiles, the rows of the next on their way while it writes one."""
    row, column, ROWS = _tile(LANES, WIDTH, UNIT)
    first = tl.program_id(0)
    step = tl.num_programs(0)
    if BATCH:
        ends = tl.cumsum((lengths + ROWS - 1) // ROWS, 0)
        tiles = tl.max(ends, 0)
        entry, position, live = _page(table, lengths, ends, table_stride, first, row, PAGE_SIZE, BATCH, ROWS)
    else:
        tiles = (count + ROWS - 1) // ROWS
        position = first * ROWS + row
        live = (row < ROWS) & (position < count)
        entry = tl.load(table + position // PAGE_SIZE, mask=live, other=-1)
    slot, target, live = _rows(entry, position, live, filled, num_slots, PAGE_SIZE, FILLED, COMPACT)
    x = tl.load(rows + slot[:, None] * row_stride + column, mask=live[:, None])
    if BATCH:
        entry, position, more = _page(
            table, lengths, ends, table_stride, first + step, row, PAGE_SIZE, BATCH, ROWS
        )
    else:
        position += step * ROWS
        entry = tl.load(table + position // PAGE_SIZE, mask=(row < ROWS) & (position < count), other=-1)

    for tile in range(first, tiles, step):
        if not BATCH:
            position = (tile + step) * ROWS + row
            more = (row < ROWS) & (position < count)
        slot, ahead, more = _rows(entry, position, more, filled, num_slots, PAGE_SIZE, FILLED, COMPACT)
        coming = tl.load(rows + slot[:, None] * row_stride + column, mask=more[:, None])
        if BATCH:
            entry, position, later = _page(
                table, lengths, ends, table_stride, tile + 2 * step, row, PAGE_SIZE, BATCH, ROWS
            )
        else:
            position += step * ROWS
            later = more
            entry = tl.load(table + position // PAGE_SIZE, mask=(row < ROWS) & (position < count), other=-1)
        y = widen(x, E5M2, BF16, NATIVE)
        tl.store(out + target[:, None] * out_stride + column, y, mask=live[:, None])
        x, target, live, more = coming, ahead, more, later


# What changes with a batch must not make a new kernel: none of it is specialised on.
@triton.jit(do_not_specialize=["table_stride", "num_slots", "batch", "limit"])
def kvlab_cast(
    rows,
    out,
    table,
    bounds,
    filled,
    row_stride,
    out_stride,
    table_stride,
    num_slots,
    batch,
    limit,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    FEW_UNIT: tl.constexpr,
    LEAST_UNIT: tl.constexpr,
    LANES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BATCH: tl.constexpr,
    FILLED: tl.constexpr,
    COMPACT: tl.constexpr,
    E5M2: tl.constexpr,
    BF16: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Cast rows of `WIDTH` bytes; a tile is as many whole rows as `LANES` lanes of `UNIT` bytes hold.

    BATCH 0: `table` is a list of slots or pages and `bounds[batch]` says how many; otherwise [batch, …] pages
    and `bounds` the lengths. `filled`: tokens of each page in the list. COMPACT: row i of the list to row i.
    Few rows, at most one tile for each program, go the shortest way, `FEW_UNIT` bytes a lane; and as few as
    that allows `LEAST_UNIT`, so that more programs share them.
    """
    first = tl.program_id(0)
    row, _, ROWS = _tile(LANES, WIDTH, FEW_UNIT)
    if BATCH:
        request = tl.arange(0, BATCH)
        lengths = tl.load(bounds + request, mask=request < batch, other=0)
        lengths = tl.minimum(tl.maximum(lengths, 0), limit)
        ends = tl.cumsum((lengths + ROWS - 1) // ROWS, 0)
        tiles = tl.max(ends, 0)
        count = 0
        entry, position, live = _page(table, lengths, ends, table_stride, first, row, PAGE_SIZE, BATCH, ROWS)
    else:
        # The entries are read while their count is still on its way, both ways to lay them out.
        position = first * ROWS + row
        entry = tl.load(table + position // PAGE_SIZE, mask=(row < ROWS) & (position < limit), other=-1)
        least_row, _, LEAST_ROWS = _tile(LANES, WIDTH, LEAST_UNIT)
        least_position = first * LEAST_ROWS + least_row
        is_least_row = (least_row < LEAST_ROWS) & (least_position < limit)
        least_entry = tl.load(table + least_position // PAGE_SIZE, mask=is_least_row, other=-1)
        count = tl.minimum(tl.load(bounds + batch) * PAGE_SIZE, limit)
        lengths = 0
        tiles = (count + ROWS - 1) // ROWS
        live = (row < ROWS) & (position < count)
    if tiles > tl.num_programs(0):
        _many(
            rows,
            out,
            table,
            lengths,
            count,
            filled,
            row_stride,
            out_stride,
            table_stride,
            num_slots,
            WIDTH,
            UNIT,
            LANES,
            PAGE_SIZE,
            BATCH,
            FILLED,
            COMPACT,
            E5M2,
            BF16,
            NATIVE,
        )
    elif BATCH:  # noqa: SIM114 -- decided at compile time: the next branch has no names then
        _once(
            rows,
            out,
            entry,
            position,
            live,
            filled,
            row_stride,
            out_stride,
            num_slots,
            WIDTH,
            FEW_UNIT,
            LANES,
            PAGE_SIZE,
            FILLED,
            COMPACT,
            E5M2,
            BF16,
            NATIVE,
        )
    elif (count + LEAST_ROWS - 1) // LEAST_ROWS > tl.num_programs(0):
        _once(
            rows,
            out,
            entry,
            position,
            live,
            filled,
            row_stride,
            out_stride,
            num_slots,
            WIDTH,
            FEW_UNIT,
            LANES,
            PAGE_SIZE,
            FILLED,
            COMPACT,
            E5M2,
            BF16,
            NATIVE,
        )
    else:
        _once(
            rows,
            out,
            least_entry,
            least_position,
            is_least_row & (least_position < count),
            filled,
            row_stride,
            out_stride,
            num_slots,
            WIDTH,
            LEAST_UNIT,
            LANES,
            PAGE_SIZE,
            FILLED,
            COMPACT,
            E5M2,
            BF16,
            NATIVE,
        )


def shadow_cast(
    rows: torch.Tensor,
    shadow: torch.Tensor,
    active: ActiveSlots | SlotList,
    *,
    cut: Tuning | None = None,
) -> torch.Tensor:
    """Cast the active slots of `rows` into their own places in `shadow`.

    rows [slots, row] or [slots, 1, row], FP8 e4m3fn or e5m2, row stride free; shadow of the same shape, BF16
    or FP16. Nothing else is written. From tables, a slot is cast once for each request that reads it; given
    the step's `SlotList`, once: so no sharing costs more than the pool. Allocate `shadow` zeroed: attention
    multiplies the tail of a last page by zero. Returns `shadow`.
    """
    _check_layers(rows, shadow)
    if isinstance(active, SlotList):
        _check_list(active, rows)
    else:
        check_table(active, rows)
    _launch(rows, shadow, active, compact=False, cut=cut)
    return shadow


# Layouts of rows and shadow that were found right: every layer of every step comes with the same two.
_right: set[tuple[Any, ...]] = set()


def _check_layers(rows: torch.Tensor, shadow: torch.Tensor) -> None:
    layout: tuple[Any, ...] = ()
    if isinstance(rows, torch.Tensor) and isinstance(shadow, torch.Tensor):
        layout = (rows.device, rows.dtype, rows.shape, rows.stride())
        layout = (*layout, shadow.device, shadow.dtype, shadow.shape, shadow.stride())
        if layout in _right:
            return
    source = rows_2d("rows", rows)
    target = rows_2d("shadow", shadow, WIDE_DTYPES)
    expect("shadow", target, f"{list(source.shape)} as rows", sizes=tuple(source.shape), device=source.device)
    _right.add(layout)


def gather_cast(
    rows: torch.Tensor, compact: torch.Tensor, slot_map: SlotMap, *, cut: Tuning | None = None
) -> torch.Tensor:
    """Cast each distinct slot of `slot_map` into its compact row; attention reads `slot_map.new_indices`.

    rows as in `shadow_cast`; compact [rows, row] or [rows, 1, row] BF16 or FP16, at least `slot_map.rows`
    rows. Paged: a page's tail that no request reads is not written, so allocate zeroed. Returns `compact`.
    """
    source = rows_2d("rows", rows)
    target = rows_2d("compact", compact, WIDE_DTYPES)
    _check_map(slot_map, source)
    if target.shape[0] < slot_map.rows or target.shape[1] != source.shape[1]:
        raise BadInput(
            f"compact: expected [{slot_map.rows} or more, {source.shape[1]}], got {described(compact)}"
        )
    expect("compact", target, "[rows, row]", device=source.device)
    _launch(source, target, slot_map, compact=True, cut=cut)
    return compact


def _check_map(found: SlotMap, rows: torch.Tensor) -> None:
    if not isinstance(found, SlotMap):
        raise BadInput(f"slot_map: expected what slot_map() returns, got {described(found)}")
    _check_list(found, rows)


def _check_list(found: SlotMap | SlotList, rows: torch.Tensor) -> None:
    if found.num_slots != rows.shape[0] or found.slots.device != rows.device:
        name = "slot_map" if isinstance(found, SlotMap) else "active"
        raise BadInput(
            f"{name}: expected one of {rows.shape[0]} slots on {rows.device} as rows, "
            f"got {found.num_slots} slots on {found.slots.device}"
        )


def _batch(batch: int) -> int:
    """A power of two that holds `batch`. Between one and 64 the compiler takes a third more registers."""
    return 1 if batch == 1 else max(64, triton.next_power_of_2(batch))


def _launch(
    source: torch.Tensor,
    target: torch.Tensor,
    active: ActiveSlots | SlotMap | SlotList,
    *,
    compact: bool,
    cut: Tuning | None,
) -> None:
    arguments = _arguments(source, target, active, compact=compact, cut=cut)
    if arguments is not None:
        _cast(*arguments)


def prepared(rows: torch.Tensor, shadow: torch.Tensor, active: ActiveSlots) -> tuple[Any, ...] | None:
    """The launch of such a `shadow_cast` that was made before (`Direct.prepared`), or None."""
    arguments = _arguments(rows, shadow, active, compact=False, cut=None)
    if arguments is None:
        return None
    key, grid, _, numbers, _ = arguments
    return _cast.prepared(key, grid, numbers)


def _arguments(
    source: torch.Tensor,
    target: torch.Tensor,
    active: ActiveSlots | SlotMap | SlotList,
    *,
    compact: bool,
    cut: Tuning | None,
) -> tuple[Any, ...] | None:
    """What `Direct` is called with; None where there is nothing to do. `source` [slots, width] or
    [slots, 1, width], as `target`.
    """
    filled, batch, paged, page_size = None, 0, False, 1
    if isinstance(active, SlotList):
        table, bounds, limit = active.slots, active.count, active.num_slots
    elif isinstance(active, SlotMap):
        table, bounds, limit, page_size = active.slots, active.count, active.rows, active.page_size
        filled = active.slots_filled if active.is_paged else None
    else:
        table, bounds, batch, paged = active.table, active.bounds, active.batch, active.is_paged
        page_size = active.page_size
        limit = table.shape[1] * page_size if paged else table.numel()
        if paged and not batch:
            return None
    device, width = source.device, source.shape[-1]
    cut = cut or tuning(device, tables=batch if paged else 0, page_size=page_size)
    batches = _batch(batch) if paged else 0
    strides = source.stride()[0], target.stride()[0]

    def constants() -> dict[str, Any]:
        unit = next(u for u in (16, 8, 4, 2, 1) if u <= cut.unit and width % u == 0)
        least = min(unit, cut.least)
        return {
            "WIDTH": width,
            "UNIT": unit,
            "FEW_UNIT": min(unit, 2 * least),
            "LEAST_UNIT": least,
            "LANES": max(cut.lanes, triton.next_power_of_2(width // least)),
            "PAGE_SIZE": page_size,
            "BATCH": batches,
            "FILLED": filled is not None,
            "COMPACT": compact,
            "E5M2": source.dtype == torch.float8_e5m2,
            "BF16": target.dtype == torch.bfloat16,
            "NATIVE": cut.native,
            "num_warps": cut.warps,
        }

    dtypes = source.dtype, target.dtype, table.dtype, bounds.dtype
    return (
        (device.index, cut, dtypes, strides, width, page_size, batches, filled is not None, compact),
        cut.grid * chip(device)[1],
        (
            source if cut.native else source.view(torch.uint8),
            target,
            table,
            bounds,
            table if filled is None else filled,
        ),
        (*strides, table.stride(0) if paged else 0, source.shape[0], batch, limit),
        constants,
    )


_cast = Direct(kvlab_cast)
