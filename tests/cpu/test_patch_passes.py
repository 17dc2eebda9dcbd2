"""Which slots a pass reads is found once: the list serves the layers of one pass, and of no other."""

import weakref
from types import SimpleNamespace

import pytest
import torch
from kernel_inputs import bits, most_undrawn, random_pool, stock_bits

from kvlab.kernels import tickets
from kvlab.kernels.active import ActiveSlots
from kvlab.kernels.tickets import PassTickets
from kvlab.patch import casts
from kvlab.patch.scratch import Scratch
from kvlab.patch.strategies.passes import Passes
from kvlab.patch.strategies.shadow import Shadow
from kvlab.patch.write import NewRows

SLOTS, WIDTH = 40, 32


class Backend:
    """What a call knows a backend by."""

    def __init__(self):
        self.forward_metadata = object()


def tables(slots, device):
    indices = torch.tensor(slots, dtype=torch.int32, device=device)
    return ActiveSlots.ragged(indices, torch.tensor([0, len(slots)], dtype=torch.int32, device=device))


def call(backend, layer, active, /, **changed):
    facts = {
        "backend": backend,
        "layer": SimpleNamespace(layer_id=layer),
        "reads": SimpleNamespace(tables=[active]),
        "kind": "decode",
        "lane": "shared",
        "generation": 1,
        "is_capturing": False,
        "lasts": True,
        "scratch": SCRATCH,
        "pending": None,
        "is_direct": False,
        "kept": {},
        "settle": lambda: None,
    }
    return SimpleNamespace(**(facts | changed))


SCRATCH = Scratch()


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    monkeypatch.setattr(casts, "INTERPRET", True)


@pytest.mark.parametrize(
    "changed",
    [
        {"generation": 2},
        {"is_capturing": True},
        {"layer": SimpleNamespace(layer_id=1)},
        {"kind": "extend"},
        {"lane": "decode"},
        {"backend": Backend()},
        {"reads": SimpleNamespace(tables=[tables([1, 2, 3], "cpu")])},
    ],
    ids=lambda c: next(iter(c)),
)
def test_what_begins_another_pass(changed):
    passes, backend, active = Passes(), Backend(), tables([1, 2, 3], "cpu")
    assert [passes.of(call(backend, n, active)).layers for n in (0, 1)] == [1, 2]
    its = passes.of(call(backend, 2, active, **changed))
    assert its.layers == 1
    passes.of(call(backend, 3, active))
    backend.forward_metadata = object()
    assert passes.of(call(backend, 4, active)).layers == 1, "new metadata"


def test_layers_that_a_pipeline_or_a_hybrid_model_leaves_out_do_not_matter():
    passes, backend, active = Passes(), Backend(), tables([1], "cpu")
    assert [passes.of(call(backend, n, active)).layers for n in (40, 44, 45)] == [1, 2, 3]
    assert passes.of(call(backend, 40, active)).layers == 1


def check(strategy, its, device):
    rows = random_pool(SLOTS, WIDTH, torch.float8_e4m3fn, seed=its.layer.layer_id, device=device)
    SCRATCH.lasting.clear()
    wide = strategy.cast(its, rows, torch.bfloat16)
    at = its.reads.tables[0].distinct(SLOTS)
    assert torch.equal(bits(wide)[at], stock_bits(rows, torch.bfloat16)[at])
    others = torch.ones(SLOTS, dtype=torch.bool, device=device)
    others[at] = False
    assert not bits(wide)[others].any()


def test_every_layer_of_every_pass_gets_its_own_slots(device):
    """The tables are refilled in place between passes, as a replay's are; two backends take turns."""
    strategy, one, other = Shadow(), Backend(), Backend()
    mine, theirs = tables([3, 5, 5, 9, -1], device), tables([0, 1, 30], device)
    for generation in range(3):
        mine.table.copy_(torch.tensor([3 + generation, 5, 5, 9 + generation, -1]))
        theirs.table.add_(1)
        for layer in range(4):
            check(strategy, call(one, layer, mine, generation=generation), device)
            check(strategy, call(other, layer, theirs, generation=generation), device)


