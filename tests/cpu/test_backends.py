"""Who else could serve: the answers, their evidence, and what unknown names get. No network, no SGLang."""

import itertools
import json
import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab import cli
from kvlab.backends import answer, cost, decide, history, live, matrix, question, rules, sources
from kvlab.backends.advice import advise
from kvlab.errors import BadInput

# Lines where the pool is cast, extend / decode, as read by hand from the releases.
CASTS = {
    "0.5.8": ((575, 639), (977, 1255)),
    "0.5.9": ((575, 639), (999, 1274)),
    "0.5.12": ((575, 639), (953, 1251)),
    "0.5.15.post1": ((577, 639), (1405, 1760)),
    "0.5.18": ((657, 719), (1620, 2035)),
    "0.5.20": ((748, 810), (1699, 2097)),
    "0.5.23": ((761, 822), (1944, 2350)),
}


def verdicts(model, gpu, sglang, **more):
    return {v.backend: v for v in decide(question(model, gpu, sglang, **more))}


def run(capsys, *args):
    with pytest.raises(SystemExit) as stop:
        cli.main(["backends", *args])
    out = capsys.readouterr()
    return stop.value.code, out.out, out.err


@pytest.mark.parametrize("release", CASTS)
def test_the_cast_is_found_where_a_reader_found_it(release):
    casts = rules.load("sglang", release)["casts"]
    found = tuple(tuple(casts[b][p]["line"] for p in ("extend", "decode")) for b in ("flashinfer", "fa3"))
    assert found == CASTS[release]


def test_glm5_on_the_source_texts_card():
    """Both failures of the source text, each with the check that it met, and what it went on with."""
    found = verdicts("glm-5", "rtx-pro-6000", "0.5.9")
    trtllm = found["trtllm_mla"]
    assert trtllm.works is False
    assert "Expected qk_nope_head_dim == 128, got 192" in trtllm.reason
    first = trtllm.evidence[0]
    assert (first.package, first.release, first.file, first.line) == (
        "flashinfer-python",
        "0.6.3",
        "flashinfer/mla.py",
        86,
    )
    cutlass = found["cutlass_mla"]
    assert cutlass.works is False
    assert "page size 128" in cutlass.reason
    assert "page size 64" in cutlass.reason
    assert [(e.file, e.line) for e in cutlass.evidence[:2]] == [
        ("sglang/srt/server_args.py", 1872),
        ("sglang/srt/mem_cache/memory_pool.py", 1778),
    ]
    assert found["fa3"].works is False
    assert "SM90" in found["fa3"].reason
    assert found["flashmla"].works is False
    assert found["flashmla"].evidence[0].kind == "message"
    reasons = {found[b].reason for b in ("trtllm_mla", "cutlass_mla", "fa3", "flashmla")}
    assert len(reasons) == 4
    flashinfer = found["flashinfer"]
    assert (flashinfer.works, flashinfer.casts_pool, flashinfer.page_size) == (True, True, 64)
    assert "--nsa-decode-backend trtllm" in flashinfer.flags
    assert found["nsa"].default
    assert found["nsa"].works is False


def test_deepseek_r1_on_h200():
    found = verdicts("deepseek-r1", "h200", "0.5.23")
    for name in ("fa3", "flashinfer"):
        assert (found[name].works, found[name].casts_pool, found[name].casts) == (
            True,
            True,
            ["decode", "extend"],
        )
    flashmla = found["flashmla"]
    assert (flashmla.works, flashmla.casts_pool, flashmla.page_size, flashmla.rounds_q) == (
        True,
        False,
        64,
        True,
    )
    assert flashmla.casts == ["extend"]
    triton = found["triton"]
    assert (triton.works, triton.casts_pool, triton.casts, triton.rounds_q) == (True, False, [], True)
    assert found["fa3"].default


def test_triton_rounds_the_query_since_0_5_12_and_the_probabilities_always():
    for release, rounds in (("0.5.9", False), ("0.5.11", False), ("0.5.12", True), ("0.5.23", True)):
        found = verdicts("deepseek-v3", "h200", release)["triton"]
        assert found.rounds_q is rounds
        assert "probabilities to FP8" in found.accuracy
        assert ("rounds the query and" in found.accuracy) is rounds
        assert any("p.to(v.dtype)" in e.quote for e in found.evidence)


