"""What SGLang 0.5.11 and newer call in the launcher and first thing in each scheduler process.

Entry point: group `sglang.srt.plugins`, name `kvlab`. KVLAB_PATCH chooses (`off` leaves SGLang alone);
KVLAB_PATCH_STRICT=1 refuses to serve unpatched. SGLANG_PLUGINS, which SGLang reads, can leave kvlab out.
"""

import logging

from kvlab.errors import BadInput
from kvlab.patch import api


def register() -> None:
    """Apply the patch. SGLang logs other exceptions and goes on unpatched; SystemExit stops it."""
    try:
        done = api.apply()
    except BadInput as e:
        # A mistyped strategy would otherwise serve unpatched with one line among many.
        raise SystemExit(f"kvlab: {e}") from None
    left = [s for s in done["sites"] if s["state"] == "left alone"]
    for site in left if done["strategy"] != "off" else []:
        logging.getLogger("kvlab.patch").warning(
            "kvlab: SGLang %s: %s left alone: %s", done["sglang"], site["site"], site["reason"]
        )
