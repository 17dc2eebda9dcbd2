"""apply, remove, status and the ways into SGLang's processes, on the real package."""

import contextlib
import inspect
import json
import logging
import multiprocessing
import os
import subprocess
import sys

import pytest
import torch
from rig import environment, probe, world
from rig.world import ForwardMode, Shape, World, fa3, flashinfer_mla

from kvlab import patch
from kvlab.patch import api, plugin, runfiles, spawn

METHODS = ("__init__", "forward_decode", "forward_extend", "init_cuda_graph_state", "init_forward_metadata")
CLASSES = (flashinfer_mla.FlashInferMLAAttnBackend, fa3.FlashAttentionBackend)
HAS_PLUGINS = world.RELEASE != "0.5.9"


def everything():
    """All functions of the two modules' classes, and what inspect says of the patched ones."""
    found = {}
    for module in (flashinfer_mla, fa3):
        for cls in (
            c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == module.__name__
        ):
            found.update({(cls.__name__, n): m for n, m in vars(cls).items() if inspect.isfunction(m)})
        found.update({(module.__name__, n): m for n, m in vars(module).items() if inspect.isfunction(m)})
    return found


def test_apply_is_idempotent_and_remove_restores_the_very_objects():
    before = everything()
    popen = vars(multiprocessing.context.SpawnProcess)["_Popen"]
    sources = {m: inspect.getsource(getattr(CLASSES[0], m)) for m in METHODS}
    first = patch.apply("exact")
    patched = everything()
    assert patched != before
    assert patch.apply("exact") == first
    assert everything() == patched
    # Another strategy replaces the first one instead of lying on top of it.
    patch.apply("fast")
    assert patch.status()["strategy"] == "fast"
    assert CLASSES[0].forward_decode.__wrapped__ is before["FlashInferMLAAttnBackend", "forward_decode"]
    patch.remove()
    patch.remove()
    assert everything() == before
    assert vars(multiprocessing.context.SpawnProcess)["_Popen"] is popen
    assert {m: inspect.getsource(getattr(CLASSES[0], m)) for m in METHODS} == sources
    assert {s["state"] for s in patch.status()["sites"]} == {"removed"}


def test_applied_restores_after_an_exception_and_nests():
    before = everything()
    with contextlib.suppress(KeyError), patch.applied("shadow"):
        with patch.applied("fast"):
            assert patch.status()["strategy"] == "fast"
        assert patch.status()["strategy"] == "shadow"
        raise KeyError
    assert everything() == before


def test_off_is_recorded(monkeypatch):
    monkeypatch.setenv("KVLAB_PATCH", "off")
    before = everything()
    assert patch.apply()["strategy"] == "off"
    assert everything() == before
    # An argument is stronger than the environment.
    assert patch.apply("exact")["strategy"] == "exact"


def test_what_a_third_party_put_on_top_stays_and_still_works():
    its = World("fa3", max_bs=2).fill()
    its.allot(0, 5)
    batch = its.batch(ForwardMode.DECODE, [5])
    its.plan(batch)
    tensors = its.tensors(batch)
    want = its.attend(batch, "decode", tensors)
    cls = fa3.FlashAttentionBackend
    original = cls.forward_decode
    patch.apply("shadow")
    ours = cls.forward_decode

    def theirs(self, *args, **kwargs):
        return ours(self, *args, **kwargs)

    cls.forward_decode = theirs
    try:
        patch.remove()
        assert cls.forward_decode is theirs
        assert torch.equal(its.attend(batch, "decode", tensors), want)
        assert patch.status()["counters"]["calls"] == {}
    finally:
        cls.forward_decode = original


@pytest.mark.parametrize("family", ["flashinfer_mla", "fa3"])
def test_one_line_at_start_up(family, caplog):
    """Release, backend, sites, strategy, bytes a step: under SGLang's own logging, at INFO."""
    with patch.applied("exact"), caplog.at_level(logging.INFO, "kvlab.patch"):
        World(family, slots=8192, shape=Shape(layers=3, rank=512, rope=64, heads=8))
        World(family, slots=8192, shape=Shape(layers=3, rank=512, rope=64, heads=8))
    lines = [r.getMessage() for r in caplog.records if r.name == "kvlab.patch"]
    gb = 3 * 8192 * 576 * 3 / 1e9
    assert lines == [
        f"kvlab: SGLang {world.RELEASE}, {family}, exact: decode shadow, extend shadow; "
        f"a decode step no longer casts 8,192 slots x 3 layers, {gb:.1f} GB of traffic"
    ]


def test_a_running_scheduler_writes_its_status(tmp_path):
    with patch.applied("exact"):
        its = World("fa3", max_bs=2, slots=8192).fill()
        its.allot(0, 5)
        said = runfiles.running(30000)
        assert [s["pid"] for s in said] == [os.getpid()]
        batch = its.batch(ForwardMode.DECODE, [5])
        its.plan(batch)
        its.attend(batch, "decode", its.tensors(batch))
    # Leaving writes once more.
    (last,) = runfiles.running(30000)
    assert last["strategy"] == "off"
    assert last["counters"]["calls"] == {"fa3.decode": {"shadow": 1}}
    assert last["server"]["tp_rank"] == 0
    json.dumps(last)


def test_two_servers_in_one_process_tree_keep_their_own_counts():
    with patch.applied("shadow"):
        api._patch.runtime.counters.calls["fa3.decode", "shadow"] = 5
        for _ in range(2):
            assert probe.forked(patch.status)["counters"]["calls"] == {}
        assert probe.forked(patch.status)["strategy"] == "shadow"
        assert patch.status()["counters"]["calls"] == {"fa3.decode": {"shadow": 5}}


