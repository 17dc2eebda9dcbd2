"""How fast is a large trace read, in how much memory, and what does each reader answer?

The trace is a recorded one repeated: the same bytes with later times and other ids. Each reader runs in a
process of its own, in turn, so that they meet the same machine.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from kvlab.errors import BadInput
from kvlab.provenance import Provenance, collect

_SHIFTED = re.compile(
    rb'("ts": ?)([0-9.]+)|("(?:correlation|External id|id|Python id|Python parent id|Ev Idx)": ?)([0-9]+)'
)
# Beyond what one recording spans: microseconds, and ids.
_STRIDE_US, _STRIDE_IDS = 90_000.0, 40_000


class Reading(msgspec.Struct, kw_only=True, frozen=True):
    """One reader: medians over the rounds, without imports. `answer` is what it says of the cast."""

    seconds: float
    cpu_seconds: float
    """Of its processes together: what a busy machine does not stretch as much."""
    peak_bytes: int
    """Resident memory, summed over its processes; pages that they share count once."""
    answer: Any
    error: str | None = None


class TraceRun(msgspec.Struct, kw_only=True, frozen=True):
    """A comparison of trace readers on one file."""

    provenance: Provenance
    source: str
    copies: int
    file_bytes: int
    events: int
    cpus: int
    """That the readers could use."""
    load: float
    """Processes that wanted to run, over the last minute: above `cpus` the measurement was not alone."""
    rounds: int
    readers: dict[str, Reading]
    speedup: float
    """json.load's time over `read`'s, which uses the CPUs that there are, four at most."""
    cpu_speedup: float
    """The same of CPU time, of all its processes."""
    memory_share: float
    """`read`'s peak over the file's size."""
    one_cpu_speedup: float | None = None
    """json.load's CPU time over `read`'s with one process; None in recordings that did not ask."""


def repeat(source: bytes, target: Path, copies: int) -> None:
    """Write a trace of `copies` times the events of `source` (JSON), each copy later and with other ids."""
    start = source.index(b"[", source.index(b'"traceEvents"')) + 1
    end = source.rindex(b"]")
    body = source[start:end].rstrip()
    with target.open("wb") as file:
        file.write(source[:start])
        for k in range(copies):
            file.write(b"," if k else b"")
            file.write(_SHIFTED.sub(lambda m, k=k: _shift(m, k), body))
        file.write(source[end:])


def _shift(found: re.Match[bytes], k: int) -> bytes:
    if found[1]:
        return found[1] + b"%.3f" % (float(found[2]) + k * _STRIDE_US)
    return found[3] + b"%d" % (int(found[4]) + k * _STRIDE_IDS)


_KERNELS = "answer = {'kernels': sum(len(r.kernels) for r in read(path).ranks)}"
# What is imported, and what is timed.
_READERS = {
    "json.load": (
        "import json",
        "with open(path) as f: answer = {'events': len(json.load(f)['traceEvents'])}",
    ),
    "read": ("from kvlab.trace import read", _KERNELS),
    "read, one CPU": (
        "from kvlab.trace import read\nif hasattr(os, 'sched_setaffinity'): "
        "os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})",
        _KERNELS,
    ),
    "report": (
        "from kvlab.trace import read, report",
        "r = report(read(path))\nc = r.kv_cast\n"
        "answer = {'steps': r.steps, 'copies_per_step': c.copies_per_step, 'ms_per_step': c.ms_per_step, "
        "'share': c.share, 'pool_slots': c.pool_slots}",
    ),
}
# HolisticTraceAnalysis looks for a folder's traces and a rank in each.
_HTA = (
    "import warnings; warnings.simplefilter('ignore')\nfrom hta.trace_analysis import TraceAnalysis",
    """
t = TraceAnalysis(trace_files={0: path}, trace_dir='')
busy = t.get_temporal_breakdown(visualize=False).to_dict('records')
kinds, kernels = t.get_gpu_kernel_breakdown(visualize=False)
answer = {'temporal_breakdown': busy, 'kernel_types': kinds.to_dict('records'),
          'longest': kernels.sort_values('sum (us)', ascending=False).head(1).to_dict('records')}
""",
)
_FRAME = """
import json, os, sys, time
path = sys.argv[1]
{imports}
started, before = time.perf_counter(), os.times()
{code}
took, after = time.perf_counter() - started, os.times()
cpu = sum(after[:4]) - sum(before[:4])
print('\\n' + json.dumps({{'seconds': took, 'cpu_seconds': cpu, 'answer': answer}}, default=str))
"""


def measure(source: Path, *, size: int, rounds: int = 3, hta: Path | None = None) -> TraceRun:
    """Compare the readers on a trace of about `size` bytes. `hta`: a Python with HolisticTraceAnalysis."""
    import gzip

    raw = source.read_bytes()
    text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    copies = max(1, round(size / len(text)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "repeated.trace.json"
        repeat(text, path, copies)
        readers = {name: (sys.executable, *reader) for name, reader in _READERS.items()}
        if hta:
            readers["HolisticTraceAnalysis"] = (str(hta), *_HTA)
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in readers}
        for turn in range(rounds):
            for name, reader in readers.items():
                if name != "HolisticTraceAnalysis" or turn == 0:
                    found[name].append(_run(*reader, path))
        file_bytes = path.stat().st_size
    done = {name: _median(runs) for name, runs in found.items()}
    for name in _READERS:
        if done[name].error:
            raise BadInput(f"bench trace: {name} failed: {done[name].error}")
    return TraceRun(
        provenance=collect(),
        source=source.parent.name + "/" + source.name,
        copies=copies,
        file_bytes=file_bytes,
        events=done["json.load"].answer["events"],
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        rounds=rounds,
        readers=done,
        load=os.getloadavg()[0],
        speedup=done["json.load"].seconds / done["read"].seconds,
        cpu_speedup=done["json.load"].cpu_seconds / done["read"].cpu_seconds,
        memory_share=done["read"].peak_bytes / file_bytes,
        one_cpu_speedup=done["json.load"].cpu_seconds / done["read, one CPU"].cpu_seconds,
    )


def _run(python: str, imports: str, code: str, path: Path) -> dict[str, Any]:
    command = [python, "-c", _FRAME.format(imports=imports, code=code), str(path)]
    peak = 0
    # Files, not pipes: nobody empties a pipe while memory is watched.
    with tempfile.TemporaryFile("w+") as out_file, tempfile.TemporaryFile("w+") as err_file:
        child = subprocess.Popen(command, stdout=out_file, stderr=err_file)
        while child.poll() is None:
            peak = max(peak, _resident(child.pid))
            time.sleep(0.02)
        out, err = (f.seek(0) or f.read() for f in (out_file, err_file))
    if child.returncode:
        return {
            "seconds": 0.0,
            "cpu_seconds": 0.0,
            "answer": None,
            "peak": peak,
            "error": (err.strip() or "?").splitlines()[-1],
        }
    return {**json.loads(out.strip().splitlines()[-1]), "peak": peak, "error": None}


def _resident(pid: int) -> int:
    """Resident bytes of a process and its children, shared ones once, from /proc; 0 where there is none."""
    total = 0
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                total += _resident(int(child))
    except OSError:
        pass
    return total


def _median(runs: list[dict[str, Any]]) -> Reading:
    ordered = sorted(runs, key=lambda r: r["seconds"])
    middle = ordered[len(ordered) // 2]
    return Reading(
        seconds=middle["seconds"],
        cpu_seconds=middle["cpu_seconds"],
        peak_bytes=max(r["peak"] for r in runs),
        answer=middle["answer"],
        error=middle["error"],
    )
