"""One call through the seam, on a backend of a few lines: nothing of it outlives the call."""

import functools
import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from torch.utils._python_dispatch import TorchDispatchMode

from kvlab.kernels.active import ActiveSlots
from kvlab.kernels.checks import FP8_DTYPES
from kvlab.kernels.reference import mla_attention
from kvlab.patch import casts, strategies
from kvlab.patch.reads import ADAPTERS, Reads
from kvlab.patch.runtime import Runtime, Step
from kvlab.patch.sites import RECOGNISED, Site
from kvlab.patch.standing import standing
from kvlab.pool import LatentPool

RANK, ROPE, HEADS = 32, 16, 2
SITE = Site("flashinfer_mla", "decode", "here", "Backend", RECOGNISED, holder="self")
LAYER = SimpleNamespace(
    layer_id=0, tp_q_head_num=HEADS, head_dim=RANK + ROPE, v_head_dim=RANK, scaling=1.0, logit_cap=0.0
)


def filled(pool, seed=0):
    """Random codes in every layer, none of them NaN."""
    generator = torch.Generator().manual_seed(seed)
    for buffer in pool.kv_buffer:
        codes = torch.randint(0, 0x48, buffer.shape, generator=generator, dtype=torch.int32)
        sign = torch.randint(0, 2, buffer.shape, generator=generator, dtype=torch.int32) * 0x80
        buffer.copy_((codes | sign).to(torch.uint8))
    return pool


class Backend:
    """What the seam meets: a pool, the step's metadata, and the cast."""

    def __init__(self):
        self.token_to_kv_pool = LatentPool(5_000, kv_lora_rank=RANK, qk_rope_head_dim=ROPE)
        self.kv_indptr = torch.tensor([0, 7], dtype=torch.int32)
        wrapper = SimpleNamespace(
            _kv_indices_buf=torch.arange(3, 10, dtype=torch.int32),
            _kv_indptr_buf=self.kv_indptr,
            _use_cuda_graph=False,
        )
        self.forward_metadata = SimpleNamespace(decode_wrapper=wrapper)

    def forward_decode(self, q, k, v, layer, forward_batch):
        rows = self.token_to_kv_pool.get_key_buffer(layer.layer_id).to(q.dtype)
        active = ActiveSlots.ragged(self.forward_metadata.decode_wrapper._kv_indices_buf, self.kv_indptr)
        return mla_attention(q[..., :RANK], q[..., RANK:], rows, active, sm_scale=layer.scaling)[0]


@pytest.mark.parametrize("strategy", ["stock", "shadow", "gather"])
def test_a_call_leaves_nothing_to_the_garbage_collector(strategy):
    backend, runtime = Backend(), Runtime(strategy, is_strict=False, version=None)

    def one_call():
        q = torch.ones(1, HEADS, RANK + ROPE, dtype=torch.bfloat16)
        batch = SimpleNamespace(seq_lens_sum=7)
        runtime.call(SITE, Backend.forward_decode, backend, q, None, None, LAYER, batch)
        return weakref.ref(q)

    one_call()
    gc.collect()
    gc.disable()
    try:
        q = one_call()
        assert q() is None
    finally:
        gc.enable()
    assert runtime.counters.as_dict()["calls"] == {"flashinfer_mla.decode": {strategy: 2}}


class Watched(TorchDispatchMode):
    """What of `held` is alive at each of stock's casts of a whole layer."""

    def __init__(self, held):
        super().__init__()
        self.held, self.seen = held, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and args[0].dtype in FP8_DTYPES:
            self.seen.append([h() is not None for h in self.held])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("strategy", ["shadow", "gather", "fused"])
def test_what_a_failed_strategy_had_allocated_is_gone_when_stock_casts(strategy, monkeypatch):
    """Two wide layers at once are memory that a full device has not: the request would be lost."""
    held = []

    def fails(*args, **kwargs):
        memory = torch.empty(8)
        held.append(weakref.ref(memory))
        raise RuntimeError("no launch")

    backend, runtime = Backend(), Runtime(strategy, is_strict=False, version=None)
    q = torch.ones(1, HEADS, RANK + ROPE, dtype=torch.bfloat16)
    call = functools.partial(
        runtime.call, SITE, Backend.forward_decode, backend, q, None, None, LAYER, SimpleNamespace()
    )
    call()
    owner, name = (strategies.fused, "attend") if strategy == "fused" else (casts, strategy)
    monkeypatch.setattr(owner, name, fails)
    with Watched(held) as watched:
        call()
    assert watched.seen[-1] == [False]
    assert runtime.counters.fallbacks == {f"{strategy} failed": 1}


