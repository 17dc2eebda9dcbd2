"""The gap analysis: bounds by hand, the verdict's rule, the recorded step, odd input, live timings."""

import json
import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab import cli, models
from kvlab import suspects as s
from kvlab.errors import BadInput
from kvlab.suspects import recorded
from kvlab.suspects.analysis import Measured
from kvlab.suspects.bounds import all_reduce_us, bounds, full_cast_ms, message_bytes
from kvlab.suspects.cases import analyse_case, elsewhere
from kvlab.suspects.results import LiveRun, Product, Reduce, Shape, Small, step_ms
from kvlab.suspects.shapes import distinct_experts, linears
from kvlab.weights import weights

GLM5 = models.load("glm-5")


@pytest.fixture
def run(capsys):
    def run(*args):
        with pytest.raises(SystemExit) as done:
            cli.main(["suspects", *map(str, args)])
        out = capsys.readouterr()
        return done.value.code, out.out, out.err

    return run


@pytest.mark.parametrize("model", ["glm-5", "deepseek-v3", "kimi-k2"])
@pytest.mark.parametrize("tp", [1, 8])
def test_the_products_of_a_token_read_the_weights_that_kvlab_counts(model, tp):
    geometry = models.load(model)
    read = sum(x.weights for x in linears(geometry, tp=tp, batch=1))
    assert read * 2 == pytest.approx(weights(geometry).rank_bytes(tp=tp, mlp="bf16", other="bf16"), abs=2)


def test_a_case_reads_the_bytes_of_its_formats():
    found = bounds(s.case()[0])
    read = found["gemm"].bytes + found["experts"].bytes
    assert read == pytest.approx(weights(GLM5).rank_bytes(tp=8, mlp="nvfp4", other="bf16"), abs=8)
    # NVFP4: 9 bytes for 16 weights; eight experts of 3 x 6144 x 2048 in each of 75 layers, over eight ranks.
    assert found["experts"].bytes == 75 * 3 * 6144 * 2048 * 9 // 16
    fp8 = bounds(s.case(mlp="fp8")[0])["experts"]
    assert fp8.bytes * 9 == found["experts"].bytes * 16
    assert found["experts"].ms == pytest.approx(1e3 * found["experts"].bytes / 1.792e12)
    # A token's products: two operations a weight.
    assert found["experts"].flops == 2 * 75 * 3 * 6144 * 2048


def test_a_big_batch_is_bound_by_operations():
    many = bounds(s.case(gpu="h200", mlp="bf16", batch=4096, context=100)[0])
    assert many["gemm"].by == "operations"
    # Each expert sees 128 of those tokens, fewer than the card's operations a byte.
    assert many["experts"].by == "bytes"
    assert bounds(s.case(gpu="h200", mlp="bf16")[0])["gemm"].by == "bytes"


@given(st.integers(1, 300), st.integers(1, 8))
@settings(derandomize=True, max_examples=60)
def test_distinct_experts_grow_with_the_batch_to_all_of_them(batch, top_k):
    found = distinct_experts(256, top_k, batch)
    assert distinct_experts(256, top_k, 1) == pytest.approx(top_k)
    assert min(256, top_k) - 1e-6 <= found <= min(256, top_k * batch) + 1e-6
    assert found < distinct_experts(256, top_k, batch + 1)


def test_distinct_experts_are_those_of_random_routing():
    import random

    rng = random.Random(0)
    seen = [len({e for _ in range(16) for e in rng.sample(range(256), 8)}) for _ in range(400)]
    assert sum(seen) / len(seen) == pytest.approx(distinct_experts(256, 8, 16), rel=0.01)


