"""A trace in memory: what the diagnosis needs of each event, in columns, a rank at a time.

Times are microseconds as in the file. About 36 bytes a kernel: names and launch shapes are interned.
"""

import os
import re
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from kvlab.errors import BadInput
from kvlab.trace.classes import classify
from kvlab.trace.events import Args, Complete, Event, Events
from kvlab.trace.stream import chunks

Config = tuple[tuple[int, ...] | None, tuple[int, ...] | None]
"""A launch shape: (grid, block), None where the trace does not say; kept for what may cast a pool alone."""

# Before PyTorch 1.13 the categories were spelled with capitals.
GPU = frozenset({"kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset"})
OP, FRAME, RUNTIME, NOTE, GPU_NOTE = range(5)
HOST = {
    "cpu_op": OP,
    "Operator": OP,
    "python_function": FRAME,
    "cuda_runtime": RUNTIME,
    "cuda_driver": RUNTIME,
    "Runtime": RUNTIME,
    "user_annotation": NOTE,
    "gpu_user_annotation": GPU_NOTE,
}
_RANKED = re.compile(r"\[([A-Za-z]+\d+(?:-[A-Za-z]+\d+)*)\] ?(.*)")
_FILE_RANK = re.compile(r"(?:^|[-_.])(TP|DP|PP|EP|rank)[-_]?(\d+)", re.IGNORECASE)
_NONE = Args()


@dataclass(slots=True)
class Kernels:
    """GPU work of one rank ordered by start: parallel columns; `name` indexes Trace.names, and so on."""

    name: array = field(default_factory=lambda: array("i"))
    start: array = field(default_factory=lambda: array("d"))
    dur: array = field(default_factory=lambda: array("d"))
    track: array = field(default_factory=lambda: array("i"))
    corr: array = field(default_factory=lambda: array("q"))
    config: array = field(default_factory=lambda: array("i"))

    def __len__(self) -> int:
        return len(self.start)


@dataclass(slots=True)
class HostEvents:
    """Operators, Python frames, runtime calls and annotations of one rank, ordered by start.

    `corr`: a runtime call's correlation id, an annotation's external id, which its GPU counterparts share.
    """

    kind: array = field(default_factory=lambda: array("b"))
    name: array = field(default_factory=lambda: array("i"))
    start: array = field(default_factory=lambda: array("d"))
    dur: array = field(default_factory=lambda: array("d"))
    track: array = field(default_factory=lambda: array("i"))
    corr: array = field(default_factory=lambda: array("q"))
    shapes: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    """(Input Dims, Input type) of the operators of which the profiler recorded shapes, by index."""

    def __len__(self) -> int:
        return len(self.start)


@dataclass(slots=True)
class Rank:
    """One GPU's share of a trace."""

    key: str
    device: str | None
    kernels: Kernels
    host: HostEvents


@dataclass(slots=True)
class Trace:
    """What `read` returns."""

    path: str
    names: list[str]
    configs: list[Config]
    tracks: list[tuple[int | str, int | str]]
    """(pid, tid) of a stream or thread."""
    ranks: list[Rank]
    meta: dict[str, Any]
    """The file's other keys: deviceProperties, distributedInfo, …"""
    notes: list[str]
    """What was odd about the file, a line each."""

    def stream(self, track: int) -> str:
        """The stream's number as the profiler shows it."""
        return str(self.tracks[track][1])


def read(path: str | Path) -> Trace:
    """Read a Chrome trace (.json or .json.gz) as torch.profiler writes it; ranks in one file are kept apart.

    Raises BadInput for what is not a trace. A file that is cut off is read as far as it goes, with a note.
    """
    from kvlab.trace import workers

    plain = _plain_size(Path(path))
    if plain and (found := workers.read(Path(path), plain)):
        builder, meta, notes = found
        return builder.finish(str(path), meta, notes)
    return build(chunks(path), str(path))


def _plain_size(path: Path) -> int:
    """Bytes of an uncompressed file; 0 where it is compressed or cannot be read."""
    try:
        with path.open("rb") as file:
            return 0 if file.read(2) == b"\x1f\x8b" else os.fstat(file.fileno()).st_size
    except OSError:
        return 0


