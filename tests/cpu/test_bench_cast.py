"""`kvlab bench cast` without a GPU: the recorded run as data and as a table, and what it must show."""

import json
import os
import subprocess
import sys

import msgspec
import pytest

from kvlab.bench.recorded import newest
from kvlab.bench.results import CastRun
from kvlab.cli import main
from kvlab.errors import BadInput


def kvlab(*args: str) -> subprocess.CompletedProcess:
    """`kvlab bench …` as on a host without a GPU."""
    command = [sys.executable, "-m", "kvlab", "bench", *args]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, capture_output=True, text=True, env=env)


@pytest.fixture(scope="module")
def run() -> CastRun:
    return newest("cast.json", CastRun)[1]


def test_recorded_prints_one_object(run):
    done = kvlab("cast", "--recorded", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert msgspec.json.decode(done.stdout, type=CastRun) == run
    assert json.loads(done.stdout)["provenance"]["gpus"]


def test_recorded_prints_a_table(run):
    done = kvlab("cast", "--recorded")
    assert (done.returncode, done.stderr) == (0, "")
    assert run.gpu in done.stdout
    assert "shadow" in done.stdout
    assert "slot_map, once a step" in done.stdout
    assert f"a launch that reads the count, {run.floors[-1].programs} programs" in done.stdout


@pytest.mark.parametrize("options", [[], ["--sweep"], ["--kv-dtype", "fp8_e5m2", "--pool", "1"]])
def test_without_a_gpu_it_says_where_to_look(options, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as left:
        main(["bench", "cast", "--json", *options])
    assert left.value.code == 2
    said = "kvlab: bench cast: no CUDA device here; --recorded prints the newest recorded run\n"
    assert tuple(capsys.readouterr()) == ("", said)


def test_a_dtype_that_is_none_is_named():
    done = kvlab("cast", "--kv-dtype", "fp8")
    assert done.returncode == 2
    assert "--kv-dtype: expected fp8_e4m3 or fp8_e5m2, got 'fp8'" in done.stderr


def test_the_recorded_run_holds_what_is_claimed_of_it(run):
    """Bits first; then every shape beats stock by what it leaves out."""
    by_size = {(s.slots, s.order): s for s in run.shapes}
    for shape in run.shapes:
        stock = shape.results["stock"]
        for name, timing in shape.results.items():
            assert timing.exact, f"{name} at {shape.slots}"
            if name != "torch_index" or shape.slots < run.pool_slots // 2:
                assert name == "stock" or timing.cold_us < stock.cold_us
    assert {n for n, _ in by_size} >= {100, 1_000, 10_000, 100_000, run.pool_slots}
    # A cast of few slots is dearer than a launch that only learns how many there are, and that than none.
    nothing, counted = (max(f.us for f in run.floors if f.reads is reads) for reads in (False, True))
    assert nothing < counted < min(t.warm_us for t in by_size[100, "random"].results.values() if t.warm_us)
    every = sorted(run.replays, key=lambda r: r.tokens)
    assert [r.us for r in every] == sorted(r.us for r in every)


def test_a_wrong_result_has_no_time(run):
    shape = run.shapes[0]
    wrong = msgspec.structs.replace(shape.results["shadow"], warm_us=None, cold_us=None, exact=False)
    spoilt = msgspec.structs.replace(shape, results=shape.results | {"shadow": wrong})
    from kvlab.bench.commands.cast import table

    cells = [list(c.cells) for c in table(msgspec.structs.replace(run, shapes=[spoilt])).columns]
    row = next(i for i, name in enumerate(cells[3]) if name == "shadow")
    assert [column[row] for column in cells[4:]] == ["wrong", "wrong", "", ""]


def test_no_recorded_run_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("kvlab.data.root", lambda: tmp_path)
    with pytest.raises(BadInput, match=r"--recorded: no cast.json under data/recorded"):
        newest("cast.json", CastRun)
    (tmp_path / "recorded" / "x").mkdir(parents=True)
    (tmp_path / "recorded" / "x" / "cast.json").write_text('{"gpu": 1}')
    with pytest.raises(BadInput, match=r"cast.json: not a recorded run"):
        newest("cast.json", CastRun)
    for content in (b"\xff\xfe{", b"", b"[" * 100_000):
        (tmp_path / "recorded" / "x" / "cast.json").write_bytes(content)
        with pytest.raises(BadInput, match=r"cast.json: not a recorded run"):
            newest("cast.json", CastRun)
    (tmp_path / "recorded" / "x" / "cast.json").unlink()
    (tmp_path / "recorded" / "x" / "cast.json").mkdir()
    with pytest.raises(BadInput, match=r"cast.json: cannot be read"):
        newest("cast.json", CastRun)
