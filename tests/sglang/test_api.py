"""apply, remove, status and the ways into SGLang's processes, on the real package."""

import contextlib
import functools
import gc
import importlib
import inspect
import json
import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import warnings
import weakref
from pathlib import Path

import pytest
import torch
from rig import environment, probe, world
from rig.world import ForwardMode, Shape, World, fa3, flashinfer_mla

import kvlab
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


def test_what_a_third_party_put_on_top_stays_and_still_works(tmp_path):
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
    runtime = api._patch.runtime
    runtime.server = {"port": 30000}
    try:
        patch.remove()
        run_file = tmp_path / "run" / f"{os.getpid()}.json"
        said = run_file.read_bytes()
        assert json.loads(said)["strategy"] == "off"
        # A hook that is called all the same: what was removed says nothing any more.
        runtime.counters.fallback("late")
        runtime.on_change(True)
        assert run_file.read_bytes() == said
        assert cls.forward_decode is theirs
        assert torch.equal(its.attend(batch, "decode", tensors), want)
        assert patch.status()["counters"]["calls"] == {}
    finally:
        cls.forward_decode, runtime.server = original, {}


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


def in_fresh_process(code, *arguments, **env):
    """stdout's last line, as JSON, of `code` in a new interpreter."""
    environment = {**os.environ, "PYTHONPATH": str(probe.RIG.parent), **env}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *arguments],
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


def loaded_in_a_fork(before=lambda: None):
    """The strategy after SGLang's own loading of plugins, or the line that it stopped with.

    A process that has never loaded any is all that loading asks for: a fork of this one has its imports.
    """
    plugins = importlib.import_module("sglang.srt.plugins")
    assert not plugins._plugins_loaded

    def load():
        before()
        try:
            plugins.load_plugins()
        except SystemExit as stopped:
            return str(stopped.code)
        return patch.status()["strategy"]

    return probe.forked(load)


UNINSTALLED = """
from rig import environment
import json, pathlib, shutil, sys
import torch
import kvlab
from kvlab import patch
from rig.world import ForwardMode, World

folder = pathlib.Path(kvlab.__file__).parent
assert folder.parent == pathlib.Path(sys.argv[1]), folder
patch.apply("exact")
its = World("flashinfer_mla", max_bs=2, slots=8192).fill()
its.allot(0, 5)
shutil.rmtree(folder)

def step():
    batch = its.batch(ForwardMode.DECODE, [5])
    its.plan(batch)
    tensors = its.tensors(batch)
    got = its.attend(batch, "decode", tensors)
    with its.unpatched():
        return torch.equal(got, its.attend(batch, "decode", tensors))

same = [step()]
strategies = patch.api._patch.runtime.strategies
def breaks(*_):
    raise RuntimeError("no")
strategies["shadow"].cast = breaks
same += [step(), step()]
counters = patch.status()["counters"]
patch.remove()
print(json.dumps([same, counters["calls"], counters["fallbacks"], patch.status()["strategy"]]))
"""


def test_uninstalled_while_it_serves(tmp_path):
    """`pip uninstall` takes the files away under a running scheduler: it serves on until a restart."""
    folder = Path(kvlab.__file__).parent
    shutil.copytree(folder, tmp_path / "kvlab", ignore=shutil.ignore_patterns("__pycache__", "_data"))
    path = os.pathsep.join([str(tmp_path), str(probe.RIG.parent)])
    code, (same, calls, fallbacks, strategy) = in_fresh_process(
        UNINSTALLED, str(tmp_path), PYTHONPATH=path, PYTHONSAFEPATH="1"
    )
    assert code == 0
    assert same == [True] * 3
    # Where the strategy breaks then, the next one or stock still serves.
    assert sum(calls["flashinfer_mla.decode"].values()) == 3
    assert calls["flashinfer_mla.decode"]["shadow"] == 1
    assert fallbacks == {"shadow failed": 1}
    assert strategy == "off"


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
def test_sglang_plugins_is_honoured(monkeypatch):
    monkeypatch.setenv("KVLAB_PATCH", "gather")
    monkeypatch.setenv("SGLANG_PLUGINS", "kvlab")
    assert loaded_in_a_fork() == "gather"
    monkeypatch.setenv("SGLANG_PLUGINS", "another")
    assert loaded_in_a_fork() == "off"


@pytest.mark.skipif(not HAS_PLUGINS, reason="plugins came with 0.5.11")
def test_strict_stops_the_launcher(monkeypatch):
    real = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: real(self).replace(b".get_key_buffer(", b".other("))
    assert loaded_in_a_fork() == "exact"
    monkeypatch.setenv("KVLAB_PATCH_STRICT", "1")
    assert loaded_in_a_fork().startswith("kvlab: KVLAB_PATCH_STRICT: SGLang")


