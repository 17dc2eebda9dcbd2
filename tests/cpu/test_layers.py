"""The two launches of a layer, made again for the next one: the very arguments that each alone would get."""

from types import SimpleNamespace

import pytest
import torch

from kvlab.kernels import cast, direct, kv_write, tickets
from kvlab.kernels.active import ActiveSlots
from kvlab.kernels.direct import Direct
from kvlab.kernels.layers import WriteAndCast
from kvlab.patch.write import new_rows

SLOTS, RANK, ROPE = 24, 32, 16
WIDTH = RANK + ROPE
E4M3 = torch.float8_e4m3fn


@pytest.fixture
def launched(monkeypatch):
    """Every launch: (kernel's name, "compiled") of Triton's own, (name, grid, arguments) of a direct one."""
    told = []

    def pretend(kernel):
        name = kernel.fn.__name__

        def run(x, y, z, stream, function, packed, metadata, enter, leave, *args):
            assert (y, z, function, packed) == (1, 1, name, "packed")
            assert stream in (7, 8)
            assert metadata is enter is leave is None
            told.append((name, x, args))

        compiled = SimpleNamespace(run=run, function=name, packed_metadata="packed")

        class Pretended:
            arg_names = kernel.arg_names

            def __getitem__(self, grid):
                return lambda *args, **constants: told.append((name, "compiled")) or compiled

        return Direct(Pretended())

    monkeypatch.setattr(direct, "is_known", lambda: True)
    monkeypatch.setattr(direct, "current_stream", lambda device: 7)
    monkeypatch.setattr("kvlab.kernels.layers.current_stream", lambda device: 7)
    monkeypatch.setattr(kv_write, "_launch", pretend(kv_write.kvlab_kv_write))
    monkeypatch.setattr(cast, "_cast", pretend(cast.kvlab_cast))
    return told


def tables(tokens=9):
    ints = {"dtype": torch.int32}
    return ActiveSlots.ragged(torch.zeros(tokens, **ints), torch.tensor([0, tokens], **ints))


def pages():
    return ActiveSlots.paged(torch.ones(2, 3, dtype=torch.int32), torch.tensor([5, 9], dtype=torch.int32), 4)


def layer(
    *, tokens=2, padding=0, loc=torch.int64, q=torch.bfloat16, fp8=E4M3, flat=False, wide=None, slots=SLOTS
):
    """A layer's own tensors: buffer, loc, nope, rope, rows and the wide layer."""
    buffer = torch.zeros(slots, 1, WIDTH + padding, dtype=torch.uint8)[..., :WIDTH]
    new = torch.zeros(tokens, WIDTH, dtype=q) if flat else torch.zeros(tokens, 1, WIDTH, dtype=q)
    rows = buffer.view(fp8)
    out = torch.zeros(slots, 1, WIDTH, dtype=wide or q)
    return buffer, torch.arange(tokens, dtype=loc), new[..., :RANK], new[..., RANK:], rows, out


def of(its):
    """New rows, raw ones and the wide layer, as `again` has them."""
    buffer, loc, nope, rope, rows, out = its
    pool = SimpleNamespace(kv_buffer=[buffer], start_layer=0, dtype=rows.dtype)
    # A width of its own that the pool has not is no write of ours.
    new = new_rows(pool, SimpleNamespace(layer_id=0), loc, nope, rope)
    return new or SimpleNamespace(layout=()), rows, out


def alone(its, active):
    """The two launches one by one, as a layer's own, then kept."""
    buffer, loc, nope, rope, rows, out = its
    kv_write.write(buffer, loc, nope, rope, rows.dtype, out)
    cast.shadow_cast(rows, out, active)


def noted(layers, its, active):
    alone(its, active)
    layers.note(*of(its), active)


@pytest.mark.parametrize("make", [tables, pages])
@pytest.mark.parametrize(
    "kind", [{}, {"padding": 16}, {"tokens": 3, "loc": torch.int32}, {"flat": True}], ids=str
)
def test_again_is_what_each_alone_is_launched_with(launched, make, kind):
    layers, active = WriteAndCast(), make()
    first, second = layer(**kind), layer(**kind)
    assert not layers.again(*of(first), active)
    noted(layers, first, active)
    assert [n for n, what, *_ in launched if what == "compiled"] == ["kvlab_kv_write", "kvlab_cast"]
    launched.clear()
    alone(second, active)
    want = list(launched)
    assert [n for n, *_ in want] == ["kvlab_kv_write", "kvlab_cast"]
    launched.clear()
    assert layers.again(*of(second), active)
    assert launched == want


OTHERS = {
    "more tokens": {"tokens": 3},
    "a padded pool": {"padding": 16},
    "a smaller pool": {"slots": 16},
    "int32 slots": {"loc": torch.int32},
    "another query dtype": {"q": torch.float16},
    "another query dtype alone": {"q": torch.float16, "wide": torch.bfloat16},
    "another FP8": {"fp8": torch.float8_e5m2},
    "another wide dtype": {"wide": torch.float16},
    "rows without a middle": {"flat": True},
}


