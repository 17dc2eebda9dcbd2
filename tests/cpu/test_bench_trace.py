"""The comparison of trace readers, on a file small enough for a test; timings are not what is tested."""

import json

import msgspec
import pytest

from kvlab.bench.trace import TraceRun, measure
from kvlab.cli import main
from kvlab.data import recorded

REAL = recorded("h200-stock") / "decode.trace.json.gz"


def test_every_reader_answers_for_the_same_file():
    run = measure(REAL, size=5_500_000, rounds=1)
    assert run.copies == 3
    assert run.file_bytes == pytest.approx(3 * 1_840_000, rel=0.01)
    assert run.events == run.readers["json.load"].answer["events"] == 3 * 5346
    assert run.readers["read"].answer == {"kernels": 3 * 2176}
    said = run.readers["report"].answer
    assert (said["steps"], said["copies_per_step"], said["pool_slots"]) == (3, 78, 495_552)
    assert all(r.seconds > 0 and r.cpu_seconds > 0 and r.peak_bytes > 1 << 20 for r in run.readers.values())
    assert msgspec.json.decode(msgspec.json.encode(run), type=TraceRun) == run


def test_the_recorded_run(capsys):
    with pytest.raises(SystemExit) as e:
        main(["bench", "trace", "--recorded", "--json"])
    assert e.value.code == 0
    run = json.loads(capsys.readouterr().out)
    assert run["file_bytes"] > 400e6
    assert run["memory_share"] < 0.25
    assert run["speedup"] >= 6
    assert run["readers"]["report"]["answer"]["copies_per_step"] == 78
    kinds = run["readers"]["HolisticTraceAnalysis"]["answer"]["kernel_types"]
    assert kinds[0]["kernel_type"] == "COMPUTATION"
    assert kinds[0]["percentage"] > 99
