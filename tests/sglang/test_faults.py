"""Faults injected into a patched SGLang: no wrong value, no lost call, one line each."""

import contextlib
import logging
import types
from pathlib import Path

import pytest
import torch
from rig.world import ForwardMode, World, fa3, flashinfer_mla

from kvlab import patch
from kvlab.patch import api, casts, hooks, plan_hooks, selfcheck, write
from kvlab.patch.runtime import Runtime
from kvlab.patch.scratch import Scratch
from kvlab.patch.sites import installed
from kvlab.patch.strategies.fused import Fused

LENGTHS = [5, 17, 9]
CLASSES = (flashinfer_mla.FlashInferMLAAttnBackend, fa3.FlashAttentionBackend)


@pytest.fixture
def its():
    world = World("flashinfer_mla", max_bs=4).fill()
    for request, n in enumerate(LENGTHS):
        world.allot(request, n)
    return world


def steps(world, strategy, number=2):
    """`number` steps of all layers; every output is compared with stock's on the same rows."""
    batch = world.batch(ForwardMode.DECODE, LENGTHS)
    world.plan(batch)
    with patch.applied(strategy):
        for _ in range(number):
            tensors = world.tensors(batch)
            for layer in range(world.shape.layers):
                got = world.attend(batch, "decode", tensors, layer)
                with world.unpatched():
                    want = world.attend(batch, "decode", tensors, layer)
                assert torch.equal(want.view(torch.int16), got.view(torch.int16))
        return patch.status()


def lines(caplog):
    return [
        r.getMessage() for r in caplog.records if r.name == "kvlab.patch" and r.levelno >= logging.WARNING
    ]


def raising(error):
    def fail(*args, **kwargs):
        raise error

    return fail


def serving(monkeypatch, owner, name, value):
    """`owner.name` is `value` once the self-check has passed."""
    monkeypatch.setattr(selfcheck, "check", lambda strategy, facts: None)
    monkeypatch.setattr(owner, name, value)


def test_a_kernel_that_raises_while_serving(its, monkeypatch, caplog):
    serving(monkeypatch, casts, "shadow", raising(RuntimeError("illegal instruction")))
    status = steps(its, "shadow")
    # The call that failed was stock's; the next ones are another exact strategy's.
    assert status["counters"]["calls"] == {"flashinfer_mla.decode": {"gather": 3, "stock": 1}}
    assert status["counters"]["fallbacks"] == {"shadow failed": 1}
    assert len(lines(caplog)) == 1
    assert "RuntimeError: illegal instruction" in lines(caplog)[0]


def test_what_cannot_be_decided_is_stock_s_and_no_strategy_s_fault(its, monkeypatch, caplog):
    """A pool of a fork's own, for one: said once, and no file is written for each layer of each step."""
    told = []
    monkeypatch.setattr("kvlab.patch.attempt.standing", raising(AttributeError("no kv_buffer")))
    monkeypatch.setattr("kvlab.patch.runfiles.RunFile.changed", lambda self, force: told.append(force))
    status = steps(its, "shadow")
    assert status["counters"]["calls"] == {"flashinfer_mla.decode": {"stock": 4}}
    assert status["counters"]["fallbacks"] == {"not understood": 4}
    assert status["counters"]["kv_writes"] == {"stock": 4}
    assert True not in told
    assert lines(caplog) == [
        "kvlab: calls of flashinfer_mla.decode are left to stock: AttributeError: no kv_buffer"
    ]


@pytest.mark.parametrize("hook", ["built", "graphs_ready", "metadata_ready", "replayed"])
@pytest.mark.parametrize("family", ["flashinfer_mla", "fa3"])
def test_what_we_do_behind_a_hook_ends_no_server_and_no_step(family, hook, monkeypatch, caplog):
    with patch.applied("shadow"):
        monkeypatch.setattr(Runtime, hook, raising(KeyError("no such thing")))
        world = World(family, max_bs=4).fill()
        for request, n in enumerate(LENGTHS):
            world.allot(request, n)
        world.graphs()
        capture = world.batch(ForwardMode.DECODE, [1] * len(LENGTHS))
        world.capture(capture)
        world.attend(capture, "decode", world.tensors(capture))
        batch = world.batch(ForwardMode.DECODE, LENGTHS)
        world.replay(batch)
        for _ in range(2):
            world.plan(batch)
            tensors = world.tensors(batch)
            got = world.attend(batch, "decode", tensors)
            with world.unpatched():
                want = world.attend(batch, "decode", tensors)
            assert torch.equal(want.view(torch.int16), got.view(torch.int16))
        counters = patch.status()["counters"]
    served = counters["calls"][f"{family}.decode"]
    # What ran before the hook failed was served as it should be.
    assert served == ({"shadow": 1, "stock": 2} if hook == "replayed" else {"stock": 3})
    (line,) = lines(caplog)
    assert line.startswith("kvlab: the patch failed behind ")
    assert line.endswith("KeyError: 'no such thing'; stock serves from now on")


