"""What a wrapper checks, freezes and wraps, on a small wrapper of our own put where a release would be."""

import json
import traceback

import pytest

from kvlab import cli, inspection
from kvlab.backends import probe, sources
from kvlab.errors import BadInput

WRAPPER = '''"""A wrapper with one of everything."""


def traced(f):
    return f


class BatchMLAPagedAttentionWrapper:
    def __init__(self, workspace):
        self._workspace = workspace

    @traced
    def plan(self, kv_indptr, kv_indices, page_size):
        if page_size not in (1, 64):
            raise ValueError(f"page_size is {page_size}, not 1 or 64")
        assert kv_indices is not None, "no indices"
        self._kv_indices_buf = kv_indices
        self._lengths = kv_indptr.to("cpu")
        self._unused = page_size

    @overload
    def run(self, q): ...

    def run(self, q, out=None):
        if out is None:
            raise RuntimeError("out is needed")
        return self._workspace, self._kv_indices_buf, self._lengths
'''


@pytest.fixture
def release(tmp_path, monkeypatch):
    """A downloaded flashinfer 0.6.3 that is the small wrapper."""
    root = tmp_path / "sources" / "flashinfer-python-0.6.3"
    (root / "flashinfer").mkdir(parents=True)
    (root / "flashinfer" / "mla.py").write_text(WRAPPER)
    (root / "complete").touch()
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path))
    sources._module.cache_clear()
    yield "0.6.3"
    sources._module.cache_clear()


def test_checks_are_found_with_their_words(release):
    plan = inspection.wrapper(release).method("plan")
    assert [(c.exception, c.says) for c in plan.checks] == [
        ("ValueError", "page_size is {page_size}, not 1 or 64"),
        ("AssertionError", "no indices"),
    ]
    assert plan.decorators == ["traced"]
    assert plan.parameters == ["kv_indptr", "kv_indices", "page_size"]
    assert plan.source.startswith("@traced\ndef plan(")


def test_frozen_is_what_plan_keeps_and_run_reads(release):
    found = inspection.wrapper(release)
    assert [(k.name, k.host) for k in found.frozen()] == [("_kv_indices_buf", False), ("_lengths", True)]
    # The overload before it is not the method.
    assert found.method("run").parameters == ["q", "out"]
    assert found.method("run").uses == ["_kv_indices_buf", "_lengths", "_workspace"]


def test_fp8_is_taken_since():
    assert inspection.fp8_since() == {"fa3": "0.6.14", "fa2": "0.6.18"}


def test_json_and_unknown_names(release, capsys):
    def run(*args):
        with pytest.raises(SystemExit) as stop:
            cli.main(["inspect", *args])
        return stop.value.code, capsys.readouterr()

    code, said = run("--flashinfer", release, "--json")
    assert code == 0
    assert json.loads(said.out)["release"] == release
    code, said = run("--flashinfer", release, "--method", "run")
    assert (code, said.out.splitlines()[0]) == (0, "def run(self, q, out=None):")
    for args in (("--flashinfer", "0.9.9"), ("--flashinfer", release, "--method", "stop")):
        code, said = run(*args)
        assert (code, said.out, said.err.count("\n")) == (2, "", 1)


def test_without_a_release_and_without_flashinfer(monkeypatch):
    monkeypatch.setattr(sources, "installed", lambda package: None)
    with pytest.raises(BadInput, match="name a release"):
        inspection.wrapper()


def tree(tmp_path, text):
    (tmp_path / "mod.py").write_text(text)
    return sources.Tree("pkg", "1.0", tmp_path).module("mod.py")


def test_a_function_of_a_release_runs_alone_and_its_traceback_names_the_release(tmp_path):
    module = tree(
        tmp_path,
        "\n\n@wrapped(missing)\ndef f(x: Missing) -> None:\n    if x > LIMIT:\n        raise "
        "ValueError('over')\n",
    )
    function = module.real("f", {"LIMIT": 2})
    function(2)
    with pytest.raises(ValueError, match="over") as raised:
        function(3)
    frame = traceback.extract_tb(raised.value.__traceback__)[-1]
    assert (frame.filename, frame.lineno, frame.line) == ("pkg-1.0/mod.py", 6, "raise ValueError('over')")
    with pytest.raises(NameError, match="LIMIT"):
        module.real("f", {})(1)
    with pytest.raises(LookupError, match="no function g"):
        module.real("g", {})


def test_a_probe_imports_nothing_of_the_release(tmp_path):
    module = tree(
        tmp_path,
        "def f():\n    from sglang.deep import thing\n    import json\n    return thing, json.dumps(1)\n",
    )
    stand_in = probe.Stub(thing="stand-in")
    assert module.real("f", probe.namespace({}, {"sglang": stand_in}))() == ("stand-in", "1")


def test_messages_of_a_compiled_extension(tmp_path):
    binary = (
        b"\x00\x7fELF\x00Dense MLA is only supported on SM90\x00_Z9supportedNOT\x00nothing to see here\x00"
    )
    (tmp_path / "ops.so").write_bytes(binary)
    assert sources.Tree("pkg", "1.0", tmp_path).messages("ops.so") == ["Dense MLA is only supported on SM90"]
    assert sources.Tree("pkg", "1.0", tmp_path).messages("none.so") == []


def test_pins_come_from_the_metadata(tmp_path):
    folder = tmp_path / "sglang-0.5.9.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        "Name: sglang\nRequires-Dist: flashinfer_python[cu13]==0.6.12\nRequires-Dist: torch==2.11.0\n"
        "Requires-Dist: numpy\nRequires-Dist: pytest==8.0; extra == 'test'\n"
    )
    assert sources.Tree("sglang", "0.5.9", tmp_path).requires == {
        "flashinfer-python": "0.6.12",
        "torch": "2.11.0",
    }
