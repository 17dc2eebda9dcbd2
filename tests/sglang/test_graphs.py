"""CUDA-graph replay on a CPU: Python runs at capture only, so tensors bound then must be right later.

The stand-ins keep what a graph keeps (buffers by reference, lengths as the plan froze them) and the rig
copies what a GPU copies. `frozen` makes the patch read, at replay, the very tensors that it bound at capture.
"""

import contextlib
from unittest import mock

import pytest
import torch
from rig.world import TRANSLATES, ForwardMode, Shape, World, fa3, flashinfer_mla

from kvlab import patch
from kvlab.kernels.active import ActiveSlots
from kvlab.patch import reads
from kvlab.patch.reads import ADAPTERS, Reads

FAMILIES = ("flashinfer_mla", "fa3")
LENGTHS = [5, 17, 9, 40]


@pytest.fixture
def frozen(monkeypatch):
    """The first answer of each adapter is its only one: what a captured graph would go on reading."""
    kept = {}

    def freeze(name, adapter):
        class Frozen(type(adapter)):
            def reads(self, backend, kind, layer, forward_batch, last=None):
                key = (name, id(backend), kind)
                if key not in kept:
                    kept[key] = super().reads(backend, kind, layer, forward_batch)
                return kept[key]

        return Frozen()

    for name, adapter in list(ADAPTERS.items()):
        monkeypatch.setitem(ADAPTERS, name, freeze(name, adapter))
    return kept


def world_of(family, lengths=LENGTHS, extra=8, **kwargs):
    world = World(family, max_bs=max(len(lengths), 1) + 4, **kwargs).fill()
    for request, n in enumerate(lengths):
        world.allot(request, n + extra)
    world.graphs()
    return world


def step(world, batch, kind, tensors):
    return [world.attend(batch, kind, tensors, layer) for layer in range(world.shape.layers)]


def replayed(world, capture_batch, batches, kind, strategy):
    """[(stock, patched)] for each replayed batch, from the same pool; captured once under each."""
    before = [b.clone() for b in world.pool.kv_buffer]
    tensors = [world.tensors(b) for b in (capture_batch, *batches)]

    def capture_and_replay():
        for buffer, was in zip(world.pool.kv_buffer, before, strict=True):
            buffer.copy_(was)
        world.capture(capture_batch)
        step(world, capture_batch, kind, tensors[0])
        outputs = []
        for batch, its in zip(batches, tensors[1:], strict=True):
            world.replay(batch)
            outputs.append(step(world, batch, kind, its))
        return outputs

    with world.unpatched():
        stock = capture_and_replay()
    with patch.applied(strategy):
        return list(zip(stock, capture_and_replay(), strict=True))


def assert_pairs(pairs):
    for number, (want, got) in enumerate(pairs):
        for a, b in zip(want, got, strict=True):
            assert torch.equal(a.view(torch.int16), b.view(torch.int16)), f"replay {number} differs"


@pytest.mark.parametrize("strategy", ["shadow", "gather"])
@pytest.mark.parametrize("family", FAMILIES)
def test_decode_replay_with_growing_lengths(family, strategy, frozen):
    world = world_of(family)
    capture = world.batch(ForwardMode.DECODE, [1] * 4)
    grown = [[n + more for n in LENGTHS] for more in (0, 1, 2)]
    shrunk = [[2, 3, 1, 4]]  # the index buffer keeps a stale tail of the longer step
    batches = [world.batch(ForwardMode.DECODE, lengths) for lengths in (*grown, *shrunk)]
    assert_pairs(replayed(world, capture, batches, "decode", strategy))


@pytest.mark.parametrize("page_size", [16, 64])
def test_decode_replay_on_pages(page_size, frozen):
    world = world_of("fa3", page_size=page_size, slots=32 * page_size, context=512)
    capture = world.batch(ForwardMode.DECODE, [1] * 4)
    batches = [world.batch(ForwardMode.DECODE, [n + more for n in LENGTHS]) for more in (0, 3)]
    assert_pairs(replayed(world, capture, batches, "decode", "shadow"))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_padded_batch_reads_slot_0_and_stale_tails_are_left(family, frozen):
    world = world_of(family)
    capture = world.batch(ForwardMode.DECODE, [1] * 6)
    full = world.batch(ForwardMode.DECODE, [*LENGTHS, 1, 1])
    # Two requests in a graph of six: SGLang pads with request 0's row cut to one token; here an empty row.
    padded = world.batch(ForwardMode.DECODE, [30, 6, 1, 1, 1, 1], requests=[3, 1, 5, 5, 5, 5])
    world.requests.req_to_token[5] = 0
    pairs = replayed(world, capture, [full, padded], "decode", "shadow")
    # Padded tokens all write to slot 0, in any order: their outputs are discarded, here too.
    real = [4, 2]
    assert_pairs(
        [([t[:n] for t in want], [t[:n] for t in got]) for (want, got), n in zip(pairs, real, strict=True)]
    )


