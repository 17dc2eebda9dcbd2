"""Values carry their origin, convert their units and refuse what has none."""

import json
import math
import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.book import compute, describe, exports, figures, measured, recorded, recorded_file, reported, units
from kvlab.book.values import Origin, Value
from kvlab.errors import BadInput

pytestmark = pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning")


@pytest.fixture
def data(tmp_path, monkeypatch):
    run = tmp_path / "recorded" / "one"
    run.mkdir(parents=True)
    rows = [
        {"bs": 1, "ctx": 100, "cast_us": 800.0, "pool_bytes": 1000},
        {"bs": 1, "ctx": 200, "cast_us": 900.0},
    ]
    (run / "times.json").write_text(json.dumps({"gpu": "NVIDIA H200", "rows": rows}))
    (run / "provenance.json").write_text(
        json.dumps(
            {"gpus": ["NVIDIA H200"], "versions": {"torch": "2.11.0"}, "date": "2026-11-29T10:00:00+00:00"}
        )
    )
    (tmp_path / "reported").mkdir()
    (tmp_path / "reported" / "claims.yml").write_text(
        "claims:\n- {id: step, quote: a step of 95.6 ms, value: 95.6, unit: ms, also: {slots: 100}}\n"
        "- {id: silent, quote: no figure}\n"
    )
    (tmp_path / "reported" / "elsewhere.yml").write_text(
        "reports:\n- {id: other, source: issue 9, quantity: a step, value: 31.5, unit: ms,"
        " also: {cast_us: 225.8}}\n"
    )
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path))
    return tmp_path


def test_recorded_value_names_file_key_and_provenance(data):
    v = recorded("one/times.json", "rows[bs=1,ctx=200].cast_us")
    assert (v.value, v.unit) == (900.0, "us")
    for part in (
        "data/recorded/one/times.json",
        "rows[bs=1,ctx=200].cast_us",
        "NVIDIA H200",
        "torch 2.11.0",
        "2026-11-29",
    ):
        assert part in describe(v)


def test_traced_structures_hand_out_values(data):
    rows = recorded("one/times.json", "rows")
    assert [r.cast_us.value for r in rows] == [800.0, 900.0]
    assert [r.cast_us.unit for r in rows] == ["us", "us"]
    assert "rows[1].cast_us" in describe(rows[1].cast_us)
    assert rows[0]["pool_bytes"].unit == "B"


def test_computed_value_remembers_its_inputs(data):
    step, cast = reported("step"), recorded("one/times.json", "rows[0].cast_us")
    share = cast / step
    assert math.isclose(share.value, 0.8 / 95.6)
    assert share.unit is None
    assert share.origin.kind == "computed"
    assert "claims.yml, step" in describe(share)
    assert "times.json" in describe(share)
    assert (1 - share).origin.sources == share.origin.sources


def test_another_report_than_the_source_text_names_itself(data):
    said = reported("other", "cast_us").with_unit("us")
    assert f"{said:.1f us}" == "225.8\u00a0µs"
    assert "elsewhere.yml, other.cast_us: issue 9, a step" in describe(said)


def test_call_is_traced_with_its_inputs(data):
    total = compute(math.fsum, [r.cast_us for r in recorded("one/times.json", "rows")], unit="us")
    assert f"{total:.1f ms}" == "1.7\u00a0ms"
    assert "times.json" in describe(total)
    size = compute(lambda p: p.stat().st_size, recorded_file("one/times.json"), unit="B")
    assert size.value == (data / "recorded/one/times.json").stat().st_size
    assert measured(math.sqrt, reported("step")).origin.kind == "measured"


@pytest.mark.parametrize("bare", [64.6, 3, 576, -1.0, True])
@pytest.mark.parametrize("operation", ["add", "sub", "mul", "truediv"])
def test_bare_number_beside_a_value_is_refused(data, bare, operation):
    v = reported("step")
    for left, right in ((v, bare), (bare, v)):
        with pytest.raises(BadInput, match="no origin"):
            getattr(operator, operation)(left, right)


