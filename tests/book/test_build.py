"""A small book, built as a reader builds the real one: what is redone, refused and left behind."""

import json
import os
import re
import shutil
import subprocess
import sys
import time

import pytest
import yaml

from .conftest import ROOT, kvlab

HEADER = "---\nkernelspec:\n  display_name: Python 3\n  language: python\n  name: python3\n---\n\n"
CHAPTER = (
    HEADER
    + """# What does {n}`cast:.1f us` buy?

```{code-cell} ipython3
:tags: [parameters]
seed: int = 7
live: bool = False
```

```{code-cell} ipython3
from kvlab.book import bare, export, parameter, recorded, show, show_table
import plotly.graph_objects as go

cast = recorded("one/times.json", "cast_us")
step = recorded("one/times.json", "step_us")
export(cast=cast, share=cast / step, seed=parameter("seed"))
```

```{code-cell} ipython3
---
mystnb:
  figure:
    name: fig-cast
    caption: The cast takes {n}`share:.1f %` of the step.
---
fig = go.Figure(go.Bar(x=bare([cast, step], "us"), y=["cast", "step"], orientation="h"))
show(fig, alt=f"Bars of {cast:.1f us}.")
```

It takes {n}`cast:.1f us`, see {numref}`fig-cast`; seed {n}`seed`.

$$
\\val{share:.1f %} < 1
$$

| part | time |
|---|---|
| cast | {n}`cast:.1f us` |
"""
)
INDEX = """# A small book

The cast takes {n}`chapter.cast:.1f us` of a step.

```{value-origins}
```

```{execution-status}
```
"""
README = "# small\n\nThe cast takes <!--n chapter.cast:.1f us-->800.0 µs<!--/n-->.\n"


