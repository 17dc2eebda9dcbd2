"""SGLang's launcher in this process, with the patch applied before and in every scheduler it spawns."""

import runpy
import sys
from collections.abc import Sequence

from kvlab.errors import BadInput
from kvlab.patch import sites


def launch(arguments: Sequence[str]) -> None:
    """Run `python -m sglang.launch_server ARGUMENTS`, patched. Returns when the server ends."""
    if sites.installed().root is None:
        raise BadInput("sglang: not installed in this environment; install a release from 0.5.8 on")
    from kvlab.patch import apply

    apply()
    sys.argv = ["sglang.launch_server", *arguments]
    # As `-m` runs it: spawned children find the same main module and run nothing twice.
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
