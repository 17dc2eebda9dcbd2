"""Every release from 0.5.8 on: the sites found in the real source, patched, restored."""

import ast
import inspect
import subprocess
import sys
import types

import fetch_sources
import pytest

from kvlab.patch import diff, hooks, reads, sites
from kvlab.patch.runtime import Runtime

pytestmark = pytest.mark.sources

# Lines of `get_key_buffer(` by release: flashinfer_mla extend and decode, fa3 extend and decode.
LINES = {
    "0.5.8": (575, 639, 977, 1255),
    "0.5.9": (575, 639, 999, 1274),
    "0.5.12": (575, 639, 953, 1251),
    "0.5.15.post1": (577, 639, 1405, 1760),
    "0.5.18": (657, 719, 1620, 2035),
    "0.5.20": (748, 810, 1699, 2097),
    "0.5.23": (761, 822, 1944, 2350),
}


def root(release):
    return fetch_sources.source("sglang", release) / "sglang"


def found(release):
    return list(sites.find(root(release)))


@pytest.mark.parametrize("release", fetch_sources.SGLANG)
def test_all_four_sites_are_recognised(release):
    its = found(release)
    assert [s.name for s in its] == [
        "flashinfer_mla.decode",
        "flashinfer_mla.extend",
        "fa3.decode",
        "fa3.extend",
    ]
    assert [(s.state, s.reason) for s in its] == [(sites.RECOGNISED, "")] * 4
    # Who holds the pool is read from the code: the batch through 0.5.12.post1, the backend from 0.5.13.
    is_old = tuple(int(n) for n in release.split(".post")[0].split(".")) <= (0, 5, 12)
    assert {s.holder for s in its} == {"forward_batch" if is_old else "self"}
    if release in LINES:
        lines = {s.name: s.line for s in its}
        extend, decode, fa3_extend, fa3_decode = LINES[release]
        assert lines == {
            "flashinfer_mla.extend": extend,
            "flashinfer_mla.decode": decode,
            "fa3.extend": fa3_extend,
            "fa3.decode": fa3_decode,
        }


def module_of(release, family):
    """The backend's class and functions, compiled from the real file; nothing else of it runs."""
    path = root(release) / family.path
    tree = ast.parse(path.read_text(encoding="utf-8"))
    wanted = {family.cls, "FlashInferMLAIndicesUpdaterDecode", "fast_mla_decode_plan"}
    body = [ast.parse("from __future__ import annotations").body[0]]
    for node in tree.body:
        if getattr(node, "name", None) not in wanted:
            continue
        if isinstance(node, ast.ClassDef):
            node.bases, node.decorator_list = [], []
            node.body = [n for n in node.body if isinstance(n, ast.FunctionDef) and not n.decorator_list]
        body.append(node)
    module = types.ModuleType(family.module)
    module.__file__ = str(path)
    exec(compile(ast.Module(body, []), str(path), "exec"), module.__dict__)
    return module


def functions(module):
    """Every function of the module and its classes, by name."""
    owners = [module, *(c for c in vars(module).values() if isinstance(c, type))]
    return {
        f"{getattr(owner, '__name__', '')}.{name}": member
        for owner in owners
        for name, member in vars(owner).items()
        if inspect.isfunction(member)
    }


def look(member):
    """What inspect says of a function."""
    return inspect.signature(member), inspect.getsource(member), inspect.getmodule(member)


@pytest.mark.parametrize("family", sites.FAMILIES, ids=lambda f: f.name)
@pytest.mark.parametrize("release", fetch_sources.SGLANG)
def test_patched_and_restored(release, family, monkeypatch):
    module = module_of(release, family)
    monkeypatch.setitem(sys.modules, family.module, module)
    before = functions(module)
    mine = [s for s in found(release) if s.family == family.name]
    done, marked = hooks.Replacements(), []
    hooks.install(Runtime("exact", is_strict=False, version=release), mine, done, marked.append)
    assert marked == mine
    patched = functions(module)
    changed = [name for name in before if patched[name] is not before[name]]
    assert {f"{family.cls}.forward_decode", f"{family.cls}.forward_extend"} <= set(changed)
    # Each release has hooks that run before a replay, whatever their names.
    assert any("init_forward_metadata" in name for name in changed)
    # A wrapped method looks like the original, and afterwards the original is there, the very object.
    looks = {name: look(before[name]) for name in changed}
    assert {name: look(patched[name]) for name in changed} == looks
    done.undo()
    after = functions(module)
    assert after == before
    assert {name: look(after[name]) for name in changed} == looks