class Small:
    def __init__(self, root):
        self.root = root
        shutil.copy(ROOT / "_config.yml", root)
        shutil.copytree(ROOT / "book" / "_static", root / "book" / "_static")
        shutil.copy(ROOT / "book" / "references.bib", root / "book")
        (root / "book" / "_toc.yml").write_text(
            "format: jb-book\nroot: book/index\nchapters:\n- file: book/chapter\n"
        )
        (root / "data" / "reported").mkdir(parents=True)
        (root / "data" / "recorded" / "one").mkdir(parents=True)
        self.record(800.0)
        self.write("index", INDEX)
        self.write("chapter", CHAPTER)
        (root / "README.md").write_text(README.replace("800.0 µs", "800.0\u00a0µs"))

    def record(self, cast_us):
        run = self.root / "data" / "recorded" / "one"
        (run / "times.json").write_text(json.dumps({"cast_us": cast_us, "step_us": 1000.0}))

    def write(self, name, text):
        (self.root / "book" / f"{name}.md").write_text(text)

    def kvlab(self, *args):
        return kvlab("book", *args, cwd=self.root, KVLAB_DATA=str(self.root / "data"))

    def start(self, *args):
        return subprocess.Popen(
            [sys.executable, "-m", "kvlab", "book", *args],
            cwd=self.root,
            # A build that is killed leaves its kernel's files.
            env={**os.environ, "KVLAB_DATA": str(self.root / "data"), "TMPDIR": str(self.root.parent)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def build(self, ok=True):
        done = self.kvlab("build")
        assert (done.returncode == 0) is ok, done.stdout + done.stderr
        return done.stdout if ok else done.stderr

    def text(self, page):
        html = (self.root / "_build" / "html" / "book" / f"{page}.html").read_text("utf-8")
        html = re.sub(r"<script.*?</script>", "", html, flags=re.S)
        return re.sub(r"<[^>]+>", "", html.partition("<article")[2].partition("</article>")[0]).replace(
            "\u00a0", " "
        )

    def stamps(self):
        files = [
            *(self.root / "_build/html/book").glob("*.html"),
            *(self.root / "book/executed").glob("*/*.ipynb"),
        ]
        return {f.name: f.stat().st_mtime_ns for f in files}


@pytest.fixture
def small(tmp_path):
    return Small(tmp_path)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """Where the small book is built: the doctrees hold absolute paths, so it is changed in this one place."""
    return tmp_path_factory.mktemp("small") / "here"


@pytest.fixture(scope="module")
def built(workplace, tmp_path_factory):
    """One built small book; a copy of it stays as it was."""
    workplace.mkdir()
    Small(workplace).build()
    kept = object.__new__(Small)
    kept.root = tmp_path_factory.mktemp("kept") / "small"
    shutil.copytree(workplace, kept.root)
    return kept


@pytest.fixture
def again(built, workplace):
    """The built small book in its place, whatever a test before made of it."""
    shutil.rmtree(workplace)
    shutil.copytree(built.root, workplace)
    here = object.__new__(Small)
    here.root = workplace
    return here


def test_numbers_reach_every_place(built):
    page = built.text("chapter")
    assert "What does 800.0 µs buy?" in page
    assert "The cast takes 80.0 % of the step." in page
    assert "It takes 800.0 µs, see Fig. 1; seed 7." in page
    assert "80.0\\,\\mathrm{\\%}" in page
    assert "The cast takes 800.0 µs of a step." in built.text("index")
    assert "data/recorded/one/times.json: cast_us" in built.text("index")


def test_second_build_redoes_nothing(again):
    before = again.stamps()
    assert "chapter: unchanged" in again.build()
    assert again.stamps() == before


def test_changed_data_changes_every_number_and_nothing_else(again):
    before = {page: again.text(page) for page in ("chapter", "index")}
    again.record(700.0)
    assert "chapter: executed" in again.kvlab("build").stdout
    assert "README.md:3" in again.build(ok=False)
    assert "rewritten" in again.kvlab("readme").stdout
    again.build()
    after = {page: again.text(page) for page in ("chapter", "index")}
    assert "700.0\u00a0µs" in (again.root / "README.md").read_text("utf-8")
    # index.md itself did not change: it is rebuilt because the value that it quotes did.
    for page in before:
        assert "800" not in after[page]
        assert "80.0" not in after[page]
    assert after["chapter"] == before["chapter"].replace("800", "700").replace("80.0", "70.0")


def test_only_the_page_that_changed_is_rendered(again):
    before = again.stamps()
    again.write("chapter", CHAPTER + "\nOne more sentence.\n")
    again.build()
    changed = {name for name, stamp in again.stamps().items() if stamp != before[name]}
    assert "chapter.html" in changed
    assert "genindex.html" not in changed


def test_changed_style_reaches_the_pages(again):
    css = again.root / "book" / "_static" / "kvlab.css"
    css.write_text(css.read_text() + "\n.kv-new { color: red; }\n")
    before = again.stamps()
    again.build()
    assert ".kv-new" in (again.root / "_build" / "html" / "_static" / "kvlab.css").read_text()
    # The style's address carries its digest: the pages were written again, not executed again.
    after = again.stamps()
    assert after["chapter.html"] != before["chapter.html"]
    assert after["chapter.ipynb"] == before["chapter.ipynb"]


# A chapter that executes for as long as a file `hold` is there.
HELD = """
```{code-cell} ipython3
import time
from pathlib import Path

while Path("hold").exists():
    time.sleep(1 / 2)
```
"""


def held_by(first, again):
    """A second build beside `first`, which holds the book: what it says while it waits."""
    second = again.start("build")
    line = f"kvlab: the book is built or run by process {first.pid}; waiting for it\n"
    assert second.stderr.readline() == line
    return second


def start_held(again, more):
    (again.root / "hold").touch()
    again.write("chapter", CHAPTER + HELD + more)
    first = again.start("build")
    while not list((again.root / "book" / "executed").glob(".run-*")):
        assert first.poll() is None, first.communicate()
        time.sleep(0.02)
    return first


def test_two_builds_at_once_take_turns(again):
    first = start_held(again, "\nOne more sentence.\n")
    second = held_by(first, again)
    (again.root / "hold").unlink()
    said = [process.communicate(timeout=300) for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], said
    assert "chapter: executed" in said[0][0]
    assert "chapter: unchanged" in said[1][0]
    assert "One more sentence." in again.text("chapter")


def test_a_killed_build_holds_nobody_up_and_passes_for_nothing(again):
    first = start_held(again, "\nSee {ref}`nowhere`.\n")
    second = held_by(first, again)
    first.kill()
    first.communicate()
    (again.root / "hold").unlink()
    out, err = second.communicate(timeout=300)
    # What the first one had begun is begun anew.
    assert "chapter: executed" in out
    assert second.returncode == 1
    assert "undefined label: 'nowhere'" in err
    assert not (again.root / "_build" / "html").exists()
    assert [p.name for p in (again.root / "book" / "executed").iterdir()] == ["build"]


def test_what_a_killed_build_left_is_rendered_again(again):
    before = again.stamps()
    (again.root / "_build" / ".unfinished").touch()
    again.build()
    after = again.stamps()
    assert all(after[name] != before[name] for name in before if name.endswith(".html"))
    assert after["chapter.ipynb"] == before["chapter.ipynb"]
    assert not (again.root / "_build" / ".unfinished").exists()


def test_page_with_a_typed_copy_fails(small):
    small.write("chapter", CHAPTER + "\nThat is 800.0 us.\n")
    for _ in range(2):
        assert "'800.0 us' in prose has no origin" in small.build(ok=False)


def test_warnings_are_errors_and_stay_so_when_repeated_unchanged(again):
    bad = (
        "\nSee {n}`cats`, {n}`cast:.1f mm`, {n}`chapter.cast:.9q us` and {ref}`nowhere`.\n\n$$\\val{cats}$$\n"
    )
    again.write("chapter", CHAPTER + bad)
    for _ in range(2):
        said = again.build(ok=False)
        for part in (
            "{n}`cats`: cats: chapter exports no 'cats'; it has cast",
            "cannot be written in mm",
            "is no number format",
            "undefined label: 'nowhere'",
            "\\val{cats}: cats: chapter exports no 'cats'",
        ):
            assert part in said
        assert not (again.root / "_build" / "html").exists()


def test_failing_cell_is_named_and_nothing_is_left(small):
    small.write("chapter", CHAPTER + "\n```{code-cell} ipython3\nraise ValueError('no such slot')\n```\n")
    said = small.build(ok=False)
    line = len(CHAPTER.splitlines()) + 2
    assert f"book/chapter.md, code cell 4 (line {line}): ValueError: no such slot" in said
    assert list((small.root / "book" / "executed").iterdir()) == []


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        ("show(go.Figure(go.Bar(x=[0], y=[1])), alt='Bars.')", "without caption or name"),
        ("x = 0\nexport(x=parameter('x'))", "no parameters cell defines"),
    ],
)
def test_page_that_breaks_the_rules_is_refused(small, cell, says):
    small.write("chapter", CHAPTER + f"\n```{{code-cell}} ipython3\n{cell}\n```\n")
    assert says in small.build(ok=False)
    assert not list((small.root / "book" / "executed").glob("*/*.ipynb"))


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("-p", "sed", "1"), "no page has this parameter; there are live, seed"),
        (("-p", "seed", "one"), "wants an integer"),
        (("-p", "live", "yes"), "wants true or false"),
        (("-p", "seed"), "wants a name and a value"),
        (("--lvie",), "no such option: --lvie"),
        (("trace",), "no such chapter; there are chapter"),
        (("--name", "../x"), "letters, digits"),
    ],
)
def test_bad_run_is_one_line_and_exit_2(small, args, says):
    done = small.kvlab("run", *args)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert says in done.stderr
    assert not (small.root / "book" / "executed").exists()


