"""What the attention benchmark says of a run: tables, ratios, absent and wrong rows, the chart."""

import json

import msgspec
import pytest

from kvlab import cli, data
from kvlab.bench import attention_results as results
from kvlab.bench.attention_chart import figure, page, trade
from kvlab.bench.attention_results import AttentionRun, AttentionShape, Row
from kvlab.provenance import collect


def shape(batch, context, us, *, heads=8, lengths=None, **more):
    rows = {name: Row(us=t, cold_us=t + 2, error=0.002, tb_s=1.0) for name, t in us.items()}
    return AttentionShape(
        batch=batch,
        context=context,
        heads=heads,
        bytes=batch * context * 576,
        limit_us=1.0,
        results=rows | more,
        lengths=lengths,
    )


@pytest.fixture
def run():
    missing = {"flashmla_fp8": Row(note="absent: sgl_kernel is not installed")}
    wrong = {"sglang_triton": Row(error=0.7, note="wrong: error 0.7")}
    shapes = [
        shape(
            1,
            100,
            {"fused": 6, "shadow": 12, "gather": 10, "control_bf16": 8, "stock": 836},
            **missing,
            **wrong,
        ),
        shape(64, 4096, {"fused": 60, "shadow": 240, "native_fp8_fa2": 250, "control_bf16": 80}, **missing),
        shape(2, 9, {"fused": 1, "shadow": 1000, "control_bf16": 1}, lengths=[9, 1]),
        shape(64, 4096, {"fused": 70, "control_bf16": 70}, heads=64),
    ]
    return AttentionRun(
        provenance=collect(),
        gpu="A GPU",
        l2_bytes=1,
        copy_tb_s=4.0,
        pool_slots=1000,
        layers=2,
        row_bytes=576,
        kv_dtype="fp8_e4m3",
        q_dtype="bf16",
        slots="in pages",
        wrong_above=results.WRONG_ABOVE,
        why_not_cuda="no such chip",
        shapes=shapes,
    )


@pytest.fixture
def recorded(run, tmp_path, monkeypatch):
    folder = tmp_path / "recorded" / "some-run"
    folder.mkdir(parents=True)
    (folder / "attention.json").write_bytes(msgspec.json.encode(run))
    monkeypatch.setattr(data, "root", lambda: tmp_path)
    return run


def kvlab(capsys, *args):
    with pytest.raises(SystemExit) as e:
        cli.main(args)
    return e.value.code, *capsys.readouterr()


def test_geometric_means_take_equal_contexts_of_one_head_count(run):
    assert run.geomean(8, "accurate") == pytest.approx((6 / 10 * 60 / 240) ** 0.5)
    assert run.geomean(8, "control_bf16") == pytest.approx((6 / 8 * 60 / 80) ** 0.5)
    assert run.geomean(64, "control_bf16") == pytest.approx(1.0)
    assert run.geomean(64, "accurate") is None
    assert run.geomean(16, "control_bf16") is None


def test_the_best_accurate_alternative_is_neither_stock_nor_the_control(run):
    assert run.shapes[0].best_accurate() == ("gather", 10)
    assert run.shapes[1].best_accurate() == ("shadow", 240)
    assert run.shapes[3].best_accurate() is None


