"""Where the release asked about is installed, its own source decides instead of the committed rules."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from kvlab.backends import rules, sources
from kvlab.backends.rules import Rules


@cache
def load(package: str, release: str) -> Rules:
    """Rules of a release: read from the installed package where it is that release, else the committed ones.

    A patched or forked installation so answers for itself. Raises BadInput like `rules.load`.
    """
    committed = rules.load(package, release)
    tree = sources.installed(package)
    if tree is None or tree.release != release:
        return committed
    from kvlab.backends import extract

    try:
        facts = msgspec.json.decode(msgspec.json.encode(extract.facts(tree)))
    except Exception as e:
        # Any way in which a changed source can differ: the committed rules still hold for the release.
        return msgspec.structs.replace(
            committed, origin=f"committed; the installed source reads otherwise: {e}"
        )
    return Rules(package, release, _completed(facts, committed.facts), origin="installed")


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
