"""Events come out of any stream of bytes as json.loads would give them, in bounded memory."""

import gzip
import json
import math
import os
import random
import signal
import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kvlab.bench.trace import repeat
from kvlab.data import recorded
from kvlab.errors import BadInput
from kvlab.trace import build, read
from kvlab.trace.events import Events
from kvlab.trace.store import Builder

REAL = recorded("h200-stock") / "decode.trace.json.gz"
TEXT = gzip.decompress(REAL.read_bytes())


def collect(pieces):
    events = Events(pieces, "t")
    return [e for batch in events for e in batch], events


def cut(text, places):
    at = [0, *sorted({p % (len(text) + 1) for p in places}), len(text)]
    return [text[a:b] for a, b in pairwise(at) if a < b]


def plain(event):
    return (
        event.ph,
        event.cat,
        event.name,
        event.pid,
        event.tid,
        None if math.isnan(event.ts) else event.ts,
        event.dur,
        event.args.correlation if event.args else None,
        json.loads(bytes(event.args.grid)) if event.args and len(event.args.grid) else None,
    )


def expected(raw):
    args = raw.get("args")
    return (
        raw.get("ph"),
        raw.get("cat"),
        raw.get("name", ""),
        raw.get("pid", -1),
        raw.get("tid", -1),
        raw.get("ts"),
        raw.get("dur", 0.0),
        args.get("correlation", -1) if args is not None else None,
        args["grid"] if args is not None and "grid" in args else None,
    )


nasty = st.text(alphabet='{}[],:"\\ abé\n\t\u2028', max_size=12)
event = st.fixed_dictionaries(
    {"ph": st.sampled_from(["X", "f", "M"]), "name": nasty},
    optional={
        "cat": st.sampled_from(["kernel", "cpu_op"]),
        "pid": st.integers(0, 3) | nasty,
        "tid": st.integers(0, 3),
        "ts": st.floats(0, 1e16, allow_nan=False),
        "dur": st.floats(0, 1e6, allow_nan=False),
        "args": st.fixed_dictionaries(
            {"ignored": st.recursive(nasty | st.none(), lambda c: st.lists(c) | st.dictionaries(nasty, c))},
            optional={"correlation": st.integers(0, 2**62), "grid": st.lists(st.integers(0, 9), max_size=3)},
        ),
    },
)


# A failure is a few small events already: shrinking them further takes minutes and says no more.
@settings(derandomize=True, deadline=None, max_examples=250, phases=[Phase.explicit, Phase.generate])
@given(
    st.lists(event, max_size=8),
    st.lists(st.integers(0, 10**6), max_size=30),
    st.sampled_from([None, 1]),
    st.booleans(),
    st.booleans(),
)
def test_any_cut_of_the_bytes_gives_what_json_gives(raws, places, indent, bare, meta_first):
    meta = {"deviceProperties": [{"id": 0, "name": "}, {"}], "traceName": '], "x": ['}
    whole = raws if bare else ({**meta, "traceEvents": raws} if meta_first else {"traceEvents": raws, **meta})
    text = json.dumps(whole, indent=indent, ensure_ascii=False).encode()
    got, events = collect(cut(text, places))
    assert [plain(e) for e in got] == [expected(r) for r in raws]
    assert events.notes == []
    assert events.meta == ({} if bare else meta)


@settings(derandomize=True, deadline=None, max_examples=150, phases=[Phase.explicit, Phase.generate])
@given(st.lists(event, max_size=8), st.lists(st.integers(0, 10**6), max_size=10))
def test_a_trace_does_not_need_what_brief_leaves_out(raws, places):
    text = json.dumps({"traceEvents": raws}, ensure_ascii=False).encode()
    whole = Builder()
    for batch in Events(cut(text, places), "t"):
        whole.add(batch)
    assert columns(build(cut(text, places), "t")) == columns(whole.finish("t", {}, []))


@pytest.mark.parametrize("size", [1 << 20, 65536, 977])
def test_the_recorded_trace_event_for_event(size):
    got, events = collect(TEXT[i : i + size] for i in range(0, len(TEXT), size))
    raws = json.loads(TEXT)["traceEvents"]
    assert [plain(e) for e in got] == [expected(r) for r in raws]
    assert events.meta["deviceProperties"][0]["name"] == "NVIDIA H200"
    assert (events.closed, events.notes) == (True, [])


def test_cut_off_at_every_byte_around_event_boundaries():
    head = TEXT[: TEXT.index(b'"traceEvents"')]
    events = json.loads(TEXT)["traceEvents"][870:880]
    text = head + b'"traceEvents": ' + json.dumps(events, indent=1).encode() + b', "traceName": "x"}'
    start = text.index(b'"traceEvents": [') + len(b'"traceEvents": [')
    ends = []
    for i in range(start, len(text) - len(b', "traceName": "x"}')):
        got, found = collect([text[:i]])
        assert [plain(e) for e in got] == [expected(r) for r in events[: len(got)]], i
        assert len(found.notes) == 1, i
        assert "cut off" in found.notes[0], i
        ends.append(len(got))
    assert ends == sorted(ends)
    assert (ends[0], ends[-1]) == (0, len(events))


