"""`kvlab trace` on good and odd files: an answer, or one line and exit code 2, and nothing half-written."""

import gzip
import json
import subprocess
import sys

import pytest

from kvlab.cli import main
from kvlab.data import recorded

REAL = recorded("h200-stock") / "decode.trace.json.gz"
TEXT = gzip.decompress(REAL.read_bytes())


@pytest.fixture
def kvlab(capsys):
    def run(*args):
        with pytest.raises(SystemExit) as e:
            main([str(a) for a in args])
        out, err = capsys.readouterr()
        return e.value.code, out, err

    return run


def raw():
    return json.loads(TEXT)


def events_only(keep):
    data = raw()
    data["traceEvents"] = [e for e in data["traceEvents"] if keep(e)]
    return json.dumps(data).encode()


def renamed(**changes):
    data = raw()
    for e in data["traceEvents"]:
        e.update({k: v(e) for k, v in changes.items() if k in e})
    return json.dumps(data).encode()


def overlapping():
    data = raw()
    for e in data["traceEvents"]:
        if e.get("cat") == "kernel" and e["dur"] < 100:
            e["dur"] *= 3
    return json.dumps(data).encode()


def merged():
    data = raw()
    both = [{**e, "pid": f"[TP{r:02d}] {e['pid']}"} for r in range(2) for e in data["traceEvents"]]
    return json.dumps({**data, "traceEvents": both}).encode()


def big_ids():
    data = raw()
    for e in data["traceEvents"]:
        if "correlation" in e.get("args", {}):
            e["args"]["correlation"] += 2**63
    return json.dumps(data).encode()