@pytest.mark.parametrize("strategy", ["shadow", "gather"])
@pytest.mark.parametrize("family", FAMILIES)
def test_target_verify_replay(family, strategy, frozen):
    world = world_of(family, num_draft_tokens=3)
    capture = world.verify_batch([1] * 4, 3)
    batches = [world.verify_batch([n + more for n in LENGTHS], 3) for more in (0, 2)]
    assert_pairs(replayed(world, capture, batches, "extend", strategy))


@pytest.mark.skipif(
    not hasattr(fa3.FlashAttentionBackend, "_init_full_cg_prefill_metadata"),
    reason="a prefill is captured whole, its attention too, from 0.5.15 on",
)
@pytest.mark.parametrize("strategy", ["shadow", "gather"])
def test_a_prefill_that_is_captured_whole(strategy, frozen):
    """One table for all shapes; the slots that the batch does not fill have no tokens at all."""
    world = world_of("fa3")
    capture = world.batch(ForwardMode.EXTEND, [24, 0, 0, 0], prefix=[0] * 4)
    some = world.batch(ForwardMode.EXTEND, [5, 17, 9, 0], prefix=[0, 6, 1, 0])
    # One request with a long prefix: its row of the table was shorter before, the others' are stale.
    one = world.batch(ForwardMode.EXTEND, [40, 0, 0, 0], prefix=[20, 0, 0, 0], requests=[3, 0, 0, 0])
    assert_pairs(replayed(world, capture, [some, one], "extend", strategy))
    assert [type(its) for its in frozen.values()] == [Reads]  # stock's would be the same for nothing


@pytest.mark.parametrize("family", FAMILIES)
def test_target_verify_eager(family):
    world = world_of(family, num_draft_tokens=3)
    batch = world.verify_batch(LENGTHS, 3)
    tensors = world.tensors(batch)
    with world.unpatched():
        world.plan(batch)
        want = step(world, batch, "extend", tensors)
    with patch.applied("shadow"):
        world.plan(batch)
        assert_pairs([(want, step(world, batch, "extend", tensors))])


@pytest.mark.skipif(
    not hasattr(flashinfer_mla.FlashInferMLAAttnBackend, "_build_fast_verify_plan_kwargs"),
    reason="DFLASH's fast verify plan came with 0.5.20",
)
def test_dflash_verify_replay_refreshes_no_lengths_on_the_device(frozen, monkeypatch):
    def pairs():
        world = world_of("flashinfer_mla", num_draft_tokens=3)
        capture = world.verify_batch([1] * 4, 3, kind="dflash")
        batches = [world.verify_batch([n + m for n in LENGTHS], 3, kind="dflash") for m in (0, 2)]
        return replayed(world, capture, batches, "extend", "shadow")

    assert_pairs(pairs())
    frozen.clear()
    # Without the hook on its plan the lengths on the device are those of the capture.
    monkeypatch.setattr("kvlab.patch.plan_hooks._refreshing", lambda runtime, plan: plan)
    assert any(not torch.equal(a, b) for want, got in pairs() for a, b in zip(want, got, strict=True))


class WrapperLengths(reads.FlashInferMLA):
    """The naive reading: the wrapper's own lengths, which the fast plan leaves as captured."""

    def reads(self, backend, kind, layer, forward_batch, last=None):
        wrapper = self.wrapper(backend, kind)
        return Reads([ActiveSlots.ragged(wrapper._kv_indices_buf, wrapper._kv_indptr_buf)])