def test_strict_does_not_come_up_where_the_patch_fails_behind_a_constructor(monkeypatch):
    monkeypatch.setenv("KVLAB_PATCH_STRICT", "1")
    monkeypatch.setattr(Runtime, "built", raising(KeyError("no such thing")))
    with (
        patch.applied("shadow"),
        pytest.raises(SystemExit, match=r"KVLAB_PATCH_STRICT: .* failed behind __init__: KeyError"),
    ):
        World("fa3")


def test_an_interrupt_while_slots_are_found_leaves_no_other_pass_s(its, monkeypatch):
    """Neither a failure of ours nor the end of the process, where somebody catches it."""
    batches = [its.batch(ForwardMode.DECODE, [n - less for n in LENGTHS]) for less in (0, 3)]
    with patch.applied("gather"):
        for batch in batches:
            its.plan(batch)
            tensors = its.tensors(batch)
            if batch is batches[1]:
                with monkeypatch.context() as interrupted, pytest.raises(KeyboardInterrupt):  # noqa: PT012
                    interrupted.setattr(casts, "slot_map", raising(KeyboardInterrupt()))
                    its.attend(batch, "decode", tensors, 0)
            got = its.attend(batch, "decode", tensors, 1)
            with its.unpatched():
                assert torch.equal(its.attend(batch, "decode", tensors, 1), got)
            if batch is batches[0]:
                assert patch.status()["counters"]["calls"] == {"flashinfer_mla.decode": {"gather": 1}}


def test_every_strategy_broken_is_stock(its, monkeypatch, caplog):
    serving(monkeypatch, casts, "shadow", raising(RuntimeError("a")))
    monkeypatch.setattr(casts, "slot_map", raising(RuntimeError("b")))
    status = steps(its, "exact" if its.slots > 4000 else "shadow", number=3)
    assert status["counters"]["calls"] == {"flashinfer_mla.decode": {"stock": 6}}
    assert len(lines(caplog)) == 2


def test_a_kernel_that_does_not_compile_is_never_taken(its, monkeypatch, caplog):
    monkeypatch.setattr(casts, "shadow", raising(RuntimeError("ptxas fatal")))
    status = steps(its, "shadow")
    assert status["counters"]["calls"] == {"flashinfer_mla.decode": {"gather": 4}}
    assert status["counters"]["fallbacks"] == {}
    assert "self-check failed" in status["chosen"]["flashinfer_mla.decode"]["reason"]
    assert len(lines(caplog)) == 1
    assert "ptxas fatal" in lines(caplog)[0]


def test_a_kernel_that_is_wrong_in_one_bit_is_never_taken(its, monkeypatch, caplog):
    right = casts.shadow

    def one_bit_off(rows, out, *rest):
        right(rows, out, *rest)
        if rows.shape[0] == 256:
            out.view(torch.int16)[2, 0, 7] ^= 1
        return out

    monkeypatch.setattr(casts, "shadow", one_bit_off)
    status = steps(its, "shadow")
    assert status["counters"]["calls"] == {"flashinfer_mla.decode": {"gather": 4}}
    assert "1 of 12288 values differ from the stock cast" in lines(caplog)[0]


def test_no_memory_for_scratch(its, monkeypatch, caplog):
    serving(monkeypatch, Scratch, "rows", raising(torch.OutOfMemoryError("CUDA out of memory")))
    status = steps(its, "shadow")
    assert status["counters"]["calls"] == {"flashinfer_mla.decode": {"stock": 4}}
    assert status["counters"]["fallbacks"] == {"out of memory for scratch": 2}
    assert len(lines(caplog)) == 2


def test_a_fused_kernel_that_raises_serves_the_call_all_the_same(its, monkeypatch, caplog):
    serving(monkeypatch, Fused, "_attend", raising(RuntimeError("launch failed")))
    status = steps(its, "fused")
    assert status["counters"]["calls"] == {"flashinfer_mla.decode": {"shadow": 3, "stock": 1}}
    assert len(lines(caplog)) == 1


