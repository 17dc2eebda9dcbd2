"""What SGLang 0.5.11 and newer call in the launcher and first thing in each scheduler process.

Entry point: group `sglang.srt.plugins`, name `kvlab`. KVLAB_PATCH chooses (`off` leaves SGLang alone);
KVLAB_PATCH_STRICT=1 refuses to serve unpatched. SGLANG_PLUGINS, which SGLang reads, can leave kvlab out.
"""

import logging
import os

from kvlab.errors import BadInput
from kvlab.patch import api, policy


def register() -> None:
    """Apply the patch. SGLang logs other exceptions and goes on unpatched; SystemExit stops it.

    Where this process or the one that spawned it has called `kvlab.patch.apply`, that stands.
    """
    try:
        done = api.status() if api.is_decided() else api.apply()
    except BadInput as e:
        # A mistyped strategy would otherwise serve unpatched with one line among many.
        raise SystemExit(f"kvlab: {e}") from None
    except Exception as e:
        if policy.is_set("KVLAB_PATCH_STRICT", os.environ.get("KVLAB_PATCH_STRICT")):
            from kvlab.patch.saying import one_line

            raise SystemExit(f"kvlab: KVLAB_PATCH_STRICT: the patch failed to go in: {one_line(e)}") from e
        raise
    left = [s for s in done["sites"] if s["state"] == "left alone"]
    for site in left if done["strategy"] != "off" else []:
        logging.getLogger("kvlab.patch").warning(
            "kvlab: SGLang %s: %s left alone: %s", done["sglang"], site["site"], site["reason"]
        )