def test_passes_of_any_length_follow_each_other(device, monkeypatch):
    """A draft's single layer, then all: no pass casts what the one before it read. One list a pass."""
    built = []
    listed = casts.slot_list
    monkeypatch.setattr(casts, "slot_list", lambda *a: built.append(1) or listed(*a))
    strategy, backend, active = Shadow(), Backend(), tables([3, 5], device)
    for generation, (layers, lists) in enumerate([(3, 1), (4, 1), (1, 1), (1, 0), (1, 0), (3, 1), (2, 1)]):
        built.clear()
        active.table.add_(1)
        for layer in range(layers):
            check(strategy, call(backend, layer, active, generation=generation), device)
        assert len(built) == lists


def test_a_pass_whose_list_was_interrupted_reads_no_other_s(device, monkeypatch):
    listed, turns = casts.slot_list, iter((False, True, False))

    def interrupted(*of):
        if next(turns):
            raise KeyboardInterrupt
        return listed(*of)

    monkeypatch.setattr(casts, "slot_list", interrupted)
    strategy, backend, active = Shadow(), Backend(), tables([3, 5], device)
    for layer in range(3):
        check(strategy, call(backend, layer, active), device)
    active.table.add_(1)
    with pytest.raises(KeyboardInterrupt):
        check(strategy, call(backend, 0, active, generation=2), device)
    for layer in (1, 2):
        check(strategy, call(backend, layer, active, generation=2), device)


def test_tables_that_cannot_be_listed_are_cast_as_they_are(device, monkeypatch):
    monkeypatch.setattr(casts, "slot_list", lambda *_: None)
    strategy, backend, active = Shadow(), Backend(), tables([4, 4, 6], device)
    for layer in range(3):
        check(strategy, call(backend, layer, active), device)


@pytest.mark.parametrize("is_warm", [True, False])
def test_one_list_serves_all_captured_passes(is_warm, device):
    """Each batch size is captured once; a list a graph would cost megabytes each. One that was made inside a
    capture is zeroed by that graph's replays alone: no other pass takes it over.
    """
    strategy, backend = Shadow(), Backend()
    for size in (0, 1, 2, 3) if is_warm else (1, 2, 3):
        active = tables(list(range(size)), device)
        for layer in range(3):
            check(strategy, call(backend, layer, active, is_capturing=size > 0, generation=size), device)
    lists = {found.seen.data_ptr() for found in strategy._captured}
    assert len(strategy._captured) == len(lists) == (1 if is_warm else 3)


def test_only_a_layer_behind_the_one_that_made_the_list_reads_it_early(device, monkeypatch):
    """Early, a launch may run beside the kernel before it, which there is the list's own."""
    early, write = [], casts.write_shadow

    def noted(*args, **kwargs):
        early.append(kwargs["early"])
        return write(*args, **kwargs)

    monkeypatch.setattr(casts, "write_shadow", noted)
    strategy, backend, active = Shadow(), Backend(), tables([3, 5, 9], device)
    loc, fp8 = torch.tensor([5], device=device), torch.float8_e4m3fn
    for generation in range(2):
        for layer in range(4):
            rows = random_pool(SLOTS, WIDTH, fp8, seed=layer, device=device)
            new = torch.ones(1, WIDTH, dtype=torch.bfloat16, device=device)
            pending = NewRows(rows.view(torch.uint8), loc, new[:, :24], new[:, 24:], fp8)
            its = call(backend, layer, active, generation=generation, pending=pending)
            its.settle = lambda its=its: its.pending and its.pending.write()
            wide = strategy.cast(its, rows, torch.bfloat16)
            assert torch.equal(bits(wide)[[3, 5, 9]], stock_bits(rows, torch.bfloat16)[[3, 5, 9]])
    # The very first pass learns at its second layer that there are several.
    assert early == [False, True, True, False, True, True, True]