def test_an_argument_outweighs_what_the_plugin_is_told(monkeypatch):
    """SGLang loads its plugins when the Engine is built, after the user's own call."""
    monkeypatch.setenv("KVLAB_PATCH", "gather")
    popen = vars(multiprocessing.context.SpawnProcess)["_Popen"]
    for asked in ("fast", "off", "exact"):
        patch.apply(asked)
        plugin.register()
        assert patch.status()["strategy"] == asked
    with patch.applied("off"):
        plugin.register()
        assert patch.status()["strategy"] == "off"
    assert patch.status()["strategy"] == "exact"
    # Nothing of it is left: now the variable decides.
    patch.remove()
    assert vars(multiprocessing.context.SpawnProcess)["_Popen"] is popen
    plugin.register()
    assert patch.status()["strategy"] == "gather"


def test_schedulers_are_told_of_off_too(monkeypatch):
    started = []
    monkeypatch.setattr(multiprocessing.context.SpawnProcess, "_Popen", staticmethod(started.append))
    patch.apply("off")
    context = multiprocessing.get_context("spawn")
    context.Process._Popen(context.Process(target=flashinfer_mla.fast_mla_decode_plan))
    (process,) = started
    assert process._target.asked == "off"
    process._target.target = plugin.register
    process._target()
    assert patch.status()["strategy"] == "off"


@pytest.mark.skipif(not HAS_PLUGINS, reason="plugins came with 0.5.11")
def test_apply_before_the_engine_outweighs_the_plugin_in_sglang_s_own_loading():
    # Before anything of SGLang is imported, and behind it.
    before = "import kvlab.patch; kvlab.patch.apply('fast')\n"
    code, (status, _, _) = in_fresh_process(before + LOAD.format(backend=False))
    assert (code, status["strategy"]) == (0, "fast")
    for asked in ("gather", "off"):
        assert loaded_in_a_fork(lambda asked=asked: patch.apply(asked)) == asked


def test_another_strategy_keeps_what_captured_graphs_use():
    patch.apply("exact")
    first = api._patch.runtime
    first.has_captured = True
    first.scratch.lasting[torch.device("cpu"), "shared"] = torch.zeros(8)
    held = weakref.ref(first.scratch.lasting[torch.device("cpu"), "shared"])
    del first
    patch.remove()
    patch.apply("fast")
    gc.collect()
    assert held() is not None
    assert patch.status()["note"] == "graphs captured before stay with exact"


def test_what_was_seen_when_a_backend_was_built_holds_for_the_next_strategy(caplog):
    with patch.applied("shadow"):
        its = World("flashinfer_mla", max_bs=2).fill()
        its.allot(0, 5)
        its.runner.server_args.dcp_size = 2
    batch = its.batch(ForwardMode.DECODE, [5])
    its.plan(batch)
    with patch.applied("gather"):
        its.attend(batch, "decode", its.tensors(batch))
        status = patch.status()
        assert [s["strategy"] for s in runfiles.running(30000)] == ["off"]
        api._patch.runtime.on_change(True)
        assert [s["strategy"] for s in runfiles.running(30000)] == ["gather"]
    assert status["counters"]["fallbacks"] == {"decode context parallelism": 1}


def test_a_fork_while_another_thread_patches():
    held, done = threading.Event(), threading.Event()

    def hold():
        with api._lock:
            held.set()
            done.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:

        def removed():
            signal.alarm(20)
            return patch.remove()["strategy"]

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            assert probe.forked(removed) == "off"
    finally:
        done.set()
        thread.join()


def test_strict_refuses_whatever_went_wrong(monkeypatch):
    def breaks():
        raise RuntimeError("no source to read")

    monkeypatch.setattr(api.sites, "installed", breaks)
    monkeypatch.setattr(api, "is_decided", lambda: False)
    with pytest.raises(RuntimeError, match="no source to read"):
        plugin.register()
    monkeypatch.setenv("KVLAB_PATCH_STRICT", "1")
    with pytest.raises(
        SystemExit, match="KVLAB_PATCH_STRICT: the patch failed to go in: RuntimeError: no so"
    ):
        plugin.register()
    monkeypatch.undo()
    # What is neither yes nor no would serve unpatched some day, with nobody knowing.
    monkeypatch.setenv("KVLAB_PATCH_STRICT", "ture")
    with pytest.raises(SystemExit, match="'ture' is neither yes nor no; use 1 or 0"):
        plugin.register()


def test_remove_where_somebody_made_another_list_of_finders(monkeypatch):
    monkeypatch.delitem(sys.modules, fa3.__name__)
    patch.apply("exact")
    monkeypatch.setattr(
        sys, "meta_path", [f for f in sys.meta_path if type(f).__module__ != "kvlab.patch.hooks"]
    )
    assert patch.remove()["strategy"] == "off"


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
            @functools.wraps(flashinfer_mla.FlashInferMLAAttnBackend.forward_decode)
            def forward_decode(self, *args, **kwargs):
                raise NotImplementedError

        class Younger(Sibling):
            pass

        its = World("flashinfer_mla", slots=8192)
        for sibling in (Sibling, Younger):
            caplog.clear()
            api._patch.runtime.said.lines.clear()
            with environment.OnCPU():
                sibling(its.runner)
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
