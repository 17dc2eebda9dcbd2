"""Do the figures in README.md still say what the pages computed?

GitHub renders no roles, so a figure stands between two comments that name its value:
`<!--n memory.pool_bytes:.2f GB-->22.26 GB<!--/n-->`. `kvlab book readme` rewrites them, the build compares.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from kvlab.book import exports, run
from kvlab.errors import BadInput

MARK = re.compile(r"<!--n ([^>]+?)-->(.*?)<!--/n-->", re.S)


def render(text: str, executed: Mapping[str, run.Executed]) -> str:
    """README's text with every marked figure as its value now reads; BadInput for a name no page exports."""
    return MARK.sub(lambda m: f"<!--n {m[1]}-->{shown(m[1], executed)}<!--/n-->", text)


def shown(target: str, executed: Mapping[str, run.Executed]) -> str:
    """A marker's `page.name:format` as text."""
    name, _, spec = target.partition(":")
    page, _, key = name.strip().rpartition(".")
    if page not in executed or key not in executed[page].values:
        raise BadInput(f"README.md: {name.strip()}: no page exports this; write page.name")
    return format(exports.from_dict(key, executed[page].values[key]), spec)


def check(root: Path, executed: Mapping[str, run.Executed]) -> list[str]:
    """A line for every marked figure that no longer says what its value says."""
    text = (root / "README.md").read_text("utf-8")
    problems = []
    for m in MARK.finditer(text):
        want = shown(m[1], executed)
        if m[2] != want:
            line = text.count("\n", 0, m.start()) + 1
            problems.append(
                f"README.md:{line}: says {m[2]!r}, but {m[1]} is {want!r}; "
                "python -m kvlab book readme rewrites it"
            )
    return problems


def rewrite(root: Path, executed: Mapping[str, run.Executed]) -> bool:
    """Bring README.md up to date; says whether it changed."""
    path = root / "README.md"
    before = path.read_text("utf-8")
    after = render(before, executed)
    if after != before:
        path.write_text(after, "utf-8")
    return after != before
