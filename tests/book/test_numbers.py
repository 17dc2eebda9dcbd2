"""A typed number is found wherever it hides, and a name with digits is left alone."""

import pytest

from kvlab.book import numbers
from kvlab.book.pages import Page

from .conftest import ROOT

CELL = "```{code-cell} ipython3\n"

TYPED = {
    "prose": "The cast takes 64.6 ms.",
    "prose, split by markup": "The cast takes **64** *ms* of the step.",
    "prose, percent": "That is 69% of it.",
    "prose, ratio": "A 5000x reduction.",
    "prose, ratio sign": "It runs 3× faster.",
    "prose, separator": "All 495,552 of them.",
    "prose, three digits": "It holds 576 of them.",
    "prose, counted": "Over 78 layers.",
    "heading": "# What do 64.6 ms buy?",
    "emphasis": "It takes *64.6* of them.",
    "list": "- one\n- 64.6 ms",
    "quote": "> It takes 64.6 ms.",
    "link text": "[64.6 ms](memory.md)",
    "reference text": "{ref}`64.6 ms <fig-cast>`",
    "code span": "It takes `64.6 ms`.",
    "table": "| part | time |\n|---|---|\n| cast | 64.6 ms |",
    "table head": "| 64.6 ms | time |\n|---|---|\n| cast | a |",
    "list-table": "```{list-table} Parts\n* - cast\n  - 64.6 ms\n```",
    "csv-table": '```{csv-table} Parts\n"cast","64.6 ms"\n```',
    "table title": "```{list-table} The 64.6 ms\n* - cast\n  - a\n```",
    "figure caption": "```{figure} a.png\n:name: fig-a\nIt takes 64.6 ms.\n```",
    "figure alt": "```{figure} a.png\n:alt: It takes 64.6 ms\nA caption.\n```",
    "image alt": "![It takes 64.6 ms](a.png)",
    "cell caption": CELL
    + "---\nmystnb:\n  figure:\n    name: a\n    caption: It takes 64.6 ms.\n---\nshow(f)\n```",
    "math": "$a = 64.6$",
    "math block": "$$\na = 2 \\times 576\n$$",
    "math directive": "```{math}\n:label: eq-a\na = 61\\,\\mathrm{GiB}\n```",
    "math role": "{math}`a = 64.6`",
    "amsmath": "\\begin{align}\na &= 64.6\n\\end{align}",
    "math text": "$$\\text{64 ms}$$",
    "admonition": "```{admonition} Takeaway\nIt takes 64.6 ms.\n```",
    "admonition title": "```{admonition} The 64.6 ms\nIt is long.\n```",
    "fold": ":::{dropdown} Derivation\nIt takes 64.6 ms.\n:::",
    "nested": "::::{dropdown} Derivation\n:::{note}\nIt takes 64.6 ms.\n:::\n::::",
    "unknown directive": "```{mystery} x\nIt takes 64.6 ms.\n```",
    "html": "<p>It takes 64.6 ms.</p>",
    "definition list": "cast\n: It takes 64.6 ms.",
    "footnote": "Long[^a].\n\n[^a]: It takes 64.6 ms.",
    "listing": "```text\ncast 64.6 ms\n```",
    "console output": "```console\n$ python -m kvlab memory --slots 495552\npool 22.26 GB\n```",
    "comment in a listing": "```python\nx = f(y)  # takes 64.6 ms\n```",
    "code cell": CELL + "x = 64.6\n```",
    "code cell, integer": CELL + "x = 3\n```",
    "code cell, exponent": CELL + "x = 1e9\n```",
    "code cell, string": CELL + 'print("It takes 64.6 ms")\n```',
    "code cell, f-string": CELL + 'print(f"{v:.1f ms} of 95.6 ms")\n```',
    "code cell, figure title": CELL + 'fig.update_layout(title="The 64.6 ms")\n```',
    "code cell, parsed string": CELL + 'x = float("64.6")\n```',
    "code cell, shell": CELL + "!echo 64.6 ms\n```",
    "code cell, magic": CELL + "%%bash\necho 64.6 ms\n```",
    "code cell, keyword": CELL + "fig.update_layout(height=400)\n```",
}