def test_the_recorded_run_as_json_has_the_promised_keys(recorded, capsys):
    code, out, err = kvlab(capsys, "bench", "attention", "--recorded", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["provenance"]["kvlab"]
    first = found["shapes"][0]
    assert {"batch", "context", "heads", "limit_us", "results"} <= set(first)
    assert first["results"]["fused"]["us"] == 6
    assert first["results"]["fused"]["error"] == 0.002


def test_the_table_names_what_is_absent_and_shows_no_time_for_what_is_wrong(recorded, capsys):
    code, out, _ = kvlab(capsys, "bench", "attention", "--recorded")
    assert code == 0
    assert "absent: sgl_kernel is not installed" in out
    assert "wrong: error 0.7" in out
    assert "fused is fused_triton here: no such chip" in out
    assert "1 x 9 + 1 x 1" in out
    assert "836.0 (838.0)" in out


def test_of_the_recorded_run_what_is_asked_for_is_shown(recorded, capsys, tmp_path):
    """Or one line that says what there is instead; nothing that was asked is passed over."""
    chosen = ("--heads", "8", "--shapes", "1x100,unequal", "--only", "fused,gather", "--pool", "1000")
    code, out, err = kvlab(capsys, "bench", "attention", "--recorded", "--json", *chosen)
    assert (code, err) == (0, "")
    shapes = json.loads(out)["shapes"]
    asked = [s for s in recorded.shapes if s.heads == 8 and (s.lengths or (s.batch, s.context) == (1, 100))]
    assert [s["results"].keys() for s in shapes] == [s.results.keys() & {"fused", "gather"} for s in asked]
    assert [(s["batch"], s["context"], s["heads"]) for s in shapes] == [
        (s.batch, s.context, s.heads) for s in asked
    ]
    heads = ", ".join(map(str, sorted({s.heads for s in recorded.shapes})))
    for wrong, says in (
        (("--heads", "8,12"), f"--heads: 12 is not in the recorded run, which has {heads}"),
        (("--shapes", "2x3"), "--shapes: 2x3 is not in the recorded run, which has "),
        (("--only", "fast"), "--only: fast is not in the recorded run, which has "),
        (("--pool", "999"), "--pool: 999 is not in the recorded run, which has 1000"),
        (("--layers", "3"), "--layers: 3 is not in the recorded run, which has 2"),
        (("--seconds", "9"), "--seconds: is for measuring, and --recorded shows a run that was made"),
    ):
        code, out, err = kvlab(capsys, "bench", "attention", "--recorded", *wrong)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith(f"kvlab: {says}")
    there = tmp_path / "part.json"
    assert kvlab(capsys, "bench", "attention", "--recorded", *chosen, "--out", str(there))[0] == 0
    assert json.loads(there.read_text())["shapes"] == shapes


def test_the_newest_recorded_run_is_taken(run, recorded, capsys):
    older = msgspec.structs.replace(run.provenance, date="1999-01-01T00:00:00+00:00")
    folder = data.recorded() / "zzz-older"
    folder.mkdir()
    old = msgspec.structs.replace(run, provenance=older, gpu="An older GPU")
    (folder / "attention.json").write_bytes(msgspec.json.encode(old))
    assert "An older GPU" not in kvlab(capsys, "bench", "attention", "--recorded")[1]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--heads", "8,x"], "--heads: expected numbers"),
        (["--shapes", "64"], "--shapes: expected BATCHxCONTEXT"),
        (["--only", "fusedd"], "--only: expected names among stock"),
        (["--pool", "128", "--shapes", "1x4096"], "--pool: this shape needs 4160 slots, the pool has 128"),
    ],
)
def test_bad_arguments_are_named(capsys, args, words):
    code, out, err = kvlab(capsys, "bench", "attention", *args)
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


def test_a_bar_for_each_row_with_a_time_and_the_limit_as_a_line(run):
    fig = figure(run, 8)
    bars = {t.name: t for t in fig.data if t.type == "bar"}
    assert set(bars) == {"stock", "gather", "shadow", "fused", "control_bf16", "native_fp8_fa2"}
    assert list(bars["fused"].y) == [6, 60, 1]
    assert next(iter(figure(run, 8, cold=True).data[0].y)) == 838
    assert fig.data[-1].type == "scatter"
    assert "stock" not in {t.name for t in figure(run, 8, skip=("stock",)).data}


def test_the_trade_is_relative_to_the_control(run):
    points = {t.name: t for t in trade(run, 8).data}
    assert list(points["fused"].x) == [0.75, 0.75, 1]
    assert list(points["control_bf16"].x) == [1, 1, 1]


def test_the_page_needs_no_network(run):
    html = page(run)
    assert "<script src=" not in html.replace(' src="data:', "")
    assert "cdn.plot.ly" not in html.split("</script>")[-1]


def test_every_row_of_the_tables_can_be_built():
    from kvlab.bench.peers import BUILDERS

    assert set(BUILDERS) == set(results.ROWS | results.ON_REQUEST)
