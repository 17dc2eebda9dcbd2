"""Bytes of a trace file, plain or gzip, a chunk at a time."""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

from kvlab.errors import BadInput

# Small enough that a batch of events stays in memory the allocator reuses: 2 MiB takes half as long again.
CHUNK = 128 << 10


def chunks(path: str | Path, size: int = CHUNK) -> Iterator[bytes]:
    """Yield the (decompressed) content in pieces of `size` bytes. Told by its first bytes, not by its name.

    Raises BadInput for a file that cannot be opened, is empty, or whose gzip stream is damaged or cut off.
    """
    path = Path(path)
    try:
        with path.open("rb") as raw:
            magic = raw.read(2)
            raw.seek(0)
            if not magic:
                raise BadInput(f"{path}: empty file; a trace is a JSON object with a traceEvents array")
            yield from _pieces(gzip.GzipFile(fileobj=raw) if magic == b"\x1f\x8b" else raw, size)
    except EOFError:
        raise BadInput(
            f"{path}: truncated gzip: the stream ends before its end marker; copy the file again, "
            f"or save what is there with zcat and report on that"
        ) from None
    except (gzip.BadGzipFile, zlib.error) as e:
        raise BadInput(f"{path}: damaged gzip ({e}); copy the file again") from None
    except OSError as e:
        raise BadInput(
            f"{path}: {e.strerror or e}; give a torch-profiler trace (.json or .json.gz)"
        ) from None


def _pieces(file: object, size: int) -> Iterator[bytes]:
    while piece := file.read(size):  # type: ignore[attr-defined]
        yield piece