def test_an_all_reduce_by_hand():
    ring = all_reduce_us("ring", 8, 12_288, bandwidth=63e9, base_us=3.6, hop_us=1.0)
    assert ring == pytest.approx(3.6 + 14 + 14 / 8 * 12_288 / 63e3)
    one_shot = all_reduce_us("one-shot", 8, 12_288, bandwidth=63e9, base_us=3.6, hop_us=1.0)
    assert one_shot == pytest.approx(3.6 + 1 + 7 * 12_288 / 63e3)
    # Small messages are faster in one hop, large ones around the ring.
    big = [all_reduce_us(a, 8, 2**27, bandwidth=63e9, base_us=3.6, hop_us=1.0) for a in ("ring", "one-shot")]
    assert one_shot < ring
    assert big[0] < big[1]
    assert all_reduce_us("ring", 1, 12_288, bandwidth=63e9, base_us=3.6, hop_us=1.0) == 0


def test_the_whole_pool_is_what_the_memory_chapter_counts():
    one = s.case()[0]
    assert full_cast_ms(one) == pytest.approx(1e3 * 78 * 856_313_856 / 1.792e12)
    assert bounds(one)["cast"].bytes == 78 * 100 * 576 * 3
    assert full_cast_ms(s.case(kv_dtype="bf16")[0]) == 0


def test_the_recorded_step_is_split_without_rest():
    step = recorded.h200_step()
    assert step.shares["cast"].ms == pytest.approx(66.47, rel=0.01)
    assert step.shares["routing"].launches == 150
    assert step.shares["experts"].launches == 225
    assert "communication" not in step.shares
    from kvlab import data
    from kvlab.trace import read, report

    found = report(read(data.recorded("h200-stock") / "decode.trace.json.gz"))
    kernels = sum(share.ms for name, share in step.shares.items() if name != "launches")
    assert kernels == pytest.approx(sum(c.ms_per_step for c in found.categories.values()), rel=1e-3)
    assert step.shares["launches"].ms == pytest.approx(found.step_ms - found.active_ms)


def test_the_source_text_and_the_recorded_rank_leave_the_cast_standing():
    for found in (s.source_text(), s.recorded_rank()):
        assert found.left_standing == ["cast"]
        assert {"gemm", "experts", "routing", "communication"} <= set(found.ruled_out)
        assert found.suspect("cast").share > 0.7
        # Granted all of it at once, the others leave most of the cast unexplained.
        assert found.explained_ms + found.unexplained_ms == pytest.approx(found.step_ms)
        assert found.unexplained_ms > 0.75 * found.suspect("cast").measured_ms
        for one in found.suspects:
            assert one.most_ms >= one.bound_ms, one.name
    # Nothing bounds the gaps between kernels: they are granted what they took on record, times the slack.
    gaps = s.source_text().suspect("launches")
    assert gaps.bound_ms == 0
    assert gaps.most_ms == pytest.approx(s.SLACK * gaps.bound.launches * recorded.h200_step().gap_us / 1e3)
    rank = s.recorded_rank()
    assert rank.step_ms == pytest.approx(77.48, abs=0.01)
    for name in ("gemm", "experts", "routing", "attention", "elementwise"):
        assert rank.suspect(name).measured_ms > rank.suspect(name).bound_ms


def test_without_the_cast_others_become_worth_looking_at():
    found = s.source_text()
    assert found.after_gap_ms == pytest.approx(found.gap_ms - found.suspect("cast").excess_ms)
    assert found.after["communication"] == "worth looking at"
    assert found.after["routing"] == "ruled out"


def test_the_rule_is_the_excess_over_the_gap():
    one, _ = s.case(tp=1, gpu="h200", mlp="bf16")
    floor = s.analyse(one).floor_ms
    gap = 100.0
    for excess, wanted in ((19.9, "ruled out"), (20.1, "worth looking at")):
        measured = {"routing": Measured(ms=bounds(one)["routing"].ms + excess, source="made up")}
        found = s.analyse(one, step_ms=floor + gap, measured=measured)
        assert found.suspect("routing").verdict == wanted
        assert found.suspect("routing").share == pytest.approx(excess / gap)
    # At the factor that it names, a suspect stands on the threshold.
    at = found.suspect("routing")
    assert (at.factor_to_matter - 1) * at.bound_ms == pytest.approx(found.threshold * gap)
    # More slack never clears a suspect, nor does a lower threshold.
    loose, strict = (s.source_text(slack=k, threshold=x) for k, x in ((7, 0.2), (5, 0.1)))
    base = set(s.source_text().left_standing)
    assert base <= set(loose.left_standing)
    assert base < set(strict.left_standing)
    assert s.analyse(one).suspect("cast").verdict == "unknown"


