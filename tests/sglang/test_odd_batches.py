"""Batches, layers and pools that no ordinary step has, and what changes behind the patch's back."""

import itertools

import pytest
import torch
from rig import environment, world
from rig.cases import FAMILIES, LENGTHS, ready, same
from rig.world import ForwardMode, Shape, World, fa3

from kvlab import patch

EXACT = ("shadow", "gather")


def layers_of(its, batch, kind, tensors, *, save=True):
    return [its.attend(batch, kind, tensors, n, save=save) for n in range(its.shape.layers)]


def assert_same(its, batch, kind, strategy):
    """Stock and patched from the same pool: the same outputs, the same bytes; no call goes to stock."""
    before, tensors = [b.clone() for b in its.pool.kv_buffer], its.tensors(batch)
    with its.unpatched():
        want = layers_of(its, batch, kind, tensors)
    wrote = [b.clone() for b in its.pool.kv_buffer]
    for buffer, was in zip(its.pool.kv_buffer, before, strict=True):
        buffer.copy_(was)
    with patch.applied(strategy):
        got = layers_of(its, batch, kind, tensors)
        counters = patch.status()["counters"]
    assert same(want, got)
    assert all(map(torch.equal, wrote, its.pool.kv_buffer))
    assert counters["calls"] == {f"{its.family}.{kind}": {strategy: its.shape.layers}}
    assert counters["fallbacks"] == {}


@pytest.mark.parametrize("strategy", EXACT)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_request_without_tokens(family, strategy):
    its = ready(family)
    batch = its.batch(ForwardMode.DECODE, LENGTHS)
    batch.seq_lens = torch.tensor([5, 0, 9])
    batch.seq_lens_cpu, batch.seq_lens_sum = batch.seq_lens.clone(), 14
    its.plan(batch)
    assert_same(its, batch, "decode", strategy)
    # Of an extend, some requests bring nothing new.
    batch = its.batch(ForwardMode.EXTEND, LENGTHS, prefix=[2, 17, 9])
    its.plan(batch)
    assert_same(its, batch, "extend", strategy)


@pytest.mark.parametrize("kind", ["decode", "extend"])
@pytest.mark.parametrize("family", FAMILIES)
def test_scales_of_a_layer_are_treated_as_stock_does(family, kind):
    """A checkpoint may bring k_scale; stock's MLA applies it neither to the rows nor to the write."""
    its = ready(family)
    for layer in its.layers:
        layer.k_scale, layer.v_scale = torch.tensor(0.5), torch.tensor(2.0)
        layer.k_scale_float, layer.v_scale_float = 0.5, 2.0
    mode, prefix = (ForwardMode.DECODE, None) if kind == "decode" else (ForwardMode.EXTEND, [1, 2, 3])
    batch = its.batch(mode, LENGTHS, prefix=prefix)
    its.plan(batch)
    assert_same(its, batch, kind, "shadow")


@pytest.mark.parametrize("family", FAMILIES)
def test_fp16_queries_of_e5m2_rows(family):
    its = ready(family, fp8=torch.float8_e5m2, shape=Shape(dtype=torch.float16))
    batch = its.batch(ForwardMode.DECODE, LENGTHS)
    its.plan(batch)
    assert_same(its, batch, "decode", "shadow")


@pytest.mark.parametrize("strategy", EXACT)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pool_whose_memory_is_made_anew(family, strategy):
    """Memory that is released and resumed, or a pool that is resized: between steps, and within one."""
    its = ready(family)
    batch, slots = its.batch(ForwardMode.DECODE, LENGTHS), its.slots
    its.plan(batch)
    with patch.applied(strategy):
        for grown in (0, 64, 0):
            tensors = its.tensors(batch)
            its.attend(batch, "decode", tensors, 0)
            its.pool.kv_buffer = [
                torch.randint(0, 64, (slots + grown, 1, its.shape.width), dtype=torch.uint8) for _ in range(2)
            ]
            got = layers_of(its, batch, "decode", tensors, save=False)
            with its.unpatched():
                assert same(layers_of(its, batch, "decode", tensors, save=False), got)
        assert patch.status()["counters"]["fallbacks"] == {}


