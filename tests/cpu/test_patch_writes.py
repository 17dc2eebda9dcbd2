"""A call writes its new rows before it casts: what waits for the cast is there whenever anybody reads."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from kvlab.kernels.active import ActiveSlots
from kvlab.kernels.reference import mla_attention
from kvlab.patch import casts, write
from kvlab.patch.policy import Facts
from kvlab.patch.runtime import Runtime, Step
from kvlab.patch.scratch import Scratch
from kvlab.patch.sites import RECOGNISED, Site
from kvlab.patch.trust import Trust

RANK, ROPE, HEADS, SLOTS = 32, 16, 2, 96
WIDTH = RANK + ROPE
FP8 = torch.float8_e4m3fn
SITE = Site("flashinfer_mla", "decode", "here", "Backend", RECOGNISED, holder="self")


class Pool:
    """SGLang's MLATokenToKVPool in a few lines; `wrote` counts its own writes."""

    def __init__(self, layers=3, dtype=FP8, device="cpu"):
        generator = torch.Generator().manual_seed(0)
        shape = SLOTS, 1, WIDTH
        codes = (torch.randint(0, 0x48, shape, generator=generator, dtype=torch.int32) for _ in range(layers))
        self.kv_buffer = [c.to(device, torch.uint8) for c in codes]
        self.dtype, self.store_dtype, self.start_layer, self.wrote = dtype, torch.uint8, 0, 0

    def get_key_buffer(self, layer_id):
        return self.kv_buffer[layer_id].view(self.dtype)

    def set_mla_kv_buffer(self, layer, loc, nope, rope):
        self.wrote += 1
        row = torch.cat([nope, rope], -1).to(self.dtype).view(torch.uint8)
        self.kv_buffer[layer.layer_id][loc] = row.view(-1, 1, WIDTH)


class Backend:
    """`between`: what its method does with its pool between write and cast; `reads`: the layer it casts;
    `writes`: where a layer writes of a step's slots, None: nothing.
    """

    def __init__(self, pool, slots=(3, 9, 4)):
        self.token_to_kv_pool = pool
        ints = {"dtype": torch.int32, "device": pool.kv_buffer[0].device}
        self.kv_indptr = torch.tensor([0, len(slots)], **ints)
        self.between, self.reads = lambda pool: None, lambda layer: layer.layer_id
        self.writes = lambda layer, loc: loc
        wrapper = SimpleNamespace(
            _kv_indices_buf=torch.tensor(slots, **ints),
            _kv_indptr_buf=self.kv_indptr,
            _use_cuda_graph=False,
        )
        self.forward_metadata = SimpleNamespace(decode_wrapper=wrapper)

    def forward_decode(self, q, k, v, layer, forward_batch):
        pool = self.token_to_kv_pool
        loc = self.writes(layer, forward_batch.loc)
        if loc is not None:
            pool.set_mla_kv_buffer(layer, loc, k, v)
        self.between(pool)
        rows = pool.get_key_buffer(self.reads(layer)).to(q.dtype)
        # Attention may load slot 0 and mask it: a NaN there would go through.
        assert rows[0].isfinite().all()
        its = self.forward_metadata.decode_wrapper
        active = ActiveSlots.ragged(its._kv_indices_buf, self.kv_indptr)
        return mla_attention(q[..., :RANK], q[..., RANK:], rows, active, sm_scale=1.0)[0]


@pytest.fixture(autouse=True)
def _release(monkeypatch):
    module = ModuleType("sglang.srt.mem_cache.memory_pool")
    module.MLATokenToKVPool = Pool
    monkeypatch.setitem(sys.modules, module.__name__, module)
    rows = Scratch.rows

    def dirty(self, *args, lasts):
        out = rows(self, *args, lasts=lasts)
        return out if lasts else out.fill_(torch.nan)

    monkeypatch.setattr(Scratch, "rows", dirty)


