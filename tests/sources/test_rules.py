"""Rules and sources must agree: extracted anew from real wheels, the committed rules come out the same."""

import json
import shutil
from pathlib import Path

import msgspec
import pytest

from kvlab.backends import decide, extract, live, question, reproduce, rules, sources
from kvlab.errors import BadInput

pytestmark = pytest.mark.sglang

RELEASES = [
    ("sglang", "0.5.8"),
    ("sglang", "0.5.9"),
    ("sglang", "0.5.12"),
    ("sglang", "0.5.15.post1"),
    ("sglang", "0.5.20"),
    ("sglang", "0.5.23"),
    ("flashinfer-python", "0.6.3"),
    ("flashinfer-python", "0.6.12"),
    ("flashinfer-python", "0.7.2"),
    ("flashinfer-python", "0.7.4"),
    ("sgl-kernel", "0.3.21"),
    ("sgl-flash-mla", "1.0.0"),
]


@pytest.mark.parametrize(("package", "version"), RELEASES)
def test_the_committed_rules_are_what_the_source_says(package, version):
    assert extract.extract(package, version) == rules.load(package, version).facts


# One line of the source changed, and the rule that must then differ.
MUTATIONS = [
    (
        "sglang",
        "0.5.9",
        "sglang/srt/server_args.py",
        "self.page_size = 128\n",
        "self.page_size = 64\n",
        "constraints",
    ),
    (
        "sglang",
        "0.5.9",
        "sglang/srt/mem_cache/memory_pool.py",
        "assert self.page_size == 64",
        "assert self.page_size == 32",
        None,
    ),
    (
        "sglang",
        "0.5.9",
        "sglang/srt/layers/attention/flashinfer_mla_backend.py",
        "k_buffer = forward_batch.token_to_kv_pool.get_key_buffer(layer.layer_id).to(",
        "k_buffer = forward_batch.token_to_kv_pool.get_active_rows(layer.layer_id).to(",
        "casts",
    ),
    (
        "flashinfer-python",
        "0.6.3",
        "flashinfer/mla.py",
        "if qk_nope_head_dim != 128:",
        "if qk_nope_head_dim not in (128, 192):",
        "mla_shape",
    ),
    (
        "flashinfer-python",
        "0.7.2",
        "flashinfer/xqa.py",
        "if head_group_ratio != 128:",
        "if head_group_ratio > 128:",
        "xqa",
    ),
    (
        "flashinfer-python",
        "0.7.4",
        "flashinfer/mla/_utils.py",
        "kv_lora_rank == nope_mla_dimensions.kv_lora_rank",
        "kv_lora_rank < nope_mla_dimensions.kv_lora_rank",
        "mla_shape",
    ),
    (
        "sgl-kernel",
        "0.3.21",
        "sgl_kernel/attention.py",
        "assert block_num % (128 / PAGE_SIZE) == 0",
        "assert block_num > 0",
        "cutlass_mla",
    ),
]


@pytest.mark.parametrize(("package", "version", "file", "old", "new", "fact"), MUTATIONS)
def test_a_changed_source_is_noticed(package, version, file, old, new, fact, tmp_path):
    """The comparison can fail: a release whose check is changed in one line no longer matches its rules."""
    tree = sources.fetch(package, version)
    changed = sources.Tree(package, version, tmp_path)
    for part in tree.root.iterdir():
        if part.is_dir():
            shutil.copytree(part, tmp_path / part.name)
    path = tmp_path / file
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
    committed = rules.load(package, version).facts
    if fact is None:
        with pytest.raises(LookupError, match="is not where it was"):
            extract.facts(changed)
        return
    assert msgspec.json.decode(msgspec.json.encode(extract.facts(changed)))[fact] != committed[fact]


@pytest.mark.parametrize("package", ["sglang", "flashinfer-python"])
def test_a_release_that_is_not_known_yet_is_read_where_it_is_installed(package, monkeypatch, tmp_path):
    """The newest source under a later number answers as the newest; what it lacks is not guessed at."""
    newest = rules.releases(package)[-1]
    tree = sources.Tree(package, "99.0", sources.fetch(package, newest).root)
    monkeypatch.setattr(sources, "installed", lambda name: tree if name == package else None)
    live.load.cache_clear()
    found = live.load(package, "99.0")
    assert found.facts == {**rules.load(package, newest).facts, "release": "99.0"}
    asked = {"sglang": "99.0"} if package == "sglang" else {"sglang": "0.5.23", "flashinfer": "99.0"}
    verdicts = decide(question("glm-5", "h200", **asked))
    assert all(v.reason for v in verdicts)
    moved = {
        "sglang": "sglang/srt/layers/attention/flashattention_backend.py",
        "flashinfer-python": "flashinfer/prefill.py",
    }[package]
    shutil.copytree(tree.root, tmp_path / "tree", ignore=lambda _, names: {Path(moved).name} & set(names))
    tree = sources.Tree(package, "99.0", tmp_path / "tree")
    live.load.cache_clear()
    with pytest.raises(BadInput, match=r"99\.0: newer than .* it is installed, and its source"):
        question("glm-5", "h200", **asked)
    live.load.cache_clear()


@pytest.mark.parametrize("version", ["0.5.9", "0.5.15.post1", "0.5.23"])
def test_the_argument_handler_moves_pages_as_the_rules_say(version):
    """The release's own handler is run for each backend: the page size that it leaves is the rule's."""
    tree = sources.fetch("sglang", version)
    constraints = rules.load("sglang", version)["constraints"]
    for backend, rule in constraints.items():
        page = rule["page"]
        wanted = 64 if 64 in page["sizes"] else page["becomes"]
        assert reproduce.page_size_of(tree, backend) == wanted, backend
    assert reproduce.page_size_of(tree, "flashinfer") == 64


def test_both_failures_of_the_source_text_are_raised_by_its_own_releases():
    nope, width, pool, page, dtype = reproduce.all_of()
    assert (nope.release, nope.exception, nope.says) == (
        "0.6.3",
        "ValueError",
        "Expected qk_nope_head_dim == 128, got 192",
    )
    assert width.says == "Expected block_num % (128 / block_size) == 0, got block_num=1 and block_size=64"
    assert (pool.release, pool.exception, pool.quote) == (
        "0.5.9",
        "AssertionError",
        "assert self.page_size == 64",
    )
    assert page.quote == "assert block_num % (128 / PAGE_SIZE) == 0"
    assert dtype.quote == "assert q_nope.dtype == q_pe.dtype == kv_c_and_k_pe_cache.dtype"
    for raised in (nope, width, pool, page, dtype):
        tree = sources.fetch(raised.package, raised.release)
        line = (tree.root / raised.file).read_text(encoding="utf-8").splitlines()[raised.line - 1]
        assert raised.quote in line


def test_the_recorded_exceptions_are_the_ones_raised_here():
    from kvlab import data

    recorded = json.loads((data.recorded("backend-failures") / "raised.json").read_bytes())["raised"]
    assert recorded == msgspec.to_builtins(reproduce.all_of())
