"""How do spawned SGLang servers get seeded weights under `--load-format dummy`? By a plugin for the occasion.

SGLang's dummy weights are so small that the FP8 rows come out all zero: no expert is like another and any two
servers answer alike. The plugin is a folder to put on PYTHONPATH, with the one entry point of an installed
distribution; SGLang calls it in every process, and `kvlab.dummy` seeds the weights there.
"""

import sys
from pathlib import Path
from typing import Any

_LOADER = "sglang.srt.model_loader.loader"


def plugin(folder: Path) -> Path:
    """Make `folder` such a distribution; returns it."""
    info = folder / "kvlab_seeded-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvlab-seeded\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nkvlab_seeded = kvlab.bench.seeded:install\n", encoding="utf-8"
    )
    return folder


def install() -> None:
    """What SGLang calls: seed this process's dummy weights, for its life."""
    from kvlab.patch.hooks import AfterImport

    if _LOADER in sys.modules:
        _seed()
    else:
        sys.meta_path.insert(0, AfterImport({_LOADER: _seed}))


def _seed(_: Any = None) -> None:
    from kvlab import dummy

    dummy.seeded_dummy_weights().__enter__()
