"""The recorded H200 step explained, and the same step as other profilers would have written it."""

import copy
import gzip
import json
import re
from pathlib import Path

import pytest

from kvlab.data import recorded
from kvlab.errors import BadInput
from kvlab.trace import build, classes, read, report, reports, slowest, spread
from kvlab.trace.attribute import origins
from kvlab.trace.classes import classify, rules, short
from kvlab.trace.layers import layers
from kvlab.trace.steps import find
from kvlab.trace.timeline import united

REAL = recorded("h200-stock") / "decode.trace.json.gz"
TEXT = gzip.decompress(REAL.read_bytes())
CONTROL_MS = float(
    re.search(r"control, BF16 KV.*?\| 100 \|.*?\| ([\d.]+) ms", (REAL.parent / "README.md").read_text())[1]
)
GPU = ("kernel", "gpu_memcpy", "gpu_memset")


@pytest.fixture(scope="module")
def raw():
    return json.loads(TEXT)


@pytest.fixture(scope="module")
def recorded_step():
    return report(read(REAL))


def made(raw, events, **meta):
    return build([json.dumps({**raw, "traceEvents": events, **meta}).encode()], "made")


def kernels(raw):
    return [e for e in raw["traceEvents"] if e.get("cat") in GPU]


def shifted(events, us, ids, **changes):
    out = []
    for e in events:
        e = copy.deepcopy(e)
        if "ts" in e:
            e["ts"] += us
        for key in ("correlation", "External id"):
            if key in e.get("args", {}):
                e["args"][key] += ids
        out.append({**e, **changes})
    return out


def is_cast(e):
    return e["name"].startswith("void at::native::unrolled") and e["args"]["grid"][0] > 1000


def test_the_recorded_step(recorded_step, raw):
    r = recorded_step
    cast = r.kv_cast
    durations = [e["dur"] for e in kernels(raw) if is_cast(e)]
    assert len(durations) == 78
    assert (r.steps, r.layers, r.cuda_graphs, r.batch) == (1, 78, True, [1])
    assert cast.copies_per_step == 78
    assert cast.ms_per_step == pytest.approx(sum(durations) / 1e3)
    assert cast.ms_per_step == pytest.approx(66.5, rel=0.01)
    assert round(cast.share, 2) == 0.85
    assert cast.spread < 0.01
    assert r.predicted_step_ms == pytest.approx(CONTROL_MS, rel=0.10)
    assert r.step_ms == pytest.approx(77.65, rel=0.01)  # the step without the profiler, by the README
    assert (r.device, r.backend) == ("NVIDIA H200", "flashinfer")


def test_pool_and_row_to_the_slot_from_the_launch_grid(recorded_step):
    cast = recorded_step.kv_cast
    assert (cast.pool_slots, cast.pool_rows, cast.row_bytes) == (495_552, 495_553, 576)
    assert cast.pool_slots_from == "launch grid"
    assert "512 + 64" in cast.row_bytes_from
    low, high = cast.elements_per_copy
    assert low <= 495_553 * 576 <= high
    assert high - low < 576
    assert cast.bytes_per_copy == 3 * 576 * 495_553
    # The duration at the bandwidth measured outside the loop is an independent, coarser witness.
    assert cast.pool_slots_by_duration == pytest.approx(495_552, rel=0.03)
    assert cast.source_dtype == "FP8"


