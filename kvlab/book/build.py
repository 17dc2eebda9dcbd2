"""From the sources to _build/html: check the numbers, execute what changed, render; warnings are errors.

Builds and runs of one checkout take turns. One that was killed leaves nothing that the next takes for built.
"""

import contextlib
import io
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from kvlab.book import run
from kvlab.book.pages import pages
from kvlab.errors import BadInput

# The folder of book/executed that a build fills; `kvlab book run` makes a new one each time.
BUILD_RUN = "build"


class BuildFailed(RuntimeError):
    """What stands between the sources and the page, one line each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def build(root: Path, *, chosen_run: str | None = None, say: Callable[[str], None] = print) -> Path:
    """Build the book into _build/html. Raises BuildFailed, CellFailed or BadInput, leaving no html then."""
    with run.turn(root):
        return _build(root, chosen_run, say)


def _build(root: Path, chosen_run: str | None, say: Callable[[str], None]) -> Path:
    from kvlab.book import numbers, readme

    html = root / "_build" / "html"
    unfinished = root / "_build" / ".unfinished"
    if unfinished.is_file():
        _discard(root)
    unfinished.touch()
    try:
        problems = numbers.check(root)
        if problems:
            raise BuildFailed(problems)
        executed = _execute(root, chosen_run, say)
        problems = readme.check(root, executed)
        if problems:
            raise BuildFailed(problems)
        _render(root, chosen_run, say)
    except BaseException:
        _discard(root)
        raise
    finally:
        unfinished.unlink(missing_ok=True)
    return html


def _discard(root: Path) -> None:
    """Warnings are not repeated for cached pages: what a failed build wrote would let a second one pass."""
    shutil.rmtree(root / "_build" / ".doctrees", ignore_errors=True)
    shutil.rmtree(root / "_build" / "html", ignore_errors=True)


def _execute(root: Path, chosen_run: str | None, say: Callable[[str], None]) -> dict[str, run.Executed]:
    found = {}
    executed = run.runs(root)
    if chosen_run is not None and not any(e.path.parent.name == chosen_run for e in executed):
        names = sorted({e.path.parent.name for e in executed})
        raise BadInput(
            f"--run {chosen_run}: no such run in book/executed; there are {', '.join(names) or 'none'}"
        )
    for page in pages(root):
        if not page.cells:
            continue
        why = run.why_stale(page, executed, chosen_run)
        if why and chosen_run:
            raise BadInput(f"--run {chosen_run}: its {page.name} is out of date ({why}); run it again")
        if why:
            e = run.execute(page, run.executed_root(root) / BUILD_RUN, {}, root)
            say(f"{page.name}: executed in {e.kvlab['seconds']:.1f} s ({why})")
        else:
            e = run.newest(page, executed, chosen_run)
            assert e is not None
            say(f"{page.name}: unchanged ({e.path.parent.name})")
        found[page.name] = e
    return found


def _render(root: Path, chosen_run: str | None, say: Callable[[str], None]) -> None:
    from jupyter_book.sphinx import build_sphinx
    from sphinx.util.console import nocolor

    log = io.StringIO()
    overrides: dict[str, object] = {
        "external_toc_path": (root / "book" / "_toc.yml").as_posix(),
        "latex_individualpages": False,
        "kvlab_run": chosen_run or "",
        # Sphinx looks at the pages alone: what renders and decorates them counts as well.
        "kvlab_code": run.tree_sha256(Path(__file__).parent),
        "kvlab_static": run.tree_sha256(root / "book" / "_static"),
    }
    # What `jb build . --toc book/_toc.yml -W --keep-going` calls, its status kept from stdout.
    if not sys.stderr.isatty():
        nocolor()
    before = os.getcwd()
    os.chdir(root)
    try:
        with contextlib.redirect_stdout(log):
            result = build_sphinx(
                root,
                root / "_build" / "html",
                noconfig=True,
                path_config=root / "_config.yml",
                confoverrides=overrides,
                warningiserror=True,
                keep_going=True,
            )
    finally:
        os.chdir(before)
    sys.stderr.flush()
    if isinstance(result, Exception):
        raise BuildFailed([f"the build broke: {type(result).__name__}: {result}"])
    if result:
        raise BuildFailed(["the pages have warnings (above), and warnings are errors"])
    built = [line for line in log.getvalue().splitlines() if line.startswith("updating environment")]
    say(*built[-1:] or [""])
