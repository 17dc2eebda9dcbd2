"""`kvlab bench step`: which processes a plan becomes, how runs merge, what the command refuses."""

import gzip
import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab import cli
from kvlab.bench import step, step_results
from kvlab.bench.step import Plan
from kvlab.bench.step_results import Process, Step, StepRun
from kvlab.errors import BadInput
from kvlab.provenance import Provenance


def provenance(date: str = "2026-01-01T00:00:00+00:00", patch: str = "off") -> Provenance:
    return Provenance(
        date=date,
        command="x",
        commit=None,
        dirty=None,
        python="3",
        platform="x",
        gpus=["G"],
        driver="1",
        versions={"sglang": "0.5.15.post1"},
        kvlab="0",
        kvlab_patch=patch,
    )


def one(strategy: str = "stock", ms: float | None = 1.0, **changed) -> Step:
    known = {
        "strategy": strategy,
        "model": "glm-5",
        "backend": "flashinfer",
        "cuda_graphs": True,
        "batch": 1,
        "context": 100,
        "pool": 495_552,
        "page_size": 1,
        "layers": 78,
        "heads": 8,
        "tp": 8,
        "step_ms": ms,
        "reason": "" if ms else "too large",
    }
    return Step(**{**known, **changed})


def a_run(*steps: Step, date: str = "2026-01-01T00:00:00+00:00") -> StepRun:
    made = Process(provenance=provenance(date), strategy=steps[0].strategy, memory={}, patch={})
    return StepRun(provenance=made.provenance, runs=list(steps), processes=[made])


def test_a_plan_is_one_process_a_strategy_and_pool(tmp_path):
    plan = Plan(strategies=("stock", "exact", "control_bf16"), pools=(65_536, 495_552))
    made = step.children(plan, tmp_path, tmp_path)
    assert [(c.strategy, c.pool) for c in made][:2] == [("stock", 65_536), ("exact", 65_536)]
    assert len({(c.strategy, c.pool) for c in made}) == len(made) == 6
    assert len({c.out for c in made}) == 6
    assert made[0].points[:3] == ((1, 100), (16, 100), (64, 100))