def test_every_class_is_shown_and_nothing_is_in_other_unlisted(recorded_step, raw):
    r = recorded_step
    names = {e["name"] for e in kernels(raw)}
    assert {k.name for k in r.kernels} == names
    assert r.unclassified == []
    assert sum(c.launches for c in r.categories.values()) == len(kernels(raw))
    assert {"other", "dtype cast", "attention", "GEMM", "MoE", "norm/activation", "copy", "sampling"} <= set(
        r.categories
    )
    in_other = {k.label for k in r.kernels if k.category == "other"}
    assert in_other == {"embedding lookup", "bookkeeping: positions, lengths, indices"}
    busy = sum(c.ms_per_step for c in r.categories.values())
    assert busy == pytest.approx(r.busy_ms, rel=0.01)
    assert classify("a_kernel_of_tomorrow").known is False
    unknown = made(
        raw, [{**e, "name": "new_thing"} if "fused_moe" in e["name"] else e for e in raw["traceEvents"]]
    )
    assert report(unknown).unclassified == ["new_thing"]
    assert report(unknown).categories["other"].launches > 100


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<>>>", "attention"),
        ("void flash::prepare_varlen_num_blocks_kernel<1, true>(int, int)", "attention"),
        (
            "void flashinfer::mla::BatchMLAPagedAttentionKernel<flashinfer::mla::KernelTraits<false>>",
            "attention",
        ),
        ("_fwd_grouped_kernel_stage1", "attention"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("void sglang::cross_device_reduce_1stage<__nv_bfloat16, 8>(void*)", "communication"),
        ("void moe::dev::routing::routingDeepSeek::routingMainKernel<>", "MoE"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64", "GEMM"),
        ("deep_gemm::sm90_fp8_gemm_1d2d_impl<>", "GEMM"),
        ("void flashinfer::sampling::TopKTopPSamplingFromProbKernel<512u>", "sampling"),
        ("Memcpy DtoH (Device -> Pinned)", "copy"),
        ("_per_token_group_quant_8bit", "norm/activation"),
        ("triton_poi_fused__to_copy_bitwise_and_exp2_index_mul_where_0", "dtype cast"),
        ("_cast", "dtype cast"),
    ],
)
def test_kernels_of_other_backends(name, cls):
    assert classify(name).cls == cls


def test_kernels_of_ours_are_known_as_ours():
    kernels = Path(classes.__file__).resolve().parents[1] / "kernels"
    triton = [n for f in kernels.glob("*.py") for n in re.findall(r"(?m)^def (kvlab_\w+)\(", f.read_text())]
    sources = (kernels / "cuda").glob("mla_*.cu")
    cuda = [n for f in sources for n in re.findall(r"(?s)__global__.*?\b(\w*mla_\w+)\(", f.read_text())]
    assert len(triton) > 5
    assert len(cuda) >= 2
    for name in triton + cuda:
        assert classify(name).label.startswith("kvlab: "), name


def test_every_rule_is_reachable():
    labels = [kind.label for _, kind in rules()]
    assert len(labels) == len(set(labels))
    assert (
        short("void at::native::vectorized_elementwise_kernel<4, x>(int)") == "vectorized_elementwise_kernel"
    )


def test_united():
    assert united([(0.0, 10.0), (2.0, 3.0), (5.0, 12.0), (20.0, 21.0)]) == 13.0
    assert united([]) == 0.0


def test_streams_apart_and_overlaps_on_a_stream_united(raw):
    base = kernels(raw)[0]
    at = base["ts"]

    def kernel(start, dur, stream, name="fused_moe_kernel"):
        args = {**base["args"], "stream": stream}
        return {
            **base,
            "cat": "kernel",
            "name": name,
            "ts": at + start,
            "dur": dur,
            "tid": stream,
            "args": args,
        }

    events = [
        kernel(0, 10, 7),
        kernel(5, 10, 7),
        kernel(12, 8, 9, "nvjet_gemm"),
        kernel(40, 10, 9, "nvjet_gemm"),
    ]
    r = report(made(raw, events))
    assert r.busy_ms == pytest.approx((15 + 8 + 10) / 1e3)
    assert r.active_ms == pytest.approx((20 + 10) / 1e3)
    assert r.idle_ms == pytest.approx(20 / 1e3)
    assert r.categories["MoE"].ms_per_step == pytest.approx(15 / 1e3)
    assert r.categories["MoE"].exposed_ms == pytest.approx(12 / 1e3)
    assert r.categories["GEMM"].exposed_ms == pytest.approx((5 + 10) / 1e3)


