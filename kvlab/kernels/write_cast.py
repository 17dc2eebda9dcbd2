"""How does a decode step write its new rows and cast the active ones in one launch?

The write (kvlab.kernels.kv_write) and the cast to each slot's own place (kvlab.kernels.cast.shadow_cast) are
a launch each, a layer; at small batches the second launch costs as much as its work. `without` takes the
slots that a step writes off its list of slots (kvlab.kernels.slot_list), once a step. Then a layer needs one
launch, `write_cast`: its first programs write the new tokens, as FP8 codes into the pool and, widened, into
the shadow, and the others cast what is left on the list, which nobody is writing. The bits are those of the
two launches, one after the other.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from kvlab.kernels.cast_cut import Tuning, widest_unit
from kvlab.kernels.chip import chip, early_launch, starts_early
from kvlab.kernels.direct import Direct
from kvlab.kernels.kv_write import edge_codes, new_row
from kvlab.kernels.widen import widen

# A larger batch takes two launches, which it does not notice.
MAX_WRITES = 64


@triton.jit(do_not_specialize=["writes"])
def kvlab_slot_list_without(slots, count, loc, writes, WRITES: tl.constexpr, LANES: tl.constexpr):
    """Entries that are in `loc` become -1. Slot 0, which padded rows share, stays."""
    few = tl.arange(0, WRITES)
    fresh = tl.load(loc + few, mask=few < writes, other=0).to(tl.int32)
    fresh = tl.where(fresh > 0, fresh, -1)
    tokens = tl.load(count)
    for at in range(tl.program_id(0) * LANES, tokens, tl.num_programs(0) * LANES):
        place = at + tl.arange(0, LANES)
        slot = tl.load(slots + place, mask=place < tokens, other=0)
        is_fresh = tl.max((slot[:, None] == fresh[None, :]).to(tl.int32), 1)
        tl.store(slots + place, tl.full([LANES], -1, tl.int32), mask=(place < tokens) & (is_fresh != 0))


@triton.jit
def _write(
    codes,
    out,
    loc,
    nope,
    rope,
    token,
    row_stride,
    out_stride,
    nope_stride,
    rope_stride,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK: tl.constexpr,
    E5M2: tl.constexpr,
    BF16: tl.constexpr,
    OVER: tl.constexpr,
    INF: tl.constexpr,
    NAN: tl.constexpr,
    NEGATIVE_NAN: tl.constexpr,
):
    """One new token: its codes to the pool, what they mean to the shadow."""
    slot, column, is_row, code = new_row(
        loc,
        nope,
        rope,
        token,
        nope_stride,
        rope_stride,
        NOPE,
        ROPE,
        BLOCK,
        E5M2,
        OVER,
        INF,
        NAN,
        NEGATIVE_NAN,
    )
    tl.store(codes + slot * row_stride + column, code, mask=is_row)
    # Slot 0 is cast like any other, if it is active: what a padded row holds may not stay in the shadow.
    wide = widen(code, E5M2, BF16, False)
    tl.store(out + slot * out_stride + column, wide, mask=is_row & (slot > 0))


@triton.jit
def _cast(
    rows,
    out,
    entry,
    live,
    column,
    row_stride,
    out_stride,
    num_slots,
    E5M2: tl.constexpr,
    BF16: tl.constexpr,
    NATIVE: tl.constexpr,
    EARLY: tl.constexpr,
):
    slot = entry.to(tl.int64)
    live &= (slot >= 0) & (slot < num_slots)
    x = tl.load(rows + slot[:, None] * row_stride + column, mask=live[:, None])
    if EARLY:
        tl.extra.cuda.gdc_wait()
    tl.store(out + slot[:, None] * out_stride + column, widen(x, E5M2, BF16, NATIVE), mask=live[:, None])


@triton.jit(do_not_specialize=["num_slots", "limit", "writes"])
def kvlab_write_cast(
    codes,
    rows,
    out,
    slots,
    count,
    loc,
    nope,
    rope,
    row_stride,
    out_stride,
    nope_stride,
    rope_stride,
    num_slots,
    limit,
    writes,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    FEW_UNIT: tl.constexpr,
    LANES: tl.constexpr,
    E5M2: tl.constexpr,
    BF16: tl.constexpr,
    NATIVE: tl.constexpr,
    OVER: tl.constexpr,
    INF: tl.constexpr,
    NAN: tl.constexpr,
    NEGATIVE_NAN: tl.constexpr,
    EARLY: tl.constexpr,
):
    """`codes` and `rows` are one buffer, as uint8 and as FP8 (uint8 too unless NATIVE).

    EARLY: the kernel before may still run. What it may write, the new tokens, is read after it; so is what
    an attention before it may still read, the shadow, written after it. The list and the rows that it names
    are older.
    """
    program = tl.program_id(0)
    if program < writes:
        if EARLY:
            tl.extra.cuda.gdc_wait()
        _write(
            codes,
            out,
            loc,
            nope,
            rope,
            program.to(tl.int64),
            row_stride,
            out_stride,
            nope_stride,
            rope_stride,
            NOPE,
            ROPE,
            BLOCK,
            E5M2,
            BF16,
            OVER,
            INF,
            NAN,
            NEGATIVE_NAN,
        )
    else:
        first = program - writes
        step = tl.num_programs(0) - writes
        lane = tl.arange(0, LANES)
        FEW_UNITS: tl.constexpr = (NOPE + ROPE) // FEW_UNIT
        FEW_ROWS: tl.constexpr = LANES // FEW_UNITS
        # The entries are read while their count is still on its way.
        few_row = lane // FEW_UNITS
        few_position = first * FEW_ROWS + few_row
        few_live = few_row < FEW_ROWS
        few_entry = tl.load(slots + few_position, mask=few_live & (few_position < limit), other=-1)
        total = tl.minimum(tl.load(count), limit)
        if (total + FEW_ROWS - 1) // FEW_ROWS <= step:
            few_column = (lane % FEW_UNITS)[:, None] * FEW_UNIT + tl.arange(0, FEW_UNIT)[None, :]
            few_live &= few_position < total
            _cast(
                rows,
                out,
                few_entry,
                few_live,
                few_column,
                row_stride,
                out_stride,
                num_slots,
                E5M2,
                BF16,
                NATIVE,
                EARLY,
            )
        else:
            # Many rows: the rows of the next tile are on their way while this one is written.
            UNITS: tl.constexpr = (NOPE + ROPE) // UNIT
            ROWS: tl.constexpr = LANES // UNITS
            row = lane // UNITS
            is_row = row < ROWS
            column = (lane % UNITS)[:, None] * UNIT + tl.arange(0, UNIT)[None, :]
            tiles = (total + ROWS - 1) // ROWS
            position = first * ROWS + row
            slot = tl.load(slots + position, mask=is_row & (position < total), other=-1).to(tl.int64)
            live = (slot >= 0) & (slot < num_slots)
            x = tl.load(rows + slot[:, None] * row_stride + column, mask=live[:, None])
            position += step * ROWS
            entry = tl.load(slots + position, mask=is_row & (position < total), other=-1)
            if EARLY:
                tl.extra.cuda.gdc_wait()
            for _ in range(first, tiles, step):
                ahead = entry.to(tl.int64)
                more = (ahead >= 0) & (ahead < num_slots)
                coming = tl.load(rows + ahead[:, None] * row_stride + column, mask=more[:, None])
                position += step * ROWS
                entry = tl.load(slots + position, mask=is_row & (position < total), other=-1)
                y = widen(x, E5M2, BF16, NATIVE)
                tl.store(out + slot[:, None] * out_stride + column, y, mask=live[:, None])
                x, slot, live = coming, ahead, more


@lru_cache
def _tuning(device: torch.device) -> Tuning:
    """The cut that sweeps of this launch found best (data/recorded/h200-cast-notes-3)."""
    capability, _ = chip(device)
    if not capability:
        return Tuning(lanes=128, unit=16, warps=4, grid=1, native=False)
    return Tuning(lanes=512, unit=16, warps=8, grid=3, native=capability >= 89)


_without = Direct(kvlab_slot_list_without)
_launch = Direct(kvlab_write_cast)


def without(slots: torch.Tensor, count: torch.Tensor, loc: torch.Tensor) -> None:
    """Take the slots that `loc` names off a step's list, in place: their entries become -1.

    slots int32 [capacity], of which `count` int32 [1] are valid; loc int32 or int64 [tokens], at most
    MAX_WRITES. Slot 0 stays.
    """
    _without(
        (slots.device.index, loc.dtype),
        chip(slots.device)[1],
        (slots, count, loc),
        (loc.numel(),),
        lambda: {"WRITES": MAX_WRITES, "LANES": 128, "num_warps": 4},
    )


def write_cast(
    buffer: torch.Tensor,
    shadow: torch.Tensor,
    slots: torch.Tensor,
    count: torch.Tensor,
    loc: torch.Tensor,
    nope: torch.Tensor,
    rope: torch.Tensor,
    fp8: torch.dtype,
    *,
    early: bool = False,
    cut: Tuning | None = None,
) -> torch.Tensor:
    """`kv_write.write(buffer, loc, nope, rope, fp8)`, and a shadow cast of a list `without` them, at once.

    buffer uint8 [slots, 1, rank + rope], slot stride free; shadow BF16 or FP16 of the same shape; slots and
    count as in `without`; loc int32 or int64 [tokens], at most MAX_WRITES; nope [tokens, rank], rope
    [tokens, rope]. Every slot of `loc` but 0 is written to the shadow, active or not. `early`: the list and
    its rows were complete before the kernel that runs before this one, so both may be read while that one
    ends (programmatic dependent launch, SM90 on). Returns `shadow`.
    """
    device, dtype = buffer.device, nope.dtype
    source, target = buffer.view(buffer.shape[0], -1), shadow.view(shadow.shape[0], -1)
    cut = cut or _tuning(device)
    early = early and starts_early(device)
    rank, rope_width = nope.shape[-1], rope.shape[-1]
    strides = source.stride(0), target.stride(0), nope.stride(0), rope.stride(0)

    def constants() -> dict[str, Any]:
        over, inf, nan, negative = edge_codes(fp8, dtype, device)
        width = rank + rope_width
        unit = widest_unit(width, cut.unit)
        few = min(unit, 8)
        return {
            "NOPE": rank,
            "ROPE": rope_width,
            "BLOCK": triton.next_power_of_2(width),
            "UNIT": unit,
            "FEW_UNIT": few,
            "LANES": max(cut.lanes, triton.next_power_of_2(width // few)),
            "E5M2": fp8 == torch.float8_e5m2,
            "BF16": target.dtype == torch.bfloat16,
            "NATIVE": cut.native,
            "OVER": over,
            "INF": inf,
            "NAN": nan,
            "NEGATIVE_NAN": negative,
            "EARLY": early,
            "num_warps": cut.warps,
            **early_launch(early),
        }

    _launch(
        (device.index, cut, early, fp8, dtype, loc.dtype, target.dtype, rank, rope_width, strides),
        max(cut.grid * chip(device)[1], loc.numel() + 2),
        (source, source.view(fp8) if cut.native else source, target, slots, count, loc, nope, rope),
        (*strides, source.shape[0], slots.numel(), loc.numel()),
        constants,
    )
    return shadow