def build(pieces: Iterable[bytes], name: str) -> Trace:
    """`read` for bytes that are already there; `name` stands for the file in messages."""
    events = Events(pieces, name, brief=True)
    builder = Builder()
    for batch in events:
        builder.add(batch)
    return builder.finish(name, events.meta, events.notes)


class _Ids(dict):
    """Numbers for values in the order they are first seen."""

    def __missing__(self, value: object) -> int:
        self[value] = number = len(self)
        return number


class _Launches(dict):
    """Numbers of launch shapes by the text of (grid, block)."""

    def __init__(self, configs: _Ids) -> None:
        self._configs = configs

    def __missing__(self, raw: tuple[bytes, bytes]) -> int:
        self[raw] = number = self._configs[_launch(raw[0]), _launch(raw[1])]
        return number


_ts = attrgetter("ts")


class Builder:
    """Columns from batches of events."""

    def __init__(self) -> None:
        self.names, self.tracks, self.configs = _Ids(), _Ids(), _Ids()
        self.kernels, self.host = Kernels(), HostEvents()
        self.events = 0
        self.configs[None, None]  # 0: not kept
        self._shaped: set[str] = set()
        self._known = 0
        self._launches = _Launches(self.configs)
        self._seams: tuple[list[int], list[int]] = [], []

    def add(self, batch: list[Event]) -> None:
        """Keep what is needed of a batch."""
        self.events += len(batch)
        timed = [e for e in batch if type(e) is Complete] or [
            e for e in batch if type(e) is Event and e.ph == "X"
        ]
        gpu = [e for e in timed if e.cat in GPU]
        self._add_kernels(gpu)
        if len(gpu) == len(timed):
            return
        self._add_host([e for e in timed if e.cat in HOST])
        # Tools that rewrite traces drop `cat`: a launch shape or a stream says what ran on the GPU.
        if bare := [(e, e.args or _NONE) for e in timed if e.cat is None]:
            self._add_kernels([e for e, a in bare if len(a.grid) or a.stream is not None])

    def _add_kernels(self, events: list[Event]) -> None:
        if not events:
            return
        args, names = self._add_common(self.kernels, events)
        if self._known < len(self.names):
            # Launch shapes matter for what may cast a pool alone, and cost the most to keep.
            new = list(self.names)[self._known :]
            self._shaped.update(self.names[n] for n in new if classify(n).role in ("cast", "fp4"))
            self._known = len(self.names)
        config = self.kernels.config
        first = len(config)
        config.frombytes(bytes(len(events) * config.itemsize))
        for i in [i for i, name in enumerate(names) if name in self._shaped]:
            config[first + i] = self._launches[bytes(args[i].grid), bytes(args[i].block)]

    def _add_host(self, events: list[Event]) -> None:
        if not events:
            return
        first = len(self.host)
        args, _ = self._add_common(self.host, events)
        kinds = [HOST[e.cat] for e in events]
        self.host.kind.fromlist(kinds)
        if max(kinds) >= NOTE:
            for i, kind in enumerate(kinds):
                if kind >= NOTE:
                    self.host.corr[first + i] = _int64([args[i].external])[0]
        # Shapes matter for the casts alone; those of every operator would not fit a bounded memory.
        for i in [i for i, e in enumerate(events) if e.name in _COPIES]:
            if len(args[i].dims):
                self.host.shapes[first + i] = (_plain(args[i].dims), _plain(args[i].types))

    def _add_common(self, columns: Kernels | HostEvents, events: list[Event]) -> tuple[list[Args], list[int]]:
        """Order the events and append what both kinds have; the events' arguments and names' numbers."""
        events.sort(key=_ts)
        self.seam(columns)
        args = [e.args or _NONE for e in events]
        names = list(map(self.names.__getitem__, [e.name for e in events]))
        # Lists of numbers at once: an array grows by an iterator's items one at a time.
        columns.start.fromlist([e.ts for e in events])
        columns.dur.fromlist([e.dur for e in events])
        columns.name.fromlist(names)
        corr = [a.correlation for a in args]
        try:
            columns.corr.fromlist(corr)
        except (OverflowError, TypeError):
            columns.corr.extend(_int64(corr))
        pids, tids = {e.pid for e in events}, {e.tid for e in events}
        if len(pids) > 1:
            columns.track.fromlist([self.tracks[e.pid, e.tid] for e in events])
        else:
            (pid,) = pids
            track = {tid: self.tracks[pid, tid] for tid in tids}
            numbers = [track[e.tid] for e in events] if len(track) > 1 else [*track.values()] * len(events)
            columns.track.fromlist(numbers)
        return args, names

    def seam(self, columns: Kernels | HostEvents) -> None:
        """What is appended to `columns` next is ordered, but may start before the end of what is there."""
        self._seams[columns is self.host].append(len(columns))

    def order(self) -> int:
        """Order what there is by start; the number of events left out because they have no time."""
        self.kernels, dropped = _clean(self.kernels, self._seams[0])
        self.host, more = _clean(self.host, self._seams[1])
        self._seams = [], []
        return dropped + more

    def finish(self, name: str, meta: dict[str, Any], notes: list[str]) -> Trace:
        """The trace, its ranks apart; `meta` and `notes` as Events leaves them."""
        if not self.events:
            notes.append("the traceEvents array is empty")
        names = list(map(_sayable, self.names))
        tracks = [(_sayable(pid), _sayable(tid)) for pid, tid in self.tracks]
        if dropped := self.order():
            notes.append(f"{dropped} events without a usable time left out")
        kernels, host = self.kernels, self.host
        labels = _labels(tracks, kernels, host, meta, name)
        ranks = []
        for key in sorted(set(labels.gpu.values()) or set(labels.host.values()), key=_natural):
            mine = _select(kernels, [t for t, k in labels.gpu.items() if k == key])
            theirs = _select(host, [t for t, k in labels.host.items() if k in (key, None)])
            ranks.append(Rank(key, _device(tracks, mine, meta), mine, theirs))
        return Trace(name, names, list(self.configs), tracks, ranks, meta, notes)