def layer(n):
    return SimpleNamespace(
        layer_id=n, tp_q_head_num=HEADS, head_dim=WIDTH, v_head_dim=RANK, scaling=1.0, logit_cap=0.0
    )


def both(
    strategy="shadow",
    *,
    change=lambda backend: None,
    prepare=lambda *of: None,
    tokens=3,
    loc=(4,),
    device="cpu",
):
    """Two steps of three layers, stock's and patched: the same outputs and pool bytes after each call.

    Returns the counters and both pools.
    """
    pools = Pool(device=device), Pool(device=device)
    runtime = Runtime(strategy, is_strict=False, version=None)
    backends = [Backend(pool) for pool in pools]
    for backend in backends:
        change(backend)
    prepare(runtime, backends[1])
    for step in range(2):
        runtime.metadata_ready("flashinfer_mla", backends[1], Step("DECODE", 1))
        slots = torch.tensor(loc, dtype=torch.int64, device=device)
        batch = SimpleNamespace(loc=slots, seq_lens_sum=tokens)
        for n in range(3):
            generator = torch.Generator().manual_seed(10 * step + n)
            q = torch.randn(1, HEADS, WIDTH, generator=generator).bfloat16().to(device)
            new = torch.randn(len(loc), 1, WIDTH, generator=generator).bfloat16().to(device) * 3
            call = q, new[..., :RANK], new[..., RANK:], layer(n), batch
            want = Backend.forward_decode(backends[0], *call)
            got = runtime.call(SITE, Backend.forward_decode, backends[1], *call)
            assert torch.equal(got, want)
            # Slot 0 takes what several padded rows write: any of them.
            for one, other in zip(*(pool.kv_buffer for pool in pools), strict=True):
                assert torch.equal(one[1:], other[1:])
    return SimpleNamespace(**runtime.counters.as_dict(), pools=pools)


@pytest.fixture
def kernels(device, monkeypatch):
    """Where the kernels run; what they are checked for before they serve is checked elsewhere."""
    monkeypatch.setattr(casts, "INTERPRET", True)
    for check in ("check_write", "check"):
        monkeypatch.setattr(f"kvlab.patch.selfcheck.{check}", lambda *facts: None)
    return device


def with_graphs(runtime, backend):
    runtime.graphs_ready("flashinfer_mla", backend)


MANY = tuple(range(1, 66))


@pytest.mark.parametrize("loc", [(), (4,), (0, 0, 4), (3, 9, 4, 70), MANY])
@pytest.mark.parametrize(("tokens", "graphs"), [(3, False), (None, False), (SLOTS + 1, False), (3, True)])
def test_new_rows_are_read_by_their_own_layer(loc, tokens, graphs, kernels):
    """In one launch with the cast where there is a list and they are few, else in one before it."""
    prepare = with_graphs if graphs else lambda *of: None
    its = both(tokens=tokens, loc=loc, prepare=prepare, device=kernels)
    assert its.fallbacks == {}
    is_joint = 0 < len(loc) <= 64 and (graphs or tokens != 3)
    assert its.kv_writes == ({"one launch": 1, "with the cast": 5} if is_joint else {"one launch": 6})


@pytest.mark.parametrize("last", [None, (9,), (4,)], ids=["nothing", "another slot", "a copy"])
def test_a_layer_that_writes_otherwise_than_the_first_reads_all_its_rows(last, kernels):
    """The list leaves out what the first layers write: that is cast too where a layer does not write it."""
    other = None if last is None else torch.tensor(last, dtype=torch.int64, device=kernels)
    its = both(
        change=lambda backend: setattr(
            backend, "writes", lambda layer, loc: other if layer.layer_id == 2 else loc
        ),
        prepare=with_graphs,
        device=kernels,
    )
    assert its.calls == {"flashinfer_mla.decode": {"shadow": 6}}
    assert its.fallbacks == {}


