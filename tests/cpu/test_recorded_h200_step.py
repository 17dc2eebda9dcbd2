"""The recorded decode steps of the patch on an H200: what they prove, held against what was promised."""

import gzip
import json
from functools import cache

import pytest

from kvlab import data
from kvlab.bench import step_results

FOLDER = data.recorded("h200-step")
MAIN = {"model": "glm-5", "backend": "flashinfer", "page_size": 1, "cuda_graphs": True}
# Two processes on one card: neither the host nor the GPU repeats itself closer than this.
NOISE = 1.02


@cache
def run(name="step.json"):
    return step_results.read(FOLDER / name)


@cache
def read(name):
    return json.loads((FOLDER / name).read_text("utf-8"))


def steps(strategy, **only):
    """The measured steps of one server's strategy, by (batch, context)."""
    found = [
        s
        for s in run().runs
        if s.strategy == strategy
        and s.step_ms is not None
        and all(getattr(s, k) == v for k, v in only.items())
    ]
    by_point = {(s.batch, s.context): s for s in found}
    assert len(by_point) == len(found)
    return by_point


def case(strategy, **changed):
    whole = {"strategy": strategy, "layers": 78, "pool": 495_552, "burn": 0, **MAIN, **changed}

    def is_it(run):
        return all(run["case"][k] == v for k, v in whole.items())

    return is_it


def test_stock_and_the_control_were_patched_nowhere_and_say_so():
    seen = set()
    for process in run().processes:
        is_patched = any(s["state"] == "patched" for s in process.patch["sites"])
        unpatched = process.strategy in ("stock", "control_bf16")
        assert is_patched != unpatched
        assert (process.provenance.kvlab_patch == "off") == unpatched
        assert (process.patch["strategy"] == "off") == unpatched
        if unpatched:
            assert process.patch["counters"]["calls"] == {}
        else:
            assert process.provenance.kvlab_patch == process.strategy
            assert process.patch["counters"]["bytes_avoided"] > 0
        seen.add(process.strategy)
    assert seen == set(step_results.STRATEGIES) - {"fused"}


@pytest.mark.parametrize(
    ("strategy", "serves"),
    [
        ("exact", "shadow"),
        ("shadow", "shadow"),
        ("gather", "gather"),
        ("fast", "fused"),
        ("native", "native"),
    ],
)
def test_what_served_is_what_was_asked_for(strategy, serves):
    found = steps(strategy, **MAIN)
    assert found
    for step in found.values():
        assert step.served["flashinfer_mla.decode"] == serves
        served = run().processes[step.process].patch["counters"]["calls"]["flashinfer_mla.decode"]
        assert set(served) == {serves}


def test_every_strategy_has_every_point_that_fits():
    points = {(1, 100), (16, 100), (64, 100), (1, 8192), (16, 8192), (1, 65_536)}
    # `fast` decodes with fused, which by itself was not recorded.
    for strategy in set(step_results.STRATEGIES) - {"fused"}:
        assert set(steps(strategy, **MAIN)) == points
    without = [s for s in run().runs if s.step_ms is None]
    assert without
    assert all("slots of a pool" in s.reason for s in without)


def test_stock_pays_for_its_pool_and_exact_does_not():
    stock, exact = steps("stock", **MAIN), steps("exact", **MAIN)
    assert stock[1, 100].step_ms / exact[1, 100].step_ms >= 6.9


def test_exact_keeps_near_the_control():
    exact, control = steps("exact", **MAIN), steps("control_bf16", **MAIN)
    assert exact[1, 100].replay_ms <= NOISE * control[1, 100].replay_ms
    assert exact[1, 8192].step_ms <= 1.07 * control[1, 8192].step_ms


def test_fast_is_nowhere_slower_than_the_control():
    fast, control = steps("fast", **MAIN), steps("control_bf16", **MAIN)
    for point, step in fast.items():
        assert step.step_ms <= NOISE * control[point].step_ms
        assert step.replay_ms <= NOISE * control[point].replay_ms


@pytest.mark.parametrize(
    ("file", "pools"), [("pools.json", {65_536, 495_552}), ("pools-2.json", {65_536, 1_000_000})]
)
@pytest.mark.parametrize("context", [100, 8192])
def test_a_patched_step_does_not_know_its_pool(file, pools, context):
    its = {s.pool: s.replay_ms for s in run(file).runs if (s.strategy, s.context) == ("exact", context)}
    assert set(its) == pools
    assert max(its.values()) <= 1.01 * min(its.values())


def test_stock_s_step_grows_with_its_pool():
    [small] = [s for s in run("pools.json").runs if (s.strategy, s.context) == ("stock", 100)]
    [large] = [s for s in run("pools-2.json").runs if (s.strategy, s.context) == ("stock", 100)]
    middle = steps("stock", **MAIN)[1, 100]
    slope = (middle.replay_ms - small.replay_ms) / (middle.pool - small.pool)
    assert large.replay_ms == pytest.approx(middle.replay_ms + slope * (large.pool - middle.pool), rel=0.05)


