"""Is somebody else at it? A lock between processes that ends with its holder, however that ends."""

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path


@contextlib.contextmanager
def held(path: Path, waiting: Callable[[str], None] = lambda holder: None) -> Iterator[None]:
    """Hold the lock of file `path` (made where it is missing, and left there), once nobody else does.

    Where it must wait, `waiting` is told who has it, once: its process number, or "another process".
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            pid = file.read().strip()
            waiting(f"process {pid}" if pid else "another process")
            fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield
        # A pid that no longer builds anything must not be named to the next one.
        file.truncate(0)