def test_failing_first_the_wrapper_s_own_lengths_are_stale_at_replay(monkeypatch):
    def pairs():
        world = world_of("flashinfer_mla")
        capture = world.batch(ForwardMode.DECODE, [1] * 4)
        batch = world.batch(ForwardMode.DECODE, LENGTHS)
        got = replayed(world, capture, [batch], "decode", "shadow")
        wrapper = world.backend.forward_metadata.decode_wrapper
        return got, wrapper._kv_indptr_buf.tolist(), world.backend.kv_indptr[:5].tolist()

    ours, stale, true = pairs()
    assert_pairs(ours)
    assert stale == [0, 1, 2, 3, 4]
    assert true == [0, 5, 22, 31, 71]
    monkeypatch.setitem(ADAPTERS, "flashinfer_mla", WrapperLengths())
    naive, _, _ = pairs()
    assert not torch.equal(naive[0][0][0], naive[0][1][0])


def test_aliased_host_buffers_would_hide_it(monkeypatch):
    # The same naive reading passes where `.to("cpu")` aliases, as it does on a CPU: hence the rig's copies.
    monkeypatch.setitem(ADAPTERS, "flashinfer_mla", WrapperLengths())
    world = world_of("flashinfer_mla")
    b = world.backend
    b.cuda_graph_kv_indptr_cpu = b.cuda_graph_kv_indptr
    capture = world.batch(ForwardMode.DECODE, [1] * 4)
    assert_pairs(replayed(world, capture, [world.batch(ForwardMode.DECODE, LENGTHS)], "decode", "shadow"))


def multi_step(world, steps):
    """The real multi-step draft backend and the draft input that it fills."""
    import importlib

    world.runner.server_args.page_size = 1
    backend = flashinfer_mla.FlashInferMLAMultiStepDraftBackend(world.runner, 1, steps)
    draft = importlib.import_module("sglang.srt.speculative.eagle_info").EagleDraftInput()
    return backend, draft


