"""SGLang's one-batch benchmark in this process, patched first: what `trace record --one-batch` starts.

    python -m kvlab.trace.onebatch MODULE STATUS SEED FRAMES ARGUMENTS...

The benchmark loads no plugins, so KVLAB_PATCH is obeyed here. STATUS is a file for what the patch says of
itself when the benchmark has run; SEED an integer for `--load-format dummy`, or `-` for SGLang's own values;
FRAMES `stack`, or `no-stack` for a profiler that does not follow Python.

Imports take longer than the benchmark: they may overlap another process's run, what follows may not.
$KVLAB_BENCH_TURN names a file; whoever started this process makes it when the GPU is free.
"""

import contextlib
import importlib
import json
import os
import runpy
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def main(argv: Sequence[str]) -> None:
    """Run MODULE's command line with ARGUMENTS; its exit code stands."""
    module, status, seed, frames, *arguments = argv
    from kvlab import dummy, patch

    weights = contextlib.nullcontext() if seed == "-" else dummy.seeded_dummy_weights(int(seed))
    patch.apply()
    if frames == "no-stack":
        _record_no_frames()
    _wait_for_turn(module)
    sys.argv = [module, *arguments]
    try:
        with weights:
            # As `-m` runs it: spawned ranks find the same main module and run nothing twice.
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        Path(status).write_text(json.dumps(patch.status()), encoding="utf-8")


def _record_no_frames() -> None:
    """The benchmark always asks for Python frames, which slow an eager step's host several times."""
    import torch.profiler

    profile = torch.profiler.profile

    def without(*args: Any, **keywords: Any) -> torch.profiler.profile:
        return profile(*args, **{**keywords, "with_stack": False})

    torch.profiler.profile = without


def _wait_for_turn(module: str) -> None:
    marker = os.environ.get("KVLAB_BENCH_TURN")
    if not marker:
        return
    importlib.import_module(module)
    del sys.modules[module]  # runpy runs it again, as __main__
    while not os.path.exists(marker):
        time.sleep(0.05)


if __name__ == "__main__":
    main(sys.argv[1:])