def test_what_others_report_stands_beside_the_bound_and_counts_on_such_a_card():
    found = s.source_text().suspect("communication")
    us, said = recorded.reported_us("rtx-pro-6000", 8, message_bytes(s.case()[0]))
    assert 45 < us < 344
    assert found.elsewhere_ms == found.most_ms == pytest.approx(157 * us / 1e3)
    assert said.source in found.elsewhere_from
    # Outside the reported sizes nothing is claimed.
    assert recorded.reported_us("rtx-pro-6000", 8, 1024) is None
    assert recorded.reported_us("rtx-pro-6000", 4, 12_288) is None
    # Times of another card are shown and grant nothing.
    gemm = s.source_text().suspect("gemm")
    assert gemm.most_ms == pytest.approx(5 * gemm.bound_ms)
    assert "NVIDIA H200" in gemm.elsewhere_from


def test_the_products_alone_add_up_to_those_of_the_step_and_two_cards_reduce():
    name, run = recorded.newest_run()
    assert run.device == "NVIDIA H200"
    alone = step_ms(run, "gemm", batch=1, fmt="bf16")
    assert alone == pytest.approx(s.recorded_rank().suspect("gemm").measured_ms, rel=0.05)
    small = [r for r in run.reduces if r.ranks == 2 and r.bytes == 12_288]
    assert len(small) == 1
    assert small[0].correct
    rank = s.recorded_rank().suspect("communication")
    assert rank.elsewhere_ms == pytest.approx(157 * small[0].us / 1e3)
    assert name in rank.elsewhere_from
    refused = {p.reason for shape in run.shapes for p in shape.products if p.format == "nvfp4"}
    assert refused == {"no nvfp4 tensor cores before SM100; this card is SM90"}


def test_a_part_that_overran_its_bound_on_record_is_granted_as_much():
    found = s.source_text().suspect("attention")
    seen = s.recorded_rank().suspect("attention")
    assert seen.measured_ms / seen.bound_ms > s.SLACK
    assert found.most_ms / found.bound_ms == pytest.approx(seen.measured_ms / seen.bound_ms)


def test_a_factor_of_launches_is_not_granted_to_bytes():
    found = analyse_case(*s.case(batch=64, context=4096), step_ms=500).suspect("attention")
    assert found.bound.by == "bytes"
    assert found.most_ms == pytest.approx(s.SLACK * found.bound_ms)


def test_nobody_is_granted_more_than_the_gap():
    found = analyse_case(*s.case(batch=64, context=4096), step_ms=100)
    assert max(x.share for x in found.suspects) == pytest.approx(1)
    assert found.unexplained_ms == 0
    # Nobody measured the cast of that step, so nothing is said about the step without it.
    assert found.after_gap_ms is None
    assert set(found.after.values()) == {"unknown"}


def test_without_cuda_graphs_the_host_is_worth_looking_at():
    found = analyse_case(*s.case(cuda_graphs=False))
    assert found.suspect("launches").bound.by == "the host"
    assert found.suspect("launches").verdict == "worth looking at"


def test_fp4_on_a_hopper_card_is_bound_and_said_so():
    found = analyse_case(*s.case(gpu="h200"))
    assert any("FP4 GEMM cannot run on NVIDIA H200" in n for n in found.notes)
    assert found.suspect("experts").bound.bytes == 75 * 3 * 6144 * 2048 * 9 // 16
    assert found.suspect("experts").verdict == "unknown"


