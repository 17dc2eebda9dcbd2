"""apply / remove / status / applied: the patch of this process and of the schedulers it spawns.

What serves is imported by `apply`: whoever only asks, or turns the patch off, does not wait for it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvlab.errors import BadInput
from kvlab.patch import policy, sites, spawn
from kvlab.patch.replacements import Replacements
from kvlab.patch.sites import LEFT_ALONE, Site

if TYPE_CHECKING:
    from kvlab.patch.runtime import Runtime

log = logging.getLogger("kvlab.patch")

PATCHED = "patched"
WAITING = "waiting"
REMOVED = "removed"
OFF = "off"


@dataclass
class _Patch:
    """What is in place in this process."""

    runtime: Runtime
    installed: sites.Installed
    done: Replacements
    in_place: set[str] = field(default_factory=set)
    is_applied: bool = True
    on_end: Callable[[], None] = lambda: None


_lock = threading.RLock()
_patch: _Patch | None = None
# Of strategies that others replaced: graphs captured meanwhile still read and write what these hold.
_captured: list[Runtime] = []
_said_misspelt: set[str] = set()
# What `apply("off")` put in place: spawned schedulers are told.
_said_off: Replacements | None = None


def apply(strategy: str | None = None) -> dict[str, Any]:
    """Patch SGLang in this process, and in every scheduler that it spawns from now on. Idempotent.

    `strategy`: `exact` (bit-identical only; the default), `fast`, one strategy by name, or `off`; None takes
    $KVLAB_PATCH. An argument also outweighs what the variable tells the plugin, here and in the schedulers.
    Backends that SGLang has not imported yet are patched when it does. Returns `status()`.

    Raises BadInput for a strategy that does not exist. Unrecognised code is left alone, with a reason in the
    status; with KVLAB_PATCH_STRICT=1 that raises SystemExit, the one exception that SGLang does not swallow.
    """
    global _patch, _said_off
    asked = policy.parse(strategy if strategy is not None else os.environ.get("KVLAB_PATCH"))
    is_strict = policy.is_set("KVLAB_PATCH_STRICT", os.environ.get("KVLAB_PATCH_STRICT"))
    for wrong in policy.misspelt(os.environ):
        if wrong not in _said_misspelt:
            _said_misspelt.add(wrong)
            log.warning("kvlab: %s", wrong)
    if asked == "off":
        with _lock:
            remove()
            if strategy is not None:
                _said_off = Replacements()
                spawn.install(asked, _said_off)
            return status()
    from kvlab.patch import hooks
    from kvlab.patch.runfiles import RunFile
    from kvlab.patch.runtime import Runtime

    with _lock:
        _forget_off()
        if _patch is not None and _patch.is_applied:
            if _patch.runtime.asked == asked:
                return status()
            remove()
        found = sites.installed()
        _refuse_unserved(found, is_strict)
        before = _patch.runtime if _patch is not None else None
        runtime = Runtime(asked, is_strict=is_strict, version=found.version, before=before)
        patch = _Patch(runtime, found, Replacements())
        file = RunFile(lambda: _status(patch), runtime)
        runtime.on_change, patch.on_end = file.changed, file.end
        try:
            hooks.install(runtime, found.recognised, patch.done, lambda site: patch.in_place.add(site.name))
            spawn.install(asked, patch.done)
        except BaseException:
            # Half a patch is none.
            patch.done.undo()
            raise
        if before is not None and before.has_captured:
            _captured.append(before)
        _patch = patch
        return status()


def remove() -> dict[str, Any]:
    """Put back the very functions that were there before. Idempotent.

    Graphs captured meanwhile go on using the scratch, so it stays; `status()` says so. An Engine that is
    built later loads the plugin and is patched: `apply("off")` prevents that.
    """
    with _lock:
        _forget_off()
        if _patch is not None and _patch.is_applied:
            _patch.runtime.is_active = False
            _patch.done.undo()
            _patch.in_place.clear()
            _patch.is_applied = False
            if _patch.runtime.server:
                stay = "; captured graphs stay patched" if _patch.runtime.has_captured else ""
                log.info("kvlab: removed from this scheduler%s", stay)
            _patch.on_end()
        return status()


@contextmanager
def applied(strategy: str | None = None) -> Iterator[dict[str, Any]]:
    """Patched inside; what was before outside, also after an exception."""
    was_decided = is_decided()
    before = _patch.runtime.asked if _patch is not None and _patch.is_applied else "off"
    # Put back the very same runtime, counters and scratch where the strategy does not change.
    try:
        yield apply(strategy)
    finally:
        if was_decided:
            apply(before)
        else:
            remove()


def is_decided() -> bool:
    """Has somebody applied a strategy in this process, or `off`? Then the plugin leaves it at that."""
    return _said_off is not None or (_patch is not None and _patch.is_applied)


def _forget_off() -> None:
    global _said_off
    if _said_off is not None:
        _said_off.undo()
        _said_off = None


def status() -> dict[str, Any]:
    """`sglang, sites, strategy, counters{calls, fallbacks, bytes_avoided}`, what was chosen and why."""
    return _status(_patch)


def _status(patch: _Patch | None) -> dict[str, Any]:
    if patch is None:
        found = sites.installed()
        return {
            "sglang": found.version,
            "sites": [_entry(s, None) for s in found.sites],
            "strategy": OFF,
            "counters": {"calls": {}, "fallbacks": {}, "bytes_avoided": 0, "kv_writes": {}},
            "chosen": {},
            "scratch_bytes": 0,
            "note": "",
        }
    runtime = patch.runtime
    return {
        "sglang": patch.installed.version,
        "sites": [_entry(s, patch) for s in patch.installed.sites],
        "strategy": runtime.asked if patch.is_applied else OFF,
        "counters": runtime.counters.as_dict(),
        "chosen": {
            site: {"strategy": c.strategy, "reason": c.reason} for site, c in sorted(runtime.chosen.items())
        },
        "scratch_bytes": runtime.scratch.nbytes(),
        "note": _note(patch),
    }


def _note(patch: _Patch) -> str:
    """What else serves in this process: graphs stay as they were captured."""
    if not patch.is_applied and patch.runtime.has_captured:
        return "captured graphs stay patched"
    if patch.is_applied and _captured:
        return f"graphs captured before stay with {', '.join(dict.fromkeys(r.asked for r in _captured))}"
    return ""


def _entry(site: Site, patch: _Patch | None) -> dict[str, Any]:
    if site.state == LEFT_ALONE:
        state, reason = LEFT_ALONE, site.reason
    elif patch is None:
        state, reason = site.state, "not applied"
    elif not patch.is_applied:
        state, reason = REMOVED, ""
    elif site.name in patch.in_place:
        lost = patch.runtime.displaced(site.name)
        state, reason = (PATCHED, "") if lost is None else (LEFT_ALONE, lost)
    elif site.name in patch.runtime.unpatched:
        state, reason = LEFT_ALONE, patch.runtime.unpatched[site.name]
    else:
        state, reason = WAITING, "SGLang has not imported this backend yet"
    return {"site": site.name, "state": state, "reason": reason, "line": site.line}


def _refuse_unserved(found: sites.Installed, is_strict: bool) -> None:
    """Strict: no server rather than an unpatched one."""
    if not is_strict:
        return
    if found.root is None:
        raise SystemExit("kvlab: KVLAB_PATCH_STRICT: no SGLang is installed here")
    left = [s for s in found.sites if s.state == LEFT_ALONE]
    if left:
        why = "; ".join(f"{s.name}: {s.reason}" for s in left)
        raise SystemExit(
            f"kvlab: KVLAB_PATCH_STRICT: SGLang {found.version} is not served unpatched ({why}); "
            "unset it, or set KVLAB_PATCH=off"
        )


def _after_fork() -> None:
    """A forked child keeps the patch and counts for itself. Nobody is left in it who could free the lock."""
    global _lock
    _lock = threading.RLock()
    if _patch is not None:
        _patch.runtime.counters.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

__all__ = ["BadInput", "applied", "apply", "remove", "status"]