MIDDLE = TEXT.index(b"BatchMLAPageAttentionHopperKernel", len(TEXT) // 2)
READ = {
    "no ProfilerStep and no annotations": events_only(lambda e: "annotation" not in e.get("cat", "")),
    "no CPU ops": events_only(lambda e: e.get("cat") in ("kernel", "gpu_memcpy")),
    "cut off after an event": TEXT[: TEXT.rindex(b"thread_sort_index") - 20],
    "trailing garbage": TEXT + b"\n<html>proxy error</html>",
    "invalid UTF-8": TEXT.replace(b'"python3"', b'"pyth\xff\xfen3"'),
    "int64 ids": big_ids(),
    "several ranks merged": merged(),
    "no cat": renamed(cat=lambda e: None),
    "overlapping durations": overlapping(),
    "as a bare array": json.dumps(raw()["traceEvents"]).encode(),
    "with a byte order mark": b"\xef\xbb\xbf" + TEXT,
}


@pytest.mark.parametrize("kind", READ)
def test_odd_files_that_are_read(kvlab, tmp_path, kind):
    path = tmp_path / "odd.json"
    path.write_bytes(READ[kind])
    code, out, err = kvlab("trace", "report", path, "--json")
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert answer["kv_cast"]["copies_per_step"] == 78
    assert answer["kv_cast"]["ms_per_step"] == pytest.approx(66.469, rel=0.001)
    said = " ".join(answer["notes"])
    assert ("cut off" in said) == kind.startswith("cut off")
    assert ("garbage" in said) == kind.endswith("garbage")


def test_a_file_cut_off_in_an_event_is_read_as_far_as_it_goes(kvlab, tmp_path):
    path = tmp_path / "cut.json"
    path.write_bytes(TEXT[:MIDDLE])
    code, out, _ = kvlab("trace", "report", path, "--json")
    answer = json.loads(out)
    assert code == 0
    assert 0 < sum(k["launches"] for k in answer["kernels"]) < 2176
    assert any("cut off" in n and "unfinished" in n and "too short" in n for n in answer["notes"])


def test_a_prefill_trace_is_answered(kvlab, tmp_path):
    path = tmp_path / "prefill.json"
    path.write_bytes(TEXT.replace(b"step[DECODE bs=1]", b"step[EXTEND bs=1 toks=100]"))
    code, out, _ = kvlab("trace", "report", path, "--json")
    answer = json.loads(out)
    assert (code, answer["steps"], answer["kv_cast"]) == (0, 0, None)
    assert answer["other_steps"] == {"prefill": 1}
    assert answer["diagnosis"][0]["verdict"] == "cannot tell"


REFUSED = {
    "empty": (b"", "empty file"),
    "no events": (b'{"traceEvents": []}', "no GPU kernels"),
    "zero kernels": (events_only(lambda e: e.get("cat") == "cpu_op"), "no GPU kernels"),
    "gzip truncated": (REAL.read_bytes()[:40_000], "truncated gzip"),
    "gzip damaged": (REAL.read_bytes()[:30_000] + b"\0" * 5000 + REAL.read_bytes()[35_000:], "gzip"),
    "JSON, but no trace": (b'{"model_type": "deepseek_v3", "layers": 61}', "not a trace"),
    "text": (b"Traceback (most recent call last):\n", "not a trace"),
    "binary": (bytes(range(256)) * 50, "not a trace"),
    "no JSON number": (b"42", "not a trace"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_odd_files_that_are_refused(kvlab, tmp_path, kind):
    content, said = REFUSED[kind]
    path = tmp_path / "odd.json"
    path.write_bytes(content)
    page = tmp_path / "page.html"
    code, out, err = kvlab("trace", "report", path, "--json", "--html", page)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert str(path) in err
    assert said in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["odd.json"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["report", "nowhere.json"], "nowhere.json: No such file"),
        (["report", "."], "Is a directory"),
        (["report", REAL, "--bandwidth", "-1"], "--bandwidth: -1"),
        (["report", REAL, "--bandwidth", "1034"], "TB/s"),
        (["diff", REAL, "nowhere.json"], "nowhere.json"),
        (["report"], "FILE"),
    ],
)
def test_bad_arguments(kvlab, tmp_path, monkeypatch, args, said):
    monkeypatch.chdir(tmp_path)
    code, out, err = kvlab("trace", *args)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert said in err
    assert list(tmp_path.iterdir()) == []


def test_the_keys_checks_rely_on(kvlab):
    code, out, err = kvlab("trace", "report", REAL, "--json")
    answer = json.loads(out)
    assert (code, err) == (0, "")
    assert {"steps", "step_ms", "categories", "kv_cast", "diagnosis", "predicted_step_ms"} <= answer.keys()
    cast = {"copies_per_step", "ms_per_step", "share", "bytes_per_copy", "pool_slots"}
    assert cast <= answer["kv_cast"].keys()


def test_text_report(kvlab):
    code, out, err = kvlab("trace", "report", REAL)
    assert (code, err) == (0, "")
    for said in ("78 casts a step", "66.5 ms together", "85%", "495,552 slots", "What to do: ", "other"):
        assert said in out


def patched(tmp_path):
    """The recorded step as a cast of the active slots alone would leave it."""
    data = raw()
    shift, events = 0.0, []
    for e in sorted(data["traceEvents"], key=lambda e: e.get("ts", 0)):
        e = {**e, "ts": e["ts"] - shift} if "ts" in e else e
        if "direct_copy" in e["name"] and e["dur"] > 100:
            shift += e["dur"] - 5.4
            e = {**e, "name": "_cast", "dur": 5.4}
        events.append(e)
    path = tmp_path / "patched.json"
    path.write_text(json.dumps({**data, "traceEvents": events}))
    return path


def test_diff(kvlab, tmp_path):
    code, out, err = kvlab("trace", "diff", REAL, patched(tmp_path), "--json")
    d = json.loads(out)
    assert (code, err) == (0, "")
    assert d["kv_cast_gone"] is True
    assert d["after_step_ms"] == pytest.approx(11.43, rel=0.01)
    assert d["delta_ms"] == pytest.approx(-78 * (852.166 - 5.4) / 1e3, rel=0.001)
    assert [n[:5] for n in d["appeared"]] == ["_cast"]
    assert len(d["vanished"]) == 1
    assert "c10::BFloat16" in d["vanished"][0]
    cast = d["categories"]["dtype cast"]
    assert (cast["before_launches"], cast["after_launches"]) == (82, 82)
    assert cast["before_share"] > 0.85
    assert cast["after_share"] < 0.05
    assert d["categories"]["GEMM"]["delta_ms"] == pytest.approx(0, abs=0.01)
    assert abs(d["kernels"][0]["delta_ms"]) == max(abs(k["delta_ms"]) for k in d["kernels"])
    code, out, _ = kvlab("trace", "diff", REAL, patched(tmp_path))
    assert "vanished" in out
    assert "appeared" in out


def test_diff_of_a_trace_with_itself_is_nothing(kvlab):
    d = json.loads(kvlab("trace", "diff", REAL, REAL, "--json")[1])
    assert (d["delta_ms"], d["appeared"], d["vanished"]) == (0, [], [])
    assert {k["delta_ms"] for k in d["kernels"]} == {0}


def test_diff_of_folders_compares_every_rank(kvlab, tmp_path):
    for run in ("before", "after"):
        (tmp_path / run).mkdir()
        for tp in range(2):
            data = raw()
            del data["distributedInfo"]
            # The second rank, and all of the second run, are faster throughout.
            pace = (0.9 if tp else 1.0) * (0.5 if run == "after" else 1.0)
            for e in data["traceEvents"]:
                e.update({k: e[k] * pace for k in ("ts", "dur") if k in e})
            (tmp_path / run / f"run-TP-{tp}.trace.json").write_text(json.dumps(data))
    d = json.loads(kvlab("trace", "diff", tmp_path / "before", tmp_path / "after", "--json")[1])
    assert [r["rank"] for r in d["ranks"]] == ["TP00", "TP01"]
    assert (d["before_rank"], d["after_rank"]) == ("TP00", "TP00")
    for side in ("before", "after"):
        slow, fast = (r[f"{side}_ms"] for r in d["ranks"])
        assert d[f"{side}_spread"] == pytest.approx((slow - fast) / fast)
        assert d[f"{side}_step_ms"] == slow > fast
        assert d[f"{side}_spread"] == pytest.approx(1 / 0.9 - 1, rel=0.001)
    assert [r["before_cast_ms"] for r in d["ranks"]] == [pytest.approx(t, rel=0.001) for t in (66.47, 59.82)]
    assert [r["after_cast_ms"] for r in d["ranks"]] == [pytest.approx(t, rel=0.001) for t in (33.23, 29.91)]
    code, out, err = kvlab("trace", "diff", tmp_path / "before", tmp_path / "after" / "run-TP-0.trace.json")
    assert (code, err) == (0, "")
    assert "the ranks differ: TP00, TP01 before, TP00 after" in out
    assert "slowest rank over fastest" in out
    page = tmp_path / "diff.html"
    kvlab("trace", "diff", tmp_path / "before", tmp_path / "after", "--html", page)
    assert "TP01" in page.read_text()
    (tmp_path / "none").mkdir()
    code, _, err = kvlab("trace", "diff", tmp_path / "none", tmp_path / "after")
    assert (code, "no *.trace.json" in err) == (2, True)


def test_several_files_are_ranks(kvlab, tmp_path):
    for tp in range(2):
        data = raw()
        del data["distributedInfo"]
        for e in data["traceEvents"]:
            if tp and e.get("cat") == "kernel" and "fused_moe" in e["name"]:
                e["dur"] *= 0.5
        (tmp_path / f"run-TP-{tp}.trace.json").write_text(json.dumps(data))
    files = sorted(tmp_path.glob("*.json"))
    answer = json.loads(kvlab("trace", "report", *files, "--json")[1])
    assert [r["rank"] for r in answer["ranks"]] == ["TP00", "TP01"]
    assert answer["slowest"] == answer["rank"]
    assert answer["step_spread"] >= 0
    assert (
        answer["ranks"][1]["categories"]["MoE"]["ms_per_step"]
        < answer["ranks"][0]["categories"]["MoE"]["ms_per_step"]
    )
    code, out, _ = kvlab("trace", "report", *files)
    assert code == 0
    assert "2 ranks" in out


def test_html_without_plotly_says_what_to_install(tmp_path):
    code = (
        "import sys; sys.modules['plotly'] = None\n"
        "from kvlab.cli import main\n"
        f"main(['trace', 'report', {str(REAL)!r}, '--html', {str(tmp_path / 'x.html')!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "pip install 'kvlab[book]'" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_reading_needs_neither_plotly_nor_rich_nor_torch():
    code = "import sys, kvlab.trace; print({'plotly', 'rich', 'torch', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