ALONE = {
    "fewer slots": (1, lambda loc: loc[:1]),
    "nope of its own": (2, lambda t: t.contiguous()),
    "rope of its own": (3, lambda t: t.contiguous()),
    "nope of another width": (2, lambda t: t[..., :-2]),
    "rope of another width": (3, lambda t: t[..., :-2]),
    "fewer rows": (4, lambda t: t[:-1]),
    "a padded wide layer": (5, lambda t: torch.zeros(SLOTS, 1, WIDTH + 16, dtype=t.dtype)[..., :WIDTH]),
    "a longer wide layer": (5, lambda t: torch.zeros(SLOTS + 1, 1, WIDTH, dtype=t.dtype)),
}


@pytest.mark.parametrize(("at", "change"), ALONE.values(), ids=ALONE)
def test_nor_is_one_of_whose_tensors_one_alone_is_laid_out_otherwise(launched, at, change):
    layers, active = WriteAndCast(), tables()
    noted(layers, layer(), active)
    launched.clear()
    its = list(layer())
    its[at] = change(its[at])
    assert not layers.again(*of(its), active)
    assert launched == []


@pytest.mark.parametrize("kind", OTHERS.values(), ids=OTHERS)
def test_a_layer_laid_out_otherwise_is_not_launched_as_the_last_one(launched, kind):
    layers, active = WriteAndCast(), tables()
    noted(layers, layer(), active)
    launched.clear()
    assert not layers.again(*of(layer(**kind)), active)
    assert launched == []
    assert layers.again(*of(layer()), active)


def test_nor_are_other_tables_tensors_off_16_bytes_or_launches_that_somebody_watches(launched, monkeypatch):
    layers, active = WriteAndCast(), tables()
    noted(layers, layer(), active)
    launched.clear()
    assert not layers.again(*of(layer()), tables()), "equal tables elsewhere"
    its = list(layer())
    for at, shape in ((0, (SLOTS, 1, WIDTH)), (1, (2,))):
        apart = torch.zeros(torch.Size(shape).numel() + 1, dtype=its[at].dtype)[1:].view(shape)
        assert not layers.again(*of([*its[:at], apart, *its[at + 1 :]]), active)
    assert launched == []
    monkeypatch.setattr(direct.knobs.runtime, "launch_enter_hook", print)
    assert not layers.again(*of(layer()), active)
    assert launched == []


def test_casts_of_two_streams_draw_from_counters_of_their_own(launched, monkeypatch):
    """Where tiles may be drawn. They are this step's: another begins with others, zero."""
    seen = []
    for active in (tables(400), tables(400)):
        layers = WriteAndCast()
        noted(layers, layer(), active)
        counters = {stream: torch.zeros(4, dtype=torch.int32) for stream in (7, 8)}
        for stream in (7, 8, 7):
            monkeypatch.setattr("kvlab.kernels.layers.current_stream", lambda device, stream=stream: stream)
            monkeypatch.setattr(layers, "tickets", lambda wide, its=counters[stream]: its)
            assert layers.again(*of(layer()), active)
            assert launched[-1][2][5] == counters[stream].data_ptr()
        seen += counters.values()
    assert len({t.data_ptr() for t in seen}) == 4


def test_where_no_tile_can_be_drawn_nothing_is_kept_for_it(launched):
    """The launch gets the bounds in the counters' place, and leaves them alone (test_cast)."""
    layers, active = WriteAndCast(), tables(300)
    noted(layers, layer(), active)
    assert layers.again(*of(layer()), active)
    assert launched[-1][2][5] == active.bounds.data_ptr()
    assert not layers.tickets._of
    assert not tickets._tickets


@pytest.fixture(autouse=True)
def nobody_s(monkeypatch):
    monkeypatch.setattr(tickets, "_tickets", {})


def test_tables_that_were_resized_in_place_are_others(launched):
    layers, active = WriteAndCast(), tables()
    noted(layers, layer(), active)
    for t in (active.table, active.bounds):
        size = t.numel()
        t.resize_(size - 1)
        assert not layers.again(*of(layer()), active)
        t.resize_(size)
    assert layers.again(*of(layer()), active)


def test_what_was_not_kept_is_not_made_again(launched):
    """Another release of Triton, or no new row: the usual way for every layer."""
    layers, active = WriteAndCast(), tables()
    its = layer()
    layers.note(*of(its), active)
    assert not layers.again(*of(its), active)
    noted(layers, layer(), active)
    # A cast that was not launched: no request.
    nobody = ActiveSlots.paged(torch.ones(0, 3, dtype=torch.int32), torch.ones(0, dtype=torch.int32), 4)
    noted(layers, layer(), nobody)
    assert not layers.again(*of(layer()), nobody)
    assert not layers.again(*of(layer()), active)
    noted(layers, layer(tokens=0), active)
    assert not layers.again(*of(layer(tokens=0)), active)
