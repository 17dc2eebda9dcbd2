"""Launches that share a key share a compiled kernel: what it was compiled for must be the same for both."""

import itertools

import pytest
import torch

from kvlab.kernels import cast, clear, kv_write, write_cast
from kvlab.kernels.active import ActiveSlots
from kvlab.kernels.slot_list import list_for
from kvlab.kernels.slot_map import SlotMap

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
WIDE = (torch.bfloat16, torch.float16)
INDEX = (torch.int32, torch.int64)
SLOTS = 24


class Noted:
    """In a `Direct`'s place: notes what Triton compiles a launch for, and launches nothing."""

    def __init__(self, direct):
        self.kernel = direct.kernel
        its = getattr(self.kernel, "kwargs", None)
        self.runtime = its["do_not_specialize"] if its else self.kernel.do_not_specialize
        self.compiled, self.launches = {}, 0

    def __call__(self, key, grid, tensors, numbers, constants):
        names = self.kernel.arg_names[len(tensors) :]
        constants = constants()
        # Constants follow the numbers: a kept kernel is handed them in that order.
        assert set(names[len(numbers) :]) <= set(constants)
        given = {n: v for n, v in zip(names, numbers, strict=False) if n not in (self.runtime or ())}
        what = [t.dtype for t in tensors], given, constants
        assert self.compiled.setdefault(key, what) == what
        assert key[0] == tensors[0].device.index
        assert grid > 0
        self.launches += 1


@pytest.fixture
def noted(monkeypatch):
    def note(module, name="_launch"):
        made = Noted(getattr(module, name))
        monkeypatch.setattr(module, name, made)
        return made

    return note


def every(**choices):
    for values in itertools.product(*choices.values()):
        yield dict(zip(choices, values, strict=True))


def strided(*shape, dtype, apart):
    """Rows that are `apart`, whatever their width."""
    return torch.zeros((*shape[:-1], apart), dtype=dtype)[..., : shape[-1]]


SPLITS = [(32, 16), (16, 32), (32, 8), (16, 16)]


def test_the_kv_write(noted):
    launch = noted(kv_write)
    choices = {"fp8": FP8, "dtype": WIDE, "loc": INDEX, "split": SPLITS, "clear": (None, *WIDE)}
    for c in every(**choices, far=range(4)):
        rank, rope = c["split"]
        apart = [64 + 16 * (c["far"] == n) for n in range(3)]
        wide = torch.zeros(SLOTS, 1, rank + rope, dtype=c["clear"] or WIDE[0])
        kv_write.write(
            strided(SLOTS, 1, rank + rope, dtype=torch.uint8, apart=apart[0]),
            torch.zeros(3, dtype=c["loc"]),
            strided(3, 1, rank, dtype=c["dtype"], apart=apart[1]),
            strided(3, 1, rope, dtype=c["dtype"], apart=apart[2]),
            c["fp8"],
            None if c["clear"] is None else wide,
        )
    assert len(launch.compiled) == launch.launches


def paged(batch, pages, size):
    ints = (torch.zeros(n, dtype=torch.int32) for n in ((batch, pages), (batch,)))
    return ActiveSlots.paged(*ints, size)


def test_the_tails_of_pages(noted):
    launch = noted(clear)
    choices = {"dtype": WIDE, "width": (32, 48), "apart": (64, 80), "size": (2, 4)}
    for c in every(**choices, pages=(1, 3), batch=(1, 2)):
        rows = strided(SLOTS, 1, c["width"], dtype=c["dtype"], apart=c["apart"])
        clear.clear_tails(rows, paged(c["batch"], c["pages"], c["size"]))
    assert (len(launch.compiled), launch.launches) == (16, 64)


def tables():
    """Of every layout, and of each several shapes that one kernel serves."""
    for dtype, n in itertools.product(INDEX, (4, 9)):
        bounds = torch.zeros(2, dtype=torch.int32)
        yield ActiveSlots.ragged(torch.zeros(n, dtype=dtype), bounds)
    for size, batch, pages in itertools.product((1, 4), (1, 2, 65), (1, 3)):
        yield paged(batch, pages, size)


def a_map(active):
    """Where a `slot_map` of one request would lie."""
    ints = (torch.zeros(n, dtype=torch.int32) for n in (SLOTS, SLOTS, 1, 1, 1))
    return SlotMap(*ints, SLOTS, active.page_size, active.is_paged, active.capacity)


CUTS = None, cast.Tuning(lanes=64, unit=16, warps=4, grid=1, native=True)


def test_the_cast(noted):
    launch = noted(cast, "_cast")
    for c in every(fp8=FP8, dtype=WIDE, width=(32, 48), far=range(3), cut=CUTS):
        apart = [64 + 16 * (c["far"] == n) for n in (1, 2)]
        rows = strided(SLOTS, 1, c["width"], dtype=torch.uint8, apart=apart[0])
        rows = rows.view(c["fp8"])
        out = strided(SLOTS, 1, c["width"], dtype=c["dtype"], apart=apart[1])
        for active in (*tables(), list_for(SLOTS, rows.device)):
            cast.shadow_cast(rows, out, active, cut=c["cut"])
            if isinstance(active, ActiveSlots) and active.batch == 1 and active.capacity <= SLOTS:
                cast.gather_cast(rows, out, a_map(active), cut=c["cut"])
    # Slots of int32, as a list has them, and of int64; pages of 1 and 4 of one, few and many requests; maps
    # of slots and of pages of 1 and 4.
    kinds = 2 + 2 * 3 + 1 + 2
    assert len(launch.compiled) == kinds * 48 < launch.launches


@pytest.mark.parametrize("chip", ["starts early", "does not"])
def test_the_write_with_the_cast(noted, monkeypatch, chip):
    monkeypatch.setattr(write_cast, "starts_early", lambda device: chip == "starts early")
    launch = noted(write_cast)
    choices = {"fp8": FP8, "dtype": WIDE, "loc": INDEX, "split": SPLITS, "out": WIDE, "far": range(5)}
    for c in every(**choices, early=(False, True), cut=CUTS):
        rank, rope = c["split"]
        apart = [64 + 16 * (c["far"] == n) for n in range(4)]
        write_cast.write_cast(
            strided(SLOTS, 1, rank + rope, dtype=torch.uint8, apart=apart[0]),
            strided(SLOTS, 1, rank + rope, dtype=c["out"], apart=apart[1]),
            torch.zeros(SLOTS, dtype=torch.int32),
            torch.zeros(1, dtype=torch.int32),
            torch.zeros(3, dtype=c["loc"]),
            strided(3, rank, dtype=c["dtype"], apart=apart[2]),
            strided(3, rope, dtype=c["dtype"], apart=apart[3]),
            c["fp8"],
            early=c["early"],
            cut=c["cut"],
        )
    assert len(launch.compiled) == launch.launches // (1 if chip == "starts early" else 2)


def test_what_takes_slots_off_the_list(noted):
    launch = noted(write_cast, "_without")
    for dtype, tokens in itertools.product(INDEX, (1, 3)):
        of = [(SLOTS, torch.int32), (1, torch.int32), (tokens, dtype)]
        write_cast.without(*(torch.zeros(n, dtype=t) for n, t in of))
    assert (len(launch.compiled), launch.launches) == (2, 4)
