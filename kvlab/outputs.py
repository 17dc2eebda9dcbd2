"""Can the file or folder that a command is to write be written? Asked before the work, in one wording."""

import contextlib
import os
import tempfile
from pathlib import Path

from kvlab.errors import BadInput


def check(option: str, path: Path | None) -> None:
    """Raises BadInput where the file `path`, which `option` names, could not be written; None is no file."""
    if path is None or _is_stream(path):
        return
    if path.is_dir():
        raise _unwritable(option, path, "it is a folder")
    try:
        handle, made = _beside(path)
    except OSError as e:
        raise _unwritable(option, path, e.strerror or str(e)) from None
    os.close(handle)
    os.unlink(made)


def write(option: str, path: Path, content: str | bytes) -> None:
    """Write the file whole or not at all; text as UTF-8. Raises BadInput as `check` does."""
    data = content.encode() if isinstance(content, str) else content
    made = None
    try:
        if _is_stream(path):
            path.write_bytes(data)
            return
        handle, made = _beside(path)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(made, 0o666 & ~umask)
        # Behind a link: what it leads to.
        os.replace(made, os.path.realpath(path))
    except OSError as e:
        if made is not None:
            with contextlib.suppress(OSError):
                os.unlink(made)
        raise _unwritable(option, path, e.strerror or str(e)) from None


def _is_stream(path: Path) -> bool:
    """A device or a pipe, such as /dev/stdout: nothing may be put in its place."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _beside(path: Path) -> tuple[int, str]:
    """A new file in the folder of `path`, open, and its name."""
    real = Path(os.path.realpath(path))
    return tempfile.mkstemp(dir=real.parent, prefix=f".{real.name}.", suffix=".part")


def _unwritable(option: str, path: Path, why: str) -> BadInput:
    return BadInput(
        f"{option}: {path} cannot be written: {why}; give a file in a folder that exists and can be written"
    )