@given(
    pool=st.integers(2_000, 1_200_000),
    batches=st.lists(st.integers(1, 64), min_size=1, max_size=3),
    contexts=st.lists(st.integers(1, 70_000), min_size=1, max_size=3),
    page_size=st.sampled_from([1, 16, 64]),
)
def test_the_control_holds_what_the_fp8_pool_holds(pool, batches, contexts, page_size):
    plan = Plan(batches=tuple(batches), contexts=tuple(contexts), page_size=page_size)
    slots = step.control_pool(plan, pool)
    steps = step.WARM_UP + plan.steps + step.GRAPH_STEPS

    def held(batch, context, size):
        return batch * -(-(context + steps + 1) // page_size) * page_size <= size

    assert slots % page_size == 0
    for batch in batches:
        for context in contexts:
            # Nearly full pools may hold a point that the estimate leaves out, by a page a request.
            if batch * (context + steps + 2 + page_size) <= pool:
                assert held(batch, context, slots)


@pytest.mark.parametrize(
    ("plan", "names"),
    [
        (Plan(strategies=("stok",)), "--strategies: stok"),
        (Plan(strategies=()), "--strategies: none"),
        (Plan(backend="triton"), "--backend triton"),
        (Plan(page_size=64), "--page-size 64"),
        (Plan(page_size=64, backend="fa3", pools=(100,)), "--page-size 64"),
        (Plan(batches=(0,)), "--batches"),
    ],
)
def test_what_cannot_be_served_is_named(plan, names):
    with pytest.raises(BadInput, match=names):
        plan.check()


def test_the_newest_measurement_of_a_step_counts():
    old = a_run(one(ms=2.0), one("exact", ms=3.0), date="2026-01-01T00:00:00+00:00")
    new = a_run(one(ms=1.0), date="2026-01-02T00:00:00+00:00")
    merged = step_results.merge([new, old])
    assert merged.provenance.date == "2026-01-02T00:00:00+00:00"
    assert {s.strategy: s.step_ms for s in merged.runs} == {"stock": 1.0, "exact": 3.0}
    for s in merged.runs:
        want = "2026-01-02" if s.strategy == "stock" else "2026-01-01"
        assert merged.processes[s.process].provenance.date.startswith(want)


def test_a_step_that_was_not_measured_does_not_hide_one_that_was():
    old = a_run(one(ms=2.0))
    new = a_run(one(ms=None), date="2026-01-02T00:00:00+00:00")
    assert [s.step_ms for s in step_results.merge([old, new]).runs] == [2.0]


@given(st.lists(st.tuples(st.sampled_from(["stock", "exact"]), st.integers(1, 3)), min_size=1, max_size=6))
def test_merging_again_changes_nothing(points):
    runs = [
        a_run(one(s, ms=float(i + 1), batch=b), date=f"2026-01-{i + 1:02}T00:00:00+00:00")
        for i, (s, b) in enumerate(points)
    ]
    once = step_results.merge(runs)
    assert step_results.merge([once]) == once
    assert len({s.key for s in once.runs}) == len(once.runs)
    assert {s.process for s in once.runs} == set(range(len(once.processes)))


def test_find_wants_one_answer():
    run = a_run(one(ms=2.0), one(ms=4.0, pool=65_536), one("exact", ms=None))
    assert run.find("stock", 1, 100, pool=65_536).step_ms == 4.0
    assert run.find("exact", 1, 100) is None
    with pytest.raises(BadInput, match="2 steps of stock"):
        run.find("stock", 1, 100)


def kvlab(capsys, *args) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main([str(a) for a in args])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_the_command_merges_and_prints(tmp_path, capsys):
    for i, run in enumerate([a_run(one(ms=77.5)), a_run(one("exact", ms=11.1, low_ms=11.0, high_ms=11.2))]):
        step_results.write(tmp_path / f"{i}.json", run)
    out = tmp_path / "all" / "step.json"
    out.parent.mkdir()
    said = kvlab(capsys, "bench", "step", "--merge", tmp_path, "--out", out, "--json")
    assert msgspec.json.decode(said, type=StepRun) == step_results.read(out)
    shown = kvlab(capsys, "bench", "step", "--merge", out)
    assert "77.50" in shown
    assert "11.10 (11.00-11.20)" in shown


def test_runs_with_more_in_them_are_read_too(tmp_path):
    whole = json.loads(msgspec.json.encode(a_run(one())))
    (tmp_path / "run.json").write_text(json.dumps({**whole, "identity": {}, "case": {}}))
    assert step_results.read(tmp_path / "run.json").runs[0].step_ms == 1.0


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"runs": 1}'])
def test_what_is_no_run_is_refused_by_name(tmp_path, content):
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=r"broken\.json: not a run"):
        step_results.read(path)


@pytest.mark.parametrize("text", ["", "1,x", "0", "-1"])
def test_numbers_are_whole_and_positive(text):
    with pytest.raises(BadInput, match="--pools"):
        step.numbers("--pools", text)


def test_a_process_is_told_apart_by_its_own_command():
    from kvlab.bench.step_child import child_command

    plan = Plan(strategies=("exact",), batches=(1, 16), contexts=(100,), cuda_graphs=False)
    [child] = step.children(plan, Path("rank"), Path("out"))
    words = child_command(child)
    assert words[:5] == ["python", "-m", "kvlab", "bench", "step"]
    assert "--no-cuda-graphs" in words
    assert not any("/" in w for w in words)


@pytest.mark.parametrize("name", ["exact.trace.json.gz", "exact.trace.json"])
def test_a_step_s_trace_names_itself_and_no_path_of_this_host(tmp_path, name):
    import torch

    from kvlab.bench.sglang_rank import export
    from kvlab.trace import read

    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, with_stack=True, acc_events=True) as profiler:
        torch.ones(4).add_(1)
    export(profiler, tmp_path / name)
    assert [p.name for p in tmp_path.iterdir()] == [name]
    raw = (tmp_path / name).read_bytes()
    text = gzip.decompress(raw) if name.endswith(".gz") else raw
    assert json.loads(text)["traceName"] == "exact.trace.json"
    assert str(tmp_path).encode() not in text
    assert read(tmp_path / name).ranks