def three_steps(raw, events):
    return [e for k in range(3) for e in shifted(events, 90_000.0 * k, 40_000 * k)]


def without(raw, *cats):
    return [e for e in raw["traceEvents"] if e.get("cat") not in cats]


def profiler_steps(raw):
    steps = [e for e in raw["traceEvents"] if "user_annotation" in e.get("cat", "")]
    return without(raw, "user_annotation", "gpu_user_annotation") + [
        {**e, "name": "ProfilerStep#4"} for e in steps
    ]


def eager(raw):
    """Every kernel with an id and a launch of its own, inside an operator, a module and frames."""
    events = [e for e in raw["traceEvents"] if e.get("ph") == "M"]
    frame = {"ph": "X", "cat": "python_function", "pid": 1234, "tid": 1234, "args": {}}
    first = min(e["ts"] for e in kernels(raw))
    path = "sglang/srt/model_executor/model_runner.py(2387): forward"
    events.append({**frame, "name": path, "ts": first - 60, "dur": 90_000.0})
    events.append(
        {**frame, "name": path.replace("): forward", "): forward_decode"), "ts": first - 50, "dur": 80_000.0}
    )
    for i, e in enumerate(sorted(kernels(raw), key=lambda e: e["ts"])):
        at = first - 40 + 5 * i
        host = {"ph": "X", "pid": 1234, "tid": 1234}
        shapes = {
            "Input Dims": [[495553, 1, 576], [495553, 1, 576], []],
            "Input type": ["c10::BFloat16", "c10::Float8_e4m3fn", ""],
        }
        name = "aten::copy_" if is_cast_like(e) else "aten::mm"
        events += [
            {**frame, "name": "nn.Module: DeepseekV2DecoderLayer_0", "ts": at - 0.5, "dur": 4.5},
            {
                **host,
                "cat": "cpu_op",
                "name": name,
                "ts": at,
                "dur": 3.0,
                "args": shapes if is_cast(e) else {},
            }
            if is_cast_like(e)
            else {**host, "cat": "cpu_op", "name": name, "ts": at, "dur": 3.0, "args": {}},
            {
                **host,
                "cat": "cuda_runtime",
                "name": "cudaLaunchKernel",
                "ts": at + 1,
                "dur": 1.0,
                "args": {"correlation": 90_000 + i},
            },
            {**e, "args": {**e["args"], "correlation": 90_000 + i}},
        ]
    return events


def is_cast_like(e):
    return "grid" in e.get("args", {}) and is_cast(e)


@pytest.mark.parametrize(
    ("how", "events", "found_by"),
    [
        ("annotated", lambda raw: raw["traceEvents"], "SGLang's step annotations"),
        ("no gpu annotations", lambda raw: without(raw, "gpu_user_annotation"), "SGLang's step annotations"),
        ("ProfilerStep", profiler_steps, "ProfilerStep"),
        (
            "no ProfilerStep",
            lambda raw: without(raw, "user_annotation", "gpu_user_annotation"),
            "CUDA graph replays",
        ),
        ("no CPU ops", kernels, "CUDA graph replays"),
        ("eager", eager, "Python frames of the model runner"),
    ],
)
def test_three_steps_are_told_apart(raw, recorded_step, how, events, found_by):
    r = report(made(raw, three_steps(raw, events(raw))))
    assert (r.steps, r.steps_found_by) == (3, found_by)
    assert r.kv_cast.copies_per_step == 78
    assert r.kv_cast.ms_per_step == pytest.approx(recorded_step.kv_cast.ms_per_step)
    assert r.kv_cast.pool_slots == 495_552
    assert r.wall_ms == pytest.approx(90.0)
    assert r.kv_cast.share == pytest.approx(recorded_step.kv_cast.share, rel=0.01)
    if found_by != "Python frames of the model runner":
        assert r.step_ms == pytest.approx(recorded_step.step_ms, rel=0.001)
        assert r.predicted_step_ms == pytest.approx(CONTROL_MS, rel=0.10)
    else:
        # Without graphs the gaps are real, and what the launches take on the host bounds the step from below.
        assert not r.cuda_graphs
        assert r.step_ms == pytest.approx(90.0)
        assert r.predicted_step_ms == pytest.approx(90.0 - recorded_step.kv_cast.ms_per_step, rel=0.001)


