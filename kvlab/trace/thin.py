"""What of a trace file is kept? Nothing that names its host; asked so, only what explains its kernels."""

import gzip
import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_PACKAGES = re.compile(rb'"(?:/[^"/\n]+)+/(?:site|dist)-packages/')
_ABSOLUTE = re.compile(rb'"(?:/[^"/\n]+)+/([^"/\n]+\.py\()')
# The profiler names the file that it wrote, which was a temporary one.
_TRACE_NAME = re.compile(rb'("traceName": ?")/(?:[^"/\n]+/)*')
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_EXPLAINS_NOTHING = ("python_function", "ac2g", "overhead")


def shorten_paths(source: Path, target: Path, *, stack: bool = True) -> None:
    """Copy a trace, gzipped, with absolute paths cut to the package or the file.

    Without `stack` the events of Python frames, most of an eager trace, are left out.
    """
    with source.open("rb") as file, target.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, 0) as new:
        lines = gzip.GzipFile(fileobj=file) if source.suffix == ".gz" else file
        for line in lines if stack else _without_frames(lines):
            new.write(_TRACE_NAME.sub(rb"\1", _ABSOLUTE.sub(rb'"\1', _PACKAGES.sub(b'"', line))))


def _without_frames(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Drop events of category python_function. Kineto opens and closes an event on lines of their own."""
    rest = iter(lines)
    for line in rest:
        yield line
        if b'"traceEvents"' in line:
            break
    event: list[bytes] = []
    for line in rest:
        if not event and line.rstrip() != b"  {":
            yield line
            continue
        event.append(line)
        if line.rstrip() in (b"  },", b"  }"):
            if not any(b'"cat": "python_function"' in one for one in event):
                yield from event
            event = []
    yield from event


def leave_out(source: Path, target: Path) -> None:
    """Copy a trace, gzipped, without what explains no kernel: frames, arrows, operators without a launch.

    Less than half of an eager step is left. A report says the same of it, but for frames and modules.
    """
    raw = source.read_bytes()
    document = json.loads(gzip.decompress(raw) if source.suffix == ".gz" else raw)
    events = [e for e in document["traceEvents"] if e.get("cat") not in _EXPLAINS_NOTHING]
    calls: dict[Any, list[float]] = {}
    for event in events:
        if event.get("cat") in _LAUNCHES:
            calls.setdefault((event["pid"], event["tid"]), []).append(event["ts"])
    for found in calls.values():
        found.sort()

    def explains(event: dict[str, Any]) -> bool:
        if event.get("cat") != "cpu_op":
            return True
        mine = calls.get((event["pid"], event["tid"]), [])
        next_call = bisect_left(mine, event["ts"])
        return next_call < len(mine) and mine[next_call] <= event["ts"] + event["dur"]

    document["traceEvents"] = list(filter(explains, events))
    text = json.dumps(document, separators=(",", ":")).encode()
    target.write_bytes(gzip.compress(text, 9, mtime=0))
