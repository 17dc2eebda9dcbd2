"""Trace events out of a stream of bytes: in batches, typed, with bounded memory.

A batch is cut at the last `}` before a `,` or `]` for which the text up to there, in brackets, is a valid
JSON array. JSON is read left to right without looking ahead, so a text that is valid up to a point is at the
top level there: a brace inside a string or a nested object can never be taken for a boundary, only cost a
second try.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, Literal, Union

import msgspec

from kvlab.errors import BadInput

# An event or a header larger than this is no profiler's.
LIMIT = 64 << 20
_TRIES = 6
_START = re.compile(rb'"traceEvents"\s*:\s*\[')
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|["{}\[\]]', re.DOTALL)
_BEHIND = re.compile(rb"[ \t\r\n]*(\]|,(?=[ \t\r\n]*(?:\{|\Z)))")
_SPACE = b" \t\r\n"


class Args(msgspec.Struct, gc=False):
    """The arguments of an event that kvlab uses; the others are skipped, not stored."""

    correlation: int = -1
    external: int = msgspec.field(default=-1, name="External id")
    grid: msgspec.Raw = msgspec.Raw()
    block: msgspec.Raw = msgspec.Raw()
    stream: int | None = None
    dims: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input type")


class _Fields(msgspec.Struct, gc=False):
    name: str = ""
    pid: int | str = -1
    tid: int | str = -1
    ts: float = float("nan")
    dur: float = 0.0
    args: Args | None = None


class Event(_Fields, gc=False):
    """One Chrome trace event. `ts` and `dur` in microseconds; NaN where the file gives no `ts`."""

    ph: str | None = None
    cat: str | None = None


# The profiler's categories: a name that is known need not be made anew for each event.
_Category = Literal[
    "kernel",
    "gpu_memcpy",
    "gpu_memset",
    "gpu_user_annotation",
    "user_annotation",
    "cpu_op",
    "python_function",
    "cuda_runtime",
    "cuda_driver",
    "cuda_sync",
    "overhead",
    "Trace",
]


class Complete(_Fields, gc=False, tag_field="ph", tag="X"):
    """An Event that takes time, as all do that a trace is made of: what `brief` reads them as."""

    ph: ClassVar[str] = "X"
    cat: _Category | None = None


class Momentary(msgspec.Struct, gc=False, tag_field="ph"):
    """A flow's end, metadata, a counter: two of five events in a trace of graphs, of which none is kept."""


_MOMENTARY = [
    msgspec.defstruct(f"Momentary_{ph}", [], bases=(Momentary,), tag_field="ph", tag=ph, gc=False)
    for ph in "stfMiICbenNODPRc"
]


