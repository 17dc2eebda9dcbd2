"""The pages of `trace report --html` and `trace diff --html` in a real browser with the network off."""

import gzip
import json

import pytest

from kvlab.cli import main
from kvlab.data import recorded

pytest.importorskip("plotly")
pytestmark = pytest.mark.browser
REAL = recorded("h200-stock") / "decode.trace.json.gz"


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    data = json.loads(gzip.decompress(REAL.read_bytes()))
    for e in data["traceEvents"]:
        if "direct_copy" in e["name"] and e["dur"] > 100:
            e.update(name="_cast", dur=5.4)
    after = folder / "after.json"
    after.write_text(json.dumps(data))
    both = [{**e, "pid": f"[TP{r:02d}] {e['pid']}"} for r in range(2) for e in data["traceEvents"]]
    merged = folder / "merged.json"
    merged.write_text(json.dumps({**data, "traceEvents": both}))
    for name, args in (
        ("report.html", ("report", REAL)),
        ("ranks.html", ("report", merged)),
        ("diff.html", ("diff", REAL, after)),
    ):
        with pytest.raises(SystemExit) as e:
            main(["trace", *map(str, args), "--json", "--html", str(folder / name)])
        assert e.value.code == 0
    return folder


@pytest.fixture
def open_page(chromium, pages):
    contexts = []

    def show(name, scheme="light"):
        context = chromium.new_context(
            offline=True, color_scheme=scheme, viewport={"width": 1150, "height": 900}
        )
        contexts.append(context)
        page = context.new_page()
        page.said, page.asked = [], []
        page.on("console", lambda m: page.said.append(m.text))
        page.on("pageerror", lambda e: page.said.append(str(e)))
        page.on("request", lambda r: page.asked.append(r.url))
        page.goto((pages / name).as_uri())
        page.wait_for_function("[...document.querySelectorAll('.js-plotly-plot')].every(f => f._fullLayout)")
        return page

    yield show
    for context in contexts:
        context.close()


def bars(page, figure):
    return page.locator(f"#figure-{figure} .barlayer .point path").count()


def figures(page):
    return page.evaluate(
        "[...document.querySelectorAll('.js-plotly-plot')].map(f => "
        "[f.id, f.data[0].type, f.data.reduce((n, t) => n + (t.x || t.values || []).length, 0)])"
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_report_is_drawn_offline(open_page, scheme):
    page = open_page("report.html", scheme)
    found = {name: (kind, points) for name, kind, points in figures(page)}
    classes, step, layer, strip, icicle = found.values()
    assert classes == ("bar", 9)
    assert step == ("bar", 2176)
    assert layer[0] == "bar"
    assert 20 <= layer[1] <= 40
    assert strip == ("bar", 78 * 6)
    assert icicle[0] == "icicle"
    assert icicle[1] > 78
    names = [name.removeprefix("figure-") for name in found]
    assert bars(page, names[1]) == 2176
    assert bars(page, names[2]) == layer[1]
    assert page.locator(".slice").count() > 10
    text = page.inner_text("body")
    for said in (
        "78 casts a step",
        "495,552 slots",
        "full-pool KV cast: found",
        "unrolled_elementwise_kernel",
    ):
        assert said in text
    ink, paper = page.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    assert ink != paper
    assert page.said == []
    assert len(page.asked) == 1


def test_the_diff_is_drawn_offline(open_page):
    page = open_page("diff.html")
    (found,) = figures(page)
    assert found[1] == "waterfall"
    values = page.evaluate("document.querySelector('.js-plotly-plot').data[0].y")
    assert sum(values[:-1]) == pytest.approx(values[-1])
    assert page.locator(".waterfalllayer .point path").count() >= len(values)
    text = page.inner_text("body")
    assert "vanished" in text
    assert "appeared" in text
    assert (page.said, len(page.asked)) == ([], 1)


def test_ranks_beside_each_other(open_page):
    page = open_page("ranks.html")
    assert "2 ranks" in page.inner_text("body")
    ranks = page.evaluate("document.querySelector('.js-plotly-plot').data[0].x")
    assert ranks == ["TP00", "TP01"]
    assert page.said == []