@pytest.mark.parametrize("has_graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("strategy", EXACT)
@pytest.mark.parametrize("family", FAMILIES)
def test_another_table_between_the_metadata_and_a_call(family, strategy, has_graphs):
    its = ready(family)
    if has_graphs:
        its.graphs()
    batch = its.batch(ForwardMode.DECODE, LENGTHS)
    its.plan(batch)
    tensors, metadata = its.tensors(batch), its.backend.forward_metadata
    owner, name = (
        (metadata, "page_table") if family == "fa3" else (metadata.decode_wrapper, "_kv_indices_buf")
    )
    outputs = []
    with patch.applied(strategy):
        for change in (lambda t: t, lambda t: t.flip(0).contiguous(), lambda t: t.add_(1)):
            setattr(owner, name, change(getattr(owner, name)))
            got = layers_of(its, batch, "decode", tensors, save=False)
            with its.unpatched():
                assert same(layers_of(its, batch, "decode", tensors, save=False), got)
            outputs.append(got)
    assert not same(outputs[0], outputs[1])
    assert not same(outputs[1], outputs[2])


@pytest.mark.parametrize("family", FAMILIES)
def test_another_strategy_between_plan_and_run(family):
    its = ready(family)
    chain = ("off", "shadow", "gather", "off", "gather", "shadow", "stock", "off")
    for before, after in itertools.pairwise(chain):
        patch.apply(before)
        batch = its.batch(ForwardMode.DECODE, LENGTHS)
        its.plan(batch)
        tensors = its.tensors(batch)
        got = [its.attend(batch, "decode", tensors, 0, save=False)]
        patch.apply(after)
        got.append(its.attend(batch, "decode", tensors, 1, save=False))
        with its.unpatched():
            assert same(layers_of(its, batch, "decode", tensors, save=False), got), (before, after)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_target_and_its_draft_take_turns(family):
    """Two backends, pools of other sizes, one scratch: now the larger asks first, now the other."""
    target = ready(family, shape=Shape(layers=3), slots=512)
    draft = ready(family, shape=Shape(layers=1), slots=768, seed=3)
    with patch.applied("shadow"):
        for has_graphs in (False, True):
            for its in (target, draft) if has_graphs else ():
                its.graphs()
            for its in (target, draft, draft, target, draft):
                batch = its.batch(ForwardMode.DECODE, LENGTHS)
                its.plan(batch)
                tensors = its.tensors(batch)
                got = layers_of(its, batch, "decode", tensors, save=False)
                with its.unpatched():
                    assert same(layers_of(its, batch, "decode", tensors, save=False), got)
        # One wide layer, of the larger pool; the smaller one's stays for graphs that may hold it.
        width = its.shape.width
        assert patch.status()["scratch_bytes"] in (768 * width * 2, (512 + 768) * width * 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_sglang_s_own_two_batch_overlap(family):
    from sglang.srt.layers.attention.tbo_backend import TboAttnBackend

    one, two = ready(family), World(family, max_bs=8, seed=2)
    two.requests.req_to_token.copy_(one.requests.req_to_token)
    with patch.applied("shadow"):
        made = []

        def creator():
            # SGLang's own creator, three backends over one runner.
            made.append(World(family, max_bs=8, pool=one.pool))
            made[-1].requests.req_to_token.copy_(one.requests.req_to_token)
            return made[-1].backend

        tbo = TboAttnBackend.init_new(creator)
        whole = made[0].batch(ForwardMode.DECODE, LENGTHS)
        whole.tbo_children = [
            made[1].batch(ForwardMode.DECODE, LENGTHS[:2]),
            made[2].batch(ForwardMode.DECODE, LENGTHS[2:], requests=[2]),
        ]
        with environment.OnCPU():
            tbo.init_forward_metadata(whole)
        tensors = made[0].tensors(whole)
        halves = [[t[:2] for t in tensors], [t[2:] for t in tensors]]

        def step():
            return [
                its.attend(batch, "decode", half, layer, save=False)
                for layer in range(2)
                for its, batch, half in zip(made[1:], whole.tbo_children, halves, strict=True)
            ]

        got, together = step(), layers_of(made[0], whole, "decode", tensors, save=False)
        counters = patch.status()["counters"]
        with one.unpatched():
            assert same(step(), got)
            assert same(layers_of(made[0], whole, "decode", tensors, save=False), together)
    assert counters["calls"] == {f"{family}.decode": {"shadow": 2 * 2 + 2}}
    # The two halves are the whole.
    assert same([torch.cat(got[:2]), torch.cat(got[2:])], together)


@pytest.mark.parametrize("strategy", ["shadow", "gather"])
def test_a_tree_of_drafts_is_verified_by_two_tables(strategy):
    """fa3's target-verify of several branches, planned by SGLang: the committed rows and the drafts' own."""
    its = ready("fa3", topk=2, num_draft_tokens=3)
    batch = its.verify_batch(LENGTHS, 3)
    its.plan(batch)
    extra = its.backend.forward_metadata_spec_decode_expand
    assert extra.page_table is not None
    tensors, layers = its.tensors(batch), range(its.shape.layers)
    with its.unpatched():
        want = layers_of(its, batch, "extend", tensors)
    with patch.applied(strategy):
        got = [its.attend(batch, "extend", tensors, n) for n in layers]
        counters = patch.status()["counters"]
    assert same(want, got)
    # Compact rows have one table's order: such calls, and only they, are the other exact strategy's.
    assert counters["calls"] == {"fa3.extend": {"shadow": its.shape.layers}}
    assert counters["fallbacks"] == {}
    # The second table matters: without its rows the answer is another.
    kept = extra.page_table.clone()
    extra.page_table.copy_(kept.flip(0))
    with its.unpatched():
        assert not same(want, layers_of(its, batch, "extend", tensors))


def test_fa3_s_multi_step_draft_shares_one_scratch():
    steps = 3
    with patch.applied("shadow"):
        its = ready("fa3", slots=4096)
        its.runner.server_args.page_size = 1
        with environment.OnCPU():
            multi = fa3.FlashAttentionMultiStepBackend(its.runner, 1, steps)
            batch = its.batch(ForwardMode.DECODE, LENGTHS)
            batch.positions = torch.as_tensor(LENGTHS, dtype=torch.int64)
            multi.init_forward_metadata(batch)
        tensors = its.tensors(batch)
        for backend in multi.attn_backends:
            its.backend = backend
            if hasattr(backend, "flash_attn_with_kvcache"):
                backend.flash_attn_with_kvcache = fa3.flash_attn_with_kvcache
            if world.OLD_HOOKS:
                batch.token_to_kv_pool = its.pool
            got = layers_of(its, batch, "decode", tensors, save=False)
            with its.unpatched():
                assert same(layers_of(its, batch, "decode", tensors, save=False), got)
        calls = patch.status()["counters"]["calls"]
    assert calls == {"fa3.decode": {"shadow": (steps - 1) * its.shape.layers}}