def one(backend, runtime, *, layer=LAYER, kind="decode", dtype=torch.bfloat16, tokens=7):
    """One patched call beside stock's: the same bits. What was decided for it."""
    site = replace(SITE, kind=kind)
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(1, layer.tp_q_head_num, layer.head_dim, generator=generator).to(dtype)
    batch = SimpleNamespace(seq_lens_sum=tokens)
    got = runtime.call(site, Backend.forward_decode, backend, q, None, None, layer, batch)
    assert torch.equal(got, Backend.forward_decode(backend, q, None, None, layer, batch))
    return runtime.states[backend].standing[kind]


def other_pool(backend, runtime):
    backend.token_to_kv_pool = filled(LatentPool(6_000, kv_lora_rank=RANK, qk_rope_head_dim=ROPE))
    return {}


def other_rows(backend, runtime):
    """The same pool, given other memory."""
    its = backend.token_to_kv_pool
    its.kv_buffer = [b.clone() for b in its.kv_buffer]
    return {}


def other_fp8(backend, runtime):
    backend.token_to_kv_pool.dtype = torch.float8_e5m2
    return {}


def graphs(backend, runtime):
    runtime.graphs_ready("flashinfer_mla", backend)
    return {}


def a_failure(backend, runtime):
    runtime.broke("fused", RuntimeError("x"))
    return {}


def new_metadata(backend, runtime):
    runtime.metadata_ready("flashinfer_mla", backend, Step("DECODE", 1))
    return {}


