"""The ledger as a reader sees it: every claim, and every link to the place that decides it."""

import re
from html import unescape

import pytest

from kvlab.book import compute
from kvlab.book.ledger import entries, show_ledger
from kvlab.book.pages import pages
from kvlab.errors import BadInput

from .conftest import ROOT

NAMES = {p.name for p in pages(ROOT)}


def test_every_claim_stands_on_the_page_with_its_verdict(html):
    page = (html / "book" / "ledger.html").read_text("utf-8")
    rows = dict(re.findall(r'<tr id="claim-(\w+)">(.*?)</tr>', page, re.S))
    assert list(rows) == [c.id for c in entries()]
    for c in entries():
        shown = unescape(rows[c.id])
        assert c.quote in shown
        assert f">{c.verdict}</strong>" in shown
        assert (c.test is None) or c.test.rpartition("::")[2] in shown


def test_a_corrected_figure_stands_beside_its_verdict(html):
    page = (html / "book" / "ledger.html").read_text("utf-8")
    rows = dict(re.findall(r'<tr id="claim-(\w+)">(.*?)</tr>', page, re.S))
    for claim in entries():
        if claim.verdict == "corrected" and claim.value is not None:
            pattern = r'</strong>: <span class="kv-n" title="([^"]+)">([^<]+)</span>'
            figure = re.search(pattern, rows[claim.id])
            assert figure, claim.id
            assert "computed" in figure[1]
            assert f"{claim.value:g}" not in figure[2].split()
    assert "44.53\u00a0GB = 41.47\u00a0GiB" in rows["shadow"]
    assert "27.37\u00a0GB = 25.49\u00a0GiB" in rows["pool_gb"]


def test_every_link_leads_to_a_place_in_the_book(html):
    page = (html / "book" / "ledger.html").read_text("utf-8")
    links = re.findall(r'<td><a href="([\w-]+)\.html#([\w-]+)">', page)
    assert len(links) == len(entries()) > 40
    for name, place in links:
        assert f'id="{place}"' in (html / "book" / f"{name}.html").read_text("utf-8"), f"{name}#{place}"


def test_every_chapter_of_the_investigation_decides_some_claim():
    decided = {c.page.partition("#")[0] for c in entries()}
    chapters = {
        "symptom",
        "suspects",
        "trace",
        "memory",
        "selectivity",
        "plan-and-run",
        "backends-fail",
        "who-else",
        "patch",
    }
    assert chapters <= decided <= NAMES


def test_unknown_verdict_and_key_are_refused(tmp_path, monkeypatch):
    reported = tmp_path / "reported"
    reported.mkdir()
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path))
    claim = "claims:\n- {id: a, quote: q, quantity: q, verdict: %s, why: w, page: 'p#p'%s}\n"
    (reported / "claims.yml").write_text(claim % ("perhaps", ""))
    with pytest.raises(BadInput, match="'a': verdict 'perhaps' is none of confirmed"):
        show_ledger()
    (reported / "claims.yml").write_text(claim % ("confirmed", ""))
    with pytest.raises(BadInput, match="show_ledger: no corrected claim a"):
        show_ledger({"a": (compute(lambda: 1), "")})
    (reported / "claims.yml").write_text(claim % ("confirmed", ", value: many"))
    with pytest.raises(BadInput, match="claim 'a': Expected `float"):
        entries()
    (reported / "claims.yml").write_text((claim % ("confirmed", "")).replace("p#p", "p"))
    with pytest.raises(BadInput, match="'a': page 'p' names no place; write p#PLACE"):
        entries()