FREE = {
    "role": "The cast takes {n}`cast_ms:.1f ms` of {n}`memory.step:.2f ms`.",
    "role in a table": "| part | time |\n|---|---|\n| cast | {n}`cast_ms:.1f ms` |",
    "value in math": "$$\n\\frac{\\val{cast_ms:.1f ms}}{\\val{step}} + x_{12} + 2^{10} - 10^{9}\n$$",
    "names": "An RTX PRO 6000 Blackwell (SM120), an H200, GLM-5, FP8 e4m3 rows, BF16.",
    "versions": "SGLang 0.5.15.post1 pins flashinfer 0.6.12 and Python 3.12; from 0.5.11 on, plugins.",
    "pull requests": "See PR 35322, S#35291 and F#3136 of August 2026, read on 2026-11-29.",
    "command": "Run `python -m kvlab memory --slots 495552 --active 100`.",
    "flag": "Give `--max-total-tokens 495552`.",
    "shell": "```bash\npython -m kvlab memory --slots 495552 --active 100 --json\n```",
    "small counts": "One layer, 2 GPUs, 1 request, chapter 3, step 4.",
    "widths": "64-bit offsets and 8-bit floats.",
    "url": "<https://github.com/sgl-project/sglang/issues/35291>",
    "link target": "[the report](https://example.org/35291/64.6)",
    "parameters": CELL + ":tags: [parameters]\nslots: int = 495_552\n```",
    "0, 1, 2": CELL + "x = [0, 1, 2, -1]\n```",
    "address": CELL + 'recorded("h200-stock/kernels.json", "rows[bs=64,ctx=4096].us")\n```',
    "format": CELL + 'show_table(c, r, formats=["", ".1f ms", ",.0f x"])\nprint(f"{v:.2f GiB}")\n```',
    "colour": CELL + 'c = "#1f77b4"\n```',
    "comment": "% 64.6 ms is what the text says\n\nProse.",
}


def orphans(tmp_path, text):
    path = tmp_path / "page.md"
    path.write_text("---\nkernelspec:\n  name: python3\n---\n\n" + text + "\n")
    return numbers.check_page(Page(path, "book/page"))


@pytest.mark.parametrize("place", TYPED)
def test_typed_number_is_found(place, tmp_path):
    found = orphans(tmp_path, TYPED[place])
    assert found, place
    assert all(o.line > 4 for o in found)


@pytest.mark.parametrize("place", FREE)
def test_what_has_an_origin_or_is_a_name_passes(place, tmp_path):
    assert orphans(tmp_path, FREE[place]) == []


def test_message_says_where_what_and_how(tmp_path):
    (o,) = orphans(tmp_path, "Fine.\n\nThe cast takes 64.6 ms.")
    assert str(o) == "book/page.md:8: '64.6 ms' in prose has no origin; write {n}`name:format`"


def test_line_of_a_number_in_a_cell_counts_its_options(tmp_path):
    (o,) = orphans(tmp_path, "Text.\n\n" + CELL + "---\ntags: [a]\n---\nx = 1\ny = 64.6\n```")
    assert (o.line, o.numeral) == (13, "64.6")


@pytest.mark.parametrize(
    "text", ["It takes 64.6 ms.", "| a |\n|---|\n| 69 % |", "<!--n a.b-->1.0<!--/n--> of 95.6 ms"]
)
def test_readme_is_checked(text):
    assert [o.place for o in numbers.check_readme(text)] == ["README"]


def test_marked_readme_passes():
    marked = "A pool of <!--n memory.pool:.2f GB-->22.26 GB<!--/n-->."
    text = f"{marked}\n\n```bash\npython -m kvlab memory --slots 495552\n```\n"
    assert numbers.check_readme(text) == []


def test_fence_that_is_none_is_refused(tmp_path):
    from kvlab.errors import BadInput

    with pytest.raises(BadInput, match=":::"):
        orphans(tmp_path, "```{dropdown} Derivation: {n}`a`\nx\n```")


def test_the_book_and_its_readme_pass():
    assert numbers.check(ROOT) == []
