"""The cases that break a patch that is right in the easy one: each served bit for bit, or a stated route to
stock.
"""

import inspect
import types

import pytest
import torch
from rig import environment, world
from rig.cases import FAMILIES, LENGTHS, ready, same
from rig.world import ForwardMode, Shape, World, fa3, make_pool, memory_pool

from kvlab import patch
from kvlab.patch import calls, hooks
from kvlab.patch.runtime import Runtime
from kvlab.patch.sites import Site


def planned(its, mode="decode", lengths=LENGTHS):
    if mode == "decode":
        batch = its.batch(ForwardMode.DECODE, lengths)
    else:
        batch = its.batch(ForwardMode.EXTEND, lengths, prefix=[n // 2 for n in lengths])
    its.plan(batch)
    return batch


def both(its, batch, kind, strategy="shadow", save=False):
    """(stock, patched, counters) of every layer; the KV write is left out unless asked."""
    tensors = its.tensors(batch)
    layers = range(its.shape.layers)
    with its.unpatched():
        want = [its.attend(batch, kind, tensors, n, save=save) for n in layers]
    with patch.applied(strategy):
        got = [its.attend(batch, kind, tensors, n, save=save) for n in layers]
        return want, got, patch.status()["counters"]


def goes_to_stock(its, batch, kind, reason, strategy="shadow"):
    want, got, counters = both(its, batch, kind, strategy)
    assert same(want, got)
    assert counters["calls"] == {f"{its.family}.{kind}": {"stock": its.shape.layers}}
    assert counters["fallbacks"] == {reason: its.shape.layers}
    assert counters["bytes_avoided"] == 0


def cascade(page_size=1):
    """Draft decode with two branches a request: FA3 merges the prefix with a second, token-level table."""
    its = ready("fa3", page_size=page_size, slots=512 * page_size, context=512)
    batch = planned(its)
    its.backend.topk = 2
    batch.spec_info = object()
    bs, tokens = len(LENGTHS), 2 * len(LENGTHS)
    metadata = its.backend.forward_metadata
    metadata.cu_seqlens_q = torch.arange(0, tokens + 1, 2, dtype=torch.int32)
    metadata.max_seq_len_q = 2
    extra = torch.arange(its.slots - tokens, its.slots, dtype=torch.int32)
    its.backend.forward_metadata_spec_decode_expand = fa3.FlashAttentionMetadata(
        cache_seqlens_int32=torch.ones(tokens, dtype=torch.int32),
        cu_seqlens_q=torch.arange(tokens + 1, dtype=torch.int32),
        cu_seqlens_k=torch.arange(tokens + 1, dtype=torch.int32),
        max_seq_len_q=1,
        page_table=extra[:, None],
    )
    assert bs == 3
    return its, batch


def cascade_by_stock():
    """(world, batch, tensors, stock's output) of a cascade."""
    its, batch = cascade()
    tensors = its.tensors(batch, tokens=2 * len(LENGTHS))
    with its.unpatched():
        return its, batch, tensors, its.attend(batch, "decode", tensors, save=False)


def test_cascade_reads_a_second_table(monkeypatch):
    its, batch, tensors, want = cascade_by_stock()
    with patch.applied("shadow"):
        got = its.attend(batch, "decode", tensors, save=False)
        assert patch.status()["counters"]["calls"] == {"fa3.decode": {"shadow": 1}}
    assert same([want], [got])
    # One table alone would not do: the second one's rows are not in the first.
    from kvlab.patch.strategies.shadow import Shadow

    whole = Shadow.cast

    def first_table_only(self, call, rows, dtype):
        call.reads.tables = call.reads.tables[:1]
        # A fresh, zeroed buffer: memory given back by the call before would hold the right rows.
        call.lasts = True
        return whole(self, call, rows, dtype)

    monkeypatch.setattr(Shadow, "cast", first_table_only)
    with patch.applied("shadow"):
        assert not same([want], [its.attend(batch, "decode", tensors, save=False)])


@pytest.mark.parametrize("strategy", ["gather", "fused"])
def test_cascade_is_shadow_s_and_takes_nothing_from_a_strategy_that_cannot(strategy, caplog):
    its, cascaded, tensors, want = cascade_by_stock()
    with patch.applied(strategy):
        assert same([want], [its.attend(cascaded, "decode", tensors, save=False)])
        its.backend.topk = 0
        plain = planned(its)
        its.attend(plain, "decode", its.tensors(plain))
        counters = patch.status()["counters"]
    assert counters["calls"] == {"fa3.decode": {"shadow": 1, strategy: 1}}
    assert counters["fallbacks"] == {}
    assert caplog.text == ""


def test_cascade_is_stock_s_where_shadow_is_not_to_be_had(monkeypatch):
    its, batch, tensors, want = cascade_by_stock()
    with patch.applied("gather"):
        patch.api._patch.runtime.trust.broken["shadow"] = "no memory"
        assert same([want], [its.attend(batch, "decode", tensors, save=False)])
        counters = patch.status()["counters"]
    assert counters["calls"] == {"fa3.decode": {"stock": 1}}
    assert counters["fallbacks"] == {"cascade attention reads the buffer by a second table": 1}


def test_cascade_with_pages_goes_to_stock():
    its, batch = cascade(page_size=16)
    tensors = its.tensors(batch, tokens=2 * len(LENGTHS))
    # Stock itself serves this at page size 1 only; the reason is asked of the adapter.
    from kvlab.patch.reads import ADAPTERS, Stock

    got = ADAPTERS["fa3"].reads(its.backend, "decode", its.layers[0], batch)
    assert got == Stock("cascade attention with pages over 1")
    assert len(tensors) == 4


def test_context_parallelism_goes_to_stock():
    its = ready("fa3")
    batch = planned(its, "extend")
    its.backend.attn_cp_size = 2
    batch_cp = getattr(batch, "attn_cp_metadata", None)
    assert batch_cp is None
    goes_to_stock(its, batch, "extend", "context parallelism")


@pytest.mark.parametrize("family", FAMILIES)
def test_decode_context_parallelism_goes_to_stock(family, monkeypatch):
    with patch.applied("shadow"):
        its = ready(family)
        runtime = patch.api._patch.runtime
        state = runtime.state(family, its.backend)
        state.server_args = types.SimpleNamespace(dcp_size=2)
        batch = planned(its)
        tensors = its.tensors(batch)
        with its.unpatched():
            want = its.attend(batch, "decode", tensors)
        got = its.attend(batch, "decode", tensors)
        counters = patch.status()["counters"]
    assert same([want], [got])
    assert counters["fallbacks"] == {"decode context parallelism": 1}
    assert counters["kv_writes"] == {"stock": 1}


OUTSIDE = {
    "decode context parallelism": {"dcp_size": 2},
    "plans on a stream of their own, graphs off": {"disable_cuda_graph": True},
}


@pytest.mark.parametrize("why", OUTSIDE)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_server_that_is_left_to_stock_says_so_at_its_start(family, why, monkeypatch, caplog):
    """Else its one line would tell of casts that are gone while stock makes all of them."""
    monkeypatch.setenv("SGLANG_ENABLE_OVERLAP_PLAN_STREAM", "1")
    for name, value in OUTSIDE[why].items():
        monkeypatch.setattr(world.server_args(), name, value)
    with patch.applied("exact"), caplog.at_level("INFO", "kvlab.patch"):
        World(family, slots=8192)
        chosen = patch.status()["chosen"]
    said = [r.getMessage() for r in caplog.records if r.name == "kvlab.patch"]
    assert said == [
        f"kvlab: SGLang {world.RELEASE}, {family}, exact: decode and extend left to stock: {why}; "
        "nothing is patched"
    ]
    assert chosen == {f"{family}.{k}": {"strategy": "stock", "reason": why} for k in ("decode", "extend")}
    monkeypatch.setenv("KVLAB_PATCH_STRICT", "1")
    with patch.applied("exact"), pytest.raises(SystemExit, match=f"KVLAB_PATCH_STRICT.*{why}"):
        World(family, slots=8192)


def test_hybrid_attention_with_different_prefill_and_decode_backends():
    from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend

    decode = ready("flashinfer_mla")
    prefill = World("fa3", max_bs=8, pool=decode.pool)
    prefill.requests.req_to_token.copy_(decode.requests.req_to_token)
    runner = decode.runner
    runner.server_args.speculative_attention_mode = "prefill"
    runner.server_args.kv_cache_dtype = "fp8_e4m3"
    runner.kv_cache_dtype = torch.float8_e4m3fn
    hybrid = HybridAttnBackend(runner, prefill.backend, decode.backend)
    for kind, its in (("decode", decode), ("extend", prefill)):
        its.backend = hybrid
        batch = planned(its, kind)
        want, got, counters = both(its, batch, kind)
        assert same(want, got)
        assert counters["calls"] == {f"{its.family}.{kind}": {"shadow": its.shape.layers}}


@pytest.mark.parametrize("family", FAMILIES)
def test_two_batch_overlap_interleaves_two_backends_on_one_scratch(family):
    one = ready(family)
    two = World(family, max_bs=8, pool=one.pool, seed=1)
    two._free = one._free
    for request, n in enumerate([7, 3]):
        two.allot(request, n)
    batches = [planned(one), planned(two, lengths=[7, 3])]
    tensors = [one.tensors(batches[0]), two.tensors(batches[1])]

    def layers():
        return [
            its.attend(b, "decode", t, layer, save=False)
            for layer in range(2)
            for its, b, t in zip((one, two), batches, tensors, strict=True)
        ]

    with one.unpatched():
        want = layers()
    with patch.applied("shadow"):
        assert same(want, layers())


@pytest.mark.parametrize("family", FAMILIES)
def test_frozen_kv_mtp_swaps_the_pool(family):
    """The draft attends over the target's pool: it is looked up at each call, never remembered."""
    its = ready(family)
    batch = planned(its)
    other = make_pool(torch.float8_e4m3fn, slots=its.slots)
    its.fill()
    for mine, theirs in zip(other.kv_buffer, its.pool.kv_buffer, strict=True):
        mine.copy_(theirs.flip(0))
    holder = batch if world.OLD_HOOKS else its.backend
    outputs = []
    for pool in (its.pool, other):
        holder.token_to_kv_pool = pool
        want, got, _ = both(its, batch, "decode")
        assert same(want, got)
        assert holder.token_to_kv_pool is pool
        outputs.append(got[0])
    assert not torch.equal(*outputs)


@pytest.mark.parametrize("kind", ["decode", "extend"])
@pytest.mark.parametrize("family", FAMILIES)
def test_strided_pools(family, kind):
    """Unified pools interleave layers: a slot's stride is more than a row."""
    its = ready(family)
    layers, (slots, _, width) = its.shape.layers, its.pool.kv_buffer[0].shape
    backing = torch.randint(0, 64, (slots, layers, 1, width), dtype=torch.uint8)
    its.pool.kv_buffer = [backing[:, n] for n in range(layers)]
    assert not its.pool.kv_buffer[0].is_contiguous()
    batch = planned(its, kind)
    for strategy in ("shadow", "gather"):
        want, got, counters = both(its, batch, kind, strategy, save=True)
        assert same(want, got)
        assert counters["calls"] == {f"{family}.{kind}": {strategy: layers}}
        assert counters["kv_writes"] == {"one launch": layers}


@pytest.mark.parametrize("family", FAMILIES)
def test_hierarchical_cache_waits_in_get_key_buffer(family):
    """The layer's rows arrive while `get_key_buffer` waits for them; a cast before that would read the old
    ones.
    """
    its = ready(family)
    batch = planned(its)
    arrived = [b.clone() for b in its.pool.kv_buffer]
    waits = []

    class Counter:
        def wait_until(self, layer):
            waits.append(layer)
            its.pool.kv_buffer[layer].copy_(arrived[layer])

    its.pool.layer_transfer_counter = Counter()
    tensors = its.tensors(batch)
    with its.unpatched():
        want = [its.attend(batch, "decode", tensors, n, save=False) for n in range(2)]
    waits.clear()
    for buffer in its.pool.kv_buffer:
        buffer.zero_()
    with patch.applied("shadow"):
        got = [its.attend(batch, "decode", tensors, n, save=False) for n in range(2)]
    assert waits == [0, 1]
    assert same(want, got)


@pytest.mark.parametrize("strategy", ["shadow", "gather"])
def test_kv_that_arrives_by_rdma_needs_no_call(strategy):
    """Disaggregation writes a pool's memory behind everybody's back: no copy of a row outlives its call."""
    its = ready("flashinfer_mla")
    batch = planned(its)
    with patch.applied(strategy):
        for _ in range(2):
            tensors = its.tensors(batch)
            its.fill()
            got = [its.attend(batch, "decode", tensors, n, save=False) for n in range(2)]
            with its.unpatched():
                want = [its.attend(batch, "decode", tensors, n, save=False) for n in range(2)]
            assert same(want, got)


def test_prefill_decode_multiplexing_gives_each_kind_its_scratch():
    its = ready("fa3", slots=512)
    with patch.applied("shadow"):
        runtime = patch.api._patch.runtime
        state = runtime.state("fa3", its.backend)
        state.server_args, state.graphs = types.SimpleNamespace(enable_pdmux=True, dcp_size=1), True
        for kind in ("decode", "extend"):
            batch = planned(its, kind)
            tensors = its.tensors(batch)
            got = its.attend(batch, kind, tensors, save=False)
            with its.unpatched():
                assert same([its.attend(batch, kind, tensors, save=False)], [got])
        lasting = runtime.scratch.lasting
        assert sorted(lane for _, lane in lasting) == ["decode", "extend"]
        first, second = lasting.values()
        assert first.data_ptr() != second.data_ptr()
        # Two layers, as stock would hold for two streams.
        assert runtime.scratch.nbytes() == 2 * its.slots * its.shape.width * 2


def test_plan_stream_overlap_keeps_eager_calls_on_stock(monkeypatch):
    monkeypatch.setenv("SGLANG_ENABLE_OVERLAP_PLAN_STREAM", "1")
    its = ready("flashinfer_mla")
    goes_to_stock(its, planned(its), "decode", "plans on a stream of their own, graphs off")


def test_plan_stream_overlap_with_graphs_is_served(monkeypatch):
    monkeypatch.setenv("SGLANG_ENABLE_OVERLAP_PLAN_STREAM", "1")
    its = ready("flashinfer_mla")
    with patch.applied("shadow"):
        its.graphs()
        batch = its.batch(ForwardMode.DECODE, LENGTHS)
        its.capture(batch)
        tensors = its.tensors(batch)
        got = its.attend(batch, "decode", tensors, save=False)
        assert patch.status()["counters"]["calls"] == {"flashinfer_mla.decode": {"shadow": 1}}
        with its.unpatched():
            assert same([its.attend(batch, "decode", tensors, save=False)], [got])


def test_plan_stream_overlap_keeps_what_no_graph_holds_on_stock(monkeypatch):
    """A batch too large for the graphs: its plan's kv_indptr is the backend's own buffer all the same."""
    monkeypatch.setenv("SGLANG_ENABLE_OVERLAP_PLAN_STREAM", "1")
    its = ready("flashinfer_mla")
    with patch.applied("shadow"):
        its.graphs()
        batch = planned(its)
        its.attend(batch, "decode", its.tensors(batch))
        counters = patch.status()["counters"]
    assert counters["calls"] == {"flashinfer_mla.decode": {"stock": 1}}
    assert counters["fallbacks"] == {"plans on a stream of their own, outside a graph": 1}


@pytest.mark.parametrize("family", FAMILIES)
def test_deterministic_inference_takes_no_kernel_of_another_rounding(family, monkeypatch):
    monkeypatch.setattr(world.server_args(), "enable_deterministic_inference", True)
    with patch.applied("fast"):
        World(family, slots=8192)
        assert patch.status()["chosen"][f"{family}.decode"] == {
            "strategy": "shadow",
            "reason": "not fused: deterministic inference",
        }


def test_steps_that_torch_compile_traces_are_told_of(monkeypatch, caplog):
    monkeypatch.setattr(world.server_args(), "enable_torch_compile", True, raising=False)
    monkeypatch.setattr(world.server_args(), "torch_compile_max_bs", 32, raising=False)
    with patch.applied("exact"):
        World("fa3", slots=8192)
    assert "fa3: decode steps of up to 32 requests that torch.compile traces are left to stock" in caplog.text
    monkeypatch.setenv("KVLAB_PATCH_STRICT", "1")
    with patch.applied("exact"), pytest.raises(SystemExit, match="compile traces"):
        World("fa3", slots=8192)


@pytest.mark.parametrize("family", FAMILIES)
def test_captured_prefill_writes_a_scratch_that_lasts(family, monkeypatch):
    monkeypatch.setattr("kvlab.patch.calls.is_capturing", lambda device: True)
    monkeypatch.setattr("kvlab.patch.scratch.is_capturing", lambda device: True)
    its = ready(family)
    batch = planned(its, "extend")
    with patch.applied("shadow"):
        # Checked and chosen at a warm-up call, before capture.
        monkeypatch.setattr("kvlab.patch.calls.is_capturing", lambda device: False)
        its.attend(batch, "extend", its.tensors(batch), save=False)
        monkeypatch.setattr("kvlab.patch.calls.is_capturing", lambda device: True)
        tensors = its.tensors(batch)
        got = its.attend(batch, "extend", tensors, save=False)
        assert patch.status()["scratch_bytes"] == its.slots * its.shape.width * 2
        with its.unpatched():
            assert same([its.attend(batch, "extend", tensors, save=False)], [got])


def test_an_unchecked_strategy_is_not_taken_inside_a_capture(monkeypatch):
    for module in ("calls", "trust"):
        monkeypatch.setattr(f"kvlab.patch.{module}.is_capturing", lambda device: True)
    its = ready("fa3")
    batch = planned(its)
    want, got, _ = both(its, batch, "decode")
    assert same(want, got)


def test_torch_compile_traces_stock(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    its = ready("flashinfer_mla")
    batch = planned(its)
    want, got, counters = both(its, batch, "decode", save=True)
    assert same(want, got)
    assert counters["calls"] == {}


def test_dynamo_compiles_through_a_patched_method():
    class Backend:
        def forward_decode(self, q, k, v, layer, forward_batch):
            return q * 2 + k

    site = Site("fa3", "decode", "", "Backend", "recognised", holder="self")
    runtime = Runtime("exact", is_strict=False, version="")
    done = hooks.Replacements()
    done.set(Backend, "forward_decode", calls.through(runtime, site, Backend.forward_decode))
    backend, q = Backend(), torch.ones(4)
    compiled = torch.compile(lambda q: backend.forward_decode(q, q, q, None, None), backend="eager")
    assert torch.equal(compiled(q), torch.full((4,), 3.0))
    done.undo()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_bf16_pool_is_left_alone(family):
    its = World(family, torch.bfloat16, max_bs=4)
    for buffer in its.pool.kv_buffer:
        buffer.copy_(torch.randn(buffer.shape))
    for request, n in enumerate(LENGTHS):
        its.allot(request, n)
    batch = planned(its)
    want, got, counters = both(its, batch, "decode", save=True)
    assert same(want, got)
    assert counters["calls"] == counters["fallbacks"] == counters["kv_writes"] == {}


@pytest.mark.parametrize("kind", ["decode", "extend"])
@pytest.mark.parametrize("family", FAMILIES)
def test_linear_attention_beside_mla_keeps_its_rows_in_a_pool_within_a_pool(family, kind, caplog):
    """Kimi-Linear: some layers have MLA rows, under other numbers than the model's layers."""
    cls, ids = memory_pool.HybridLinearKVPool, [1, 4]
    shape = Shape(layers=5)
    options = {
        "size": 4095,
        "dtype": torch.float8_e4m3fn,
        "page_size": 1,
        "head_num": 1,
        "head_dim": shape.width,
        "full_attention_layer_ids": ids,
        "enable_kvcache_transpose": False,
        "device": "cpu",
        "mamba_pool": types.SimpleNamespace(),
        "use_mla": True,
        "kv_lora_rank": shape.rank,
        "qk_rope_head_dim": shape.rope,
    }
    known = inspect.signature(cls.__init__).parameters
    with environment.OnCPU():
        pool = cls(**{k: v for k, v in options.items() if k in known})
    pool.kv_buffer = pool.full_kv_pool.kv_buffer  # the rig's way to the rows; SGLang's pool has no such name
    with patch.applied("exact"), caplog.at_level("INFO", "kvlab.patch"):
        its = ready(family, pool=pool, shape=shape)
        del pool.kv_buffer
        batch = planned(its, kind)
        tensors = its.tensors(batch)
        before = [b.clone() for b in pool.full_kv_pool.kv_buffer]
        with its.unpatched():
            want = [its.attend(batch, kind, tensors, n) for n in ids]
        wrote = [b.clone() for b in pool.full_kv_pool.kv_buffer]
        for buffer, was in zip(pool.full_kv_pool.kv_buffer, before, strict=True):
            buffer.copy_(was)
        got = [its.attend(batch, kind, tensors, n) for n in ids]
        counters = patch.status()["counters"]
    assert same(want, got)
    assert not same(before, wrote)
    assert same(wrote, pool.full_kv_pool.kv_buffer)
    assert counters["calls"] == {f"{family}.{kind}": {"shadow": len(ids)}}
    assert counters["fallbacks"] == {}
    assert "no longer casts 4,096 slots x 2 layers" in caplog.text


def test_a_model_without_mla_is_none_of_ours(caplog, monkeypatch):
    """fa3 serves most other models too, with FP8 keys and values: nothing is cast there, counted or said."""
    its = World("fa3", max_bs=4)
    runner, shape = its.runner, its.shape
    width = shape.width
    runner.model_config.attention_arch = type(runner.model_config.attention_arch).MHA
    with environment.OnCPU():
        runner.token_to_kv_pool = pool = memory_pool.MHATokenToKVPool(
            size=its.slots - 1,
            page_size=1,
            dtype=torch.float8_e4m3fn,
            head_num=1,
            head_dim=width,
            layer_num=shape.layers,
            device="cpu",
            enable_memory_saver=False,
            enable_alt_stream=False,
        )
    seen = []

    def attend(q, k_cache, v_cache, **kwargs):
        seen.append((type(k_cache), k_cache.view(torch.uint8).sum().item()))
        return torch.zeros(len(q), shape.heads, width, dtype=q.dtype)

    monkeypatch.setattr(fa3, "flash_attn_with_kvcache", attend)
    for request, n in enumerate(LENGTHS):
        its.allot(request, n)
    told = []
    with patch.applied("exact"), environment.OnCPU(), caplog.at_level("INFO", "kvlab.patch"):
        monkeypatch.setattr(patch.api._patch.runtime, "on_change", told.append)
        backend = its.backend = fa3.FlashAttentionBackend(runner)
        backend.flash_attn_with_kvcache, backend._get_scheduler_metadata = attend, None
        batch = its.batch(ForwardMode.DECODE, LENGTHS)
        if world.OLD_HOOKS:
            batch.token_to_kv_pool = pool
        its.plan(batch)
        for layer in range(shape.layers):
            radix = world.RadixAttention(shape.heads, width, 1.0, 1, layer_id=layer)
            q, k, v = (torch.randn(len(LENGTHS), n, width).to(shape.dtype) for n in (shape.heads, 1, 1))
            backend.forward_decode(q.flatten(1), k, v, radix, batch)
        counters = patch.status()["counters"]
    assert [kind for kind, _ in seen] == [torch.Tensor] * shape.layers
    assert all(total > 0 for _, total in seen)  # the new rows are there
    assert counters["calls"] == counters["fallbacks"] == counters["kv_writes"] == {}
    assert caplog.text == ""
    # On leaving: a file for each layer of each step would take longer than the step.
    assert told.count(True) <= 1


def test_the_block_fp4_pool_is_left_to_stock_with_a_reason(caplog):
    """It dequantises all its slots inside `get_key_buffer`, before there is a cast to defer."""
    cls = memory_pool.MLATokenToKVPoolFP4
    own = vars(cls)["get_key_buffer"]
    assert "batched_dequantize" in own.__code__.co_names
    pool = object.__new__(cls)
    pool.dtype, pool.store_dtype = getattr(torch, "float4_e2m1fn_x2", torch.uint8), torch.uint8
    runtime = Runtime("exact", is_strict=False, version="")
    with caplog.at_level("INFO", "kvlab.patch"):
        runtime.built("fa3", World("fa3").backend, types.SimpleNamespace(token_to_kv_pool=pool))
    assert "MLATokenToKVPoolFP4 left to stock: FP4 rows are dequantised by the pool itself" in caplog.text
    assert runtime.chosen == {}
    strict = Runtime("exact", is_strict=True, version="")
    with pytest.raises(SystemExit, match=r"KVLAB_PATCH_STRICT.*FP4 rows are dequantised"):
        strict.built("fa3", World("fa3").backend, types.SimpleNamespace(token_to_kv_pool=pool))


@pytest.mark.parametrize("family", FAMILIES)
def test_class_checks_and_identity_of_the_pool_during_a_call(family, monkeypatch):
    its = ready(family)
    batch = planned(its)
    seen = {}
    holder = batch if world.OLD_HOOKS else its.backend
    plain = memory_pool.MLATokenToKVPool.get_key_buffer

    def get_key_buffer(self, layer_id):
        seen["view"] = holder.token_to_kv_pool
        return plain(self, layer_id)

    monkeypatch.setattr(memory_pool.MLATokenToKVPool, "get_key_buffer", get_key_buffer)
    with patch.applied("shadow"):
        its.attend(batch, "decode", its.tensors(batch))
    assert isinstance(seen["view"], memory_pool.MLATokenToKVPool)
    assert seen["view"] is not its.pool
    assert seen["view"].size == its.pool.size
    assert holder.token_to_kv_pool is its.pool


@pytest.mark.parametrize("kind", ["decode", "extend"])
def test_a_sibling_that_calls_super_is_reached(kind):
    """As FlashMLA's extend and TRTLLM-MLA's fallback do."""
    its = ready("flashinfer_mla")

    class Sibling(type(its.backend)):
        def forward_extend(self, *args, **kwargs):
            return super().forward_extend(*args, **kwargs)

    its.backend.__class__ = Sibling
    batch = planned(its, kind)
    want, got, counters = both(its, batch, kind)
    assert same(want, got)
    assert counters["calls"] == {f"flashinfer_mla.{kind}": {"shadow": 2}}


def test_positional_arguments():
    its = ready("flashinfer_mla", shape=Shape(layers=1))
    batch = planned(its)
    q, q_rope, k, k_rope = its.tensors(batch)

    def call():
        with environment.OnCPU():
            return its.backend.forward_decode(
                q.clone(), k, k, its.layers[0], batch, False, q_rope.clone(), k_rope
            )

    with its.unpatched():
        want = call()
    for strategy in ("shadow", "fused"):
        with patch.applied(strategy):
            got = call()
            assert patch.status()["counters"]["calls"] == {"flashinfer_mla.decode": {strategy: 1}}
        assert torch.allclose(want.float(), got.float(), atol=0.02)