_COPIES = frozenset({"aten::copy_", "aten::_to_copy", "aten::to"})


def _plain(raw: msgspec.Raw | bytes) -> Any:
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return None


def _sayable(value: int | str) -> int | str:
    """A text may hold half a surrogate pair, which JSON can say and no file can take."""
    if isinstance(value, str) and not value.isascii():
        return value.encode("utf-8", "replace").decode()
    return value


def _launch(raw: bytes) -> tuple[int, ...] | None:
    """A grid or block, None where the trace has none or not whole numbers."""
    found = _plain(raw) if raw else None
    if isinstance(found, list) and all(isinstance(n, int) for n in found):
        return tuple(found)
    return None


def _int64(values: list[int]) -> array:
    try:
        return array("q", values)
    except (OverflowError, TypeError):
        # uint64 and beyond: an id only has to stay the same on both sides.
        return array("q", [((int(v) + (1 << 63)) % (1 << 64)) - (1 << 63) for v in values])


# Microseconds that no clock shows, a long way below where sums overflow.
_NO_TIME = 1e30


def _clean(columns: Any, seams: list[int]) -> tuple[Any, int]:
    """Columns ordered by start, without events that have no time; negative durations count as none.

    `seams`: where the start may be before the one before it.
    """
    start, dur = columns.start, columns.dur
    # One NaN makes the sum one, and one number that is no time makes it larger than all times together.
    timeless = not (abs(sum(start)) < _NO_TIME and abs(sum(dur)) < _NO_TIME)
    dropped = 0
    if timeless or not _nearly_ordered(columns, seams):
        order = list(range(len(start)))
        if timeless:
            order = [i for i in order if abs(start[i]) < _NO_TIME and abs(dur[i]) < _NO_TIME]
        dropped = len(start) - len(order)
        order.sort(key=start.__getitem__)
        columns = _take(columns, order)
    if len(columns) and min(columns.dur) < 0:
        columns.dur = array("d", [max(d, 0.0) for d in columns.dur])
    return columns, dropped


# CUPTI writes kernels of several streams a few places out of order, also across the edge of a batch; where
# two processes' stretches meet, events are as far from their place as a step is long.
_NEAR = (16, 4096)


