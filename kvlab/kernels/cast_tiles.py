"""Which rows are in a tile of the cast? A tile is as many whole rows as a program's lanes hold at once.

Of a list, of slots or of pages, every tile but the last is full. Of page tables each request has tiles of its
own. Entries that are negative or past the pool are no rows. Device code of `kvlab.kernels.cast_kernel`.
"""

import triton
import triton.language as tl


@triton.jit
def tile_lanes(LANES: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr):
    """A tile's row and unit of UNIT bytes of each lane, and how many whole rows it holds."""
    UNITS: tl.constexpr = WIDTH // UNIT
    ROWS: tl.constexpr = LANES // UNITS
    lane = tl.arange(0, LANES)
    return lane // UNITS, lane % UNITS, ROWS


@triton.jit
def request_of(tile, ends):
    """The request that a tile is of, and the tiles before that request. `ends`: the tile each ends before."""
    return tl.sum((ends <= tile).to(tl.int32), 0), tl.max(tl.where(ends <= tile, ends, 0), 0)


@triton.jit
def length_of(b, lengths, BATCH: tl.constexpr):
    """`lengths[b]`, of lengths that are held in registers."""
    return tl.sum(tl.where(tl.arange(0, BATCH) == b, lengths, 0), 0)


@triton.jit
def walk_on(tile, b, before, length, bounds, batch, limit, tiles, ROWS: tl.constexpr):
    """Request, tiles before it and its length for `tile`, from those of a tile before it.

    A walk over short requests costs fewer registers than holding all lengths, and fewer registers are more
    rows on their way. From `tiles` on there is nothing to walk to: no row of such a tile is within a length.
    """
    end = before + (length + ROWS - 1) // ROWS
    while (tile >= end) & (tile < tiles) & (b < batch - 1):
        b += 1
        before = end
        length = tl.minimum(tl.maximum(tl.load(bounds + b), 0), limit)
        end += (length + ROWS - 1) // ROWS
    return b, before, length


@triton.jit
def entries(table, table_stride, tile, row, b, before, length, PAGE_SIZE: tl.constexpr, ROWS: tl.constexpr):
    """Of each lane: its table's entry, the position in its request, and whether the request is that long."""
    position = (tile - before) * ROWS + row
    live = (row < ROWS) & (position < length)
    entry = tl.load(table + b.to(tl.int64) * table_stride + position // PAGE_SIZE, mask=live, other=-1)
    return entry, position, live


@triton.jit
def from_and_to(
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