def test_value_without_origin_is_refused():
    with pytest.raises(BadInput, match="no origin"):
        Value(64.6)
    with pytest.raises(BadInput, match="no origin"):
        exports.export(cast_ms=64.6)
    with pytest.raises(BadInput, match="no origin"):
        figures.bare([64.6])
    with pytest.raises(BadInput, match="no origin"):
        figures.show_table(["a"], [[64.6]])


def test_figure_without_words_is_refused():
    import plotly.graph_objects as go

    with pytest.raises(BadInput, match="say what the figure shows"):
        figures.show(go.Figure(), alt=" ")
    with pytest.raises(BadInput, match="one of short, medium, tall"):
        figures.show(go.Figure(), alt="Bars.", height="huge")


def test_units_are_checked(data):
    step, size = reported("step"), recorded("one/times.json", "rows[0].pool_bytes")
    with pytest.raises(BadInput, match="cannot be written"):
        step + size
    with pytest.raises(BadInput, match="cannot be written"):
        format(size, "ms")
    rate = size / recorded("one/times.json", "rows[0].cast_us")
    assert rate.unit == "B/s"
    assert math.isclose(rate.value, 1000 / 800e-6)
    assert f"{(1 / step).with_unit('tok/s'):.1f}" == "10.5\u00a0tok/s"
    with pytest.raises(BadInput):
        step.with_unit("B")


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: recorded("one/none.json", "a"), "one/none.json"),
        (lambda: recorded("one/times.json", "rows[ctx=300].cast_us"), "matches 0 rows"),
        (lambda: recorded("one/times.json", "rows[bs=1].cast_us"), "matches 2 rows"),
        (lambda: recorded("one/times.json", "rows[7].cast_us"), "2 entries"),
        (lambda: recorded("one/times.json", "row"), "there is gpu, rows"),
        (lambda: reported("nothing"), "no claim or report 'nothing'; there are step, silent, other"),
        (lambda: reported("silent"), "no value"),
        (lambda: reported("step", "pages"), "claims.yml: 'step' has no further figure"),
        (lambda: reported("other", "pages"), "elsewhere.yml: 'other' has no further figure"),
    ],
)
def test_bad_reference_is_one_line(data, call, says):
    with pytest.raises(BadInput, match=r"[.:]") as e:
        call()
    assert says in str(e.value)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("value", "unit", "spec", "shown"),
    [
        (44528320512, "B", "both", "44.53 GB = 41.47 GiB"),
        (22264160256, "B", ".2f GB", "22.26 GB"),
        (495552, "slots", "", "495,552 slots"),
        (495552, "slots", ", -", "495,552"),
        (0.67573, None, ".1f %", "67.6 %"),
        (4955.52, None, ",.0f x", "4,956×"),
        (827.8186, "us", "", "828 µs"),
        (827.8186, "us", ".2f ms", "0.83 ms"),
        (0.00123456, None, "", "0.00123"),
        (1.0344e12, "B/s", ".2f TB/s", "1.03 TB/s"),
        (78.0, "casts", "", "78 casts"),
        (2176.0, None, ",", "2,176"),
        (-3.5, "ms", "", "−3.50 ms"),
        ("NVIDIA H200", None, "", "NVIDIA H200"),
    ],
)
def test_written_for_a_reader(value, unit, spec, shown):
    assert units.write(value, unit, spec).replace(units.NBSP, " ") == shown


@given(st.integers(0, 2**60), st.sampled_from(["B", "KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"]))
def test_bytes_survive_a_round_trip(n, unit):
    assert units.convert(units.convert(n, "B", unit), unit, "B") == pytest.approx(n, rel=1e-12)


@given(st.integers(1, 10**12), st.integers(1, 10**6))
def test_ratio_does_not_depend_on_units(size, microseconds):
    origin = Origin("computed", "drawn")
    rate = Value(size, "B", origin) / Value(microseconds, "us", origin)
    again = Value(size, "B", origin).to("MiB") / Value(microseconds, "us", origin).to("ms")
    assert again.to("B/s").value == pytest.approx(rate.value, rel=1e-12)
