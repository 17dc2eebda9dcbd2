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
from kvlab.kernels.tickets import tickets_of
from kvlab.kernels.widen import widen, widen_words

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
    Few rows are read by `few` lanes of twice `least` bytes, even fewer by `least`.
    """

    lanes: int
    unit: int
    warps: int
    grid: int
    native: bool
    least: int = 4
    few: int = 128


@lru_cache
def tuning(device: torch.device) -> Tuning:
    """The cut that sweeps on an H200 found best (data/recorded/h200-cast-notes-3); small in the interpreter.

    The grid is what fits an SM at once. More programs would slow small steps, which wait for all to start.
    """
    capability, _ = chip(device)
    if not capability:
        return Tuning(lanes=128, unit=16, warps=4, grid=1, native=False)
    native = capability >= 89
    return Tuning(lanes=1024 if native else 512, unit=8, warps=8, grid=4, native=native, few=256)


# 32-bit registers of an SM, of every chip since SM80.
_REGISTERS = 65536
# From so many tiles a program on they are drawn; an atomic each is dear before that.
_DRAWN = tl.constexpr(4)


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
    """A tile's row and unit of UNIT bytes of each lane, and how many whole rows it holds."""
    UNITS: tl.constexpr = WIDTH // UNIT
    ROWS: tl.constexpr = LANES // UNITS
    lane = tl.arange(0, LANES)
    return lane // UNITS, lane % UNITS, ROWS


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
    _, unit, _ = _tile(LANES, WIDTH, UNIT)
    slot, target, live = _rows(entry, position, live, filled, num_slots, PAGE_SIZE, FILLED, COMPACT)
    x = _take(rows, slot, live, unit, row_stride, UNIT, False)
    _put(out, x, target, live, unit, out_stride, UNIT, E5M2, BF16, NATIVE, False)