@pytest.mark.parametrize("waits", [False, True], ids=["written before", "with new rows"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_graphs_off_what_attention_may_load_and_mask_is_zero(waits, page_size, device, monkeypatch):
    """Slot 0 and the tail of a last page; the memory that a call is given holds anything, NaN too."""

    def anything(self, device, lane, rows, width, dtype, *, lasts):
        return torch.full((rows, 1, width), float("nan"), dtype=dtype, device=device)

    monkeypatch.setattr(Scratch, "rows", anything)
    fp8 = torch.float8_e4m3fn
    rows = random_pool(SLOTS, WIDTH, fp8, seed=1, device=device)
    ints = {"dtype": torch.int32, "device": device}
    lengths = torch.tensor([3], **ints)
    active = tables([4, 5, 6], device)
    if page_size > 1:
        active = ActiveSlots.paged(torch.tensor([[1]], **ints), lengths, page_size)
    its = call(Backend(), 0, active, lasts=False, is_direct=True)
    its.settle = lambda clear: False
    if waits:
        new = torch.ones(1, WIDTH, dtype=torch.bfloat16, device=device)
        loc = torch.tensor([5], device=device)
        given = NewRows(rows.view(torch.uint8), loc, new[:, :24], new[:, 24:], fp8)
        its.settle = lambda clear: given.write(clear) or True
    wide = Shadow().cast(its, rows, torch.bfloat16)
    assert torch.equal(bits(wide)[4:7], stock_bits(rows, torch.bfloat16)[4:7])
    zeroed = [0, 7] if page_size > 1 else [0]
    assert not bits(wide)[zeroed].any()
    others = [s for s in range(SLOTS) if s not in (*zeroed, 4, 5, 6)]
    assert wide[others].isnan().all()


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("again", [True, False], ids=["laid out alike", "otherwise"])
def test_graphs_off_a_layer_s_launches_are_the_last_one_s(again, page_size, device, monkeypatch):
    """What they leave out, the tails of last pages, is zeroed before; a layer laid out otherwise is noted."""
    told = []
    layers = SimpleNamespace(
        again=lambda *given: told.append(("again", len(given))) or again,
        note=lambda *given: told.append(("note", len(given))),
        tickets=PassTickets(),
    )
    monkeypatch.setattr(casts, "clear_tails", lambda out, active: told.append(("tails", active.page_size)))
    rows = random_pool(SLOTS, WIDTH, torch.float8_e4m3fn, seed=1, device=device)
    new = torch.ones(1, WIDTH, dtype=torch.bfloat16, device=device)
    loc = torch.tensor([5], device=device)
    given = NewRows(rows.view(torch.uint8), loc, new[:, :24], new[:, 24:], rows.dtype)
    ints = {"dtype": torch.int32, "device": device}
    active = tables([4, 5], device)
    if page_size > 1:
        active = ActiveSlots.paged(torch.tensor([[1]], **ints), torch.tensor([2], **ints), page_size)
    its = call(
        Backend(), 0, active, lasts=False, is_direct=True, pending=given, kept={"write and cast": layers}
    )
    its.settle = lambda clear: told.append(("settle",)) or given.write(clear) or True
    wide = Shadow().cast(its, rows, torch.bfloat16)
    tails = [("tails", page_size)] if page_size > 1 else []
    if again:
        assert told == [*tails, ("again", 4)]
        assert its.pending is None
        assert its.is_apart
    else:
        assert told == [*tails, ("again", 4), ("settle",), *tails, ("note", 4)]
        assert torch.equal(bits(wide)[4:6], stock_bits(rows, torch.bfloat16)[4:6])


def test_graphs_off_counters_that_a_cast_left_behind_end_with_its_pass(device, monkeypatch):
    """Bounds that change during a cast leave them counting: that pass leaves tiles out, the next begins anew,
    and nothing is kept between.
    """
    monkeypatch.setattr(tickets, "_tickets", {})
    slots = most_undrawn(WIDTH, device) * 11 // 8
    rows = random_pool(slots, WIDTH, torch.float8_e4m3fn, seed=1, device=device)
    active = tables(range(1, slots), device)
    stock = stock_bits(rows, torch.bfloat16)

    def wide(kept):
        its = call(Backend(), 0, active, lasts=False, is_direct=True, kept=kept)
        its.settle = lambda clear: False
        its.scratch = SimpleNamespace(
            rows=lambda *shape, lasts: torch.zeros(slots, 1, WIDTH, dtype=torch.bfloat16, device=device)
        )
        return bits(Shadow().cast(its, rows, torch.bfloat16))

    kept = {}
    for _ in range(2):
        assert torch.equal(wide(kept)[1:], stock[1:])
    (counters,) = kept["write and cast"].tickets._of.values()
    assert not counters.any()
    counters[0] = 3
    assert not torch.equal(wide(kept)[1:], stock[1:])
    gone = weakref.ref(counters)
    del counters
    kept.clear()
    assert gone() is None
    assert torch.equal(wide(kept)[1:], stock[1:])
    assert not tickets._tickets