def test_graphs_without_a_known_attention_are_steps_beside_many_kernels_of_no_launch(raw):
    events = three_steps(raw, [{**e, "name": f"k_{len(e['name'])}"} for e in kernels(raw)])
    loose = {
        "ph": "X",
        "cat": "kernel",
        "name": "loose",
        "pid": 0,
        "tid": 7,
        "dur": 0.1,
        "args": {"stream": 7},
    }
    last = max(e["ts"] + e["dur"] for e in events)
    events += [{**loose, "ts": last + 10_000.0 + i} for i in range(9_000)]
    found = find(trace := made(raw, events), trace.ranks[0])
    assert (found.how, len(found.decode())) == ("CUDA graph replays", 3)


def test_a_copy_that_runs_ahead_on_another_stream_does_not_join_two_steps(raw):
    events = three_steps(raw, raw["traceEvents"])
    for k, e in enumerate(e for e in events if e.get("cat") == "gpu_user_annotation" and e["tid"] == 146):
        e["ts"] -= 40_000.0 * k
    r = report(made(raw, events))
    assert (r.steps, r.steps_found_by) == (3, "SGLang's step annotations")
    assert r.wall_ms == pytest.approx(90.0)


def test_steps_by_kernels_alone_without_graphs(raw):
    events = [{**e, "args": {k: v for k, v in e["args"].items() if k != "correlation"}} for e in kernels(raw)]
    r = report(made(raw, three_steps(raw, events)))
    assert (r.steps, r.steps_found_by) == (3, "kernels that run once a step")
    assert r.kv_cast.copies_per_step == 78


def test_eager_host_is_the_bound_where_it_is_slower(raw):
    events = eager(raw)
    for e in events:
        if e.get("cat") in ("cpu_op", "cuda_runtime"):
            e["ts"] = (e["ts"] - 5112352926429.317) * 7 + 5112352926429.317
    r = report(made(raw, events))
    assert r.host_ms == pytest.approx(7 * 5 * 2175 / 1e3, rel=0.01)
    assert r.predicted_step_ms == r.host_ms
    assert "host" in r.predicted_from


def test_sizes_from_recorded_shapes(raw):
    cast = report(made(raw, eager(raw))).kv_cast
    assert (cast.pool_slots, cast.row_bytes, cast.pool_slots_from) == (495_552, 576, "recorded shapes")
    assert (cast.source_dtype, cast.source_dtype_from) == ("Float8_e4m3fn", "recorded shapes")
    forward = "sglang/srt/model_executor/model_runner.py(2387): forward_decode"
    assert cast.launched_from == ["DeepseekV2DecoderLayer_0", forward, "aten::copy_"]


def test_kernels_go_back_to_operators_modules_and_frames(raw):
    trace = made(raw, eager(raw))
    rank = trace.ranks[0]
    casts = [
        i
        for i in range(len(rank.kernels))
        if "direct_copy" in trace.names[rank.kernels.name[i]] and rank.kernels.dur[i] > 100
    ]
    found = origins(trace, rank, casts)
    assert len(found) == 78
    for origin in found.values():
        assert origin.operators == ("aten::copy_",)
        assert origin.modules == ("DeepseekV2DecoderLayer_0",)
        assert origin.frames[-1].endswith("): forward_decode")
    graph = read(REAL)
    # Under graph replay the launch is one for all: nothing to go back to.
    assert origins(graph, graph.ranks[0], range(100, 200)) == {}


def no_grid(raw):
    return [
        {**e, "args": {k: v for k, v in e["args"].items() if k not in ("grid", "block")}}
        for e in kernels(raw)
    ]