@pytest.mark.parametrize("is_graph", [False, True], ids=["eager", "replay"])
def test_multi_step_draft_shares_one_scratch(is_graph):
    from rig import environment

    steps = 3
    with patch.applied("shadow"):
        world = World("flashinfer_mla", max_bs=4, slots=4096).fill()
        for request, n in enumerate(LENGTHS):
            world.allot(request, n + steps)
        with environment.OnCPU():
            multi, draft = multi_step(world, steps)
            batch = world.batch(ForwardMode.DECODE, LENGTHS, spec_info=draft)
            batch.positions = torch.as_tensor(LENGTHS, dtype=torch.int64)
            if is_graph:
                multi.init_cuda_graph_state(4, 4)
                multi.init_forward_metadata_out_graph(batch, in_capture=True) if hasattr(
                    multi, "init_forward_metadata_out_graph"
                ) else multi.init_forward_metadata_capture_cuda_graph(batch)
            else:
                multi.init_forward_metadata(batch)
        tensors = world.tensors(batch)
        for backend in multi.attn_backends:
            world.backend = backend
            got = step(world, batch, "decode", tensors)
            with world.unpatched():
                want = step(world, batch, "decode", tensors)
            assert_pairs([(want, got)])
        assert patch.status()["counters"]["calls"] == {
            "flashinfer_mla.decode": {"shadow": (steps - 1) * world.shape.layers}
        }
        scratch = patch.status()["scratch_bytes"]
        assert scratch in (0, world.slots * world.shape.width * 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_draft_extend(family):
    world = world_of(family, num_draft_tokens=3)
    batch = world.batch(ForwardMode.DRAFT_EXTEND_V2, [n + 3 for n in LENGTHS], prefix=LENGTHS)
    batch.spec_info = verify_input_for_draft(batch)
    tensors = world.tensors(batch)
    with world.unpatched():
        world.plan(batch)
        want = step(world, batch, "extend", tensors)
    with patch.applied("shadow"):
        world.plan(batch)
        assert_pairs([(want, step(world, batch, "extend", tensors))])


def test_draft_extend_replay(frozen):
    """On fa3: flashinfer's MLA backend refuses to capture one, in all three releases."""

    def batch_of(world, lengths):
        batch = world.batch(ForwardMode.DRAFT_EXTEND_V2, [n + 3 for n in lengths], prefix=lengths)
        batch.spec_info = verify_input_for_draft(batch)
        return batch

    world = world_of("fa3", num_draft_tokens=3)
    batches = [batch_of(world, [n + more for n in LENGTHS]) for more in (0, 2)]
    assert_pairs(replayed(world, batch_of(world, [1] * 4), batches, "extend", "shadow"))


@pytest.mark.skipif(not TRANSLATES, reason="the first release whose draft graphs make their own metadata")
def test_draft_extends_that_make_their_own_metadata_are_counted(monkeypatch):
    """By the real runners, of one step's graph and of all steps'; no backend hears of these replays."""
    from sglang.srt.speculative import multi_layer_eagle_draft_extend_cuda_graph_runner as runners

    capturing = [False]
    monkeypatch.setattr("kvlab.patch.calls.is_capturing", lambda device: capturing[0])
    with patch.applied("shadow"):
        world = world_of("fa3", slots=4096, num_draft_tokens=3)
        batch = world.batch(ForwardMode.DRAFT_EXTEND_V2, [n + 3 for n in LENGTHS], prefix=LENGTHS)
        batch.spec_info = verify_input_for_draft(batch)
        world.capture(batch)
        capturing[0] = True
        step(world, batch, "extend", world.tensors(batch))
        capturing[0] = False
        assert world.backend.draft_extend_metadata_captured_in_graph()
        bs, tokens = batch.batch_size, sum(LENGTHS)
        anything = mock.MagicMock()
        anything.backend.replay.return_value = [anything]

        def runner(cls, **its):
            made = cls.__new__(cls)
            vars(made).update(
                dict.fromkeys(("backend", "buffers", "deepep_adapter"), anything.backend), **its
            )
            vars(made).update(model_runner=anything, eagle_worker=anything, _make_graph_key=lambda bs: bs)
            vars(made).update(model_context=contextlib.nullcontext)
            return made

        one = runner(
            runners.MultiLayerEagleDraftExtendCudaGraphRunner,
            **{"step": 0, "forward_mode": batch.forward_mode, "captured_req_width": 3},
            **{"attn_backend": world.backend, "metadata_captured_in_graph": True},
        )
        every = runner(
            runners.OneGraphMultiLayerEagleMultiStepDraftExtendCudaGraphRunner,
            **{"runners": [one, None], "bs": bs, "raw_bs": bs, "seq_lens_sum": tokens},
            **{"_cached": {1: None}, "_replay_spec_info": batch.spec_info},
        )
        given = dict.fromkeys(("out_cache_loc_virtual", "kv_loc_plan", "kv_loc_cols"))
        for _ in range(2):
            one.replay(bs, tokens, batch.spec_info, None, **given)
        for _ in range(3):
            every.replay(0)
            every._cached[1] = None
            every.replay(1)
        counters = patch.status()["counters"]
        layers, row = world.shape.layers, world.shape.width
        assert counters["calls"] == {"fa3.extend": {"shadow": (2 + 3) * layers}}
        assert counters["bytes_avoided"] == (2 + 3) * layers * 3 * row * (world.slots - tokens)
        # Metadata made before the replay: the backend's own hook has told of it.
        one.metadata_captured_in_graph = False
        one.replay(bs, tokens, batch.spec_info, None, **given)
        assert patch.status()["counters"] == counters


def verify_input_for_draft(batch):
    import importlib

    draft = importlib.import_module("sglang.srt.speculative.eagle_info").EagleDraftInput()
    draft.num_tokens_per_req = 3
    return draft


def test_counters_grow_at_replay_though_python_does_not_run(monkeypatch):
    """The metadata hook adds what a captured pass does; only captured calls are known by their graph."""
    capturing = [False]
    monkeypatch.setattr("kvlab.patch.calls.is_capturing", lambda device: capturing[0])
    with patch.applied("shadow"):
        world = world_of("fa3", slots=4096, shape=Shape(layers=3))
        capture = world.batch(ForwardMode.DECODE, [1] * 4)
        world.capture(capture)
        capturing[0] = True
        step(world, capture, "decode", world.tensors(capture))
        capturing[0] = False
        assert patch.status()["counters"]["calls"] == {}
        for _ in range(5):
            world.replay(world.batch(ForwardMode.DECODE, LENGTHS))
        counters = patch.status()["counters"]
        assert counters["calls"] == {"fa3.decode": {"shadow": 5 * 3}}
        row, tokens = world.shape.width, sum(LENGTHS)
        assert counters["bytes_avoided"] == 5 * 3 * 3 * row * (world.slots - tokens)
    assert patch.status()["note"] == "captured graphs stay patched"
    assert patch.status()["scratch_bytes"] == world.slots * row * 2