def test_a_kv_write_that_raises_or_is_wrong(its, monkeypatch, caplog):
    pool = [b.clone() for b in its.pool.kv_buffer]
    monkeypatch.setattr(write, "new_rows", raising(RuntimeError("no")))
    status = steps(its, "shadow")
    assert status["counters"]["kv_writes"] == {"stock": 4}
    assert len(lines(caplog)) == 1
    assert any(not torch.equal(a, b) for a, b in zip(pool, its.pool.kv_buffer, strict=True))
    caplog.clear()
    monkeypatch.undo()
    monkeypatch.setattr(write, "quantise", lambda buffer, *rest: buffer.fill_(0))
    assert steps(its, "shadow")["counters"]["kv_writes"] == {"stock": 4}
    assert len(lines(caplog)) == 1
    assert "bytes differ from the stock write" in lines(caplog)[0]


def test_what_fails_for_one_cause_is_said_in_one_line(monkeypatch, caplog):
    """As where Triton cannot compile: each kernel's complaint is its own, the line speaks for all of them."""
    for owner, name in ((casts, "shadow"), (casts, "slot_map"), (write, "quantise")):
        monkeypatch.setattr(owner, name, raising(RuntimeError(f"ptxas fatal, kernel {name}")))
    with patch.applied("exact"):
        World("flashinfer_mla", slots=8192)
    assert lines(caplog) == [
        "kvlab: self-check of shadow, gather, the one-launch KV write failed on cpu: "
        "RuntimeError: ptxas fatal, kernel shadow; not used"
    ]
    caplog.clear()
    # Two causes, two lines.
    monkeypatch.setattr(casts, "slot_map", raising(MemoryError("x")))
    with patch.applied("exact"):
        World("flashinfer_mla", slots=8192)
    assert len(lines(caplog)) == 2


def originals():
    return [vars(c)[m] for c in CLASSES for m in ("__init__", "forward_decode", "forward_extend")]


def test_half_a_patch_is_none(monkeypatch):
    before = originals()
    real = hooks._patch_module

    def second_fails(runtime, module, *args):
        if module is fa3:
            raise RuntimeError("half way")
        real(runtime, module, *args)

    monkeypatch.setattr(hooks, "_patch_module", second_fails)
    with pytest.raises(RuntimeError, match="half way"):
        patch.apply("exact")
    assert originals() == before
    assert patch.status()["strategy"] == "off"
    monkeypatch.undo()
    with patch.applied("exact"):
        assert originals() != before
    assert originals() == before


def test_remove_between_two_layers_and_inside_a_call(its, monkeypatch):
    batch = its.batch(ForwardMode.DECODE, LENGTHS)
    its.plan(batch)
    tensors = its.tensors(batch)
    with its.unpatched():
        want = [its.attend(batch, "decode", tensors, n) for n in range(2)]
    patch.apply("shadow")
    got = [its.attend(batch, "decode", tensors, 0)]
    patch.remove()
    got.append(its.attend(batch, "decode", tensors, 1))
    assert all(map(torch.equal, want, got))

    real = casts.shadow

    def remove_meanwhile(rows, out, *rest):
        patch.remove()
        return real(rows, out, *rest)

    patch.apply("shadow")
    its.attend(batch, "decode", tensors, 0)
    monkeypatch.setattr(casts, "shadow", remove_meanwhile)
    assert torch.equal(its.attend(batch, "decode", tensors, 0), want[0])
    assert patch.status()["strategy"] == "off"
    assert its.pool is (
        batch.token_to_kv_pool if hasattr(batch, "token_to_kv_pool") else its.backend.token_to_kv_pool
    )


def unknown_release(monkeypatch, edit):
    """The installed sources as another release might have them."""
    real = Path.read_bytes

    def read_bytes(self):
        source = real(self)
        return edit(source.decode()).encode() if self.name == "flashinfer_mla_backend.py" else source

    monkeypatch.setattr(Path, "read_bytes", read_bytes)


EDITS = {
    "already fixed": (lambda t: t.replace(".to(", ".view("), "casts no pool: already fixed"),
    "another pool": (
        lambda t: t.replace("token_to_kv_pool.get_key_buffer", "kv.get_key_buffer"),
        "the pool is held by",
    ),
    "another signature": (
        lambda t: t.replace("        layer: RadixAttention,", "        lay: RadixAttention,"),
        "does not begin with",
    ),
    "no class": (lambda t: t.replace("class FlashInferMLAAttnBackend", "class Other"), "has no class"),
    "metadata": (
        lambda t: t.replace("decode_wrapper", "dec_wr").replace("prefill_wrapper", "pre_wr"),
        "does not read",
    ),
    "not Python": (lambda t: t + "\n)", "does not parse"),
}


