"""What the text's other variants do wrong, ours right beside; and each strategy's promise."""

import gc
from dataclasses import replace

import pytest
import torch
from rig import environment
from rig.world import ForwardMode, Shape, World

from kvlab import patch
from kvlab.patch import api, attempt
from kvlab.patch.attempt import Attempt
from kvlab.patch.seam import PoolView
from kvlab.patch.strategies import replan
from kvlab.patch.strategies.gather import Gather
from kvlab.patch.strategies.shadow import Shadow

LENGTHS = [5, 17, 9]
NOT_ITS = "a buffer that is not the pool's layer"


def its_of(family="flashinfer_mla", lengths=LENGTHS, **kwargs):
    its = World(family, max_bs=max(len(lengths), 4), **kwargs).fill()
    for request, n in enumerate(lengths):
        its.allot(request, n)
    return its


def step(its, batch, tensors):
    return [its.attend(batch, "decode", tensors, n, save=False) for n in range(its.shape.layers)]


def shared_prefix(requests=64, prefix=48):
    """Many requests on one radix prefix: few slots, many references."""
    its = World(
        "flashinfer_mla", max_bs=requests, slots=256, context=64, shape=Shape(layers=1, rank=16)
    ).fill()
    its.allot(0, prefix)
    for request in range(1, requests):
        its.share(request, 0, prefix)
    batch = its.batch(ForwardMode.DECODE, [prefix] * requests)
    its.plan(batch)
    return its, batch


def test_failing_first_a_compact_buffer_in_request_order_outgrows_the_pool(monkeypatch):
    its, batch = shared_prefix()
    rows = {}

    def noting(name, cls):
        real = cls.cast

        def cast(self, call, raw, dtype):
            out = real(self, call, raw, dtype)
            rows[name] = out.shape[0]
            return out

        monkeypatch.setattr(cls, "cast", cast)

    noting("replan", replan.Replan)
    noting("gather", Gather)
    tensors = its.tensors(batch)
    with its.unpatched():
        want = step(its, batch, tensors)
    for name in ("replan", "gather"):
        with patch.applied(name):
            its.plan(batch)
            got = step(its, batch, tensors)
            assert patch.status()["counters"]["calls"] == {"flashinfer_mla.decode": {name: 1}}
        assert torch.equal(want[0], got[0])
    # The text's variant: right, and twelve pools of wide rows; ours holds each slot once.
    assert rows["replan"] == 64 * 48 > 10 * its.slots
    assert rows["gather"] <= its.slots


def test_the_text_s_variant_plans_again_for_every_layer():
    its = its_of()
    batch = its.batch(ForwardMode.DECODE, LENGTHS)
    its.plan(batch)
    wrapper = its.backend.forward_metadata.decode_wrapper
    tensors = its.tensors(batch)
    plans = {}
    for strategy in ("shadow", "gather", "replan"):
        with patch.applied(strategy):
            its.plan(batch)
            before = wrapper.plans
            step(its, batch, tensors)
            plans[strategy] = wrapper.plans - before
    assert plans == {"shadow": 0, "gather": 0, "replan": its.shape.layers}


