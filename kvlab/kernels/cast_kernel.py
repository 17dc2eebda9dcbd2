"""How does one kernel cast few rows fast and many rows at the memory's pace? `kvlab_cast`, in Triton.

How many rows there are is read on the device, and the grid is fixed. Where every program has at most one
small tile, what counts is how soon its one load starts (`_once`); where it has several, that the next one is
on its way while this one is written (`_many`). What a code becomes is `kvlab.kernels.widen`'s, which rows are
in a tile `kvlab.kernels.cast_tiles`'. `kvlab.kernels.write_cast`'s kernel shares it all.
"""

import triton
import triton.language as tl

from kvlab.kernels.cast_cut import DRAWN
from kvlab.kernels.cast_tiles import entries, from_and_to, length_of, request_of, tile_lanes, walk_on
from kvlab.kernels.widen import widen, widen_words

_DRAWN = tl.constexpr(DRAWN)


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
    EARLY: tl.constexpr,
):
    """Few rows: one tile a program, whose entries are there already."""
    _, unit, _ = tile_lanes(LANES, WIDTH, UNIT)
    slot, target, live = from_and_to(entry, position, live, filled, num_slots, PAGE_SIZE, FILLED, COMPACT)
    x = _take(rows, slot, live, unit, row_stride, UNIT, False)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    _put(out, x, target, live, unit, out_stride, UNIT, E5M2, BF16, NATIVE, False)


@triton.jit
def _many(
    first,
    step,
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
    EARLY: tl.constexpr,
):
    """Many rows: each program writes a tile while the rows of its next and the entries of the one after that
    are on their way. Where one tile each is enough, it is written as soon as it is there.

    Its first three tiles are its own. Where there are many, it draws the others: SMs are not equally fast,
    and with equal shares the slowest would decide. What a draw says is needed a tile later, so that nothing
    waits for the counter's answer and then for entries.
    """
    row, unit, ROWS = tile_lanes(LANES, WIDTH, UNIT)
    if BATCH:
        ends = tl.cumsum((lengths + ROWS - 1) // ROWS, 0)
        tiles = tl.max(ends, 0)
        b, before = request_of(first, ends)
        length = length_of(b, lengths, BATCH)
    else:
        tiles = (count + ROWS - 1) // ROWS
        b = tl.zeros([], tl.int32)
        before = b
        length = count
    if BATCH:
        b, before, length = walk_on(first, b, before, length, bounds, batch, limit, tiles, ROWS)
    entry, position, live = entries(table, table_stride, first, row, b, before, length, PAGE_SIZE, ROWS)
    slot, target, is_on = from_and_to(entry, position, live, filled, num_slots, PAGE_SIZE, FILLED, COMPACT)
    x = _take(rows, slot, is_on, unit, row_stride, UNIT, WORDS)
    if tiles <= step:
        if EARLY:
            tl.extra.cuda.gdc_wait()
        _put(out, x, target, is_on, unit, out_stride, UNIT, E5M2, BF16, NATIVE, WORDS)
    else:
        coming = first + step
        if BATCH:
            b, before, length = walk_on(coming, b, before, length, bounds, batch, limit, tiles, ROWS)
        entry, position, live = entries(table, table_stride, coming, row, b, before, length, PAGE_SIZE, ROWS)

        if EARLY:
            tl.extra.cuda.gdc_wait()
        tile = first
        after = coming + step
        is_drawn = tiles > step * _DRAWN
        while tile < tiles:
            _put(out, x, target, is_on, unit, out_stride, UNIT, E5M2, BF16, NATIVE, WORDS)
            slot, target, is_on = from_and_to(
                entry, position, live, filled, num_slots, PAGE_SIZE, FILLED, COMPACT
            )
            x = _take(rows, slot, is_on, unit, row_stride, UNIT, WORDS)
            if BATCH:
                b, before, length = walk_on(after, b, before, length, bounds, batch, limit, tiles, ROWS)
            found = entries(table, table_stride, after, row, b, before, length, PAGE_SIZE, ROWS)
            entry, position, live = found
            tile = coming
            coming = after
            if is_drawn:
                # One a tile, over all programs: who draws the last leaves the counter as it was.
                drawn = tl.atomic_add(tickets, 1, sem="relaxed")
                tl.store(tickets, 0, mask=drawn == tiles - 1)
                after = 3 * step + drawn
            else:
                after += step


@triton.jit
def cast_rows(
    first,
    step,
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
    EARLY: tl.constexpr,
):
    """The share of one program, `first` of `step`: rows of `WIDTH` bytes. A tile is as many whole rows as
    `LANES` lanes of `UNIT` bytes hold.

    BATCH 0: `table` is a list of slots or pages and `bounds[batch]` says how many; otherwise [batch, …] pages
    and `bounds` the lengths. `filled`: tokens of each page in the list. COMPACT: row i of the list to row i.
    Few rows, at most one tile for each program, go the shortest way, FEW_LANES of `FEW_UNIT` bytes; and as
    few as that allows of `LEAST_UNIT`, so that more programs share them. WORDS: many rows go in words of four
    codes. `tickets`: kvlab.kernels.tickets. EARLY: the kernel before may still run; what it may read, `out`
    and `tickets`, is written after it. Tables, bounds and rows are older.
    """
    row, _, ROWS = tile_lanes(FEW_LANES, WIDTH, FEW_UNIT)
    if BATCH:
        request = tl.arange(0, BATCH)
        lengths = tl.load(bounds + request, mask=request < batch, other=0)
        lengths = tl.minimum(tl.maximum(lengths, 0), limit)
        ends = tl.cumsum((lengths + ROWS - 1) // ROWS, 0)
        tiles = tl.max(ends, 0)
        count = 0
        is_few: tl.constexpr = True
        b, before = request_of(first, ends)
        position = (first - before) * ROWS + row
        length = length_of(b, lengths, BATCH)
        live = (row < ROWS) & (position < length)
        entry = tl.load(table + b.to(tl.int64) * table_stride + position // PAGE_SIZE, mask=live, other=-1)
    else:
        # The entries are read while their count is still on its way, both ways to lay them out.
        position = first * ROWS + row
        entry = tl.load(table + position // PAGE_SIZE, mask=(row < ROWS) & (position < limit), other=-1)
        least_row, _, LEAST_ROWS = tile_lanes(FEW_LANES, WIDTH, LEAST_UNIT)
        least_position = first * LEAST_ROWS + least_row
        is_least_row = (least_row < LEAST_ROWS) & (least_position < limit)
        least_entry = tl.load(table + least_position // PAGE_SIZE, mask=is_least_row, other=-1)
        count = tl.minimum(tl.load(bounds + batch) * PAGE_SIZE, limit)
        lengths = 0
        tiles = (count + ROWS - 1) // ROWS
        live = (row < ROWS) & (position < count)
        is_few = (count + LEAST_ROWS - 1) // LEAST_ROWS > step
    if tiles > step:
        _many(
            first,
            step,
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
            EARLY,
        )
    elif is_few:
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
            EARLY,
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
            EARLY,
        )


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
    """All programs of a launch: `cast_rows`."""
    cast_rows(
        tl.program_id(0),
        tl.num_programs(0),
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
        WIDTH,
        UNIT,
        FEW_UNIT,
        LEAST_UNIT,
        LANES,
        FEW_LANES,
        PAGE_SIZE,
        BATCH,
        FILLED,
        COMPACT,
        E5M2,
        BF16,
        NATIVE,
        WORDS,
        EARLY=False,
    )
