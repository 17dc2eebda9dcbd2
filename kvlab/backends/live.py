"""Where the release asked about is installed, its own source decides instead of the committed rules."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from kvlab.backends import rules, sources
from kvlab.backends.rules import Rules
from kvlab.errors import BadInput


def here(package: str) -> str | None:
    """The installed release of a package."""
    tree = sources.installed(package)
    return tree.release if tree else None


@cache
def load(package: str, release: str) -> Rules:
    """Rules of a release: read from the installed package where it is that release, else the committed ones.

    A patched or forked installation so answers for itself, and so does a release without committed rules,
    where its source has all that theirs were read from. Raises BadInput where not, and like `rules.load`.
    """
    tree = sources.installed(package)
    if tree is None or tree.release != release:
        return rules.load(package, release)
    if not rules.is_known(package, release):
        return _unheard_of(tree)
    committed = rules.load(package, release)
    try:
        facts = _extracted(tree)
    except Exception as e:
        # Any way in which a changed source can differ: the committed rules still hold for the release.
        return msgspec.structs.replace(
            committed, origin=f"committed; the installed source reads otherwise: {e}"
        )
    return Rules(package, release, _completed(facts, committed.facts), origin="installed")


def _unheard_of(tree: sources.Tree) -> Rules:
    """An installed release without committed rules: its source alone, if it still has all that is read."""
    try:
        rules.load(tree.package, tree.release)
    except BadInput as e:
        unknown = e
    known = rules.releases(tree.package)
    like = [r for r in known if rules.version_key(r) < rules.version_key(tree.release)] or known
    try:
        facts = _extracted(tree)
    except Exception as e:
        raise BadInput(f"{unknown}; it is installed, and its source cannot be read as theirs: {e}") from e
    # What is not found may have moved: that it is gone would be a guess.
    if gone := [k for k, v in rules.load(tree.package, like[-1]).facts.items() if v and not facts.get(k)]:
        raise BadInput(f"{unknown}; it is installed, and its source lacks what was read as {', '.join(gone)}")
    return Rules(tree.package, tree.release, facts, origin="installed; no committed rules")


def _extracted(tree: sources.Tree) -> dict[str, Any]:
    from kvlab.backends import extract

    return msgspec.json.decode(msgspec.json.encode(extract.facts(tree)))


def _completed(facts: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """With what the release's compiled extensions say, where this installation lacks one of them.

    Such facts have no line. What a source says, or says no more, stands as it is installed.
    """
    whole = dict(facts)
    for name, value in known.items():
        if not isinstance(value, dict):
            continue
        if whole.get(name) is None and "quote" in value and value.get("line", 0) is None:
            whole[name] = value
        elif isinstance(whole.get(name), dict):
            whole[name] = _completed(whole[name], value)
    return whole