def test_a_file_cut_off_in_its_header_is_no_trace():
    for i in range(0, TEXT.index(b'"traceEvents"') + 15, 97):
        with pytest.raises(BadInput, match="t: not a trace"):
            collect([TEXT[:i]] if i else [])


def test_odd_events_are_read_and_malformed_ones_left_out():
    good = {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 1.0, "dur": 2.0}
    text = b"".join(
        (
            b'{"traceEvents": [',
            json.dumps({**good, "ts": "3.5", "dur": "1"}).encode() + b",",
            json.dumps({**good, "args": {"correlation": 2**64 - 1}}).encode() + b",",
            json.dumps({**good, "args": [1]}).encode() + b",",
            json.dumps({**good, "args": {"name": 5, "correlation": "12"}}).encode() + b",",
            b'{"ph": "X", "cat": "kernel", "name": "caf\xff", "pid": 0, "tid": 7, "ts": NaN, "dur": 1},',
            b'{"ph": "X", "cat": kernel},',
            json.dumps({**good, "name": "last"}).encode() + b",]}",
        )
    )
    got, events = collect([text])
    assert [e.ts for e in got][:4] == [3.5, 1.0, 1.0, 1.0]
    assert got[1].args.correlation == 2**64 - 1
    assert got[3].args.correlation == 12
    assert got[4].name == "caf\ufffd"
    assert got[-1].name == "last"
    assert len(got) == 6
    assert events.notes == ["1 malformed events left out"]
    trace = build([text], "t")
    assert len(trace.ranks[0].kernels) == 5
    assert "1 events without a usable time left out" in trace.notes


def test_numbers_and_texts_that_no_column_or_file_can_hold():
    huge = {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 10**400, "dur": 1}
    odd = {**huge, "name": "half \ud800", "pid": 1.5, "ts": 1, "args": {"grid": "\ud800"}}
    for meta in (5, {"a": 1}, [{"name": ["a"]}]):
        text = json.dumps({"deviceProperties": meta, "traceEvents": [huge, odd]}).encode()
        trace = build([text], "t")
        assert [trace.names[i] for i in trace.ranks[0].kernels.name] == ["half ?"]
        assert trace.ranks[0].device is None
        assert trace.notes == ["1 events without a usable time left out"]
    events = [{**huge, **time} for time in ({"ts": 1, "dur": 1e308}, {"ts": -1e308}, {"ts": 3}, {"ts": 2})]
    trace = build([json.dumps({"traceEvents": events}).encode()], "t")
    assert list(trace.ranks[0].kernels.start) == [2, 3]


def test_one_odd_event_does_not_slow_those_behind_it(monkeypatch):
    slowly, seen = Events._slowly, []
    monkeypatch.setattr(Events, "_slowly", lambda self, buf: seen.append(len(buf)) or slowly(self, buf))
    text = TEXT.replace(b'"ph": "X"', b'"ph": "X", "pid": 1.5', 1)
    size = 10_000
    got, _ = collect(text[i : i + size] for i in range(0, len(text), size))
    assert len(got) == len(json.loads(TEXT)["traceEvents"])
    assert sum(seen) < 5 * size < len(text) / 5


def test_a_text_without_an_event_is_not_searched_over_and_over(monkeypatch):
    from kvlab.trace import events as module

    slowly, seen = Events._slowly, []
    monkeypatch.setattr(Events, "_slowly", lambda self, buf: seen.append(len(buf)) or slowly(self, buf))
    monkeypatch.setattr(module, "LIMIT", 1 << 20)
    piece = b'{"ph": "X", "name": "k"}, {"ph": "X", "name": "k"},' * 20
    broken = b'[{"ph": "X", "name": "k}, '  # from here on what is a string is none
    with pytest.raises(BadInput, match="no end of an event"):
        collect([broken, *[piece] * 2000])
    assert sum(seen) < 4 << 20
    seen.clear()
    _, events = collect([broken, *[piece] * 100])
    assert events.notes[0].startswith("the file is cut off")


def test_an_event_larger_than_any_chunk():
    big = {"ph": "X", "cat": "kernel", "name": "k" * 300_000, "ts": 1, "dur": 1}
    text = json.dumps({"traceEvents": [big, {**big, "name": "b"}]}).encode()
    got, _ = collect(text[i : i + 1000] for i in range(0, len(text), 1000))
    assert [len(e.name) for e in got] == [300_000, 1]


