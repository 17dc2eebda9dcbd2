"""Where the recorded and reported data are: the checkout's data/, or the copy inside an installed wheel."""

import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def root() -> Path:
    """The data folder: $KVLAB_DATA, else the checkout's `data/`, else `kvlab/_data` in an installed wheel."""
    if chosen := os.environ.get("KVLAB_DATA"):
        return Path(chosen)
    checkout = _PACKAGE.parent / "data"
    return checkout if (checkout / "reported").is_dir() else _PACKAGE / "_data"


def recorded(run: str = "") -> Path:
    """The folder of one recorded run, or of all."""
    return root() / "recorded" / run


def reported(name: str = "") -> Path:
    """A file of what the source text and public reports say."""
    return root() / "reported" / name
