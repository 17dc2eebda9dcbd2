"""Can the file or folder that a command is to write be written? Asked before the work, in one wording."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvlab.errors import BadInput


def check(option: str, path: Path | None) -> None:
    """Raises BadInput where the file `path`, which `option` names, could not be written; None is no file."""
    if path is None:
        return
    try:
        if _is_stream(path):
            return
        if path.is_dir():
            raise _unwritable(option, path, "it is a folder")
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
        os.chmod(made, 0o666 & ~_umask())
        # Behind a link: what it leads to.
        os.replace(made, os.path.realpath(path))
    except OSError as e:
        if made is not None:
            with contextlib.suppress(OSError):
                os.unlink(made)
        raise _unwritable(option, path, e.strerror or str(e)) from None


def write_json(option: str, path: Path, run: Any) -> None:
    """Write what msgspec can encode as JSON to be read by people too, as `write` does."""
    import msgspec

    write(option, path, msgspec.json.format(msgspec.json.encode(run), indent=1) + b"\n")


@contextlib.contextmanager
def new_folder(option: str, path: Path) -> Iterator[Path]:
    """A folder that becomes `path`, which is new or an empty folder, if all goes well, and is gone if not.

    Raises BadInput where it could not be made, before the work.
    """
    made = None
    try:
        try:
            if path.is_dir() and any(path.iterdir()):
                raise _unwritable(option, path, "it exists and is not an empty folder", "a new folder")
            if path.exists() and not path.is_dir():
                raise _unwritable(option, path, "it exists and is no folder", "a new folder")
            path.parent.mkdir(parents=True, exist_ok=True)
            made = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
        except FileExistsError:
            raise _unwritable(option, path, f"{path.parent} is no folder", "a new folder") from None
        except OSError as e:
            raise _unwritable(option, path, e.strerror or str(e), "a new folder") from None
        yield made
        try:
            os.chmod(made, 0o777 & ~_umask())
            os.replace(made, path)
        except OSError as e:
            raise _unwritable(option, path, e.strerror or str(e), "a new folder") from None
    finally:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)


def _is_stream(path: Path) -> bool:
    """A device or a pipe, such as /dev/stdout: nothing may be put in its place."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _beside(path: Path) -> tuple[int, str]:
    """A new file in the folder of `path`, open, and its name."""
    real = Path(os.path.realpath(path))
    return tempfile.mkstemp(dir=real.parent, prefix=f".{real.name}.", suffix=".part")


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


def _unwritable(
    option: str, path: Path, why: str, right: str = "a file in a folder that exists and can be written"
) -> BadInput:
    return BadInput(f"{option}: {path} cannot be written: {why}; give {right}")