def test_what_failed_its_check_stays_two_launches(kernels, monkeypatch):
    monkeypatch.setattr(Trust, "joint_refusal", lambda self, facts: "wrong here")
    assert both(prepare=with_graphs, device=kernels).kv_writes == {"one launch": 6}


@pytest.mark.parametrize("graphs", [False, True])
def test_a_cast_of_another_layer_finds_the_rows_of_this_one_written(graphs, kernels):
    its = both(
        change=lambda backend: setattr(backend, "reads", lambda its: 0),
        prepare=with_graphs if graphs else lambda *of: None,
        device=kernels,
    )
    # The first layer's own cast still writes them, where a list is made.
    assert its.kv_writes == ({"one launch": 5, "with the cast": 1} if graphs else {"one launch": 6})


@pytest.mark.parametrize("captures", [False, True])
def test_a_captured_layer_lasts_also_where_nobody_said_that_there_are_graphs(captures, monkeypatch):
    kept = []

    def prepare(runtime, backend):
        runtime.choice(runtime.state("flashinfer_mla", backend), facts())
        monkeypatch.setattr("kvlab.patch.calls.is_capturing", lambda device: captures)
        kept.append(runtime.scratch)

    both(prepare=prepare)
    assert bool(kept[0].nbytes()) == captures


def test_prefill_and_decode_at_once_have_a_layer_each():
    kept = []

    def prepare(runtime, backend):
        with_graphs(runtime, backend)
        runtime.state("flashinfer_mla", backend).server_args = SimpleNamespace(enable_pdmux=True)
        kept.append(runtime.scratch)

    both(prepare=prepare)
    assert kept[0].as_dict()["lanes"] == ["decode"]


def seen(what):
    """Each layer's look at the first one's rows; in its own it is they that wait."""
    return lambda pool: setattr(pool, "seen", [*getattr(pool, "seen", ()), what(pool)])


BETWEEN = {
    "the bytes": (seen(lambda pool: pool.kv_buffer[0].clone()), 6),
    "the rows": (seen(lambda pool: pool.get_key_buffer(0).float()), 6),
    "a part of them": (seen(lambda pool: pool.get_key_buffer(0)[4].float()), 6),
    "written again": (lambda pool: pool.set_mla_kv_buffer(layer(0), torch.tensor([4]), *rows(7)), 12),
    "another layer's": (lambda pool: pool.set_mla_kv_buffer(layer(2), torch.tensor([9]), *rows(8)), 12),
}


