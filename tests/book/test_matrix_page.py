"""The table of backends in a real browser: filters, evidence, advice, by keyboard and without JavaScript."""

import pytest

from kvlab.backends import answer, matrix

pytestmark = pytest.mark.browser
MATRIX = matrix.build()


@pytest.fixture
def page(visit, html):
    v = visit(viewport={"width": 1200, "height": 900})
    page = v.open((html / "book" / "who-else.html").as_uri())
    page.set_default_timeout(10_000)
    yield page
    assert v.foreign == []


def rows(page):
    return page.locator(".kvlab-matrix tbody tr")


def choice(page, label):
    """The select that a screen reader calls so."""
    return page.get_by_role("combobox", name=label, exact=True)


def cells(**of):
    return [c for c in MATRIX.cells if all(getattr(c, k) == v for k, v in of.items())]


def test_it_opens_on_the_source_texts_server(page):
    wanted = cells(model="glm-5", gpu="rtx-pro-6000", sglang="0.5.9")
    assert rows(page).count() == len(wanted)
    shown = rows(page).evaluate_all("rows => rows.map(r => [r.cells[3].textContent, r.cells[5].innerText])")
    assert [s[0] for s in shown] == [c.backend for c in wanted]
    assert "Expected qk_nope_head_dim == 128, got 192" in dict(shown)["trtllm_mla"]


def test_filters_narrow_widen_and_count(page):
    choice(page, "Model").select_option("deepseek-r1")
    choice(page, "Card").select_option("h200")
    choice(page, "SGLang").select_option("0.5.23")
    choice(page, "Answer").select_option("works, no cast")
    wanted = [
        c for c in cells(model="deepseek-r1", gpu="h200", sglang="0.5.23") if c.works and not c.casts_pool
    ]
    assert rows(page).count() == len(wanted) == 2
    assert page.locator(".kvlab-matrix-count").inner_text() == "2 answers"
    for label in ("Model", "Card", "SGLang", "Answer"):
        choice(page, label).select_option("")
    assert (
        page.locator(".kvlab-matrix-count")
        .inner_text()
        .startswith(f"{len(MATRIX.cells):,} answers, the first")
    )
    assert page.locator(".kvlab-advice").is_hidden()
    # All six columns find room beside each other.
    assert page.evaluate(
        "document.querySelector('.kvlab-matrix table').scrollWidth"
        " <= document.querySelector('.kvlab-matrix').clientWidth"
    )
    # A column whose filter is set says nothing new.
    assert page.locator(".kvlab-matrix th").first.is_visible()
    choice(page, "Model").select_option("kimi-k2")
    assert page.locator(".kvlab-matrix th").first.is_hidden()


def test_evidence_and_filters_by_keyboard(page):
    choice(page, "Backend").focus()
    page.keyboard.type("cutlass")
    assert rows(page).count() == 1
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    proof = rows(page).locator("li").first
    assert proof.is_hidden()
    page.keyboard.press("Enter")
    assert proof.is_visible()
    evidence = next(
        b for b in answer("glm-5", "rtx-pro-6000", "0.5.9")["backends"] if b["backend"] == "cutlass_mla"
    )["evidence"]
    assert rows(page).locator("li").all_inner_texts() == [e["text"] for e in evidence]


def test_advice_follows_the_choice(page):
    choice(page, "Card").select_option("h200")
    wanted = answer("glm-5", "h200", "0.5.9")["advice"]
    assert page.locator(".kvlab-advice dt").all_inner_texts() == [o["what"] for o in wanted]
    assert page.locator(".kvlab-advice code").all_inner_texts() == [" ".join(o["flags"]) for o in wanted]
    assert page.locator(".kvlab-advice-of").inner_text() == "glm-5, h200, SGLang 0.5.9"


def test_on_a_phone_the_rows_stand_below_each_other(page):
    page.set_viewport_size({"width": 390, "height": 800})
    page.wait_for_timeout(200)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    choice(page, "SGLang").select_option("")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    answer_cell, why = (rows(page).first.locator("td").nth(i).bounding_box() for i in (4, 5))
    assert why["y"] >= answer_cell["y"] + answer_cell["height"]


def test_without_javascript_the_starting_rows_stand(visit, html):
    v = visit(java_script_enabled=False)
    v.page.goto((html / "book" / "who-else.html").as_uri())
    assert rows(v.page).count() == len(cells(model="glm-5", gpu="rtx-pro-6000", sglang="0.5.9"))
    assert v.page.locator(".kvlab-matrix-filters").is_hidden()
    assert v.page.locator(".kvlab-advice dt").count() > 0