def test_size_from_the_duration_where_there_is_no_grid(raw):
    cast = report(made(raw, no_grid(raw))).kv_cast
    assert cast.pool_slots_from == "duration and bandwidth"
    assert cast.pool_slots == pytest.approx(495_552, rel=0.03)
    assert "h200-stock" in cast.bandwidth_from
    given = report(made(raw, no_grid(raw)), bandwidth=1.0049e12).kv_cast
    assert given.pool_slots == pytest.approx(495_552, rel=0.01)
    assert given.bandwidth_from == "--bandwidth"


def test_size_is_unknown_without_grid_and_bandwidth(raw):
    other = [{**raw["deviceProperties"][0], "name": "NVIDIA H20"}]
    r = report(made(raw, no_grid(raw), deviceProperties=other))
    assert r.kv_cast.copies_per_step == 78
    assert (r.kv_cast.pool_slots, r.kv_cast.bytes_per_copy, r.kv_cast.bandwidth) == (None, None, None)
    assert "size is unknown" in r.diagnosis[0].text
    assert "--bandwidth" in r.diagnosis[0].text


def test_a_huge_pool_whose_copies_are_split(raw):
    """PyTorch launches a copy of more than 2^31 bytes in parts: one launch of this step, in two."""
    events = []
    for e in raw["traceEvents"]:
        if is_cast_like(e):
            half = {**e, "dur": e["dur"] / 2, "args": {**e["args"], "grid": [278749, 1, 1]}}
            events += [half, {**half, "ts": e["ts"] + e["dur"] / 2}]
        else:
            events.append(e)
    cast = report(made(raw, events)).kv_cast
    assert cast.copies_per_step == 78
    assert cast.us_per_copy == pytest.approx(852.2, rel=0.001)
    assert cast.pool_slots == pytest.approx(495_552, rel=1e-5)


def verdicts(r):
    return {f.what: f.verdict for f in r.diagnosis}


def test_controls_that_do_not_show_the_cast(raw, recorded_step):
    events = raw["traceEvents"]
    gone = report(made(raw, [e for e in events if not is_cast_like(e)]))
    small = report(
        made(
            raw,
            [
                {**e, "dur": 2.0, "args": {**e["args"], "grid": [12, 1, 1]}} if is_cast_like(e) else e
                for e in events
            ],
        )
    )
    few = [e for e in events if is_cast_like(e)][::2]
    half = report(made(raw, [e for e in events if e not in few]))
    uneven = report(
        made(
            raw,
            [
                {**e, "dur": e["dur"] * (0.5 + (i % 7) / 4)} if is_cast_like(e) else e
                for i, e in enumerate(events)
            ],
        )
    )
    for r in (gone, small, half, uneven):
        assert r.kv_cast is None
        assert r.predicted_step_ms is None
        assert verdicts(r)["full-pool KV cast"] == "not found"
    assert "direct_copy" in gone.diagnosis[0].text
    assert verdicts(recorded_step)["full-pool KV cast"] == "found"


def test_a_large_cast_that_attention_does_not_follow_is_no_pool_cast(raw):
    """Activations of a large batch, cast once a layer before its GEMMs."""
    events = raw["traceEvents"]
    attention = sorted((e for e in events if "BatchMLA" in e["name"]), key=lambda e: e["ts"])
    moved, i = [], 0
    for e in events:
        if is_cast_like(e):
            after = attention[i]
            moved.append({**e, "ts": after["ts"] + after["dur"] + 0.1})
            i += 1
        else:
            moved.append(e)
    assert report(made(raw, moved)).kv_cast is None