def rows(seed):
    new = torch.randn(1, 1, WIDTH, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return new[..., :RANK], new[..., RANK:]


@pytest.mark.parametrize(("between", "writes"), BETWEEN.values(), ids=BETWEEN)
def test_who_reads_or_writes_between_write_and_cast_finds_them_written(between, writes):
    its = both(change=lambda backend: setattr(backend, "between", between))
    assert its.kv_writes == {"one launch": writes}
    want, got = (getattr(pool, "seen", []) for pool in its.pools)
    assert len(want) == len(got)
    assert all(map(torch.equal, want, got))


def test_a_method_that_never_casts_has_written():
    def nothing(pool):
        raise KeyError("attention failed")

    pool = Pool()
    backend, runtime = Backend(pool), Runtime("shadow", is_strict=False, version=None)
    backend.between = nothing
    want = Pool()
    want.set_mla_kv_buffer(layer(1), torch.tensor([4]), *rows(1))
    batch = SimpleNamespace(loc=torch.tensor([4]), seq_lens_sum=3)
    q = torch.zeros(1, HEADS, WIDTH).bfloat16()
    with pytest.raises(KeyError):
        runtime.call(SITE, Backend.forward_decode, backend, q, *rows(1), layer(1), batch)
    assert all(map(torch.equal, pool.kv_buffer, want.kv_buffer))
    assert runtime.counters.writes == {"one launch": 1}


@pytest.mark.parametrize("cause", ["the cast fails", "the write fails"])
def test_a_failure_loses_no_row(cause, monkeypatch):
    def fail(*args):
        raise RuntimeError("no launch")

    def prepare(runtime, backend):
        owner, name = (casts, "shadow") if cause == "the cast fails" else (write, "quantise")
        state = runtime.state("flashinfer_mla", backend)
        runtime.choice(state, facts())
        assert runtime.trust.write_refusal(backend.token_to_kv_pool, facts(), state.write_refusal) is None
        monkeypatch.setattr(owner, name, fail)

    its = both(prepare=prepare)
    if cause == "the cast fails":
        assert its.fallbacks == {"shadow failed": 1}
        assert its.kv_writes == {"one launch": 6}
    else:
        assert its.fallbacks == {}
        assert its.kv_writes == {"stock": 6}


def facts():
    return Facts("decode", torch.device("cpu"), SLOTS, WIDTH, FP8, torch.bfloat16, HEADS, RANK)


def test_a_pool_at_the_place_of_one_that_is_gone_is_asked_for_itself(monkeypatch):
    """Python gives an address again: what was found of the first pool is nothing to go by."""

    class Own(Pool):
        def set_mla_kv_buffer(self, layer, loc, nope, rope):
            super().set_mla_kv_buffer(layer, loc + 1, nope, rope)

    monkeypatch.setattr("kvlab.patch.trust.id", lambda pool: 7, raising=False)
    monkeypatch.setattr("kvlab.patch.attempt.id", lambda pool: 7, raising=False)
    pools, runtime = [], Runtime("shadow", is_strict=False, version=None)
    backend = Backend(Pool())
    batch = SimpleNamespace(loc=torch.tensor([4]), seq_lens_sum=3)
    q = torch.zeros(1, HEADS, WIDTH).bfloat16()
    for pool in (backend.token_to_kv_pool, Own()):
        backend.token_to_kv_pool = pool
        runtime.call(SITE, Backend.forward_decode, backend, q, *rows(1), layer(1), batch)
        pools.append(pool.wrote)
    assert pools == [0, 1]
    assert runtime.counters.writes == {"one launch": 1, "stock": 1}


def test_stock_writes_where_stock_is_asked_for_and_where_the_whole_server_is_left_to_it(monkeypatch):
    assert both("stock").kv_writes == {"stock": 6}
    monkeypatch.setenv("SGLANG_ENABLE_OVERLAP_PLAN_STREAM", "1")
    its = both()
    assert its.kv_writes == {"stock": 6}
    assert its.fallbacks == {"plans on a stream of their own, graphs off": 6}


def test_a_layer_that_is_not_served_says_so_where_it_casts():
    pool = Pool()
    backend, runtime = Backend(pool), Runtime("shadow", is_strict=False, version=None)
    pool.kv_buffer.insert(0, torch.zeros(SLOTS, 1, WIDTH + 16, dtype=torch.uint8))
    batch = SimpleNamespace(loc=torch.tensor([4]), seq_lens_sum=3)
    q = torch.zeros(1, HEADS, WIDTH).bfloat16()
    runtime.call(SITE, Backend.forward_decode, backend, q, *rows(1), layer(1), batch)
    assert runtime.counters.fallbacks == {
        f"rows of {WIDTH + 16}, head_dim {WIDTH}, torch.bfloat16 queries": 1
    }
    assert runtime.counters.as_dict()["calls"] == {"flashinfer_mla.decode": {"stock": 1}}


def test_a_layer_of_another_size_than_the_first_is_left_to_stock():
    def change(backend):
        its = backend.token_to_kv_pool
        its.kv_buffer[2] = its.kv_buffer[2][: SLOTS - 7].clone()

    its = both(change=change)
    assert its.fallbacks == {"a buffer that is not the pool's layer": 2}
    assert its.kv_writes == {"one launch": 6}
