"""The committed rules: what each release's source says, as data that `extract` wrote."""

from __future__ import annotations

import difflib
import re
from functools import cache
from importlib import resources
from typing import Any

import msgspec

from kvlab.errors import BadInput

_PACKAGES = ("sglang", "flashinfer-python", "sgl-kernel", "sglang-kernel", "sgl-flash-mla", "triton")


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """Where something was read: a check in a file of a release, a compiled extension's message, or an
    exception.

    `kind`: `check` (refuses), `code` (does), `message` (string constant of a compiled extension, no line),
    `run` (what the release's own function answered), `raised` (the exception, raised here), `measured`.
    """

    kind: str
    package: str
    release: str
    quote: str
    file: str | None = None
    line: int | None = None

    def __str__(self) -> str:
        where = f" {self.file}" + (f":{self.line}" if self.line else "") if self.file else ""
        return f"{self.package} {self.release}{where}: {self.quote}"


class Rules(msgspec.Struct, frozen=True, eq=False):
    """The rules of one release of one package.

    `origin`: `committed` for the package's own data files, `installed` where the installed release was read.
    """

    package: str
    release: str
    facts: dict[str, Any]
    origin: str = "committed"

    def __getitem__(self, key: str) -> Any:
        return self.facts[key]

    def evidence(self, fact: dict[str, Any], kind: str = "check", says: str | None = None) -> Evidence:
        """The fact's own line as evidence; `says` replaces the quote by the message that the check raises."""
        return Evidence(
            kind="message" if fact.get("line") is None else kind,
            package=self.package,
            release=self.release,
            file=fact["file"],
            line=fact.get("line"),
            quote=says or fact["quote"],
        )


@cache
def _files() -> dict[str, dict[str, Any]]:
    folder = resources.files("kvlab.backends").joinpath("rules")
    return {f.name.removesuffix(".json"): f for f in folder.iterdir() if f.name.endswith(".json")}


def version_key(release: str) -> tuple[int, ...]:
    """Sortable: 0.5.15.post1 after 0.5.15, before 0.5.16."""
    numbers = [int(n) for n in re.findall(r"\d+", release)]
    base, post = (numbers[:-1], numbers[-1]) if ".post" in release else (numbers, 0)
    return (*base, *[0] * (3 - len(base)), post)


def releases(package: str = "sglang") -> list[str]:
    """Releases with rules, oldest first."""
    found = (re.fullmatch(rf"{re.escape(package)}-(\d.*)", name) for name in _files())
    return sorted((m[1] for m in found if m), key=version_key)


def is_known(package: str, release: str) -> bool:
    """Are there committed rules of this release?"""
    return f"{package}-{release}" in _files()


@cache
def load(package: str, release: str) -> Rules:
    """The rules of a release. Raises BadInput: an unknown release gets the nearest known, one newer than
    the newest
    rules is said to be so.
    """
    path = _files().get(f"{package}-{release}")
    if path is None:
        raise BadInput(_unknown(package, release))
    return Rules(package, release, msgspec.json.decode(path.read_bytes()))


def nearest(package: str, release: str) -> list[str]:
    """Known releases most like one that is not known."""
    known = releases(package)
    if re.fullmatch(r"\d+(\.\d+)*(\.post\d+)?", release):
        wanted = version_key(release)
        known = sorted(
            known, key=lambda r: [abs(a - b) for a, b in zip(version_key(r), wanted, strict=False)]
        )
        return sorted(known[:3], key=version_key)
    return difflib.get_close_matches(release, known, n=3, cutoff=0.3) or known[-3:]


def _unknown(package: str, release: str) -> str:
    option = {"sglang": "--sglang", "flashinfer-python": "--flashinfer"}.get(package, package)
    known = releases(package)
    if re.fullmatch(r"\d+(\.\d+)*(\.post\d+)?", release) and version_key(release) > version_key(known[-1]):
        return (
            f"{option} {release}: newer than the newest rules, which are {known[-1]}'s; nothing is "
            "known about it yet "
            f"(kvlab.backends.extract reads a release's source)"
        )
    return (
        f"{option} {release}: no rules for that {package} release; the nearest are "
        f"{', '.join(nearest(package, release))}"
        f" (known: {known[0]} to {known[-1]})"
    )