LIVE = LiveRun(
    provenance=msgspec.convert(
        {
            "date": "2026-01-01T00:00:00+00:00",
            "command": "",
            "commit": None,
            "dirty": None,
            "python": "",
            "platform": "",
            "gpus": [],
            "driver": None,
            "versions": {},
            "kvlab": "",
            "kvlab_patch": "unset",
        },
        type=LiveRun.__annotations__["provenance"],
    ),
    device="NVIDIA H200",
    model="glm-5",
    tp=8,
    copy_bandwidth=4e12,
    kernel_us=1.0,
    shapes=[
        Shape(
            batch=1,
            products=[
                Product(
                    name="o",
                    part="attention",
                    format="bf16",
                    m=1,
                    n=1,
                    k=1,
                    groups=1,
                    times=78,
                    bytes=2,
                    us=10.0,
                ),
                Product(
                    name="e",
                    part="experts",
                    format="bf16",
                    m=1,
                    n=1,
                    k=1,
                    groups=8,
                    times=75,
                    bytes=2,
                    us=20.0,
                ),
                Product(
                    name="e",
                    part="experts",
                    format="nvfp4",
                    m=1,
                    n=1,
                    k=1,
                    groups=8,
                    times=75,
                    bytes=2,
                    us=None,
                ),
            ],
            small=[Small(name="r", suspect="routing", times=75, us=4.0)],
        )
    ],
    reduces=[
        Reduce(ranks=8, bytes=12_288, us=20.0, backend="nccl", graph=True, correct=True),
        Reduce(ranks=2, bytes=12_288, us=1.0, backend="nccl", graph=True, correct=False),
    ],
    reduces_skipped=[],
)


def test_a_recorded_microbenchmark_is_found_and_counts_on_its_own_card(tmp_path, monkeypatch):
    root = tmp_path / "recorded" / "h200-suspects"
    root.mkdir(parents=True)
    (root / "suspects.json").write_bytes(msgspec.json.encode(LIVE))
    real = recorded.data.recorded
    monkeypatch.setattr(recorded.data, "recorded", lambda run="": root.parent / run if not run else real(run))
    same = elsewhere(s.case(gpu="h200", mlp="bf16")[0])
    assert same["gemm"].ms == pytest.approx(0.78)
    assert same["experts"].ms == pytest.approx(1.5)
    assert same["routing"].ms == pytest.approx(0.3)
    assert same["communication"].ms == pytest.approx(157 * 0.02)
    assert all(same[n].counts for n in ("gemm", "experts", "routing", "communication"))
    other = elsewhere(s.case()[0])
    assert not other["gemm"].counts
    # No FP4 product ran: what stands beside the experts is not of this run.
    assert "alone" not in other["experts"].source
    # A wrong sum has no time.
    two = elsewhere(s.case(gpu="h200", mlp="bf16", tp=2)[0])
    assert "communication" not in two or two["communication"].ms != pytest.approx(157 * 0.001)
    rank = s.recorded_rank().suspect("communication")
    assert rank.elsewhere_ms == pytest.approx(157 * 0.02)


def test_the_command_answers_in_one_object(run):
    code, out, err = run("--json")
    assert (code, err) == (0, "")
    said = json.loads(out)
    assert said["left_standing"] == said["recorded"]["left_standing"] == ["cast"]
    names = [x["name"] for x in said["suspects"]]
    assert names == [x["name"] for x in said["recorded"]["suspects"]]
    assert said["step_ms"] == 95.6
    assert said["rule"]
    assert said["assumptions"]
    code, out, err = run("--recorded", "--json")
    assert (code, json.loads(out)) == (0, said["recorded"])


def test_the_command_shows_verdicts_and_assumptions(run):
    code, out, _ = run()
    assert code == 0
    for wanted in (
        "ruled out",
        "worth looking at",
        "Left standing: cast.",
        "assumed:",
        "PCIe 5.0 x16",
        "Rule:",
    ):
        assert wanted in out
    code, out, _ = run("--model", "deepseek-v3", "--gpu", "b200", "--step-ms", 40, "--weights-dtype", "fp8")
    assert code == 0
    assert "deepseek-v3, b200, TP 8" in out


