"""What is the most memory that the GPUs had in use meanwhile? Asked of the driver, beside the work."""

import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def gpu_peak(every: float = 0.5) -> Iterator[Callable[[], int | None]]:
    """Watch the memory in use on the visible GPUs together; the call gives the most seen, in bytes."""
    seen: list[int] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            used = _used()
            if used is None:
                return
            seen.append(used)
            stop.wait(every)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield lambda: max(seen, default=None)
    finally:
        stop.set()
        thread.join()


def _used() -> int | None:
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command += ["-i", visible]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return sum(int(line) for line in done.stdout.split()) << 20
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