class InPlace(Shadow):
    """The text's first variant: the wide row is written where the FP8 row is, over it and its neighbour."""

    def cast(self, call, rows, dtype):
        raw = rows.view(torch.uint8).squeeze(1)
        slots, width = raw.shape
        wide = torch.as_strided(raw.view(-1).view(dtype), (slots - 1, width), (width // 2, 1))
        slot = call.reads.tables[0].distinct(slots)
        wide[slot] = rows[:, 0].view(torch.uint8)[slot].view(rows.dtype).to(dtype)
        return wide.unsqueeze(1)


def test_failing_first_a_cast_in_place_corrupts_the_next_step():
    # Every other slot, so that no active row is another's neighbour: the first step can be right.
    its = World("flashinfer_mla", max_bs=4, shape=Shape(layers=1)).fill()
    for request, n in enumerate(LENGTHS):
        its.requests.req_to_token[request, :n] = torch.arange(n) * 2 + 100 * request + 2
    batch = its.batch(ForwardMode.DECODE, LENGTHS)
    its.plan(batch)
    tensors = its.tensors(batch)
    pool = [b.clone() for b in its.pool.kv_buffer]

    def steps(strategy):
        for buffer, was in zip(its.pool.kv_buffer, pool, strict=True):
            buffer.copy_(was)
        with patch.applied(strategy):
            if strategy != "off":
                runtime = patch.api._patch.runtime
                runtime.strategies["shadow"] = replacement or runtime.strategies["shadow"]
            return [step(its, batch, tensors)[0] for _ in range(2)]

    replacement = None
    want = steps("off")
    assert torch.equal(want[0], want[1])
    replacement = InPlace()
    first, second = steps("shadow")
    assert torch.equal(first, want[0])
    assert not torch.equal(second, want[1])
    assert any(not torch.equal(a, b) for a, b in zip(its.pool.kv_buffer, pool, strict=True))
    replacement = None
    ours = steps("shadow")
    assert all(map(torch.equal, ours, want))
    assert all(map(torch.equal, its.pool.kv_buffer, pool))


def error(got, want):
    return ((got.float() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("family", ["flashinfer_mla", "fa3"])
def test_fast_is_as_near_to_float32_as_stock(family):
    from kvlab.kernels import reference
    from kvlab.kernels.active import ActiveSlots

    its = its_of(family, slots=4096, shape=Shape(layers=1, heads=8, rank=512, rope=64))
    # flashinfer's MLA kernel has no soft cap, so stock applies none.
    its.layers[0].logit_cap = 0.5 if family == "flashinfer_mla" else 0.0
    batch = its.batch(ForwardMode.DECODE, LENGTHS)
    its.plan(batch)
    tensors = its.tensors(batch)
    q, q_rope, _, _ = tensors
    table = its.requests.req_to_token[: len(LENGTHS)]
    active = ActiveSlots.paged(table, torch.tensor(LENGTHS, dtype=torch.int32), 1)
    rows = its.pool.get_key_buffer(0)
    true, _ = reference.mla_attention(q, q_rope, rows, active, sm_scale=its.layers[0].scaling)
    true = true.reshape(len(LENGTHS), -1)
    with its.unpatched():
        stock = step(its, batch, tensors)[0]
    with patch.applied("fast"):
        got = step(its, batch, tensors)[0]
        assert patch.status()["counters"]["calls"] == {f"{family}.decode": {"fused": 1}}
    assert got.shape == stock.shape
    assert got.dtype == stock.dtype
    assert error(got, true) <= 1.05 * error(stock, true)


@pytest.mark.parametrize("family", ["flashinfer_mla", "fa3"])
def test_fused_finds_the_rope_part_by_position_too(family):
    its = its_of(family, slots=4096)
    batch = its.batch(ForwardMode.DECODE, LENGTHS)
    its.plan(batch)
    q, q_rope, k, k_rope = its.tensors(batch)
    with patch.applied("fused"), environment.OnCPU():
        by_name = its.backend.forward_decode(q, k, k, its.layers[0], batch, q_rope=q_rope, k_rope=k_rope)
        by_place = its.backend.forward_decode(q, k, k, its.layers[0], batch, True, q_rope, k_rope)
        assert patch.status()["counters"]["calls"] == {f"{family}.decode": {"fused": 2}}
    assert torch.equal(by_name, by_place)


def test_fused_writes_the_kv_first():
    its = its_of(shape=Shape(layers=1))
    batch = its.batch(ForwardMode.DECODE, LENGTHS)
    its.plan(batch)
    tensors = its.tensors(batch)
    before = its.pool.kv_buffer[0].clone()
    with its.unpatched():
        want = its.attend(batch, "decode", tensors)
    written = its.pool.kv_buffer[0].clone()
    its.pool.kv_buffer[0].copy_(before)
    with patch.applied("fused"):
        got = its.attend(batch, "decode", tensors)
    assert torch.equal(its.pool.kv_buffer[0], written)
    assert torch.allclose(got.float(), want.float(), atol=0.02)


def test_native_plans_decode_for_fp8_rows_and_extend_for_wide_ones(monkeypatch):
    monkeypatch.setattr("kvlab.patch.strategies.native.flashinfer_refusal", lambda: None)
    shape = Shape(layers=2, heads=2, rank=512, rope=64)
    with patch.applied("native"):
        its = its_of(shape=shape)
        batch = its.batch(ForwardMode.DECODE, LENGTHS)
        its.plan(batch)
        wrapper = its.backend.forward_metadata.decode_wrapper
        assert wrapper._kv_data_type == torch.float8_e4m3fn
        tensors = its.tensors(batch)
        got = step(its, batch, tensors)
        assert its.backend.forward_metadata.decode_wrapper is wrapper
        assert patch.status()["counters"]["calls"] == {"flashinfer_mla.decode": {"native": 2}}
        extend = its.batch(ForwardMode.EXTEND, LENGTHS, prefix=[1] * 3)
        its.plan(extend)
        its.attend(extend, "extend", its.tensors(extend), save=False)
        assert patch.status()["counters"]["calls"]["flashinfer_mla.extend"] == {"shadow": 1}
    its.plan(batch)
    want = step(its, batch, tensors)
    assert all(torch.allclose(a.float(), b.float(), atol=0.02) for a, b in zip(want, got, strict=True))


def test_native_replays_through_the_module_that_the_first_plan_compiled(monkeypatch):
    monkeypatch.setattr("kvlab.patch.strategies.native.flashinfer_refusal", lambda: None)
    with patch.applied("native"):
        its = its_of(shape=Shape(layers=1, heads=2, rank=512, rope=64))
        its.graphs()
        capture = its.batch(ForwardMode.DECODE, [1] * 3)
        its.capture(capture)
        batch = its.batch(ForwardMode.DECODE, LENGTHS)
        its.replay(batch)
        tensors = its.tensors(batch)
        got = its.attend(batch, "decode", tensors, save=False)
        assert patch.status()["counters"]["calls"] == {"flashinfer_mla.decode": {"native": 1}}
    with patch.applied("off"):
        its.plan(batch)
        want = its.attend(batch, "decode", tensors, save=False)
    assert torch.allclose(got.float(), want.float(), atol=0.02)


def test_native_comes_and_goes_between_plan_and_run(monkeypatch):
    """Of the step that is under way nothing is lost: its plan and its rows fit each other."""
    monkeypatch.setattr("kvlab.patch.strategies.native.flashinfer_refusal", lambda: None)
    patch.apply("native")
    its = its_of(shape=Shape(layers=1, heads=2, rank=512, rope=64))
    batch = its.batch(ForwardMode.DECODE, LENGTHS)
    its.plan(batch)
    wrapper, tensors = its.backend.forward_metadata.decode_wrapper, its.tensors(batch)
    assert wrapper._kv_data_type == torch.float8_e4m3fn
    patch.remove()
    want = step(its, batch, tensors)
    assert wrapper._kv_data_type == torch.bfloat16
    patch.apply("native")
    # Planned before: stock's, and native is as good as before for the next step.
    assert all(map(torch.equal, want, step(its, batch, tensors)))
    its.plan(batch)
    step(its, batch, tensors)
    counters = patch.status()["counters"]
    assert counters["calls"] == {"flashinfer_mla.decode": {"native": 1, "stock": 1}}
    assert counters["fallbacks"] == {"planned for wide rows": 1}
    its.plan(batch)
    patch.apply("shadow")
    assert all(map(torch.equal, want, step(its, batch, tensors)))


def _its_run_fails(monkeypatch, its):
    cls = type(its.backend.decode_wrapper)
    stock_s = cls.run

    def run(self, *args, ckv_scale=None, **kwargs):
        if ckv_scale is not None:
            raise RuntimeError("no kernel image")
        return stock_s(self, *args, **kwargs)

    monkeypatch.setattr(cls, "run", run)


def _its_plan_fails(monkeypatch, its):
    cls = type(its.backend.decode_wrapper)
    stock_s = cls.plan

    def plan(self, *args):
        stock_s(self, *args)
        if args[-1] == torch.float8_e4m3fn:
            raise ValueError("FP8 rows need backend fa3")

    monkeypatch.setattr(cls, "plan", plan)


def _the_tables_are_no_longer_understood(monkeypatch, its):
    adapter = attempt.ADAPTERS["flashinfer_mla"]
    monkeypatch.setattr(adapter, "reads", lambda *a: attempt.Stock("odd tables"))


def _the_buffer_is_another(monkeypatch, its):
    monkeypatch.setattr(Attempt, "enter", _another_pool_s(Attempt.enter))


def _another_pool_s(enter):
    def of_fewer_slots(self, pool):
        enter(self, pool)
        self.facts = replace(self.facts, slots=self.facts.slots - 1)

    return of_fewer_slots


def _ours_breaks_behind_the_plan(monkeypatch, its):
    def ready(self, *args):
        raise KeyError("mode")

    monkeypatch.setattr(type(api._patch.runtime), "metadata_ready", ready)


def _is_compiled(monkeypatch, its):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)


@pytest.mark.parametrize(
    ("happens", "fallbacks", "line"),
    [
        (_its_run_fails, {"native failed": 1, "planned for FP8 rows": 1}, "no kernel image"),
        (_its_plan_fails, {"native failed": 1}, "FP8 rows need backend fa3"),
        (_the_tables_are_no_longer_understood, {"odd tables": 2, "planned for FP8 rows": 1}, "stock's plan"),
        (
            _the_buffer_is_another,
            {
                "a buffer that is not the pool's layer": 1,
                "planned for FP8 rows": 1,
                "planned for wide rows": 1,
            },
            "stock's plan",
        ),
        (_ours_breaks_behind_the_plan, {"planned for FP8 rows": 1}, "stock's plan"),
        (_is_compiled, {"planned for FP8 rows": 1}, "stock's plan"),
    ],
)
def test_what_falls_to_stock_in_a_pass_planned_for_fp8_is_planned_again(
    monkeypatch, caplog, happens, fallbacks, line
):
    """No request ends: stock's rows get stock's plan, and its very bits."""
    monkeypatch.setattr("kvlab.patch.strategies.native.flashinfer_refusal", lambda: None)
    with patch.applied("native"):
        its = its_of(shape=Shape(layers=2, heads=2, rank=512, rope=64))
        batch = its.batch(ForwardMode.DECODE, LENGTHS)
        wrapper, tensors = its.backend.decode_wrapper, its.tensors(batch)
        happens(monkeypatch, its)
        caplog.clear()
        its.plan(batch)
        got = step(its, batch, tensors)
        assert wrapper._kv_data_type == torch.bfloat16
        assert its.backend.forward_metadata.decode_wrapper is wrapper
        assert "run" not in vars(wrapper)
        assert patch.status()["counters"]["fallbacks"] == fallbacks
    assert sum(line in r.getMessage() for r in caplog.records) == 1
    with its.unpatched():
        assert all(map(torch.equal, got, step(its, batch, tensors)))


def test_native_without_fp8_mla_in_flashinfer_is_refused_with_a_reason():
    with patch.applied("native"):
        its = its_of()
        batch = its.batch(ForwardMode.DECODE, LENGTHS)
        its.plan(batch)
        its.attend(batch, "decode", its.tensors(batch))
        chosen = patch.status()["chosen"]["flashinfer_mla.decode"]
    assert chosen["strategy"] == "shadow"
    assert "not native: " in chosen["reason"]


def test_gather_casts_a_shared_row_once_and_finds_its_map_once_a_step(monkeypatch):
    from kvlab.patch import casts

    maps = []
    real = casts.slot_map
    monkeypatch.setattr(casts, "slot_map", lambda *a: maps.append(1) or real(*a))
    its = its_of(shape=Shape(layers=4))
    batch = its.batch(ForwardMode.DECODE, LENGTHS)
    with patch.applied("gather"):
        its.plan(batch)
        for _ in range(3):
            checks = len(maps)
            step(its, batch, its.tensors(batch))
            assert len(maps) - checks in (1, 2)  # the first call also checks itself
            its.plan(batch)


def test_gather_leaves_the_index_buffer_as_it_was():
    its = its_of()
    batch = its.batch(ForwardMode.DECODE, LENGTHS)
    its.plan(batch)
    wrapper = its.backend.forward_metadata.decode_wrapper
    indices, values = wrapper._kv_indices_buf, wrapper._kv_indices_buf.clone()
    with patch.applied("gather"):
        step(its, batch, its.tensors(batch))
    assert wrapper._kv_indices_buf is indices
    assert torch.equal(indices, values)


@pytest.mark.parametrize("strategy", ["shadow", "gather", "fused", "replan", "stock"])
@pytest.mark.parametrize("family", ["flashinfer_mla", "fa3"])
def test_a_call_holds_nothing_afterwards(family, strategy):
    """What waits for Python's collector keeps a step's tensors: the peak of a server's memory would grow."""
    its = its_of(family)
    batch = its.batch(ForwardMode.DECODE, LENGTHS)
    with patch.applied(strategy):
        its.plan(batch)
        gc.collect()
        gc.disable()
        try:
            its.attend(batch, "decode", its.tensors(batch), 0)
            assert not [o for o in gc.get_objects() if isinstance(o, Attempt | PoolView)]
        finally:
            gc.enable()