def test_glm5_is_in_no_release_before_0_5_9():
    found = verdicts("glm-5", "h200", "0.5.8")
    nvidia = [v for v in found.values() if not v.reason.startswith("serves")]
    assert {v.works for v in nvidia} == {False}
    assert all("first release with it is 0.5.9" in v.reason for v in nvidia)


@pytest.mark.parametrize(
    ("release", "sub", "works"),
    [("0.5.9", "flashmla_kv", False), ("0.5.12", "trtllm", False), ("0.5.17", "flashinfer_sparse_mla", True)],
)
def test_glm5s_own_default_on_sm120(release, sub, works):
    found = verdicts("glm-5", "rtx-pro-6000", release)
    name = "dsa" if "dsa" in found else "nsa"
    assert found[name].default
    assert found[name].works is works
    assert sub in found[name].reason


def test_rows_are_656_bytes_in_dsas_own_layout_and_576_for_who_reads_them_dense():
    found = verdicts("glm-5", "h200", "0.5.15.post1")
    assert found["dsa.flashmla_kv"].row_bytes == 512 + 4 * 4 + 64 * 2
    assert found["flashinfer"].row_bytes == 512 + 64
    assert found["flashinfer"].attends == "dense"
    assert found["dsa.flashmla_kv"].attends == "sparse"


def test_bf16_leaves_nothing_to_cast_but_flashmla_kv_quantizes_the_pool():
    found = verdicts("glm-5", "h200", "0.5.15.post1", kv_dtype="bf16")
    assert not found["flashinfer"].casts_pool
    assert found["flashinfer"].row_bytes == 2 * 576
    assert found["dsa.flashmla_kv"].casts_pool
    assert "quantizes a BF16 cache whole" in found["dsa.flashmla_kv"].reason


def test_e4m3_needs_compute_capability_8_9_in_triton():
    assert verdicts("deepseek-v3", "a100", "0.5.23")["triton"].works is False
    assert verdicts("deepseek-v3", "a100", "0.5.23", kv_dtype="fp8_e5m2")["triton"].works
    assert verdicts("deepseek-v3", "l40s", "0.5.23")["triton"].works


def test_page_size_asked_for_and_page_size_had():
    found = verdicts("deepseek-v3", "h200", "0.5.23", page_size=16)
    assert found["flashinfer"].page_size == 16
    assert found["flashmla"].page_size == 64
    assert any("--page-size 16 becomes 64" in n for n in found["flashmla"].notes)


def test_another_flashinfer_changes_the_answer():
    pinned = verdicts("glm-5", "b200", "0.5.9")["trtllm_mla"]
    later = verdicts("glm-5", "b200", "0.5.9", flashinfer="0.6.12")["trtllm_mla"]
    assert pinned.works is False
    assert later.works is True
    assert later.versions["flashinfer"] == "0.6.12"


CASES = st.tuples(
    st.sampled_from(["glm-5", "deepseek-r1", "deepseek-v3.2", "kimi-k2.5", "glm-4.7-flash", "longcat-flash"]),
    st.sampled_from(["rtx-pro-6000", "h200", "h100", "b200", "b300", "l40s", "a100", "rtx-5090"]),
    st.sampled_from(rules.releases()),
    st.sampled_from(["fp8_e4m3", "fp8_e5m2", "bf16"]),
)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(CASES)
def test_every_answer_has_a_reason_and_evidence_of_its_release(case):
    model, gpu, release, dtype = case
    q = question(model, gpu, release, kv_dtype=dtype)
    found = decide(q)
    assert len({v.backend for v in found}) == len(found)
    for v in found:
        assert v.reason
        assert v.evidence, (case, v.backend, v.reason)
        assert all(e.quote and e.file for e in v.evidence)
        assert all(e.release == q.sglang for e in v.evidence if e.package == "sglang")
        assert all(e.release == q.flashinfer for e in v.evidence if e.package == "flashinfer-python")
        if v.works is False:
            assert v.refusals[0] in v.reason
            assert not v.flags
        else:
            assert not v.refusals
            assert v.flags[0].endswith("-backend " + v.backend.split(".")[0])
        if v.casts_pool and v.works:
            assert any("get_key_buffer" in e.quote or "quantize_k_cache" in e.quote for e in v.evidence)
        if dtype == "bf16" and v.attends == "dense":
            assert not v.casts_pool
            assert v.rounds_q is not True


