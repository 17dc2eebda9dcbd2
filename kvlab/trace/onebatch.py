"""SGLang's one-batch benchmark in this process, patched first: what `trace record --one-batch` starts.

    python -m kvlab.trace.onebatch MODULE STATUS SEED ARGUMENTS...

The benchmark loads no plugins, so KVLAB_PATCH is obeyed here. STATUS is a file for what the patch says of
itself when the benchmark has run; SEED an integer for `--load-format dummy`, or `-` for SGLang's own values.
"""

import contextlib
import json
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str]) -> None:
    """Run MODULE's command line with ARGUMENTS; its exit code stands."""
    module, status, seed, *arguments = argv
    from kvlab import dummy, patch

    weights = contextlib.nullcontext() if seed == "-" else dummy.seeded_dummy_weights(int(seed))
    patch.apply()
    sys.argv = [module, *arguments]
    try:
        with weights:
            # As `-m` runs it: spawned ranks find the same main module and run nothing twice.
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        Path(status).write_text(json.dumps(patch.status()), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