CHANGES = {
    "pool": other_pool,
    "rows": other_rows,
    "fp8": other_fp8,
    "graphs": graphs,
    "a failure": a_failure,
    "metadata": new_metadata,
    "q dtype": lambda *_: {"dtype": torch.float16},
    "kind": lambda *_: {"kind": "extend"},
    "heads": lambda *_: {"layer": SimpleNamespace(**{**vars(LAYER), "tp_q_head_num": 4})},
    "rank": lambda *_: {"layer": SimpleNamespace(**{**vars(LAYER), "v_head_dim": RANK - 1})},
    "head_dim": lambda *_: {"layer": SimpleNamespace(**{**vars(LAYER), "head_dim": RANK})},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_decision_stands_until_something_that_it_was_read_from_is_another(change, monkeypatch):
    backend, runtime = Backend(), Runtime("shadow", is_strict=False, version=None)
    its = backend.forward_metadata
    its.use_ragged, its.prefill_wrapper = False, its.decode_wrapper
    its.decode_wrapper._qo_indptr_buf = backend.kv_indptr
    filled(backend.token_to_kv_pool)
    first = one(backend, runtime)
    assert one(backend, runtime) is first
    changed = change(backend, runtime)
    if changed.get("layer", LAYER).head_dim != LAYER.head_dim:
        # A layer of other heads asks this pool for nothing: it is not served.
        monkeypatch.setattr(Backend, "forward_decode", lambda *a: torch.zeros(1))
    assert one(backend, runtime, **changed) is not first


def test_pages_of_another_size_are_another_decision():
    backend, runtime = Backend(), Runtime("shadow", is_strict=False, version=None)
    backend.page_size = 16
    state, q = runtime.state("fa3", backend), torch.zeros(1, HEADS, RANK + ROPE, dtype=torch.bfloat16)

    def decided():
        site = replace(SITE, family="fa3")
        return standing(runtime, state, site, backend, LAYER, q, backend.token_to_kv_pool)

    first = decided()
    assert decided() is first
    assert first.facts.page_size == 16
    backend.page_size = 32
    assert decided().facts.page_size == 32


def test_two_backends_of_one_pool_decide_each_for_itself():
    here, there = Backend(), Backend()
    there.token_to_kv_pool = filled(here.token_to_kv_pool)
    there.forward_metadata.decode_wrapper._kv_indices_buf = torch.arange(20, 27, dtype=torch.int32)
    runtime = Runtime("shadow", is_strict=False, version=None)
    decided = [one(b, runtime) for b in (here, there, here, there)]
    assert decided[0] is decided[2]
    assert decided[1] is decided[3]
    assert decided[0] is not decided[1]


@pytest.mark.parametrize(
    "tell",
    [
        lambda runtime, *of: runtime.metadata_ready(*of, Step("DECODE", 1)),
        lambda runtime, *of: runtime.replayed(*of, "DECODE", 1, None),
    ],
    ids=["made", "replayed"],
)
def test_what_is_kept_of_a_step_is_let_go_of_with_its_metadata(tell):
    """Only a weak hold on pool and rows; the tables of a step are not held into the next."""
    backend, runtime = Backend(), Runtime("shadow", is_strict=False, version=None)
    one(backend, runtime)
    gone = [weakref.ref(backend.token_to_kv_pool), weakref.ref(backend.token_to_kv_pool.kv_buffer[0])]
    gone.append(weakref.ref(backend.forward_metadata.decode_wrapper._kv_indices_buf))
    backend.forward_metadata, backend.token_to_kv_pool = SimpleNamespace(), None
    tell(runtime, "flashinfer_mla", backend)
    gc.collect()
    assert [g() for g in gone] == [None] * 3


@pytest.mark.parametrize("has_graphs", [False, True])
def test_graphs_off_a_pass_of_another_backend_finds_nothing_kept(has_graphs):
    """Prefill and decode may have a backend each."""
    here, there = Backend(), Backend()
    runtime = Runtime("shadow", is_strict=False, version=None)
    if has_graphs:
        for backend in (here, there):
            runtime.graphs_ready("flashinfer_mla", backend)
    first = one(here, runtime)
    one(there, runtime)
    runtime.metadata_ready("flashinfer_mla", there, Step("EXTEND", 1))
    assert (one(here, runtime) is first) == has_graphs


@pytest.mark.parametrize("which", ["_kv_indices_buf", "_kv_indptr_buf", "_qo_indptr_buf", "kv_indptr"])
def test_flashinfer_s_tables_are_the_last_call_s_only_where_the_tensors_are(which):
    backend = Backend()
    its = backend.forward_metadata.decode_wrapper
    backend.forward_metadata.prefill_wrapper = its
    its._qo_indptr_buf = torch.tensor([0, 1], dtype=torch.int32)
    its._use_cuda_graph = which == "kv_indptr"
    kind = "extend" if which == "_qo_indptr_buf" else "decode"
    reads = functools.partial(
        ADAPTERS["flashinfer_mla"].reads, backend, kind, LAYER, SimpleNamespace(attn_dcp_metadata=None)
    )
    last = reads()
    assert reads(last) is last
    nobody_s = Reads(last.tables)
    assert reads(nobody_s) is not nobody_s
    owner = backend if which == "kv_indptr" else its
    # Equal, and somewhere else: what the kernel will read is the other one.
    setattr(owner, which, getattr(owner, which).clone())
    fresh = reads(last)
    assert fresh is not last
    held = [fresh.tables[0].table, fresh.tables[0].bounds, fresh.q_indptr]
    assert any(t is not None and t.data_ptr() == getattr(owner, which).data_ptr() for t in held)
    assert reads(fresh) is fresh


@pytest.mark.parametrize("which", ["page_table", "cache_seqlens_int32", "cu_seqlens_q", "page_size", "topk"])
def test_fa3_s_tables_are_the_last_call_s_only_where_the_tensors_are(which):
    def ints(*values):
        return torch.tensor(values, dtype=torch.int32)

    def metadata():
        return SimpleNamespace(
            page_table=ints(1, 2)[None], cache_seqlens_int32=ints(2), cu_seqlens_q=ints(0, 1)
        )

    backend = SimpleNamespace(
        page_size=1, topk=1, forward_metadata=metadata(), forward_metadata_spec_decode_expand=metadata()
    )
    reads = functools.partial(
        ADAPTERS["fa3"].reads, backend, "decode", LAYER, SimpleNamespace(spec_info=object())
    )
    last = reads()
    assert reads(last) is last
    if which == "page_size":
        backend.page_size = 16
    elif which == "topk":
        backend.topk = 2
    else:
        setattr(backend.forward_metadata, which, getattr(backend.forward_metadata, which).clone())
    fresh = reads(last)
    assert fresh is not last
    assert (len(fresh.tables), fresh.is_cascade) == ((2, True) if which == "topk" else (1, False))
    if which == "cu_seqlens_q":
        assert fresh.q_indptr is backend.forward_metadata.cu_seqlens_q


@pytest.mark.parametrize(("tokens", "lists"), [(7, 0), (5_002, 1), (None, 1)])
def test_graphs_off_no_list_is_made_but_for_more_tokens_than_slots(tokens, lists, monkeypatch):
    """The list of a step's slots is memory that stock has not."""
    made = []
    monkeypatch.setattr(casts, "slot_list", lambda *a: made.append(1))
    backend, runtime = Backend(), Runtime("shadow", is_strict=False, version=None)
    backend.token_to_kv_pool = LatentPool(5_000, kv_lora_rank=RANK, qk_rope_head_dim=ROPE, layers=3)
    for n in range(3):
        one(backend, runtime, layer=SimpleNamespace(**{**vars(LAYER), "layer_id": n}), tokens=tokens)
    assert len(made) == lists


class Anything(RuleBasedStateMachine):
    """Steps of two backends in any order, with and without the hooks: stock's bits at every call."""

    def __init__(self):
        super().__init__()
        self.runtime = Runtime("shadow", is_strict=False, version=None)
        self.pools = [LatentPool(n, kv_lora_rank=RANK, qk_rope_head_dim=ROPE, layers=3) for n in (99, 60)]
        for seed, pool in enumerate(self.pools):
            filled(pool, seed)
        self.backends = [Backend(), Backend()]
        for backend in self.backends:
            backend.token_to_kv_pool = self.pools[0]
        self.which, self.layer = 0, 0

    @property
    def backend(self):
        return self.backends[self.which]

    @rule(which=st.integers(0, 1))
    def the_other_half_of_a_batch(self, which):
        self.which = which

    @rule(pool=st.integers(0, 1))
    def another_pool(self, pool):
        self.backend.token_to_kv_pool = self.pools[pool]

    @rule()
    def other_bytes(self):
        for pool in self.pools:
            for buffer in pool.kv_buffer:
                buffer.copy_(buffer.flip(0))

    @rule(slots=st.lists(st.integers(0, 59), max_size=9), in_place=st.booleans(), told=st.booleans())
    def another_step(self, slots, in_place, told):
        """Tables that are filled anew, or new ones; `told`: by a metadata hook."""
        backend = self.backend
        wrapper = backend.forward_metadata.decode_wrapper
        indices, indptr = (torch.tensor(v, dtype=torch.int32) for v in (slots, [0, len(slots)]))
        if in_place:
            room = min(len(slots), wrapper._kv_indices_buf.numel())
            wrapper._kv_indices_buf[:room] = indices[:room]
            wrapper._kv_indptr_buf[1] = room
        else:
            backend.forward_metadata = SimpleNamespace(
                decode_wrapper=SimpleNamespace(
                    _kv_indices_buf=indices, _kv_indptr_buf=indptr, _use_cuda_graph=False
                )
            )
            backend.kv_indptr = indptr
        if told:
            self.runtime.metadata_ready("flashinfer_mla", backend, Step("DECODE", 1))

    @rule()
    def graphs_on(self):
        self.runtime.graphs_ready("flashinfer_mla", self.backend)

    @rule(kind=st.sampled_from(["float16", "bfloat16"]), heads=st.sampled_from([1, 2]), tokens=st.booleans())
    def a_call(self, kind, heads, tokens):
        backend = self.backend
        layer = SimpleNamespace(**{**vars(LAYER), "layer_id": self.layer % 3, "tp_q_head_num": heads})
        self.layer += 1
        one(backend, self.runtime, layer=layer, dtype=getattr(torch, kind), tokens=9 if tokens else None)
        assert not self.runtime.counters.fallbacks


TestAnything = Anything.TestCase
TestAnything.settings = settings(max_examples=25, stateful_step_count=25, deadline=None, derandomize=True)