@settings(max_examples=60, derandomize=True, deadline=None)
@given(CASES)
def test_advice_never_casts(case):
    model, gpu, release, dtype = case
    q = question(model, gpu, release, kv_dtype=dtype)
    by_name = {v.backend: v for v in decide(q)}
    for option in advise(q):
        name = option.what.split()[0]
        if "reads FP8 rows itself" in option.what:
            assert by_name[name].works
            assert not by_name[name].casts_pool
        assert option.flags
        assert option.accuracy
        assert option.memory


def test_advice_on_the_source_texts_card():
    q = question("glm-5", "rtx-pro-6000", "0.5.9")
    options = advise(q)
    assert options[0].what.startswith("triton")
    assert any("--kv-cache-dtype bfloat16" in o.flags and "half the tokens" in o.memory for o in options)
    assert options[-1].flags[0] == "sglang==0.5.17"


def test_cost_is_read_from_the_newest_recorded_run(tmp_path, monkeypatch):
    """No number is invented: without a run there is none, with two the newer is read."""
    monkeypatch.setattr("kvlab.data.root", lambda: tmp_path)
    cost._runs.cache_clear()
    q = question("deepseek-r1", "h200", "0.5.23")
    assert cost.of("triton", q) is None
    for date, us in (("2026-01-01", 1.0), ("2026-02-01", 2.0)):
        shape = {
            "batch": 1,
            "context": 100,
            "heads": 16,
            "results": {"sglang_triton": {"us": us, "error": 0.5}, "control_bf16": {"us": 4.0}},
        }
        folder = tmp_path / "recorded" / date
        folder.mkdir(parents=True)
        document = {"provenance": {"date": date, "gpus": ["NVIDIA H200"]}, "shapes": [shape]}
        (folder / "attention.json").write_bytes(msgspec.json.encode(document))
    cost._runs.cache_clear()
    found = cost.of("triton", q)
    assert found["source"] == "data/recorded/2026-02-01/attention.json"
    assert (found["shapes"][0]["us"], found["shapes"][0]["error"], found["shapes"][0]["control_us"]) == (
        2.0,
        0.5,
        4.0,
    )
    assert cost.of("flashmla", q) is None
    option = next(o for o in advise(q) if o.what.startswith("triton"))
    assert "0.5 to 0.5 times" in option.time
    cost._runs.cache_clear()


def test_the_installed_release_decides(tmp_path, monkeypatch):
    """A patched installation answers for itself; an unreadable one leaves the committed rules."""
    path = tmp_path / "triton" / "backends" / "nvidia" / "compiler.py"
    path.parent.mkdir(parents=True)
    release = rules.releases("triton")[-1]
    tree = sources.Tree("triton", release, tmp_path)
    monkeypatch.setattr(sources, "installed", lambda package: tree if package == "triton" else None)

    def triton():
        live.load.cache_clear()
        sources._module.cache_clear()
        return verdicts("deepseek-v3", "a100", "0.5.23")["triton"].works, live.load("triton", release).origin

    path.write_text("def f(capability, kinds):\n    if capability >= 80:\n        kinds.add('fp8e4nv')\n")
    assert triton() == (True, "installed")
    path.write_text("def f(capability, kinds):\n    if capability >= 90:\n        kinds.add('fp8e4nv')\n")
    assert triton() == (False, "installed")
    path.write_text("nothing = 1\n")
    works, origin = triton()
    assert works is False
    assert origin.startswith("committed; the installed source reads otherwise")
    live.load.cache_clear()