@pytest.mark.parametrize("case", EDITS)
def test_unrecognised_code_is_left_alone_and_strict_refuses(case, monkeypatch):
    edit, reason = EDITS[case]
    unknown_release(monkeypatch, edit)
    before = [vars(CLASSES[0])[m] for m in ("forward_decode", "forward_extend")]
    with patch.applied("exact") as status:
        states = {s["site"]: s for s in status["sites"]}
        for kind in ("decode", "extend"):
            assert states[f"flashinfer_mla.{kind}"]["state"] == "left alone"
            assert reason in states[f"flashinfer_mla.{kind}"]["reason"]
            assert states[f"fa3.{kind}"]["state"] == "patched"
        assert [vars(CLASSES[0])[m] for m in ("forward_decode", "forward_extend")] == before
    monkeypatch.setenv("KVLAB_PATCH_STRICT", "1")
    with pytest.raises(SystemExit) as refused:
        patch.apply("exact")
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)
    assert patch.status()["strategy"] == "off"


def test_strict_refuses_a_backend_that_would_be_served_by_stock(monkeypatch):
    monkeypatch.setenv("KVLAB_PATCH_STRICT", "1")
    monkeypatch.setattr(selfcheck, "check", lambda strategy, facts: "wrong")
    with patch.applied("exact"), pytest.raises(SystemExit, match="nothing is patched"):
        World("flashinfer_mla", slots=8192)
    with patch.applied("exact"), contextlib.suppress(SystemExit):
        World("flashinfer_mla", torch.bfloat16, slots=8192)


def test_a_patch_that_breaks_inside_sglangs_import_does_not_break_the_import(monkeypatch, caplog):
    before = originals()
    sites = [s for s in installed().recognised if s.family == "flashinfer_mla"]
    monkeypatch.setattr(plan_hooks, "patch_plans", raising(RuntimeError("half way")))
    runtime, done, marked = Runtime("exact", is_strict=False, version="X"), hooks.Replacements(), []
    hooks._patch_imported(runtime, flashinfer_mla, sites, done, marked.append)
    assert originals() == before
    assert marked == []
    assert lines(caplog) == [
        "kvlab: SGLang X, flashinfer_mla left to stock: the patch failed to go in: RuntimeError: half way"
    ]
    assert set(runtime.unpatched) == {"flashinfer_mla.decode", "flashinfer_mla.extend"}
    strict = Runtime("exact", is_strict=True, version="X")
    with pytest.raises(SystemExit, match="half way"):
        hooks._patch_imported(strict, flashinfer_mla, sites, done, marked.append)
    assert originals() == before


@pytest.mark.parametrize("use_ragged", [True, False])
def test_a_ragged_prefill_with_other_heads_is_no_fallback(its, use_ragged):
    batch = its.batch(ForwardMode.EXTEND, LENGTHS)
    its.backend.forward_metadata = types.SimpleNamespace(use_ragged=use_ragged)
    layer = types.SimpleNamespace(head_dim=256, layer_id=0)
    q = torch.zeros(4, 256, dtype=torch.bfloat16)
    site = next(s for s in installed().recognised if s.name == "flashinfer_mla.extend")

    def stocks(backend, q, k, v, layer, forward_batch):
        holder = backend if site.holder == "self" else forward_batch
        if not use_ragged:
            holder.token_to_kv_pool.get_key_buffer(0).to(q.dtype)
        return "stock's"

    with patch.applied("exact"):
        found = api._patch.runtime.call(site, stocks, its.backend, q, None, None, layer, batch)
        counters = patch.status()["counters"]
    assert found == "stock's"
    assert bool(counters["fallbacks"]) is not use_ragged
    assert bool(counters["calls"]) is not use_ragged


def test_removing_while_serving_is_said_in_a_line(its, caplog, monkeypatch, tmp_path):
    monkeypatch.setenv("KVLAB_RUN_DIR", str(tmp_path))
    caplog.set_level(logging.INFO, logger="kvlab.patch")
    patch.apply("exact")
    monkeypatch.setattr(api._patch.runtime, "server", {"port": 1})
    api._patch.runtime.has_captured = True
    patch.remove()
    patch.remove()
    said = [r.getMessage() for r in caplog.records if "removed" in r.getMessage()]
    assert said == ["kvlab: removed from this scheduler; captured graphs stay patched"]