class Events:
    """Iterate over batches (lists of Event); then `meta` has the file's other keys, `notes` what was odd.

    `pieces`: the file's bytes in chunks of any size. `brief`: of events that take no time only that there is
    one. Raises BadInput, naming `name`, for what is no trace.
    """

    def __init__(
        self, pieces: Iterable[bytes], name: str, *, inside: bool = False, brief: bool = False
    ) -> None:
        """`inside`: the bytes start within the array, at an event, and may stop before its end."""
        self._pieces = iter(pieces)
        self._name = name
        self._inside = inside
        kinds = [list[Union[Complete, *_MOMENTARY]]] if brief else []  # type: ignore[valid-type]
        self._decoders: list[Callable[[bytes], list[Event]]] = [
            msgspec.json.Decoder(kind).decode for kind in (*kinds, list[Event])
        ]
        self.meta: dict[str, Any] = {}
        self.notes: list[str] = []
        self.skipped = 0
        self.closed = False
        """The array's end was seen."""
        self.left = b""
        """What followed the last complete event where it was not."""

    def __iter__(self) -> Iterator[list[Event]]:
        held = [b"" if self._inside else self._header()]
        # What had no event in it is searched again when it is twice as long: each time would be quadratic.
        enough = 0
        for piece in self._pieces:
            size = sum(map(len, held)) + len(piece)
            events, rest = self._fast(held, piece) if size >= enough else (None, None)
            if events is None:
                if rest is None:
                    held.append(piece)  # no end of an event in it
                    self._check(size)
                    continue
                buf = b"".join((*held, piece))
                events, used, self.closed = self._slowly(buf)
                # With a comma at its start, it would be no array for `_fast`.
                rest = buf[used:].lstrip(_SPACE + b",")
                if used:
                    enough = 0
                else:
                    self._check(size)
                    enough = min(2 * size, LIMIT)
            if events:
                yield events
            held = [rest or b""]
            if self.closed:
                break
        buf = b"".join(held)
        while not self.closed and buf:
            events, used, self.closed = self._slowly(buf)
            if events:
                yield events
            buf = buf[used:]
            if not used:
                break
        if self.closed:
            self._footer(buf)
        else:
            self.left = buf.strip(_SPACE + b",")
            self.notes.append(
                "the file is cut off: its traceEvents array has no end"
                + (f", {len(self.left)} bytes of an unfinished event left out" if self.left else "")
                + "; what is missing is in no time or count, so steps may look too short"
            )
        if self.skipped:
            self.notes.append(f"{self.skipped} malformed events left out")

    def _check(self, size: int) -> None:
        if size > LIMIT:
            raise BadInput(f"{self._name}: no end of an event within {LIMIT >> 20} MiB; not a trace")

    def _fast(self, held: list[bytes], piece: bytes) -> tuple[list[Event] | None, bytes | None]:
        """The events up to the last end of one in `piece`, and the bytes behind it.

        No events and b"": they need a closer look; no events and None: no event ends in `piece`.
        """
        found = None
        for _, (cut, after) in zip(range(_TRIES), _cuts(piece), strict=False):
            found = b""
            # One copy: a trace of gigabytes feels each.
            text = b"".join((b"[", *held, memoryview(piece)[:cut], b"]"))
            try:
                events = self._decode(text)
            except msgspec.ValidationError:
                break  # not the usual types: no other boundary helps
            except msgspec.DecodeError:
                continue
            self.closed = piece[after - 1 : after] == b"]"
            return events, piece[after:]
        return None, found

    def _decode(self, text: bytes) -> list[Event]:
        for decode in self._decoders[:-1]:
            try:
                return decode(text)
            except msgspec.ValidationError:
                continue
        return self._decoders[-1](text)

    def _header(self) -> bytes:
        buf = b""
        for piece in self._pieces:
            buf += piece
            text = buf.removeprefix(b"\xef\xbb\xbf").lstrip(_SPACE)
            if text[:1] == b"[":
                return text[1:]
            if text[:1] not in (b"{", b""):
                break
            for found in _START.finditer(buf):
                head = _loads(buf[: found.end()].removeprefix(b"\xef\xbb\xbf") + b"]}")
                if isinstance(head, dict):
                    self.meta.update({k: v for k, v in head.items() if k != "traceEvents"})
                    return buf[found.end() :]
            if len(buf) > LIMIT:
                break
        raise BadInput(
            f"{self._name}: not a trace: no traceEvents array; give a torch-profiler .json or .json.gz"
        )

    def _slowly(self, buf: bytes) -> tuple[list[Event], int, bool]:
        """The complete events of `buf`, whatever they hold, the bytes used, and whether the array ended.

        For odd types, invalid UTF-8, a malformed event, the end of the array or of the file.
        """
        events: list[Event] = []
        used, depth, start = 0, 0, 0
        for token in _TOKEN.finditer(buf):
            char = token[0][:1]
            if char == b'"':
                if len(token[0]) == 1:
                    break  # a string that ends in a later chunk
            elif char in b"{[":
                if depth == 0:
                    start = token.start()
                depth += 1
            elif depth == 0:
                if char == b"]":
                    return events, token.end(), True
                break
            else:
                depth -= 1
                if depth == 0:
                    used = token.end()
                    self._append(events, buf[start:used])
        return events, used, False

    def _append(self, events: list[Event], text: bytes) -> None:
        raw = _loads(text)
        if isinstance(raw, dict):
            events.append(_lenient(raw))
        else:
            self.skipped += 1

    def _footer(self, buf: bytes) -> None:
        for piece in self._pieces:
            buf += piece
            if len(buf) > LIMIT:
                break
        text = buf.strip(_SPACE + b"\0")
        tail = _loads(b"{" + text.lstrip(b", \t\r\n")) if text and text != b"}" else {}
        if isinstance(tail, dict):
            self.meta.update(tail)
        else:
            self.notes.append(f"{len(text)} bytes of garbage after the last event ignored")


def _cuts(buf: bytes) -> Iterator[tuple[int, int]]:
    """(end of an event, end of the `,` or `]` behind it), from the last one backwards.

    Names of kernels hold `}, ` too: a comma counts where another event, or nothing yet, follows it.
    """
    at = len(buf)
    while (at := buf.rfind(b"}", 0, at)) >= 0:
        found = _BEHIND.match(buf, at + 1)
        if found:
            yield at + 1, found.end(1)


def _loads(text: bytes) -> Any:
    """Any JSON, also with invalid UTF-8 or bare NaN; None where it is not JSON."""
    try:
        return msgspec.json.decode(text)
    except msgspec.MsgspecError:
        try:
            return json.loads(text.decode("utf-8", "replace"), strict=False)
        except (ValueError, RecursionError):
            return None
    except RecursionError:
        return None


def _lenient(raw: dict[str, Any]) -> Event:
    """An Event of whatever types: numbers as text, ids beyond 64 bits, arguments that are no object."""
    args = raw.get("args")
    return Event(
        ph=_text(raw.get("ph")),
        cat=_text(raw.get("cat")),
        name=_text(raw.get("name")) or "",
        pid=_id(raw.get("pid")),
        tid=_id(raw.get("tid")),
        ts=_number(raw.get("ts"), float("nan")),
        dur=_number(raw.get("dur"), 0.0),
        args=Args(
            correlation=int(_number(args.get("correlation"), -1)),
            external=int(_number(args.get("External id"), -1)),
            grid=_raw(args, "grid"),
            block=_raw(args, "block"),
            stream=int(_number(args["stream"], 0)) if "stream" in args else None,
            dims=_raw(args, "Input Dims"),
            types=_raw(args, "Input type"),
        )
        if isinstance(args, dict)
        else None,
    )


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) or value is None else str(value)


def _id(value: Any) -> int | str:
    if value is None:
        return -1
    return value if isinstance(value, (int, str)) and not isinstance(value, bool) else str(value)


def _number(value: Any, default: float) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return default
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return number if abs(number) < float("inf") else default


def _raw(args: dict[str, Any], key: str) -> msgspec.Raw:
    try:
        return msgspec.Raw(msgspec.json.encode(args[key]) if key in args else b"")
    except (ValueError, OverflowError):  # half a surrogate pair, or too many digits
        return msgspec.Raw(b"")