def test_an_installed_release_without_rules_answers_from_its_source_or_not_at_all(tmp_path, monkeypatch):
    """A release newer than this package: never another one's rules in its place."""
    path = tmp_path / "triton" / "backends" / "nvidia" / "compiler.py"
    path.parent.mkdir(parents=True)
    tree = sources.Tree("triton", "99.0", tmp_path)
    monkeypatch.setattr(sources, "installed", lambda package: tree if package == "triton" else None)
    live.load.cache_clear()
    path.write_text("def f(capability, kinds):\n    if capability >= 90:\n        kinds.add('fp8e4nv')\n")
    found = live.load("triton", "99.0")
    assert (found["e4m3"]["capability"], found.origin) == (90, "installed; no committed rules")
    live.load.cache_clear()
    sources._module.cache_clear()
    path.write_text("nothing = 1\n")
    with pytest.raises(BadInput, match=r"triton 99\.0: newer than .* it is installed, and its source"):
        live.load("triton", "99.0")
    with pytest.raises(BadInput, match="newer than"):
        live.load("triton", "99.1")


def test_the_flashinfer_beside_an_installed_sglang_answers_unless_another_is_asked_for(capsys, monkeypatch):
    here = {"sglang": "0.5.23", "flashinfer-python": "0.7.4"}
    monkeypatch.setattr(live, "here", here.get)
    case = ("--model", "glm-5", "--gpu", "h200", "--json")
    assert rules.load("sglang", "0.5.23")["pins"]["flashinfer-python"] == "0.7.2"
    for args, wanted in (
        ((), "0.7.4"),
        (("--flashinfer", "0.7.1"), "0.7.1"),
        (("--sglang", "0.5.23"), "0.7.2"),
    ):
        code, out, err = run(capsys, *case, *args)
        assert (code, err) == (0, "")
        assert json.loads(out)["flashinfer"] == wanted


def test_history_says_where_each_check_changed():
    nope = history.changes("qk_nope_head_dim of MLA decode")
    assert [(s.first, s.mood) for s in nope] == [("0.6.0", "refuses"), ("0.6.5", "open"), ("0.6.6", "open")]
    assert history.changes("cutlass_mla")[0].last == "0.5.19"
    assert [s.state for s in history.changes("page size of a DSA model's pool")] == ["64 alone"]
    assert [s.first for s in history.changes("MLA wrapper's own FP8 rows")] == ["0.6.0", "0.6.14", "0.6.18"]
    for package in ("flashinfer-python", "sglang"):
        by_lane = {}
        for s in history.spans():
            if s.package == package:
                by_lane.setdefault(s.lane, []).append(s)
        known = rules.releases(package)
        for lane in by_lane.values():
            # No gap and no overlap: each span starts at the release after the one before ends.
            assert lane[0].first == known[0]
            assert lane[-1].last == known[-1]
            for before, after in itertools.pairwise(lane):
                assert known.index(after.first) == known.index(before.last) + 1


def test_history_figure_draws_every_span():
    for package in ("flashinfer-python", "sglang"):
        fig = history.figure(package)
        wanted = [s for s in history.spans() if s.package == package]
        drawn = sum(len(t.y) for t in fig.data)
        assert drawn == len(wanted)
        assert math.isclose(
            sum(sum(t.x) for t in fig.data), len(rules.releases(package)) * len({s.lane for s in wanted})
        )