def test_a_trace_of_the_step_brings_time_and_kernels(run):
    from kvlab import data

    file = data.recorded("h200-stock") / "decode.trace.json.gz"
    code, out, err = run(
        "--trace", file, "--gpu", "h200", "--tp", 1, "--weights-dtype", "bf16", "--step-ms", 90, "--json"
    )
    # The whole model on one card must read more than fits this step.
    assert code == 0 or "must take" in err
    code, out, _ = run("--trace", file, "--gpu", "h200", "--weights-dtype", "bf16", "--json")
    said = json.loads(out)
    assert code == 0
    assert said["step_ms"] == pytest.approx(77.48, abs=0.01)
    gemm = next(x for x in said["suspects"] if x["name"] == "gemm")
    assert gemm["measured_ms"] == pytest.approx(4.547, abs=0.01)


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        (["--model", "glm-55"], "glm-5"),
        (["--gpu", "voodoo2"], "sheet has"),
        (["--tp", "7"], "do not divide"),
        (["--batch", "0"], "--batch 0"),
        (["--context", "-1"], "--context -1"),
        (["--batch", "5000"], "--slots"),
        (["--weights-dtype", "int3"], "nvfp4"),
        (["--attention-dtype", "x"], "bf16"),
        (["--kv-dtype", "fp4"], "fp8, bf16"),
        (["--all-reduce", "tree"], "ring, one-shot"),
        (["--step-ms", "1"], "must take"),
        (["--slack", "0.5"], "1 or more"),
        (["--threshold", "0"], "above 0"),
        (["--bandwidth", "0"], "more than 0"),
        (["--link-bandwidth", "-3"], "more than 0"),
        (["--link-latency", "-1"], "0 or more"),
        (["--trace", "none.json"], "none.json"),
        (["--live", "--batches", "a"], "1,16"),
        (["--live", "--device", "tpu"], "cuda or cpu"),
        (["--model", "deepseek-v2"], "missing"),
        (["--batch", "many"], "--batch"),
        (["--slack", "nan"], "--slack"),
        (["--step-ms", "inf"], "--step-ms"),
        (["--step-ms", "nan"], "--step-ms"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(run, args, wanted):
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert wanted in err


def test_live_without_a_gpu_says_how_to_run_it_here(run, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, err = run("--live")
    assert code == 2
    assert "--device cpu" in err


SMALL = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "hidden_size": 64,
    "vocab_size": 128,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}


def test_the_microbenchmarks_run_on_a_cpu_with_gloo(tmp_path):
    from kvlab.suspects.live import measure

    config = tmp_path / "config.json"
    config.write_text(json.dumps(SMALL))
    found = measure(model=str(config), tp=2, batches=(1, 3), device="cpu", ranks=(2,))
    assert [x.batch for x in found.shapes] == [1, 3]
    for shape in found.shapes:
        timed = [p for p in shape.products if p.us is not None]
        assert {p.format for p in timed} == {"bf16"}
        assert all(p.us > 0 and p.bytes == 2 * p.n * p.k * p.groups for p in timed)
        assert all(p.reason for p in shape.products if p.us is None)
        assert {x.suspect for x in shape.small} == {"routing", "elementwise"}
    assert found.reduces_skipped == []
    assert [(r.ranks, r.bytes, r.correct) for r in found.reduces][:2] == [(2, 128, True), (2, 384, True)]
    assert found.provenance.kvlab_patch
    assert math.isfinite(found.copy_bandwidth)
    # What is written reads back.
    assert msgspec.json.decode(msgspec.json.encode(found), type=LiveRun) == found


def test_bad_formats_are_refused():
    from kvlab.suspects.live import measure

    with pytest.raises(BadInput, match="int8"):
        measure(formats=("int8",), device="cpu")
