"""The book's pictures of backends: a mark a verdict, and the history's own rows."""

import pytest

from kvlab.backends import decide, history, matrix, overview, question, releases, rules
from kvlab.backends.advice import advise
from kvlab.backends.page import matrix_html
from kvlab.backends.reproduce import Raised
from kvlab.book.figures import data_table
from kvlab.errors import BadInput


@pytest.mark.parametrize(
    ("model", "gpu"), [("glm-5", "rtx-pro-6000"), ("deepseek-r1", "h200"), ("deepseek-r1", "a100")]
)
def test_a_mark_is_the_verdict_of_its_release(model, gpu):
    found = overview.marks(model, gpu)
    for mark in found:
        known = rules.load("sglang", mark.release)
        name = known["dsa"]["name"] if mark.backend.startswith("dsa") else mark.backend
        verdict = next(v for v in decide(question(model, gpu, mark.release)) if v.backend == name)
        assert mark.reason == verdict.reason
        if mark.state in ("reads", "casts"):
            assert (verdict.works, verdict.casts_pool) == (True, mark.state == "casts")
        else:
            assert verdict.works is (False if mark.state == "refused" else None)
    drawn = overview.figure(model, gpu)
    assert sum(len(t.x) for t in drawn.data) == len(found)


def test_no_mark_where_a_release_lacks_the_model_or_the_backend():
    glm5 = overview.marks("glm-5", "rtx-pro-6000")
    assert {m.release for m in glm5} == set(releases()[releases().index("0.5.9") :])
    assert {m.release for m in glm5 if m.backend == "cutlass_mla"}.isdisjoint({"0.5.20", "0.5.23"})
    # Without an indexer there is nothing sparse to serve.
    assert not any(m.backend.startswith("dsa") for m in overview.marks("deepseek-r1", "h200"))
    with pytest.raises(BadInput):
        overview.marks("no-such-model", "h200")


def test_the_historys_table_has_its_spans_and_not_its_bars():
    for package in ("flashinfer-python", "sglang"):
        table = data_table(history.figure(package))
        wanted = [s for s in history.spans() if s.package == package]
        assert table.count("<tr>") == len(wanted) + 1
        for s in wanted:
            assert s.evidence is None or f"{s.evidence.file}:{s.evidence.line}" in table


def test_the_page_gives_the_advice_of_each_question():
    m = matrix.build(["glm-5", "deepseek-r1"], ["h200"], ["0.5.9", "0.5.23"])
    options, chosen = matrix.advice(m)
    assert len(chosen) == 2 * 2
    for (model, gpu, release), indices in chosen.items():
        assert [options[i] for i in indices] == advise(question(model, gpu, release))
    text = matrix_html(m, model="glm-5", gpu="h200", sglang="0.5.9")
    for i in chosen["glm-5", "h200", "0.5.9"]:
        assert f"<code>{' '.join(options[i].flags)}</code>" in text


def test_a_bare_assertion_is_shown_by_its_line():
    said, bare = (
        Raised(
            name="x",
            call="f()",
            package="p",
            release="1",
            exception=exception,
            says=says,
            file="a.py",
            line=3,
            quote="assert a == b",
        )
        for exception, says in (("ValueError", "no"), ("AssertionError", ""))
    )
    assert (said.words, said.where) == ("ValueError: no", "p 1, a.py:3")
    assert bare.words == "AssertionError at `assert a == b`"