def test_cousins(raw, recorded_step):
    write = next(f for f in recorded_step.diagnosis if "write" in f.what)
    assert write.verdict == "found"
    assert "156 conversions to FP8 a step, 2 a layer, 0.22 ms, for 78 stores" in write.text
    assert verdicts(recorded_step)["whole-pool FP4 dequantisation"] == "not found"
    # The operators that torch.compile fuses of batched_dequantize of SGLang 0.5.15.post1's FP4 cache.
    name = (
        "triton_poi_fused___rshift____to_copy_bitwise_and_copy_exp2_index_mul_ne_neg_slice_sub_unsqueeze_"
        "view_where_0"
    )
    fp4 = report(made(raw, [{**e, "name": name} if is_cast_like(e) else e for e in raw["traceEvents"]]))
    assert verdicts(fp4)["full-pool KV cast"] == "not found"
    found = next(f for f in fp4.diagnosis if "FP4" in f.what)
    assert found.verdict == "found"
    assert "not from its size" in found.text
    bf16 = report(made(raw, [e for e in raw["traceEvents"] if "float8_copy" not in e["name"]]))
    assert verdicts(bf16)["per-layer conversion chain of the FP8 KV write"] == "not found"
    assert bf16.kv_cast.source_dtype is None
    assert "taken for granted" in bf16.diagnosis[0].text


def test_a_patched_trace_says_so(raw):
    events = [
        {**e, "name": "_cast", "dur": 5.4, "args": {**e["args"], "grid": [528, 1, 1]}}
        if is_cast_like(e)
        else e
        for e in raw["traceEvents"]
    ]
    r = report(made(raw, events))
    assert r.kv_cast is None
    patch = next(f for f in r.diagnosis if f.what == "kvlab patch")
    assert "78 times a step, 0.42 ms" in patch.text


@pytest.mark.parametrize(
    ("sglang", "said"),
    [
        (None, "kvlab serve"),
        ("0.5.9", "before 0.5.11 loads no plugins"),
        ("0.5.15.post1", "loads it by itself"),
        ("0.6.1", "newer than any kvlab knows"),
    ],
)
def test_the_advice_fits_the_release(sglang, said):
    found = report(read(REAL), sglang=sglang).diagnosis[0]
    assert said in found.do


def prefill(raw):
    return [
        {**e, "name": e["name"].replace("DECODE bs=1", "EXTEND bs=1 toks=100")} if "step[" in e["name"] else e
        for e in raw["traceEvents"]
    ]


def test_a_prefill_trace(raw):
    r = report(made(raw, prefill(raw)))
    assert (r.steps, r.other_steps, r.kv_cast, r.step_ms) == (0, {"prefill": 1}, None, None)
    assert verdicts(r) == {"full-pool KV cast": "cannot tell"}


def test_prefill_between_decode_steps_is_left_out(raw):
    one = raw["traceEvents"]
    events = one + shifted(prefill(raw), 90_000.0, 40_000) + shifted(one, 180_000.0, 80_000)
    r = report(made(raw, events))
    assert (r.steps, r.other_steps) == (2, {"prefill": 1})
    bare = [e for e in events if "user_annotation" not in e.get("cat", "")]
    graphs = {e["args"]["correlation"] for e in bare if e["name"] == "cudaGraphLaunch"}
    second = sorted(graphs)[1]
    # An eager prefill between two replays: its kernels are no graph's.
    loose = [
        {**e, "args": {**e["args"], "correlation": 10**6 + i}}
        if e.get("args", {}).get("correlation") == second
        else e
        for i, e in enumerate(bare)
    ]
    r = report(made(raw, loose))
    assert (r.steps, r.steps_found_by) == (2, "CUDA graph replays")
    assert r.kv_cast.copies_per_step == 78
    assert any("belong to no step" in n for n in r.notes)


def merged(raw, slow=1.0):
    """As SGLang's profile merger writes it: every pid labelled, correlation ids of the ranks the same."""
    events = []
    for rank in range(2):
        for e in raw["traceEvents"]:
            e = {**e, "pid": f"[TP{rank:02d}] {e['pid'] if e['pid'] != 0 else rank}"}
            if rank and is_cast_like(e):
                e["dur"] *= slow
            events.append(e)
    return events


