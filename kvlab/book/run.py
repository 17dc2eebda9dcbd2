"""How does a page get its outputs? jupytext, then papermill, into book/executed/<run>/."""

import contextlib
import functools
import hashlib
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvlab import data, locks
from kvlab.book.pages import Page, pages
from kvlab.errors import BadInput

PACKAGE = Path(__file__).resolve().parents[1]
# jsonschema, which nbformat imports, builds a grammar for this optional checker, over a second each time;
# a notebook's schema has no such format.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
_PROBE = """\
import sys
from IPython.display import display
from kvlab.book import exports
display({"application/json": {
    "values": exports.exported(),
    "modules": sorted({m.__file__ for n, m in list(sys.modules.items())
                       if n.partition(".")[0] == "kvlab" and getattr(m, "__file__", None)}),
}}, raw=True)
"""


class CellFailed(RuntimeError):
    """A page did not execute: names the chapter, its cell and line, and what was raised."""


@dataclass(frozen=True)
class Executed:
    """An executed page on disk."""

    path: Path
    kvlab: dict[str, Any]

    @property
    def values(self) -> dict[str, dict]:
        return self.kvlab["values"]


def executed_root(root: Path) -> Path:
    return root / "book" / "executed"


@contextlib.contextmanager
def turn(root: Path) -> Iterator[None]:
    """The checkout's book to oneself: waits, after a line on stderr, for whoever builds or runs it."""

    def waiting(holder: str) -> None:
        sys.stderr.write(f"kvlab: the book is built or run by {holder}; waiting for it\n")
        sys.stderr.flush()

    with locks.held(root / "_build" / ".book.lock", waiting):
        for left in executed_root(root).glob(".*-*"):
            # Of an execution that was killed.
            shutil.rmtree(left, ignore_errors=True)
        yield


def runs(root: Path) -> list[Executed]:
    """Every executed page on disk, the newest first."""
    found = []
    for path in executed_root(root).glob("[!.]*/*.ipynb"):
        try:
            meta = msgspec.json.decode(path.read_bytes())["metadata"]["kvlab"]
        except (msgspec.DecodeError, KeyError, TypeError):
            continue
        found.append(Executed(path, meta))
    return sorted(found, key=lambda e: (e.kvlab["executed_at"], str(e.path)), reverse=True)


def newest(page: Page, executed: Sequence[Executed], run: str | None = None) -> Executed | None:
    """The newest execution of this very source, from one run if named."""
    for e in executed:
        if (
            (run is None or e.path.parent.name == run)
            and e.kvlab["source_sha256"] == page.source_sha256
            and (e.kvlab["page"] == page.name)
        ):
            return e
    return None


def why_stale(page: Page, executed: Sequence[Executed], run: str | None = None) -> str | None:
    """Why the page must execute again, or None: its source, kvlab's code, the data or the environment."""
    own = [e for e in executed if e.kvlab["page"] == page.name and (run is None or e.path.parent.name == run)]
    if not own:
        return "never executed"
    e = newest(page, own)
    if e is None:
        return "source changed"
    changed = [name for name, sha in e.kvlab["inputs"].items() if file_sha256(PACKAGE.parent / name) != sha]
    if changed:
        return f"{changed[0]} changed" + (f" and {len(changed) - 1} more" if len(changed) > 1 else "")
    if e.kvlab["data_sha256"] != tree_sha256(data.root()):
        return "data changed"
    if e.kvlab["environment"] != environment():
        return "environment changed"
    return None


def file_sha256(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


@functools.cache
def tree_sha256(folder: Path) -> str:
    """One digest over every file below a folder, names included."""
    total = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts):
        total.update(f"{path.relative_to(folder).as_posix()}\0{file_sha256(path)}\n".encode())
    return total.hexdigest()


@functools.cache
def environment() -> str:
    """The Python and the packages that decide what a cell prints."""
    from importlib import metadata

    names = ("torch", "triton", "numpy", "plotly", "ipykernel", "msgspec")
    have = []
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            have.append(f"{name} {metadata.version(name)}")
    return ", ".join([f"Python {platform.python_version()}", *have])


def parameters_for(
    chapters: Sequence[Page], given: Sequence[tuple[str, str]], live: bool
) -> dict[str, dict[str, Any]]:
    """The parameters of each page; BadInput for an unknown name or another type than the default's."""
    known = {n for page in chapters for n in page.parameters}
    for name, _ in given:
        if name not in known:
            raise BadInput(
                f"-p {name}: no page has this parameter; there are {', '.join(sorted(known)) or 'none'}"
            )
    wanted: dict[str, dict[str, Any]] = {}
    for page in chapters:
        own = {n: _typed(n, text, page.parameters[n]) for n, text in given if n in page.parameters}
        if live and "live" in page.parameters:
            own["live"] = True
        wanted[page.name] = own
    return wanted


def _typed(name: str, text: str, default: Any) -> Any:
    if isinstance(default, bool):
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise BadInput(f"-p {name} {text}: wants true or false")
    for kind in (int, float):
        if isinstance(default, kind):
            try:
                return kind(text)
            except ValueError:
                raise BadInput(
                    f"-p {name} {text}: wants {'an integer' if kind is int else 'a number'}"
                ) from None
    return text


def select(root: Path, names: Sequence[str]) -> list[Page]:
    """The pages with code, or those named. Raises BadInput for an unknown name."""
    having = [p for p in pages(root) if p.cells]
    if not names:
        return having
    by_name = {p.name: p for p in having}
    for name in names:
        if name not in by_name:
            raise BadInput(f"{name}: no such chapter; there are {', '.join(by_name) or 'none with code'}")
    return [by_name[n] for n in names]


