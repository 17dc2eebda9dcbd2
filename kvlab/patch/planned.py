"""What will a server do that is started here? Told before a restart, by variables and installed packages."""

import os
from importlib.metadata import entry_points
from typing import Any

from kvlab.patch import policy
from kvlab.patch.sites import LEFT_ALONE, Installed

_GROUP, _NAME = "sglang.srt.plugins", "kvlab"


def planned(installed: Installed) -> dict[str, Any]:
    """`{strategy, by, reason, misspelt}`: `by` is "plugin" where SGLang loads the patch by itself, "kvlab
    serve" where only that launcher brings it in, None where the server stays unpatched (`strategy` "off") or,
    strict, does not start. `misspelt`: variables that are nearly ours, a clause each.

    Raises BadInput for variables that no server would be started with.
    """
    return _planned(installed) | {"misspelt": policy.misspelt(os.environ)}


def _planned(installed: Installed) -> dict[str, Any]:
    asked = policy.parse(os.environ.get("KVLAB_PATCH"))
    is_strict = policy.is_set("KVLAB_PATCH_STRICT", os.environ.get("KVLAB_PATCH_STRICT"))
    if asked == "off":
        return _unpatched("KVLAB_PATCH=off")
    if installed.root is None:
        return _unpatched("no SGLang is installed here")
    left = [site for site in installed.sites if site.state == LEFT_ALONE]
    if is_strict and left:
        return {
            "strategy": asked,
            "by": None,
            "reason": f"KVLAB_PATCH_STRICT, and {left[0].name} is left alone",
        }
    if not installed.recognised:
        return _unpatched("no site of this SGLang is recognised")
    by_hand = {"strategy": asked, "by": "kvlab serve"}
    if not (installed.root / "srt" / "plugins").is_dir():
        return by_hand | {"reason": "this release loads no plugins"}
    # As SGLang reads it: empty means all.
    listed = os.environ.get("SGLANG_PLUGINS", "")
    if listed and _NAME not in [name.strip() for name in listed.split(",")]:
        return by_hand | {"reason": f"SGLANG_PLUGINS={listed} leaves {_NAME} out"}
    if not entry_points(group=_GROUP, name=_NAME):
        return by_hand | {"reason": "kvlab is on the path, not installed: SGLang finds no plugin"}
    return {"strategy": asked, "by": "plugin", "reason": ""}


def _unpatched(reason: str) -> dict[str, Any]:
    return {"strategy": "off", "by": None, "reason": reason}
