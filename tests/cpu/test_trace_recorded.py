"""The traces recorded on an H200, stock and patched: what the report and the diff say of each."""

import functools
import json

import msgspec
import pytest

from kvlab.cli import main
from kvlab.data import recorded
from kvlab.trace import read, report
from kvlab.trace.diff import diff
from kvlab.trace.recording import Recording, Try

TRACES = recorded("h200-traces-2")
EARLIER = recorded("h200-traces")
SHARE = recorded("h200-69")


@functools.cache
def told(path):
    return report(read(path))


def pairs():
    """(stock, patched, policy) of every recorded batch."""
    for path in sorted((*TRACES.glob("*-off/*.gz"), *EARLIER.glob("*-off/*.gz"))):
        for policy in ("exact", "fast"):
            run = path.parent.name.removesuffix("-off")
            patched = path.parents[1] / f"{run}-{policy}" / path.name
            if patched.exists():
                name = f"{path.parents[1].name} {run} {policy} {path.name.split('.')[0]}"
                yield pytest.param(path, patched, policy, id=name)
    for policy in ("exact", "fast"):
        (path,) = (SHARE / "off").glob("*.gz")
        yield pytest.param(path, SHARE / policy / path.name, policy, id=f"69 {policy}")


@pytest.mark.parametrize(("stock", "patched", "policy"), list(pairs()))
def test_the_cast_of_the_pool_is_in_every_stock_step_and_in_no_patched_one(stock, patched, policy):
    before, after = told(stock), told(patched)
    assert before.kv_cast.copies_per_step == 78
    assert before.kv_cast.pool_slots == 495_552
    assert before.kv_cast.row_bytes == 576
    assert before.kv_cast.ms_per_step == pytest.approx(67.0, rel=0.015)
    assert after.kv_cast is None
    change = diff(before, after)
    assert change.kv_cast_gone
    cast = change.categories["dtype cast"]
    # Decode by `fused` casts nothing; `exact` keeps a cast of the slots in use, and shows it in this class.
    limit = 0.005 if any("mla_" in name for name in change.appeared) else 0.02
    assert cast.after_ms < limit * change.after_step_ms
    assert cast.after_share < limit
    assert before.unclassified == after.unclassified == []
    # Nothing but the cast explains the difference: the rest together moved by less than a tenth of it.
    rest = [abs(c.delta_ms) for name, c in change.categories.items() if name != "dtype cast"]
    assert sum(rest) < 0.1 * (cast.before_ms - cast.after_ms)
    assert told(patched).step_ms < 0.35 * told(stock).step_ms or not after.cuda_graphs


FOLDERS = sorted(p for d in (TRACES, EARLIER, SHARE) for p in d.iterdir() if p.is_dir())


def test_every_way_to_serve_is_recorded_stock_and_patched():
    ways = {
        f"{backend}-{how}-{policy}/decode-b{batch}-c100.trace.json.gz"
        for backend in ("flashinfer", "fa3")
        for how in ("graphs", "eager")
        for policy in ("off", "exact", "fast")
        for batch in (1, 16)
    }
    found = {f"{p.parent.name}/{p.name}" for d in (TRACES, EARLIER) for p in d.glob("*/*.gz")}
    assert ways <= found
    assert max(p.stat().st_size for d in (TRACES, EARLIER) for p in d.rglob("*.gz")) < 200_000


def newest(run, batch):
    name = f"{run}/decode-b{batch}-c100.trace.json.gz"
    return next(d / name for d in (TRACES, EARLIER) if (d / name).exists())


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("backend", ["flashinfer", "fa3"])
def test_eager_steps_have_the_same_casts_and_wait_for_their_host(backend, batch):
    eager, graphs = (told(newest(f"{backend}-{how}-off", batch)) for how in ("eager", "graphs"))
    assert (eager.cuda_graphs, graphs.cuda_graphs) == (False, True)
    assert eager.kv_cast.pool_slots == graphs.kv_cast.pool_slots
    assert eager.kv_cast.ms_per_step == pytest.approx(graphs.kv_cast.ms_per_step, rel=0.02)
    assert eager.kv_cast.launched_from == ["aten::copy_"]
    assert eager.busy_ms == pytest.approx(graphs.busy_ms, rel=0.02)
    assert eager.idle_ms > eager.busy_ms
    (note,) = (n for n in diff(eager, graphs).notes if "waits for its host" in n)
    assert note.startswith("before, ")
    assert f"{eager.busy_ms:.2f} ms before and {graphs.busy_ms:.2f} after" in note
    assert not any("host" in n for n in diff(graphs, graphs).notes)


def test_a_folder_of_several_batches_is_no_folder_of_ranks(capsys):
    with pytest.raises(SystemExit) as e:
        main(["trace", "diff", str(TRACES / "fa3-graphs-off"), str(TRACES / "fa3-graphs-fast")])
    assert e.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "2 traces of rank 0 (decode-b1-c100.trace.json.gz, decode-b16-c100.trace.json.gz)" in said


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda p: p.name)
def test_each_says_how_it_was_patched(folder):
    kept = msgspec.json.decode((folder / "provenance.json").read_bytes(), type=Recording)
    policy = folder.name.rpartition("-")[2]
    assert kept.provenance.kvlab_patch == kept.request["patch"] == kept.patch["strategy"] == policy
    assert set(kept.provenance.gpus) == {"NVIDIA H200"}
    for path in folder.glob("*.gz"):
        assert path.name in kept.files


def test_the_share_of_the_source_text_is_measured():
    kept = told(SHARE / "off" / "decode-b20-c100.trace.json.gz")
    assert kept.kv_cast.share == pytest.approx(0.69, abs=0.005)
    assert kept.step_ms - kept.kv_cast.ms_per_step == pytest.approx(29.4, abs=0.2)
    tries = json.loads((SHARE / "tries.json").read_text())
    every = [msgspec.convert(t, Try) for run in tries["runs"] for t in run["tries"]]
    nearest = min(every, key=lambda t: abs(t.share - tries["wanted_share"]))
    assert (nearest.batch, nearest.share) == (20, pytest.approx(kept.kv_cast.share))
    assert tries["kept"] == "off/decode-b20-c100.trace.json.gz"
