"""Every page in a real browser, the network off: figures, math, search, colours, accessibility, phones."""

import contextlib
import json

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import TimeoutError as TookTooLong

from kvlab.book.pages import pages
from kvlab.book.run import newest, runs

from .conftest import ROOT

pytestmark = pytest.mark.browser
UNRENDERED = ("\\(", "\\[", "$$", "\\val{", "{n}`", "{numref}", ":::", "```{")
PAGES = {p.docname: p for p in pages(ROOT)}


def figures_of(page):
    """How many figures the page's execution made."""
    if not page.cells:
        return 0
    cells = json.loads(newest(page, runs(ROOT)).path.read_text("utf-8"))["cells"]
    return sum(
        bool(o.get("metadata", {}).get("kvlab", {}).get("figure"))
        for c in cells
        for o in c.get("outputs", [])
    )


def settled(page, faults):
    """What a probe still finds wrong once the figures had time to follow, large ones on a busy machine."""
    with contextlib.suppress(TookTooLong):
        page.wait_for_function(f"() => {faults}.length === 0", timeout=20_000)
    return page.evaluate(faults)


def shortened(page):
    """Leave the first rows of each long table: all come from one line of code, and axe looks at each."""
    page.evaluate(
        "document.querySelectorAll('tbody').forEach(b => [...b.rows].slice(25).forEach(r => r.remove()))"
    )


def serious(page, **options):
    # Without preload: axe would fetch the theme's imported stylesheets from the wrong folder.
    # The inside of a figure is one image to a reader who does not see it: its frame carries the words.
    frames = {"exclude": [[".js-plotly-plot"]]}
    found = Axe().run(page, frames, options={"preload": False, **options}).response["violations"]
    return [
        f"{v['id']}: {v['help']}: {n['html'][:160]}"
        for v in found
        if v["impact"] in ("serious", "critical")
        for n in v["nodes"]
    ]


def drawn_in_full(page, expected):
    figures = page.evaluate("probe.figures()")
    assert len(figures) == expected
    for i, traces in enumerate(figures):
        assert traces, f"figure {i + 1} draws nothing"
        for t in traces:
            where = f"figure {i + 1}, {t['name']} ({t['type']} {t['mode']})"
            assert t["data"] > 0, where
            if t["mode"] == "lines":
                # plotly leaves out vertices that lie on a straight line.
                assert t["drawn"] >= min(2, t["data"]), where
            elif t["mode"] != "text":
                assert t["drawn"] == t["data"], where


@pytest.mark.parametrize("docname", PAGES)
def test_page_over_loopback(docname, visit, served):
    v = visit(color_scheme="light", viewport={"width": 1200, "height": 900})
    page = v.open(f"{served}/{docname}.html")
    drawn_in_full(page, figures_of(PAGES[docname]))
    assert page.evaluate("probe.rawMath()") == []
    text = page.locator("article").inner_text()
    assert [m for m in UNRENDERED if m in text] == []
    assert page.evaluate("probe.lowContrast()") == []

    page.set_viewport_size({"width": 390, "height": 800})
    assert settled(page, "probe.overflow()") == []
    assert settled(page, "probe.collisions()") == []
    assert page.evaluate("probe.brokenWords()") == []

    page.set_viewport_size({"width": 1200, "height": 900})
    page.wait_for_timeout(600)
    shortened(page)
    assert serious(page) == []

    page.emulate_media(color_scheme="dark")
    page.wait_for_function("() => document.documentElement.dataset.theme === 'dark'")
    page.wait_for_timeout(400)
    ground = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert max(map(int, ground.strip("rgb()").split(", ")[:3])) < 80
    assert page.evaluate("probe.lightOutputs()") == 0
    assert settled(page, "probe.lowContrast()") == []
    # Only colours differ from the light page.
    assert serious(page, runOnly=["color-contrast"]) == []
    assert v.foreign == []
    assert v.errors == []


@pytest.mark.parametrize("docname", PAGES)
def test_page_from_disk(docname, visit, html):
    v = visit()
    page = v.open((html / f"{docname}.html").as_uri())
    drawn_in_full(page, figures_of(PAGES[docname]))
    assert page.evaluate("probe.rawMath()") == []
    assert v.foreign == []
    # Fonts of the theme's icons may not be preloaded from disk; nothing else may complain.
    assert [e for e in v.errors if "font" not in e and "ERR_FAILED" not in e] == []


@pytest.mark.parametrize("where", ["loopback", "disk"])
def test_search_finds_the_page(where, visit, html, request):
    base = request.getfixturevalue("served") if where == "loopback" else html.as_uri()
    v = visit()
    page = v.open(f"{base}/search.html?q=provenance")
    page.wait_for_selector("#search-results li a")
    hits = page.eval_on_selector_all("#search-results li a", "links => links.map(a => a.href)")
    assert any("where-numbers-come-from.html" in h for h in hits)
    assert v.foreign == []
    if where == "loopback":
        assert v.errors == []


def test_first_page_leads_into_the_book(visit, served):
    v = visit()
    v.page.goto(served + "/")
    v.page.wait_for_url("**/book/index.html")
    assert v.page.locator("article h1").count() == 1
    assert v.foreign == []


@pytest.fixture(scope="module")
def origins(chromium, served):
    """The places of the page of origins, as a browser sees them."""
    page = chromium.new_page()
    page.goto(f"{served}/book/where-numbers-come-from.html")
    found = page.eval_on_selector_all("[id]", "all => all.map(e => e.id)")
    page.close()
    return set(found)


@pytest.mark.parametrize("docname", PAGES)
def test_every_number_leads_to_its_origin(docname, visit, served, origins):
    v = visit()
    page = v.open(f"{served}/{docname}.html")
    for link in page.eval_on_selector_all(
        "a.kv-n", "links => links.map(a => [a.href, a.title, a.textContent])"
    ):
        href, title, shown = link
        assert title, shown
        target = href.partition("#")[2]
        assert target.startswith("n-"), href
    hrefs = sorted(
        {h.partition("#")[2] for h in page.eval_on_selector_all("a.kv-n", "a => a.map(x => x.href)")}
    )
    assert [i for i in hrefs if i not in origins] == []


def test_figure_without_javascript_leaves_its_data(visit, html):
    with_figures = [d for d, p in PAGES.items() if figures_of(p)]
    v = visit(java_script_enabled=False)
    for docname in with_figures:
        v.page.goto((html / f"{docname}.html").as_uri())
        for fig in v.page.locator(".kv-figure").all():
            assert fig.locator("noscript").inner_text().strip() or fig.locator(".kv-alt").inner_text().strip()
            fig.locator("details.kv-data > summary").click()
            assert fig.locator("details.kv-data tbody tr").first.is_visible()


def test_a_figure_that_lost_a_point_would_be_seen(visit, served):
    docname = next(d for d, p in PAGES.items() if figures_of(p))
    page = visit().open(f"{served}/{docname}.html")
    page.evaluate("() => document.querySelector('.js-plotly-plot g.trace path').remove()")
    with pytest.raises(AssertionError):
        drawn_in_full(page, figures_of(PAGES[docname]))