@triton.jit
def _take(rows, slot, live, unit, row_stride, UNIT: tl.constexpr, WORDS: tl.constexpr):
    """UNIT bytes of each lane's row, in words of four or each by itself."""
    if WORDS:
        at = (
            slot[:, None] * (row_stride // 4) + unit[:, None] * (UNIT // 4) + tl.arange(0, UNIT // 4)[None, :]
        )
        x = tl.load(rows.to(tl.pointer_type(tl.int32)) + at, mask=live[:, None])
    else:
        at = slot[:, None] * row_stride + unit[:, None] * UNIT + tl.arange(0, UNIT)[None, :]
        x = tl.load(rows + at, mask=live[:, None])
    return x


@triton.jit
def _put(
    out,
    x,
    target,
    live,
    unit,
    out_stride,
    UNIT: tl.constexpr,
    E5M2: tl.constexpr,
    BF16: tl.constexpr,
    NATIVE: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Widen them and write them to each lane's row."""
    if WORDS:
        y = widen_words(x, E5M2, BF16)
        at = (
            target[:, None] * (out_stride // 2)
            + unit[:, None] * (UNIT // 2)
            + tl.arange(0, UNIT // 2)[None, :]
        )
        tl.store(out.to(tl.pointer_type(tl.int32)) + at, y, mask=live[:, None])
    else:
        y = widen(x, E5M2, BF16, NATIVE)
        at = target[:, None] * out_stride + unit[:, None] * UNIT + tl.arange(0, UNIT)[None, :]
        tl.store(out + at, y, mask=live[:, None])


@triton.jit
def _ahead(
    table,
    bounds,
    table_stride,
    batch,
    limit,
    tile,
    row,
    b,
    before,
    length,
    PAGE_SIZE: tl.constexpr,
    BATCH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Each lane's entry of a tile and its position, and whether there is one; and the request they are of.

    Request `b` has `before` tiles before it. Tiles only go up: a walk on over short requests costs fewer
    registers than holding all lengths, and fewer registers are more rows on their way.
    """
    if BATCH:
        end = before + (length + ROWS - 1) // ROWS
        while (tile >= end) & (b < batch - 1):
            b += 1
            before = end
            length = tl.minimum(tl.maximum(tl.load(bounds + b), 0), limit)
            end += (length + ROWS - 1) // ROWS
    position = (tile - before) * ROWS + row
    live = (row < ROWS) & (position < length)
    entry = tl.load(table + b.to(tl.int64) * table_stride + position // PAGE_SIZE, mask=live, other=-1)
    return entry, position, live, b, before, length


@triton.jit
def _many(
    rows,
    out,
    table,
    bounds,
    lengths,
    count,
    filled,
    row_stride,
    out_stride,
    table_stride,
    num_slots,
    batch,
    limit,
    tickets,
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
    WORDS: tl.constexpr,
):
    """Many rows: each program writes a tile while the rows of its next are on their way.

    Its first two tiles are its own. Where there are many, it draws the others: SMs are not equally fast, and
    with equal shares the slowest would decide.
    """
    first = tl.program_id(0)
    step = tl.num_programs(0)
    row, unit, ROWS = _tile(LANES, WIDTH, UNIT)
    b = tl.zeros([], tl.int32)
    before = b
    if BATCH:
        ends = tl.cumsum((lengths + ROWS - 1) // ROWS, 0)
        tiles = tl.max(ends, 0)
        b += tl.sum((ends <= first).to(tl.int32), 0)
        before += tl.max(tl.where(ends <= first, ends, 0), 0)
        length = tl.sum(tl.where(tl.arange(0, BATCH) == b, lengths, 0), 0)
    else:
        tiles = (count + ROWS - 1) // ROWS
        length = count
    entry, position, live, b, before, length = _ahead(
        table, bounds, table_stride, batch, limit, first, row, b, before, length, PAGE_SIZE, BATCH, ROWS
    )
    slot, target, is_on = _rows(entry, position, live, filled, num_slots, PAGE_SIZE, FILLED, COMPACT)
    x = _take(rows, slot, is_on, unit, row_stride, UNIT, WORDS)
    entry, position, live, b, before, length = _ahead(
        table,
        bounds,
        table_stride,
        batch,
        limit,
        first + step,
        row,
        b,
        before,
        length,
        PAGE_SIZE,
        BATCH,
        ROWS,
    )

    tile = first
    coming = first + step
    is_drawn = tiles > step * _DRAWN
    while tile < tiles:
        _put(out, x, target, is_on, unit, out_stride, UNIT, E5M2, BF16, NATIVE, WORDS)
        slot, target, is_on = _rows(entry, position, live, filled, num_slots, PAGE_SIZE, FILLED, COMPACT)
        x = _take(rows, slot, is_on, unit, row_stride, UNIT, WORDS)
        after = coming + step
        if is_drawn:
            after = 2 * step + tl.atomic_add(tickets, 1, sem="relaxed")
        entry, position, live, b, before, length = _ahead(
            table, bounds, table_stride, batch, limit, after, row, b, before, length, PAGE_SIZE, BATCH, ROWS
        )
        tile = coming
        coming = after
    if is_drawn:  # noqa: SIM102 -- `and` would run both sides
        # The last to end leaves them as they were: every program has drawn its own last ticket by then.
        if tl.atomic_add(tickets + 1, 1) == step - 1:
            tl.store(tickets, 0)
            tl.store(tickets + 1, 0)


# What changes with a batch must not make a new kernel: none of it is specialised on.
@triton.jit(do_not_specialize=["table_stride", "num_slots", "batch", "limit"])
def kvlab_cast(
    rows,
    out,
    table,
    bounds,
    filled,
    tickets,
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
    FEW_LANES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BATCH: tl.constexpr,
    FILLED: tl.constexpr,
    COMPACT: tl.constexpr,
    E5M2: tl.constexpr,
    BF16: tl.constexpr,
    NATIVE: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Cast rows of `WIDTH` bytes; a tile is as many whole rows as `LANES` lanes of `UNIT` bytes hold.

    BATCH 0: `table` is a list of slots or pages and `bounds[batch]` says how many; otherwise [batch, …] pages
    and `bounds` the lengths. `filled`: tokens of each page in the list. COMPACT: row i of the list to row i.
    Few rows, at most one tile for each program, go the shortest way, FEW_LANES of `FEW_UNIT` bytes; and as
    few as that allows of `LEAST_UNIT`, so that more programs share them. WORDS: many rows go in words of four
    codes. `tickets`: kvlab.kernels.tickets.
    """
    first = tl.program_id(0)
    row, _, ROWS = _tile(FEW_LANES, WIDTH, FEW_UNIT)
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
        least_row, _, LEAST_ROWS = _tile(FEW_LANES, WIDTH, LEAST_UNIT)
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
            bounds,
            lengths,
            count,
            filled,
            row_stride,
            out_stride,
            table_stride,
            num_slots,
            batch,
            limit,
            tickets,
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
            WORDS,
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
            FEW_LANES,
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
            FEW_LANES,
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
            FEW_LANES,
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


def _in_words(source: torch.Tensor, target: torch.Tensor) -> bool:
    """May rows of both be read and written four codes at a time? Aligned as 16 bytes, each of them."""
    return all(t.data_ptr() % 16 == 0 and t.stride(0) * t.element_size() % 16 == 0 for t in (source, target))


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
    cut = cut or tuning(device)
    batches = _batch(batch) if paged else 0
    strides = source.stride()[0], target.stride()[0]

    def constants() -> dict[str, Any]:
        unit = next(u for u in (16, 8, 4, 2, 1) if u <= cut.unit and width % u == 0)
        least = min(unit, cut.least)
        in_words = cut.native and unit % 4 == 0 and _in_words(source, target)
        registers = _REGISTERS // (32 * cut.warps * cut.grid)
        return {
            "WIDTH": width,
            "UNIT": unit,
            "FEW_UNIT": min(unit, 2 * least),
            "LEAST_UNIT": least,
            "LANES": max(cut.lanes, triton.next_power_of_2(width // least)),
            "FEW_LANES": max(cut.few, triton.next_power_of_2(width // least)),
            "PAGE_SIZE": page_size,
            "BATCH": batches,
            "FILLED": filled is not None,
            "COMPACT": compact,
            "E5M2": source.dtype == torch.float8_e5m2,
            "BF16": target.dtype == torch.bfloat16,
            "NATIVE": cut.native,
            "WORDS": in_words,
            "num_warps": cut.warps,
            # What lets so many programs stay on an SM; the compiler may spill below it, or pass it by one.
            **({"maxnreg": registers} if in_words and registers < 255 else {}),
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
            tickets_of(target),
        ),
        (*strides, table.stride(0) if paged else 0, source.shape[0], batch, limit),
        constants,
    )


_cast = Direct(kvlab_cast)