def test_the_control_of_a_comparison_repeats_itself_and_rows_matter():
    stocks = [r for r in read("identity.json")["runs"] if r["case"]["strategy"] == "stock"]
    assert len(stocks) >= 4
    for found in stocks:
        assert found["patch"]["strategy"] == "off"
        assert found["controls"]["rerun_is_identical"]
        assert found["controls"]["a_zeroed_row_changes_logits"]
        assert found["controls"]["a_zeroed_row_changes_tokens"]
        assert all(s["finite"] for s in found["sections"].values())


def test_exact_gives_stock_s_tokens_and_logits_to_the_bit():
    compared = read("identity.json")["compared"]
    exact = [c for c in compared if c["case"]["strategy"] in ("exact", "gather", "shadow")]
    assert all(c["identical"] for c in exact)
    for strategy in ("exact", "gather"):
        [main] = [c for c in exact if case(strategy)(c)]
        assert main["tokens"] >= 16 * 256
    servers = {(c["case"]["backend"], c["case"]["page_size"], c["case"]["cuda_graphs"]) for c in exact}
    assert servers >= {("flashinfer", 1, True), ("fa3", 1, True), ("fa3", 64, True)}
    [main] = [r for r in read("identity.json")["runs"] if case("stock")(r)]
    together = main["sections"]["together"]
    assert (len(set(together["prompts"])), together["steps"]) == (16, 256)
    # Greedy answers that all run into one token would compare nothing.
    assert together["distinct_tokens"] > 1000


def test_graphs_off_gives_the_same_bits_and_holds_no_more_memory():
    eager = read("identity-eager.json")
    [stock, exact] = [r for r in eager["runs"] if not r["case"]["cuda_graphs"]]
    assert (stock["case"]["strategy"], exact["case"]["strategy"]) == ("stock", "exact")
    assert stock["patch"]["strategy"] == "off"
    assert all(r["controls"]["rerun_is_identical"] for r in (stock, exact))
    assert stock["controls"]["a_zeroed_row_changes_tokens"]
    [compared] = eager["compared"]
    assert compared["identical"]
    assert compared["tokens"] >= 16 * 32
    stages = {r["case"]["strategy"]: r["stages"] for r in read("memory-eager.json")["runs"]}
    for kind in ("peak_reserved", "peak_allocated"):
        highest = {s: max(stage[kind] for stage in of.values()) for s, of in stages.items()}
        assert highest["exact"] <= highest["stock"]


def test_slots_past_32_bits_of_bytes_and_of_values_are_right():
    huge = [c for c in read("identity.json")["compared"] if c["case"]["pool"] == 4_000_000]
    assert {c["case"]["strategy"] for c in huge if c["identical"]} >= {"exact", "gather"}
    assert all(c["case"]["burn"] * 576 > 2**31 for c in huge)
    [errors] = [e for e in read("identity.json")["errors"] if e["case"]["pool"] == 4_000_000]
    assert all(b["a_slot"] * 576 > 2**31 for b in errors["batches"])


def test_fast_is_as_near_to_float32_as_stock_in_every_layer():
    found = read("identity.json")["errors"]
    assert {e["case"]["pool"] for e in found} >= {495_552, 4_000_000}
    for case_ in found:
        for batch in case_["batches"]:
            assert len(batch["layers"]) == case_["case"]["layers"]
            for layer in batch["layers"]:
                assert 0 < layer["ours"]["all"] <= layer["stock"]["all"]


def peak(run, *until):
    stages = run["stages"]
    names = list(stages) if not until else list(stages)[: list(stages).index(until[0]) + 1]
    return max(stages[n]["peak_reserved"] for n in names)


def test_the_patch_takes_no_more_memory_than_stock():
    runs = read("memory.json")["runs"]
    [stock] = [r for r in runs if case("stock")(r)]
    [exact] = [r for r in runs if case("exact")(r)]
    assert peak(exact) <= peak(stock)


def test_fused_needs_no_wide_layer_until_an_extend_asks_for_one():
    runs = read("memory.json")["runs"]
    [stock] = [r for r in runs if case("stock")(r)]
    [fast] = [r for r in runs if case("fast")(r)]
    assert peak(stock, "decoded") - peak(fast, "decoded") >= 2**29


def test_the_machines_of_the_open_comparison_tuned_stock_s_sum_of_experts_apart():
    """Bits of two machines compare only where torch.compile chose the same blocks, as the README says."""
    grids = []
    for name in ("exact.trace.json.gz", "exact-2.trace.json.gz"):
        events = json.loads(gzip.decompress((FOLDER / name).read_bytes()))["traceEvents"]
        sums = [
            e
            for e in events
            if e["name"].startswith("triton_per_fused_copy__mul_sum") and e["cat"] == "kernel"
        ]
        assert len(sums) == 2 * 75
        grids.append({tuple(e["args"]["grid"]) for e in sums})
    assert grids == [{(192, 1, 1)}, {(48, 1, 1)}]