@pytest.mark.parametrize("release", fetch_sources.SGLANG)
def test_siblings_inherit_or_call_the_patched_class(release):
    """FlashMLA, TRTLLM-MLA and Cutlass are subclasses, and their fallbacks call super(): the hook reaches
    them.
    """
    folder = root(release) / "srt/layers/attention"
    heirs = {}
    for path in folder.glob("*mla_backend.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and "FlashInferMLAAttnBackend" in map(ast.unparse, node.bases):
                own = {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
                calls = {
                    ast.unparse(n.func)
                    for n in ast.walk(node)
                    if isinstance(n, ast.Call) and ast.unparse(n.func).startswith("super().")
                }
                heirs[node.name] = (own, calls)
    assert {"FlashMLABackend", "TRTLLMMLABackend"} <= set(heirs)
    for own, calls in heirs.values():
        assert "forward_extend" not in own or "super().forward_extend" in calls
        # Their own decode kernels read FP8 rows: they cast no pool.
        assert "super().forward_decode" not in calls or "forward_decode" in own


@pytest.mark.parametrize("release", fetch_sources.SGLANG)
def test_no_sibling_casts_its_own_pool_in_decode_without_being_known(release):
    """Every `get_key_buffer(…).to(…)` of a release's MLA backends is a site, or is one that we name here."""
    known = {f.path for f in sites.FAMILIES}
    others = {}
    for path in (root(release) / "srt/layers/attention").glob("*mla_backend.py"):
        name = str(path.relative_to(root(release)))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                others.setdefault(name, set()).update(
                    f"{node.name}:{line}" for line, _ in sites.pool_casts(node)
                )
    assert {name for name, where in others.items() if where} <= known


@pytest.mark.parametrize("version", fetch_sources.FLASHINFER)
def test_flashinfer_keeps_the_attributes_that_the_adapter_reads(version):
    folder = fetch_sources.source("flashinfer-python", version) / "flashinfer"
    files = [*folder.glob("mla.py"), *sorted(folder.glob("mla/**/*.py"))]
    text = "\n".join(p.read_text(encoding="utf-8") for p in files)
    for name in ("_kv_indices_buf", "_kv_indptr_buf", "_qo_indptr_buf", "_use_cuda_graph"):
        assert f"self.{name} = " in text
    # The kernel gets the index buffer as it is at the call: swapping it is enough.
    assert "self._kv_indices_buf,\n" in text
    if version.startswith("0.7"):
        assert "self._planned_backend = planned_backend" in text
        owner = types.SimpleNamespace(
            _kv_indices_buf=1, _planned_backend=types.SimpleNamespace(_kv_indices_buf=1)
        )
        backend = types.SimpleNamespace(forward_metadata=types.SimpleNamespace(decode_wrapper=owner))
        swap = reads.FlashInferMLA().swap(backend, "decode", 2)
        assert (owner._kv_indices_buf, owner._planned_backend._kv_indices_buf) == (2, 2)
        swap.undo()
        assert (owner._kv_indices_buf, owner._planned_backend._kv_indices_buf) == (1, 1)


def method_of(source, site):
    """The class and the method of a site, in that text."""
    tree = ast.parse(source)
    cls = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == site.cls)
    return cls, next(n for n in cls.body if isinstance(n, ast.FunctionDef) and n.name == site.method)


@pytest.mark.parametrize("release", fetch_sources.SGLANG)
def test_the_way_upstream_at_each_site(release, tmp_path):
    """`kvlab patch diff` applies to each release, and asks for nothing that is not there."""
    its = found(release)
    for family in sites.FAMILIES:
        copy = tmp_path / "sglang" / family.path
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((root(release) / family.path).read_bytes())
    text = diff.unified(sites.Installed(release, root(release), tuple(its)))
    subprocess.run(["patch", "-p1", "-s", "-d", str(tmp_path)], input=text, text=True, check=True)
    for site in its:
        path = next(f.path for f in sites.FAMILIES if f.name == site.family)
        was, _ = method_of((root(release) / path).read_bytes(), site)
        _, method = method_of((tmp_path / "sglang" / path).read_bytes(), site)
        calls = [n for n in ast.walk(method) if isinstance(n, ast.Call)]
        (call,) = (n for n in calls if ast.unparse(n.func) == "cast_active_rows")
        # One cast is left on fa3: that of cascade attention, which reads a second table.
        assert len(list(sites.pool_casts(method))) == (site.family == "fa3")
        names = [n for n in ast.walk(method) if isinstance(n, ast.Name)]
        bound = {n.id for n in names if isinstance(n.ctx, ast.Store) and n.lineno < call.lineno}
        bound |= {a.arg for a in method.args.args} | {"cast_active_rows"}
        asked = [n for n in ast.walk(call) if isinstance(n, ast.Name | ast.Attribute)]
        assert {n.id for n in asked if isinstance(n, ast.Name)} <= bound
        assert site.family != "fa3" or "use_cascade_attn" in bound
        theirs = {ast.unparse(n) for n in ast.walk(was) if isinstance(n, ast.Attribute)}
        assert {x for n in asked if (x := ast.unparse(n)).startswith("self.")} <= theirs