def test_ranks_of_a_merged_trace_are_kept_apart(raw, recorded_step):
    trace = made(
        raw, merged(raw, slow=0.9), deviceProperties=[{"id": i, "name": "NVIDIA H200"} for i in range(2)]
    )
    found = reports(trace)
    assert [r.rank for r in found] == ["TP00", "TP01"]
    assert [r.kv_cast.copies_per_step for r in found] == [78, 78]
    assert found[0].kv_cast.ms_per_step == pytest.approx(recorded_step.kv_cast.ms_per_step)
    assert found[1].kv_cast.ms_per_step == pytest.approx(0.9 * recorded_step.kv_cast.ms_per_step)
    assert found[0].busy_ms == pytest.approx(recorded_step.busy_ms)
    assert slowest(found).rank == "TP00"
    assert spread(found) is not None
    assert [len(r.host) for r in trace.ranks] == [903, 903]
    with pytest.raises(BadInput, match="TP09"):
        report(trace, "TP09")


def test_several_gpus_of_one_process(raw):
    events = [e for e in raw["traceEvents"] if e.get("cat") not in GPU]
    for e in kernels(raw):
        events += [e, {**e, "pid": 1}]
    found = reports(made(raw, events))
    assert [(r.rank, r.kv_cast.copies_per_step) for r in found] == [("GPU 0", 78), ("GPU 1", 78)]


def test_ranks_by_file_and_by_distributed_info(raw):
    text = json.dumps({**raw, "distributedInfo": {"rank": 3, "world_size": 8}}).encode()
    assert build([text], "x").ranks[0].key == "rank 3"
    text = json.dumps({k: v for k, v in raw.items() if k != "distributedInfo"}).encode()
    assert build([text], "a/1719-TP-2-DP-1.trace.json.gz").ranks[0].key == "TP02-DP01"


def test_icicles_add_up(raw, recorded_step):
    figures = pytest.importorskip("kvlab.trace.figures")
    pytest.importorskip("plotly")
    for trace, by in ((read(REAL), "class"), (made(raw, eager(raw)), "module")):
        data = figures.icicle(trace, by=by).data[0]
        value = dict(zip(data.ids, data.values, strict=True))
        below = {}
        for node, parent in zip(data.ids, data.parents, strict=True):
            below[parent] = below.get(parent, 0) + value[node]
        assert below.pop("") == pytest.approx(sum(e["dur"] for e in kernels(raw)))
        for parent, total in below.items():
            assert total <= value[parent] * (1 + 1e-9)
    with pytest.raises(BadInput, match="no modules"):
        figures.icicle(read(REAL), by="module")


def test_layers(raw):
    trace = read(REAL)
    rank = trace.ranks[0]
    step = find(trace, rank).steps[0]
    found = layers(trace, rank, step)
    assert len(found.first) == 78
    per_layer = [0] * 78
    for i in range(step.lo, step.hi):
        name, layer = trace.names[rank.kernels.name[i]], found.of(i)
        if "BatchMLA" in name or (rank.kernels.dur[i] > 100 and "direct_copy" in name):
            per_layer[layer] += 1
        if "ArgMax" in name or "192x8" in name:
            assert layer is None
    assert per_layer == [2] * 78


def test_older_spellings_and_no_cat(raw, recorded_step):
    old = {"kernel": "Kernel", "gpu_memcpy": "Memcpy", "cuda_runtime": "Runtime", "cpu_op": "Operator"}
    r = report(made(raw, [{**e, "cat": old.get(e.get("cat"), e.get("cat"))} for e in raw["traceEvents"]]))
    assert r.kv_cast.ms_per_step == pytest.approx(recorded_step.kv_cast.ms_per_step)
    bare = [{k: v for k, v in e.items() if k != "cat"} for e in raw["traceEvents"]]
    r = report(made(raw, bare))
    assert r.kv_cast.copies_per_step == 78
    assert r.kv_cast.share == pytest.approx(recorded_step.kv_cast.share, rel=0.01)