def test_what_follows_the_last_event():
    got, events = collect([b'{"traceEvents": [{"ph": "X"}]} and more'])
    assert (len(got), events.notes) == (1, ["10 bytes of garbage after the last event ignored"])
    got, events = collect([b'\xef\xbb\xbf [{"ph": "X"}, ]\n'])
    assert (len(got), events.notes) == (1, [])


def columns(trace):
    """Everything a trace holds, its table numbers resolved: those depend on how the bytes were cut."""
    return [
        trace.meta,
        trace.notes,
        *(
            [
                rank.key,
                rank.device,
                [trace.names[i] for i in part.name],
                [trace.tracks[i] for i in part.track],
                [trace.configs[i] for i in getattr(part, "config", [])],
                *(list(getattr(part, c)) for c in ("start", "dur", "corr")),
                list(getattr(part, "kind", [])),
            ]
            for rank in trace.ranks
            for part in (rank.kernels, rank.host)
        ),
    ]


def test_several_processes_read_what_one_does(tmp_path, monkeypatch):
    from kvlab.trace import workers

    path = tmp_path / "big.json"
    repeat(TEXT, path, 12)
    monkeypatch.setattr(workers, "_LEAST", 1 << 20)
    monkeypatch.setattr(workers, "_cpus", lambda: 3)
    size = path.stat().st_size
    assert len(workers._bounds(path, size, 3)) == 3
    builder, meta, notes = workers.read(path, size)
    several = builder.finish(str(path), meta, notes)
    one = build([path.read_bytes()], str(path))
    assert columns(several) == columns(one)
    assert len(one.ranks[0].kernels) == 12 * 2176
    assert columns(read(path)) == columns(one)


@pytest.mark.parametrize("fails", ["fork", "child"])
def test_a_process_that_fails_leaves_the_file_to_one(tmp_path, monkeypatch, fails):
    from kvlab.trace import workers

    path = tmp_path / "big.json"
    repeat(TEXT, path, 6)
    monkeypatch.setattr(workers, "_LEAST", 1 << 20)
    monkeypatch.setattr(workers, "_cpus", lambda: 3)

    real, children = os.fork, []

    def fork():
        if fails == "fork" and children:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        if pid := real():
            children.append(pid)
        return pid

    def hand_over(*args):
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(os, "fork", fork)
    if fails == "child":
        monkeypatch.setattr(workers, "_hand_over", hand_over)
    files = len(os.listdir("/proc/self/fd"))
    assert workers.read(path, path.stat().st_size) is None
    assert len(os.listdir("/proc/self/fd")) == files
    assert len(children) == (1 if fails == "fork" else 2)
    for pid in children:
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    assert len(read(path).ranks[0].kernels) == 6 * 2176


def test_a_wrong_guess_falls_back_to_one_process(tmp_path, monkeypatch):
    from kvlab.trace import workers

    monkeypatch.setattr(workers, "_LEAST", 1 << 10)
    monkeypatch.setattr(workers, "_cpus", lambda: 2)
    # Every `}, {` near the middle is inside a nested list or a string.
    inner = {"ph": "X", "cat": "kernel", "name": "}, {" * 4000, "args": {"x": [{"a": 1}] * 4000}, "ts": 1}
    path = tmp_path / "nested.json"
    path.write_text(json.dumps({"traceEvents": [inner]}))
    assert workers.read(path, path.stat().st_size) is None
    assert len(read(path).ranks[0].kernels) == 1


def test_order_is_restored_near_and_far():
    raws = [e for e in json.loads(TEXT)["traceEvents"] if e.get("cat") == "kernel"]
    shuffled = raws[:]
    random.Random(0).shuffle(shuffled)
    for some in (raws, shuffled):
        trace = build([json.dumps({"traceEvents": some}).encode()], "t")
        kernels = trace.ranks[0].kernels
        assert list(kernels.start) == sorted(e["ts"] for e in raws)
        by_start = {e["ts"]: e["dur"] for e in raws}
        assert list(kernels.dur) == [by_start[t] for t in kernels.start]


def test_memory_grows_far_slower_than_the_file(tmp_path):
    code = "import resource, sys; from kvlab.trace import read; read(sys.argv[1]); " + (
        "print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss"
        " + resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))"
    )
    peaks, sizes = [], []
    for copies in (4, 28):
        path = tmp_path / f"{copies}.json"
        repeat(TEXT, path, copies)
        done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout))
        sizes.append(path.stat().st_size)
    # One process against one and its workers: the largest file here may start one.
    fixed = 60 << 20
    assert peaks[1] - peaks[0] < fixed + (sizes[1] - sizes[0]) / 4


def test_a_builder_keeps_launch_shapes_of_casts_only():
    builder = Builder()
    for batch in Events([TEXT], "t"):
        builder.add(batch)
    assert ((557498, 1, 1), (128, 1, 1)) in builder.configs
    assert len(builder.configs) == 4
