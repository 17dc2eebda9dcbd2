"""How does a decode step write its new rows and cast the active ones in one launch?

The write (kvlab.kernels.kv_write) and the cast to each slot's own place (kvlab.kernels.cast.shadow_cast) are
a launch each, a layer; at small batches the second launch costs as much as its work. `without` takes the
slots that a step writes off its list of slots (kvlab.kernels.slot_list), once a step. Then a layer needs one
launch, `write_cast`: its first programs write the new tokens, as FP8 codes into the pool and, widened, into
the shadow, and the others cast what is left on the list, which nobody is writing. The bits are those of the
two launches, one after the other.
"""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from kvlab.kernels.cast import are_aligned
from kvlab.kernels.cast_cut import Tuning, constants, may_draw, tuning
from kvlab.kernels.cast_kernel import cast_rows
from kvlab.kernels.chip import chip, early_launch, starts_early
from kvlab.kernels.direct import Direct
from kvlab.kernels.kv_write import edge_codes, new_row
from kvlab.kernels.tickets import Counters, tickets_of
from kvlab.kernels.widen import widen

# A larger batch takes two launches, which it does not notice.
MAX_WRITES = 64
# Columns of a new row that a program writes, one a thread. When the wait of an early launch ends, the others
# have only to store: how soon new rows are converted is how long it takes.
_COLUMNS = 256


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
    part,
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
    """A part of a new token: its codes to the pool, what they mean to the shadow."""
    slot, column, is_row, code = new_row(
        loc,
        nope,
        rope,
        token,
        part,
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
    tickets,
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
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    FEW_UNIT: tl.constexpr,
    LEAST_UNIT: tl.constexpr,
    LANES: tl.constexpr,
    FEW_LANES: tl.constexpr,
    WORDS: tl.constexpr,
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
    PARTS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    writers = writes * PARTS
    program = tl.program_id(0)
    if program < writers:
        if EARLY:
            tl.extra.cuda.gdc_wait()
        _write(
            codes,
            out,
            loc,
            nope,
            rope,
            (program // PARTS).to(tl.int64),
            program % PARTS * BLOCK,
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
        cast_rows(
            program - writers,
            tl.num_programs(0) - writers,
            rows,
            out,
            slots,
            count,
            slots,
            tickets,
            row_stride,
            out_stride,
            0,
            num_slots,
            0,
            limit,
            WIDTH,
            UNIT,
            FEW_UNIT,
            LEAST_UNIT,
            LANES,
            FEW_LANES,
            PAGE_SIZE=1,
            BATCH=0,
            FILLED=False,
            COMPACT=False,
            E5M2=E5M2,
            BF16=BF16,
            NATIVE=NATIVE,
            WORDS=WORDS,
            EARLY=EARLY,
        )


@lru_cache
def _tuning(device: torch.device) -> Tuning:
    """The cast's cut, with four programs an SM: some write new rows (data/recorded/h200-cast-notes-3)."""
    cut = tuning(device)
    return replace(cut, grid=4) if chip(device)[0] else cut


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
    tickets: Counters = tickets_of,
) -> torch.Tensor:
    """`kv_write.write(buffer, loc, nope, rope, fp8)`, and a shadow cast of a list `without` them, at once.

    buffer uint8 [slots, 1, rank + rope], slot stride free; shadow BF16 or FP16 of the same shape; slots and
    count as in `without`; loc int32 or int64 [tokens], at most MAX_WRITES; nope [tokens, rank], rope
    [tokens, rope]. Every slot of `loc` but 0 is written to the shadow, active or not. `early`: the list and
    its rows were complete before the kernel that runs before this one, so both may be read while that one
    ends (programmatic dependent launch, SM90 on). `tickets`: as in `shadow_cast`. Returns `shadow`.
    """
    device, dtype = buffer.device, nope.dtype
    source, target = buffer.view(buffer.shape[0], -1), shadow.view(shadow.shape[0], -1)
    cut = cut or _tuning(device)
    early = early and starts_early(device)
    rank, rope_width = nope.shape[-1], rope.shape[-1]
    width, tokens = rank + rope_width, loc.numel()
    strides = source.stride(0), target.stride(0), nope.stride(0), rope.stride(0)
    block = min(_COLUMNS, triton.next_power_of_2(width))
    writers = tokens * -(-width // block)
    programs = max(cut.grid * chip(device)[1], writers + 2)
    draws = may_draw(cut, width, programs - writers, 1, slots.numel())

    def compiled_with() -> dict[str, Any]:
        over, inf, nan, negative = edge_codes(fp8, dtype, device)
        return {
            **constants(cut, width, are_aligned(source, target)),
            "NOPE": rank,
            "ROPE": rope_width,
            "BLOCK": block,
            "E5M2": fp8 == torch.float8_e5m2,
            "BF16": target.dtype == torch.bfloat16,
            "OVER": over,
            "INF": inf,
            "NAN": nan,
            "NEGATIVE_NAN": negative,
            "EARLY": early,
            **early_launch(early),
        }

    _launch(
        (device.index, cut, block, early, fp8, dtype, loc.dtype, target.dtype, rank, rope_width, strides),
        programs,
        (
            *(source, source.view(fp8) if cut.native else source, target, slots, count, loc, nope, rope),
            tickets(target) if draws else count,
        ),
        (*strides, source.shape[0], slots.numel(), tokens),
        compiled_with,
    )
    return shadow