def test_a_spawned_sglang_process_is_patched_first():
    assert probe.spawned(probe.state, plain=True) == {"strategy": "off", "patched": False}
    with patch.applied("shadow"):
        # Schedulers under a data-parallel controller: the child patches its own children too.
        assert probe.spawned(probe.grandchild) == {"strategy": "shadow", "patched": True}


def test_sglang_s_targets_are_recognised_by_their_module(monkeypatch):
    started = []
    popen = multiprocessing.context.SpawnProcess._Popen
    monkeypatch.setattr(multiprocessing.context.SpawnProcess, "_Popen", staticmethod(started.append))
    context = multiprocessing.get_context("spawn")
    target = flashinfer_mla.fast_mla_decode_plan
    with patch.applied("fast"):
        for its in (target, probe.state):
            process = context.Process(target=its)
            context.Process._Popen(process)
    wrapped, other = (p._target for p in started)
    assert isinstance(wrapped, spawn.Patched)
    assert (wrapped.target, wrapped.asked) == (target, "fast")
    assert other is probe.state
    assert popen is not None


def in_fresh_process(code, **env):
    """stdout's last line, as JSON, of `code` in a new interpreter."""
    environment = {**os.environ, "PYTHONPATH": str(probe.RIG.parent), **env}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    if done.returncode:
        return done.returncode, done.stderr.strip().splitlines()[-1]
    return 0, json.loads(done.stdout.strip().splitlines()[-1])


LOAD = """
from rig import environment
import json, sys
from sglang.srt.plugins import load_plugins
load_plugins()
import kvlab.patch
late = [s["state"] for s in kvlab.patch.status()["sites"]]
early = sorted(m for m in sys.modules if m.endswith(("flashinfer_mla_backend", "flashattention_backend")))
if {backend}:
    from rig.world import fa3, flashinfer_mla
print(json.dumps([kvlab.patch.status(), late, early]))
"""


@pytest.mark.skipif(not HAS_PLUGINS, reason="plugins came with 0.5.11")
def test_the_plugin_path():
    env = {"SGLANG_PLUGINS": "kvlab,x", "KVLAB_PATCH": "fast"}
    code, (status, late, early) = in_fresh_process(LOAD.format(backend=True), **env)
    assert code == 0
    assert status["strategy"] == "fast"
    # Nothing is imported early: a backend is patched when SGLang imports it.
    if not early:
        assert set(late) == {"waiting"}
    assert {s["state"] for s in status["sites"]} == {"patched"}


@pytest.mark.skipif(not HAS_PLUGINS, reason="plugins came with 0.5.11")
def test_sglang_plugins_is_honoured():
    _, (status, _, _) = in_fresh_process(LOAD.format(backend=False), SGLANG_PLUGINS="another")
    assert status["strategy"] == "off"


@pytest.mark.skipif(not HAS_PLUGINS, reason="plugins came with 0.5.11")
def test_strict_stops_the_launcher():
    fixed = """
import pathlib
real = pathlib.Path.read_text
pathlib.Path.read_text = lambda self, *a, **k: real(self, *a, **k).replace(".get_key_buffer(", ".other(")
"""
    code, line = in_fresh_process(fixed + LOAD.format(backend=False), KVLAB_PATCH_STRICT="1")
    assert code == 1
    assert line.startswith("kvlab: KVLAB_PATCH_STRICT: SGLang")


def test_a_mistyped_strategy_stops_the_launcher(monkeypatch):
    # SGLang logs every exception of a plugin and serves on; SystemExit it does not catch.
    monkeypatch.setenv("KVLAB_PATCH", "exakt")
    with pytest.raises(SystemExit, match="'exakt' is not a strategy"):
        plugin.register()


def test_the_plugin_says_what_it_leaves_alone(monkeypatch, caplog):
    found = api.sites.installed()
    left = tuple(s.left("why") if s.family == "fa3" else s for s in found.sites)
    monkeypatch.setattr(api.sites, "installed", lambda: api.sites.Installed(found.version, found.root, left))
    plugin.register()
    assert [r.getMessage() for r in caplog.records if r.name == "kvlab.patch"] == [
        f"kvlab: SGLang {world.RELEASE}: fa3.{kind} left alone: why" for kind in ("decode", "extend")
    ]


def test_a_sibling_with_its_own_decode_is_announced_for_extend_only(caplog):
    with patch.applied("exact"), caplog.at_level(logging.INFO, "kvlab.patch"):

        class Sibling(flashinfer_mla.FlashInferMLAAttnBackend):
            def forward_decode(self, *args, **kwargs):
                raise NotImplementedError

        its = World("flashinfer_mla", slots=8192)
        caplog.clear()
        api._patch.runtime._said.clear()
        with environment.OnCPU():
            Sibling(its.runner)
        assert "exact: extend shadow; an extend step no longer casts" in caplog.text


def test_the_stock_strategy_is_stock_s_kv_write_too():
    its = World("flashinfer_mla", max_bs=2).fill()
    its.allot(0, 5)
    batch = its.batch(ForwardMode.DECODE, [5])
    its.plan(batch)
    with patch.applied("stock"):
        its.attend(batch, "decode", its.tensors(batch))
        counters = patch.status()["counters"]
    assert counters["calls"] == {"flashinfer_mla.decode": {"stock": 1}}
    assert counters["kv_writes"] == {"stock": 1}
