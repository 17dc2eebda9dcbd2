"""A figure's menu: opened by a click, every entry within reach, each choice drawn in full."""

import pytest

from kvlab.book.pages import pages

from .conftest import ROOT

pytestmark = pytest.mark.browser
WITH_MENU = [p.docname for p in pages(ROOT) if "updatemenus" in p.text]
FIGURE = "[...document.querySelectorAll('.js-plotly-plot')].find(g => g.layout.updatemenus)"
SHOWN = "g => JSON.stringify(g._fullData.filter(t => t.visible === true).map(t => [[...t.x], [...t.y]]))"


@pytest.mark.parametrize("width", [1200, 390])
@pytest.mark.parametrize("docname", WITH_MENU)
def test_every_choice_can_be_clicked_and_is_drawn(docname, width, visit, served):
    v = visit(viewport={"width": width, "height": 900}, color_scheme="dark")
    page = v.open(f"{served}/{docname}.html")
    labels = page.evaluate(f"({FIGURE}).layout.updatemenus[0].buttons.map(b => b.label)")
    assert len(labels) > 1
    seen = {}
    for i, label in enumerate(labels):
        page.locator(".updatemenu-header").first.scroll_into_view_if_needed()
        page.locator(".updatemenu-header").first.click()
        entry = page.locator(".updatemenu-dropdown-button").nth(i)
        assert entry.text_content().strip() == label
        entry.click(timeout=5000)
        page.wait_for_timeout(300)
        seen[label] = page.evaluate(f"({SHOWN})({FIGURE})")
        figures = page.evaluate("probe.figures()")
        assert all(t["drawn"] == t["data"] for f in figures for t in f if "markers" in t["mode"])
    # The menu changes the picture: models of another depth take other memory, more heads other time.
    assert len(set(seen.values())) > 1
    assert v.errors == []
