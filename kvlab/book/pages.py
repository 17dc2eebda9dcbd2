"""Which pages has the book, and what is in their sources?"""

import ast
import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kvlab.errors import BadInput


@dataclass(frozen=True)
class Cell:
    """A code cell of a page, the line that opens its fence and the line before its code."""

    source: str
    metadata: dict[str, Any]
    line: int
    before_code: int

    @property
    def tags(self) -> list[str]:
        return list(self.metadata.get("tags", []))


@dataclass(frozen=True)
class Page:
    """A MyST source that the table of contents lists."""

    path: Path
    docname: str

    @property
    def name(self) -> str:
        return self.path.stem

    @cached_property
    def text(self) -> str:
        return self.path.read_text("utf-8")

    @property
    def source_sha256(self) -> str:
        return digest(self.text)

    @cached_property
    def cells(self) -> list[Cell]:
        found = []
        lines = self.text.splitlines()
        for cell, line in zip(*_notebook(self.text, self.path), strict=True):
            if cell.cell_type != "code":
                continue
            code = cell.source.splitlines()
            before = next((n for n in range(line, len(lines)) if lines[n : n + len(code)] == code), line)
            found.append(Cell(cell.source, dict(cell.metadata), line, before))
        return found

    @cached_property
    def parameters(self) -> dict[str, Any]:
        """Name and default of what the `parameters` cell defines; they must be literals."""
        found: dict[str, Any] = {}
        for cell in self.cells:
            if "parameters" not in cell.tags:
                continue
            for statement in ast.parse(cell.source).body:
                target = statement.target if isinstance(statement, ast.AnnAssign) else None
                if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                    target = statement.targets[0]
                if not isinstance(target, ast.Name):
                    raise BadInput(f"{self.path.name}: the parameters cell may only assign names to literals")
                try:
                    found[target.id] = ast.literal_eval(statement.value)
                except ValueError:
                    raise BadInput(f"{self.path.name}: parameter {target.id} must be a literal") from None
        return found


def digest(text: str) -> str:
    """What identifies a page's text, however its lines end."""
    return hashlib.sha256("\n".join(text.removeprefix("\ufeff").splitlines()).encode()).hexdigest()


def _notebook(text: str, path: Path) -> tuple[list[Any], list[int]]:
    from myst_nb.core.read import MystMetadataParsingError, read_myst_markdown_notebook

    try:
        nb = read_myst_markdown_notebook(text, add_source_map=True, path=path)
    except MystMetadataParsingError as e:
        raise BadInput(f"{path.name}: {e}") from None
    return nb.cells, nb.metadata["source_map"]


def checkout() -> Path:
    """The checkout of the book: the working directory or a parent with _config.yml and book/_toc.yml."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / "_config.yml").is_file() and (folder / "book" / "_toc.yml").is_file():
            return folder
    raise BadInput(
        f"{here}: no _config.yml with book/_toc.yml here or above; run this in a checkout of kvlab"
    )


def pages(root: Path) -> list[Page]:
    """The pages of book/_toc.yml, in reading order. Raises BadInput naming a file that is missing."""
    import yaml

    toc = root / "book" / "_toc.yml"
    try:
        tree = yaml.safe_load(toc.read_text("utf-8"))
    except yaml.YAMLError as e:
        raise BadInput(f"book/_toc.yml: not YAML ({' '.join(str(e).split())})") from None
    found = []
    for name in _files(tree):
        path = root / f"{name}.md"
        if not path.is_file():
            raise BadInput(f"book/_toc.yml lists {name}, but there is no {name}.md")
        found.append(Page(path, name))
    return found


def _files(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [str(node[k]).removesuffix(".md") for k in ("root", "file") if k in node]
        return own + [
            f for k in ("parts", "chapters", "sections", "subtrees", "entries") for f in _files(node.get(k))
        ]
    return [f for x in node or [] for f in _files(x)]