def test_plan_runs_nothing(small):
    done = small.kvlab("run", "--plan", "--live", "-p", "seed", "11")
    assert done.stdout == "chapter: seed=11, live=True (never executed)\n"
    assert not (small.root / "book" / "executed").exists()


def test_run_with_parameters_shows_on_the_page_and_hides_its_cell(again):
    done = again.kvlab("run", "-p", "seed", "11", "--live", "--name", "eleven")
    assert done.returncode == 0, done.stderr
    assert "book/executed/eleven" in done.stdout
    assert "chapter: unchanged (eleven)" in again.build()
    page = again.text("chapter")
    assert "seed 11." in page
    assert "# Parameters" not in page
    assert "live = True, seed = 11" in again.text("index")
    # The defaults are still there for who asks for them.
    done = again.kvlab("build", "--run", "build")
    assert done.returncode == 0, done.stderr
    assert "seed 7." in again.text("chapter")


def test_unknown_run_is_refused(again):
    done = again.kvlab("build", "--run", "twelve")
    assert done.returncode == 2
    assert "there are build" in done.stderr


def test_toc_names_a_missing_page(small):
    toc = small.root / "book" / "_toc.yml"
    listed = yaml.safe_load(toc.read_text())
    listed["chapters"].append({"file": "book/none"})
    toc.write_text(yaml.safe_dump(listed))
    done = small.kvlab("build")
    assert (done.returncode, done.stderr) == (
        2,
        "kvlab: book/_toc.yml lists book/none, but there is no book/none.md\n",
    )


def test_serve_without_a_book_and_outside_a_checkout(small, tmp_path):
    done = small.kvlab("serve", "--port", "0")
    assert done.returncode == 2
    assert "no built book here" in done.stderr
    done = kvlab("book", "build", cwd="/")
    assert done.returncode == 2
    assert "run this in a checkout" in done.stderr


def test_without_the_extra_one_line_says_what_to_install(monkeypatch):
    import importlib.util

    from kvlab.commands import book
    from kvlab.errors import BadInput

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "papermill" else find(n))
    with pytest.raises(
        BadInput, match=r"needs papermill; install kvlab with its extra, e\.g\. pip install '\.\[book\]'"
    ):
        book.build()


def test_writing_a_page_needs_no_plotly_and_no_torch_until_used():
    heavy = ("plotly", "torch", "papermill", "sphinx")
    code = f"import sys, kvlab.book; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