def test_matrix_covers_six_models_six_cards_and_every_release():
    m = matrix.build()
    assert (len(m.models), len(m.gpus), m.releases[0], m.releases[-1]) == (6, 6, "0.5.8", "0.5.23")
    seen = {(c.model, c.gpu, c.sglang) for c in m.cells}
    assert len(seen) == 6 * 6 * len(rules.releases())
    for c in m.cells[:: len(m.cells) // 50]:
        v = verdicts(c.model, c.gpu, c.sglang)[c.backend]
        assert (c.works, m.reasons[c.reason]) == (v.works, v.reason)
        assert [m.evidence[i]["text"] for i in c.evidence] == [str(e) for e in v.evidence]


def test_matrix_page_stands_without_javascript_and_carries_all_answers():
    from kvlab.backends import page

    m = matrix.build(["glm-5"], ["h200"], ["0.5.9", "0.5.23"])
    text = page.matrix_html(m, model="glm-5", gpu="h200", sglang="0.5.9")
    start = [c for c in m.cells if c.sglang == "0.5.9"]
    assert text.count("<tr>") == len(start) + 1
    payload = text.split('class="kvlab-matrix-data">')[1].split("</script>")[0]
    assert len(json.loads(payload.replace("<\\/", "</"))["cells"]) == len(m.cells)
    assert "http" not in text
    with pytest.raises(ValueError, match=r"0\.5\.10"):
        page.matrix_html(m, model="glm-5", gpu="h200", sglang="0.5.10")


def test_json_is_one_object_with_the_promised_keys(capsys):
    code, out, err = run(capsys, "--model", "glm-5", "--gpu", "rtx-pro-6000", "--sglang", "0.5.9", "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    for entry in document["backends"]:
        assert {"backend", "works", "reason", "evidence", "versions"} <= set(entry)
        assert all(e["text"] for e in entry["evidence"])
    assert document == json.loads(json.dumps(answer("glm-5", "rtx-pro-6000", "0.5.9")))


def test_matrix_json_can_be_narrowed(capsys):
    code, out, _ = run(
        capsys, "--matrix", "--model", "glm-5", "--gpu", "h200,b200", "--sglang", "0.5.9", "--json"
    )
    document = json.loads(out)
    assert code == 0
    assert (document["models"], document["gpus"], document["releases"]) == (
        ["glm-5"],
        ["h200", "b200"],
        ["0.5.9"],
    )


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--model", "glm-6", "--gpu", "h200", "--sglang", "0.5.9"), "glm-5"),
        (("--model", "glm-5", "--gpu", "h201", "--sglang", "0.5.9"), "h200"),
        (("--model", "glm-5", "--gpu", "h200", "--sglang", "0.5.7"), "0.5.8"),
        (("--model", "glm-5", "--gpu", "h200", "--sglang", "0.5.15.post2"), "0.5.15.post1"),
        (
            ("--model", "glm-5", "--gpu", "h200", "--sglang", "0.5.24"),
            "newer than the newest rules, which are 0.5.23's",
        ),
        (("--model", "glm-5", "--gpu", "h200", "--sglang", "1.0"), "newer than"),
        (("--model", "glm-5", "--gpu", "h200", "--sglang", "latest"), "no rules"),
        (("--model", "glm-5", "--gpu", "h200", "--sglang", "0.5.9", "--flashinfer", "0.9.0"), "newer than"),
        (("--model", "glm-5", "--gpu", "h200", "--sglang", "0.5.9", "--flashinfer", "0.5.3"), "0.6.0"),
        (("--model", "glm-5", "--gpu", "h200", "--sglang", "0.5.9", "--kv-dtype", "int4"), "fp8_e4m3"),
        (("--model", "glm-5", "--gpu", "h200", "--sglang", "0.5.9", "--tp", "7"), "--tp 7"),
        (("--model", "glm-5", "--gpu", "h200", "--sglang", "0.5.9", "--page-size", "-1"), "--page-size -1"),
        (("--model", "glm-5", "--gpu", "h200"), "--sglang"),
        (("--matrix", "--sglang", "0.5.9,0.5.99", "--json"), "newer"),
    ],
)
def test_unknown_names_are_one_line_and_exit_2(capsys, args, said, monkeypatch):
    monkeypatch.setattr(live, "here", lambda package: None)
    code, out, err = run(capsys, *args)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


def test_every_sglang_release_has_rules_for_what_it_pins():
    for release in rules.releases():
        pins = rules.load("sglang", release)["pins"]
        for package, version in pins.items():
            if package in ("torch", "tokenspeed-mla"):
                continue
            assert rules.load(package, version).release == version


def test_releases_sort_as_they_came_out():
    assert rules.releases()[12:14] == ["0.5.15.post1", "0.5.16"]
    with pytest.raises(BadInput, match="newer than"):
        rules.load("sglang", "0.5.23.post1")
