"""A large plain file read by several processes, a stretch each.

Where a stretch may start is guessed; that it is right is proven: a reader that starts at an event and uses up
its stretch to the last byte ends at an event, so the next one starts at one. Where a guess was wrong the file
is read by one process.
"""

import contextlib
import os
import re
import signal
import sys
import warnings
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from kvlab.trace.events import Events
from kvlab.trace.store import Builder
from kvlab.trace.stream import CHUNK

# Below this a process takes longer to start, and to hand over what it read, than it saves.
_LEAST = 16 << 20
_MOST = 4
# The part of a stretch that this process reads while the others start and hand over.
_AHEAD = 0.08
_SEAM = re.compile(rb"}\s*,\s*{")


class Part(msgspec.Struct, kw_only=True):
    """What one process read, without its columns, which follow: the tables that their numbers index."""

    whole: bool
    """The stretch was used up to its last byte, and everything in it."""
    usable: bool
    """Every event has a time."""
    events: int
    names: list[str]
    tracks: list[tuple[int | str, int | str]]
    configs: list[tuple[tuple[int, ...] | None, tuple[int, ...] | None]]
    columns: list[int]
    """Bytes of each column, as `_columns` orders them."""
    shapes: list[tuple[int, Any]]
    meta: dict[str, Any]
    notes: list[str]


def read(path: Path, size: int) -> tuple[Builder, dict[str, Any], list[str]] | None:
    """The events of a plain file in several processes, or None where one process should read it."""
    count = min(_MOST, _cpus(), size // _LEAST)
    # A forked process has all imports; elsewhere than on Linux fork is not there or not safe.
    bounds = _bounds(path, size, count) if count > 1 and sys.platform == "linux" else []
    if not bounds:
        return None
    others: list[_Other] = []
    try:
        for lo, hi in bounds[1:]:
            try:
                others.append(_start(path, lo, hi))
            except OSError:
                return None  # no process or pipe to be had
        builder, events, whole, usable = _stretch(path, *bounds[0])
        notes, meta = [], events.meta
        for i, other in enumerate(others):
            if not (whole and usable):
                return None
            try:
                with open(other.pipe, "rb", closefd=False) as pipe:
                    part = msgspec.msgpack.decode(pipe.read(int.from_bytes(pipe.read(8))), type=Part)
                    _join(builder, part, pipe)
            except (msgspec.DecodeError, ValueError, EOFError):
                return None  # it died
            last = i == len(others) - 1
            whole, usable = part.whole or last, part.usable
            meta.update(part.meta)
            notes = part.notes if last else []
        return (builder, meta, notes) if whole and usable else None
    finally:
        for other in others:
            os.close(other.pipe)
            # Where SIGCHLD is ignored, it is gone already if it was heard to its end.
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(other.pid, signal.SIGKILL)
                os.waitpid(other.pid, 0)


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _bounds(path: Path, size: int, count: int) -> list[tuple[int, int]]:
    """Stretches (start, end); each but the first starts behind the comma between two events."""
    cuts = [0]
    ends = []
    with path.open("rb") as file:
        for i in range(1, count):
            at = int(size * (i + _AHEAD) / (count + _AHEAD))
            file.seek(at)
            found = _SEAM.search(file.read(1 << 20))
            if not found:
                return []
            ends.append(at + found.start() + 1)
            cuts.append(at + found.end() - 1)
    return list(zip(cuts, [*ends, size], strict=True))


def _stretch(path: Path, lo: int, hi: int) -> tuple[Builder, Events, bool, bool]:
    events = Events(_pieces(path, lo, hi), str(path), inside=lo > 0, brief=True)
    builder = Builder()
    for batch in events:
        builder.add(batch)
    usable = builder.order() == 0
    return builder, events, not (events.closed or events.left or events.skipped), usable


def _pieces(path: Path, lo: int, hi: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(lo)
        while lo < hi and (piece := file.read(min(CHUNK, hi - lo))):
            lo += len(piece)
            yield piece


class _Other(NamedTuple):
    pid: int
    pipe: int


def _start(path: Path, lo: int, hi: int) -> _Other:
    ours, theirs = os.pipe()
    with warnings.catch_warnings():
        # Other threads' locks are none of the child's: it reads a file, writes a pipe and is gone.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            pid = os.fork()
        except OSError:
            os.close(ours)
            os.close(theirs)
            raise
    if pid:
        os.close(theirs)
        return _Other(pid, ours)
    try:
        with contextlib.suppress(BaseException), open(theirs, "wb") as pipe:
            _hand_over(*_stretch(path, lo, hi), pipe)
    finally:
        os._exit(0)


def _hand_over(builder: Builder, events: Events, whole: bool, usable: bool, pipe: BinaryIO) -> None:
    columns = list(_columns(builder))
    part = Part(
        whole=whole,
        usable=usable,
        events=builder.events,
        names=list(builder.names),
        tracks=list(builder.tracks),
        configs=list(builder.configs),
        columns=[len(column) * column.itemsize for _, column in columns],
        shapes=list(builder.host.shapes.items()),
        meta=events.meta,
        notes=events.notes,
    )
    head = msgspec.msgpack.encode(part)
    pipe.write(len(head).to_bytes(8))
    pipe.write(head)
    for _, column in columns:
        pipe.write(memoryview(column))


def _columns(builder: Builder) -> Iterator[tuple[str, array]]:
    """The columns with their names, the kernels' before the host's."""
    for columns in (builder.kernels, builder.host):
        for name in columns.__slots__:
            if isinstance(column := getattr(columns, name), array):
                yield name, column


def _join(builder: Builder, part: Part, pipe: BinaryIO) -> None:
    """Append what follows in the pipe. Raises EOFError where it ends early."""
    tables = {
        "name": [builder.names[n] for n in part.names],
        "track": [builder.tracks[t] for t in part.tracks],
        "config": [builder.configs[c] for c in part.configs],
    }
    builder.events += part.events
    builder.seam(builder.kernels)
    builder.seam(builder.host)
    first = len(builder.host)
    for (name, mine), size in zip(_columns(builder), part.columns, strict=True):
        theirs = array(mine.typecode)
        theirs.frombytes(pipe.read(size))
        if len(theirs) * mine.itemsize != size:
            raise EOFError
        table = tables.get(name)
        if table is None or table == list(range(len(table))):
            mine.extend(theirs)
        else:
            mine.fromlist([table[number] for number in theirs])
    for i, shape in part.shapes:
        builder.host.shapes[first + i] = tuple(shape)