def _nearly_ordered(columns: Any, seams: list[int]) -> bool:
    """Order the columns by start in place if few events are out of place or none far; whether that did it."""
    start = columns.start
    wrong = _wrong(start, seams)
    if isinstance(columns, HostEvents) and columns.shapes:
        return not wrong  # the shapes' keys are positions
    for near in _NEAR:
        if len(wrong) * near > len(start) // 8:
            return not wrong
        edges = []
        for i in wrong:
            lo, hi = max(i - near, 0), min(i + near, len(start))
            order = sorted(range(lo, hi), key=start.__getitem__)
            for name in columns.__slots__:
                column = getattr(columns, name)
                if isinstance(column, array):
                    column[lo:hi] = array(column.typecode, [column[j] for j in order])
            edges += [lo, hi]
        wrong = _wrong(start, edges)
    return not wrong


def _wrong(start: array, places: list[int]) -> list[int]:
    """Those of the places whose start is before the one before it."""
    return [i for i in places if 0 < i < len(start) and start[i] < start[i - 1]]


def _take(columns: Any, order: list[int]) -> Any:
    taken = type(columns)()
    for column in taken.__slots__:
        old = getattr(columns, column)
        if isinstance(old, array):
            setattr(taken, column, array(old.typecode, [old[i] for i in order]))
        else:
            new = {i: j for j, i in enumerate(order) if i in old}
            taken.shapes = {new[i]: shape for i, shape in old.items() if i in new}
    return taken


def _select(columns: Any, tracks: list[int]) -> Any:
    wanted = set(tracks)
    if wanted.issuperset(columns.track):
        return columns
    return _take(columns, [i for i, t in enumerate(columns.track) if t in wanted])


@dataclass(slots=True)
class _Labels:
    gpu: dict[int, str]
    host: dict[int, str | None]
    """None: a process that drives several GPUs, so its events belong to each."""


def _labels(
    tracks: list[tuple[int | str, int | str]],
    kernels: Kernels,
    host: HostEvents,
    meta: dict[str, Any],
    path: str,
) -> _Labels:
    """Which rank a track belongs to. SGLang's merged traces put `[TP00-DP01]` before every pid."""
    gpu, hosts = sorted(set(kernels.track)), sorted(set(host.track))
    own = _own_rank(meta, path)
    devices = {tracks[t][0] for t in gpu if not _label(tracks[t][0])}
    several = len(devices) > 1
    return _Labels(
        {t: _label(tracks[t][0]) or (f"GPU {tracks[t][0]}" if several else own) for t in gpu},
        {t: _label(tracks[t][0]) or (None if several else own) for t in hosts},
    )


def _label(pid: int | str) -> str | None:
    found = _RANKED.match(pid) if isinstance(pid, str) else None
    return found[1] if found else None


def _own_rank(meta: dict[str, Any], path: str) -> str:
    info = meta.get("distributedInfo")
    if isinstance(info, dict) and isinstance(info.get("rank"), int) and info.get("world_size", 2) != 1:
        return f"rank {info['rank']}"
    if found := _FILE_RANK.findall(Path(path).name):
        return "-".join(f"{kind.upper()}{int(number):02d}" for kind, number in found)
    return "rank 0"


def _natural(key: str | None) -> list[tuple[int, str]]:
    return [(int(n), "") if n else (-1, w) for n, w in re.findall(r"(\d+)|(\D+)", key or "")]


def _device(tracks: list[tuple[int | str, int | str]], kernels: Kernels, meta: dict[str, Any]) -> str | None:
    """The GPU's name from deviceProperties, None where the file does not say or names several kinds."""
    said = meta.get("deviceProperties")
    said = said if isinstance(said, list) else []
    found = [p for p in said if isinstance(p, dict) and isinstance(p.get("name"), str)]
    pid = str(tracks[kernels.track[0]][0]) if len(kernels) else ""
    mine = [p["name"] for p in found if str(p.get("id")) == pid.rpartition(" ")[2]]
    kinds = set(mine) if len(set(mine)) == 1 else {p["name"] for p in found}
    return kinds.pop() if len(kinds) == 1 else None


def check_not_empty(trace: Trace) -> None:
    """Raise BadInput where there is no GPU work to explain."""
    if not any(len(r.kernels) for r in trace.ranks):
        host = sum(len(r.host) for r in trace.ranks)
        raise BadInput(
            f"{trace.path}: no GPU kernels ({host} host events); record with the profiler's CUDA activity"
        )
