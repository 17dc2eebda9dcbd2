"""One launch for KV write and cast: the bits of the two launches, in the interpreter or on a GPU."""

from dataclasses import replace

import pytest
import torch

from kvlab.kernels import kv_write
from kvlab.kernels.active import ActiveSlots
from kvlab.kernels.aot import CAPABILITIES, REGISTERS_PER_SM, Spec, report_each
from kvlab.kernels.cast import shadow_cast
from kvlab.kernels.cast_cut import constants, tuning_for
from kvlab.kernels.slot_list import list_for, slot_list
from kvlab.kernels.write_cast import without, write_cast

RANK, ROPE = 64, 16
WIDTH = RANK + ROPE


def inputs(device, fp8, *, lengths, page_size=1, slots=512, seed=0, spread=1.0, padded=0):
    """Requests of `lengths`, the last token of each just being written; `padded` rows on slot 0 behind."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, 256, (slots, 1, WIDTH), generator=generator, dtype=torch.uint8).to(device)
    pages = (torch.randperm(slots // page_size - 1, generator=generator) + 1).to(torch.int32)
    table, at = torch.full((len(lengths), 16), -1, dtype=torch.int32), 0
    flat = []
    for b, n in enumerate(lengths):
        need = -(-n // page_size)
        mine = pages[at : at + need]
        at += need
        if need <= 16:
            table[b, :need] = mine
        position = torch.arange(n)
        flat.append(mine[position // page_size] * page_size + (position % page_size).to(torch.int32))
    loc = torch.tensor([int(f[-1]) for f in flat if len(f)] + [0] * padded)
    indptr = torch.tensor([0, *torch.tensor([*lengths]).cumsum(0).tolist()], dtype=torch.int32)
    stale = torch.randint(0, slots, (9,), generator=generator, dtype=torch.int32)
    if page_size == 1:
        active = ActiveSlots.ragged(torch.cat([*flat, stale]).to(device), indptr.to(device))
    else:
        lens = torch.tensor(lengths, dtype=torch.int32)
        active = ActiveSlots.paged(table.to(device), lens.to(device), page_size)
    new = torch.randn((loc.numel(), WIDTH), generator=generator).to(torch.bfloat16) * spread
    new = new.to(device)
    return rows, active, loc.to(device), new[:, :RANK], new[:, RANK:]


def both(device, fp8, dtype, **changes):
    rows, active, loc, nope, rope = inputs(device, fp8, **changes)
    one, two = rows.clone(), rows.clone()
    shadow = torch.full(rows.shape, 7.0, dtype=dtype, device=device)
    apart = shadow.clone()
    found = slot_list(active, list_for(rows.shape[0], torch.device(device)))
    without(found.slots, found.count, loc)
    write_cast(one, shadow, found.slots, found.count, loc, nope, rope, fp8)
    kv_write.write(two, loc, nope, rope, fp8)
    shadow_cast(two.view(fp8), apart, active)
    # Slot 0 takes what several padded rows write: any of them.
    assert torch.equal(one[1:], two[1:])
    assert torch.equal(shadow.view(torch.int16)[1:], apart.view(torch.int16)[1:])
    return shadow, loc


@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_the_bits_are_those_of_two_launches(device, fp8, dtype, page_size):
    shadow, loc = both(device, fp8, dtype, lengths=[5, 1, 33], page_size=page_size)
    assert (shadow[loc] != 7.0).all()


@pytest.mark.parametrize("lengths", [[1], [200], [3] * 17, [2] * 64, [120, 1, 90]])
def test_batches_and_lengths(device, lengths):
    both(device, torch.float8_e4m3fn, torch.bfloat16, lengths=lengths)


def test_padded_rows_share_slot_0(device):
    shadow, _ = both(device, torch.float8_e4m3fn, torch.bfloat16, lengths=[4, 9], padded=6)
    assert (shadow[0] == 7.0).all(), "nobody reads slot 0 here, and what is written to it may be NaN"


@pytest.mark.parametrize("many", [4, 200], ids=["few", "many"])
def test_only_what_the_list_counts_is_cast(device, many):
    """Entries that are no slot, and what an earlier step left behind the count, are left alone."""
    fp8 = torch.float8_e4m3fn
    rows, _, loc, nope, rope = inputs(device, fp8, lengths=[2, 2])
    others = [s for s in range(1, 400) if s not in loc.tolist()]
    named = [*others[:many], -1, rows.shape[0], rows.shape[0] + 3, 0, *others[many : 2 * many - 1]]
    stale = others[2 * many - 1 : 2 * many + 20]
    slots = torch.tensor(named + stale, dtype=torch.int32, device=device)
    count = torch.tensor([len(named)], dtype=torch.int32, device=device)
    shadow = torch.full(rows.shape, 7.0, dtype=torch.bfloat16, device=device)
    write_cast(rows, shadow, slots, count, loc, nope, rope, fp8)
    cast = [s for s in named if 0 <= s < rows.shape[0]] + loc.tolist()
    want = torch.full_like(shadow, 7.0)
    want[cast] = rows[cast].view(fp8).to(torch.bfloat16)
    # NaN has another sign bit on a CPU than on a GPU.
    assert torch.equal(shadow.nan_to_num(3.0), want.nan_to_num(3.0))


@pytest.mark.parametrize("loc", [[1], [699, 0, 256, 0, 255, 5], list(range(640, 704))], ids=len)
def test_without_takes_off_the_slots_that_are_written_and_no_other(device, loc):
    every = torch.arange(700, dtype=torch.int32, device=device)
    active = ActiveSlots.ragged(every, torch.tensor([0, 700], dtype=torch.int32, device=device))
    found = slot_list(active, list_for(700, torch.device(device)))
    without(found.slots, found.count, torch.tensor(loc, device=device))
    assert found.count.item() == 700
    gone = [s for s in loc if 0 < s < 700]
    assert [i for i, s in enumerate(found.slots.tolist()) if s != i] == sorted(gone)
    assert (found.slots[gone] == -1).all()


def test_slot_0_stays_on_the_list(device):
    """Padded rows are written to it and read it: attention must find it finite, whatever the shadow held."""
    rows, _, loc, nope, rope = inputs(device, torch.float8_e4m3fn, lengths=[4], padded=2)
    rows[0] = 0
    table = torch.tensor([0, 0, int(loc[0])], dtype=torch.int32, device=device)
    active = ActiveSlots.ragged(table, torch.tensor([0, 3], dtype=torch.int32, device=device))
    shadow = torch.full(rows.shape, float("nan"), dtype=torch.bfloat16, device=device)
    found = slot_list(active, list_for(rows.shape[0], torch.device(device)))
    without(found.slots, found.count, loc)
    write_cast(rows, shadow, found.slots, found.count, loc, nope, rope, torch.float8_e4m3fn)
    assert shadow[0].isfinite().all()
    assert shadow[loc[0]].isfinite().all()


def test_an_early_launch_waits_for_the_new_rows(device):
    """The kernel before makes the new rows last, and takes a while where it runs on a GPU."""
    fp8 = torch.float8_e4m3fn
    rows, active, loc, nope, rope = inputs(device, fp8, lengths=[5, 1, 33])
    new = torch.cat([nope, rope], 1)
    made = torch.empty(200_000 if device == "cuda" else 8, WIDTH, dtype=new.dtype, device=device)
    found = slot_list(active, list_for(rows.shape[0], torch.device(device)))
    without(found.slots, found.count, loc)
    for step in range(20 if device == "cuda" else 2):
        one, two = rows.clone(), rows.clone()
        shadow, apart = (torch.full(rows.shape, 7.0, dtype=torch.bfloat16, device=device) for _ in range(2))
        coming = torch.zeros_like(made)
        coming[-loc.numel() :] = new + step
        made.copy_(coming)
        last = made[-loc.numel() :]
        write_cast(
            one, shadow, found.slots, found.count, loc, last[:, :RANK], last[:, RANK:], fp8, early=True
        )
        kv_write.write(two, loc, (new + step)[:, :RANK], (new + step)[:, RANK:], fp8)
        shadow_cast(two.view(fp8), apart, active)
        assert torch.equal(one, two)
        assert torch.equal(shadow.view(torch.int16), apart.view(torch.int16))


@pytest.mark.parametrize("rope", [8, 1])
@pytest.mark.parametrize("lengths", [[5, 33], [60, 60, 60]], ids=["few", "many"])
def test_rows_of_any_width_in_layers_that_are_slices(device, rope, lengths, monkeypatch):
    """Neither the pool's rows nor the shadow's lie one behind the other; three programs write a new row."""
    monkeypatch.setattr("kvlab.kernels.write_cast._COLUMNS", 32)
    fp8 = torch.float8_e4m3fn
    rows, active, loc, nope, wide = inputs(device, fp8, lengths=lengths)
    width = RANK + rope
    pool = rows.repeat(1, 2, 1)[:, 1:, :width]
    assert pool.stride(0) == 2 * WIDTH
    both_apart = torch.full((2, rows.shape[0], 3, width), 7.0, dtype=torch.bfloat16, device=device)
    shadow, apart = both_apart[:, :, 1:2].unbind()
    two = pool.clone()
    found = slot_list(active, list_for(rows.shape[0], torch.device(device)))
    without(found.slots, found.count, loc)
    write_cast(pool, shadow, found.slots, found.count, loc, nope, wide[:, :rope], fp8)
    kv_write.write(two, loc, nope, wide[:, :rope], fp8)
    shadow_cast(two.view(fp8), apart, active)
    assert torch.equal(pool, two)
    assert torch.equal(both_apart[0].view(torch.int16), both_apart[1].view(torch.int16))


def test_what_no_fp8_can_hold_is_written_as_stock_writes_it(device):
    both(device, torch.float8_e4m3fn, torch.bfloat16, lengths=[4, 9], spread=1e4)


def test_many_rows_take_the_long_way(device):
    lengths = [150, 150, 150]
    both(device, torch.float8_e4m3fn, torch.bfloat16, lengths=lengths, slots=512)
    both(device, torch.float8_e4m3fn, torch.bfloat16, lengths=lengths, slots=512, page_size=16)


def test_it_fits_every_chip():
    """Compiled ahead of time as it is cut for each: SM80 reads bytes, the others FP8, and as many programs as
    are launched on an SM fit there.
    """
    ints = ["row_stride", "out_stride", "nope_stride", "rope_stride", "num_slots", "limit", "writes"]
    pointers = {"codes": "*u8", "out": "*bf16", "slots": "*i32", "count": "*i32", "loc": "*i64"}
    pointers |= {"nope": "*bf16", "rope": "*bf16", "tickets": "*i32"}
    row = {"NOPE": 512, "ROPE": 64, "BLOCK": 256, "E5M2": False, "BF16": True}
    codes = {"OVER": 0x7F, "INF": 0x7F, "NAN": 0x7F, "NEGATIVE_NAN": 0xFF}
    cuts = {c: replace(tuning_for(c), grid=4) for c in CAPABILITIES}
    work = []
    for capability, cut in cuts.items():
        its = constants(cut, 576, True)
        warps, most = its.pop("num_warps"), its.pop("maxnreg", None)
        spec = Spec(
            name="write and cast",
            kernel="kvlab.kernels.write_cast:kvlab_write_cast",
            signature=pointers | {"rows": "*fp8e4nv" if cut.native else "*u8"} | dict.fromkeys(ints, "i32"),
            constexprs=row | codes | its | {"EARLY": capability >= 90},
            divisible=[*pointers, "rows", *ints[:4]],
            num_warps=warps,
            maxnreg=most,
        )
        work.append((spec, capability))
    for one, cut in zip(report_each(work), cuts.values(), strict=True):
        assert one.exceeds() == [], one
        assert one.stack == 0, one
        assert one.registers * one.threads * cut.grid <= REGISTERS_PER_SM, one