def execute(page: Page, folder: Path, parameters: Mapping[str, Any], root: Path) -> Executed:
    """Run one page and put the notebook into `folder`, whole or not at all.

    Raises CellFailed naming chapter, line and error, and BadInput where the page breaks the book's rules (a
    figure without caption, a parameter() that the parameters cell does not define).
    """
    import jupytext
    import nbformat
    import papermill
    from papermill.exceptions import PapermillExecutionError

    from kvlab.provenance import collect

    nb = jupytext.read(page.path)
    nb.cells.append(nbformat.v4.new_code_cell(_PROBE, metadata={"tags": ["kvlab-probe"]}))
    nb.metadata.setdefault(
        "kernelspec", {"name": "python3", "display_name": "Python 3", "language": "python"}
    )
    nb.metadata.setdefault("language_info", {"name": "python"})
    executed_root(root).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".run-", dir=executed_root(root)) as work:
        source, out = Path(work, "source.ipynb"), Path(work, f"{page.name}.ipynb")
        nbformat.write(nb, source)
        started = time.perf_counter()
        try:
            with _environment(KVLAB_BOOK="1", PYDEVD_DISABLE_FILE_VALIDATION="1"):
                papermill.execute_notebook(
                    source,
                    out,
                    parameters=dict(parameters),
                    kernel_name="python3",
                    progress_bar=False,
                    cwd=root,
                    extra_arguments=["--log-level=CRITICAL"],
                )
        except PapermillExecutionError as e:
            raise CellFailed(_failed(page, out, e)) from None
        seconds = time.perf_counter() - started
        done = nbformat.read(out, as_version=4)
        probe = done.cells.pop().outputs[0]["data"]["application/json"]
        _check(page, done, probe["values"])
        for cell in done.cells:
            if cell.cell_type == "code":
                cell.outputs = [
                    o for o in cell.outputs if not o.get("metadata", {}).get("kvlab", {}).get("export")
                ]
            if "injected-parameters" in cell.metadata.get("tags", []):
                cell.metadata.tags.append("remove-cell")
        provenance = collect(["python", "-m", "kvlab", *sys.argv[1:]])
        done.metadata.pop("papermill", None)
        done.metadata["kvlab"] = {
            "page": page.name,
            "source_sha256": page.source_sha256,
            "parameters": dict(parameters),
            "inputs": {n: file_sha256(PACKAGE.parent / n) for n in _inputs(probe["modules"])},
            "data_sha256": tree_sha256(data.root()),
            "environment": environment(),
            "values": probe["values"],
            "executed_at": provenance.date,
            "seconds": seconds,
            "provenance": msgspec.to_builtins(provenance),
        }
        nbformat.write(done, out)
        folder.mkdir(parents=True, exist_ok=True)
        os.replace(out, folder / out.name)
    return Executed(folder / out.name, done.metadata["kvlab"])


def _inputs(modules: Sequence[str]) -> list[str]:
    """The modules that the page imported and the package data beside them (sources of kernels, presets)."""
    found = set()
    for module in map(Path, modules):
        if PACKAGE not in module.parents and module.parent != PACKAGE:
            continue
        found.add(module)
        if module.parent == Path(__file__).parent:
            # The book's own data (names.yml) says what may be written, not what a cell computes.
            continue
        found.update(p for p in module.parent.iterdir() if p.is_file() and p.suffix not in (".py", ".pyc"))
    return sorted(p.relative_to(PACKAGE.parent).as_posix() for p in found)


def _failed(page: Page, out: Path, e: Any) -> str:
    import nbformat

    before = nbformat.read(out, as_version=4).cells[: max(e.cell_index, 0)] if out.is_file() else []
    own = [
        c
        for c in before
        if c.cell_type == "code"
        and not {"injected-parameters", "papermill-error-cell-tag"} & set(c.metadata.get("tags", []))
    ]
    number = min(len(own), len(page.cells) - 1)
    line = page.cells[number].line
    what = " ".join(str(e.evalue).split())
    return f"book/{page.path.name}, code cell {number + 1} (line {line}): {e.ename}: {what}"


def _check(page: Page, nb: Any, values: Mapping[str, dict]) -> None:
    for cell in nb.cells:
        for output in cell.get("outputs", []):
            ours = output.get("metadata", {}).get("kvlab", {})
            figure = cell.metadata.get("mystnb", {}).get("figure", {})
            if (ours.get("figure") or ours.get("table")) and not (
                figure.get("caption") and figure.get("name")
            ):
                first = cell.source.strip().splitlines()[-1]
                raise BadInput(
                    f"book/{page.path.name}: the cell ending {first!r} shows a figure without caption or name"
                )
    for name, value in values.items():
        for kind, text in value["sources"]:
            if kind == "parameter" and text.split()[1] not in page.parameters:
                raise BadInput(
                    f"book/{page.path.name}: {name} rests on {text}, which no parameters cell defines"
                )


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = {k: os.environ.get(k) for k in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for k, v in before.items():
            if v is None:
                os.environ.pop(k, None)
            else:
                os.environ[k] = v


def run_all(
    chapters: Sequence[Page], folder: Path, parameters: Mapping[str, Mapping[str, Any]], root: Path
) -> Iterator[Executed]:
    """Execute pages one by one (timings must not compete) into a folder that appears when all are done."""
    with turn(root):
        executed_root(root).mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".new-", dir=executed_root(root)))
        try:
            for page in chapters:
                yield execute(page, work, parameters[page.name], root)
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(work, folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
