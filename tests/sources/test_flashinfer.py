"""The real flashinfer, imported: its checks on CPU answer what the rules answer."""

import json

import pytest

from kvlab.backends import decide, question, rules

pytestmark = pytest.mark.sglang

VERSIONS = ["0.6.3", "0.6.12", "0.7.2", "0.7.4"]
# The SGLang that pins it; the newest for the others.
BESIDE = {"0.6.3": "0.5.9", "0.6.12": "0.5.15.post1"}

# Meta tensors and a stand-in for the device's capability: everything up to the kernel's launch is the
# release's own.
_CALL = """
import inspect, json, torch
import flashinfer, flashinfer.mla
core = inspect.getmodule(inspect.unwrap(flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla))
check = getattr(core, "_check_mla_functional_shape", None) or core._check_trtllm_gen_mla_shape
takes = inspect.signature(check).parameters

def said(call):
    try:
        call()
    except (ValueError, AssertionError) as e:
        return str(e)
    return None

def shape(nope, latent, page, blocks, aligned=True):
    dim = sum(latent)
    given = dict(
        query=torch.empty(1, 1, 8, dim, dtype=torch.float8_e4m3fn, device="meta"),
        kv_cache=torch.empty(2, 1, page, dim, dtype=torch.float8_e4m3fn, device="meta"),
        qk_nope_head_dim=nope, kv_lora_rank=latent[0], qk_rope_head_dim=latent[1], sparse_mla_top_k=0,
        page_table=torch.empty(1, blocks, dtype=torch.int32, device="meta"), page_size=page,
        uses_shared_paged_kv_idx=True, batch_size=1, max_q_len=1,
        require_aligned_block_table=aligned,
    )
    return said(lambda: check(**{k: v for k, v in given.items() if k in takes}))
"""


@pytest.mark.parametrize("version", VERSIONS)
def test_the_shape_check_answers_as_the_rules_do(in_flashinfer, version):
    code = _CALL + (
        "print(json.dumps({'version': flashinfer.__version__,"
        " 'nope': {n: shape(n, (512, 64), 64, 2) for n in (64, 128, 192, 256)},"
        " 'width': shape(128, (512, 64), 64, 1), 'waived': shape(128, (512, 64), 64, 1, False)}))"
    )
    found = json.loads(in_flashinfer(version, code).splitlines()[-1])
    rule = rules.load("flashinfer-python", version)
    assert found["version"] == version
    assert {n: s for n, s in found["nope"].items() if s} == rule["mla_shape"]["says"]
    refusal = "Expected block_num % (128 / block_size) == 0, got block_num=1 and block_size=64"
    assert found["width"] == refusal
    # The rule calls the check optional where a caller may waive it.
    assert found["waived"] == (None if rule["block_num"]["optional"] else refusal)


_DISPATCH = (
    _CALL
    + """
from unittest import mock
class Reached(Exception): pass
def reach(*a, **k): raise Reached
import contextlib, sys
def decode(major, heads, nope, dtype, backend="auto"):
    page = 64
    query = torch.empty(1, 1, heads, 576, dtype=dtype, device="meta")
    cache = torch.empty(2, page, 576, dtype=dtype, device="meta")
    stand_ins = {
        "get_compute_capability": lambda *_: (major, 0),
        "is_sm12x_supported": lambda *_: major == 12,
        "get_device_sm_count": lambda *_: 188,
        "device_support_pdl": lambda *_: False,
        "get_trtllm_gen_fmha_module": lambda: mock.Mock(trtllm_paged_attention_decode=reach),
        "get_xqa_module_mla": reach,
    }
    import flashinfer.xqa
    with contextlib.ExitStack() as held:
        for name, module in list(sys.modules.items()):
            if name.startswith(("flashinfer.mla", "flashinfer.xqa")) and hasattr(module, "__dict__"):
                there = {k: v for k, v in stand_ins.items() if k in vars(module)}
                held.enter_context(mock.patch.dict(vars(module), there))
        try:
            core.trtllm_batch_decode_with_kv_cache_mla(
                query, cache, torch.empty(1 << 24, dtype=torch.uint8, device="meta"), nope, 512, 64,
                torch.empty(1, 2, dtype=torch.int32, device="meta"),
                torch.empty(1, dtype=torch.int32, device="meta"), 128, backend=backend)
        except Reached:
            return "kernel"
        except (ValueError, AssertionError) as e:
            return str(e)
"""
)


@pytest.mark.parametrize("version", VERSIONS)
def test_dispatch_on_sm120_refuses_what_the_answer_says(in_flashinfer, version):
    """GLM-5 and DeepSeek ranks through the real entry point on 12.0: it refuses as the answer does."""
    code = _DISPATCH + (
        "f8 = torch.float8_e4m3fn\n"
        "print(json.dumps({'glm5': decode(12, 8, 192, f8), 'deepseek': decode(12, 16, 128, f8),"
        " 'whole': decode(12, 128, 128, f8)}))"
    )
    found = json.loads(in_flashinfer(version, code).splitlines()[-1])
    for name, model in (("glm5", "glm-5"), ("deepseek", "deepseek-v3")):
        q = question(model, "rtx-pro-6000", BESIDE.get(version, "0.5.23"), flashinfer=version)
        verdict = {v.backend: v for v in decide(q)}["trtllm_mla"]
        assert verdict.works is False
        if found[name] == "kernel":
            # 0.6.3 starts its 128-head kernel on any number of heads: the answer says that nothing checks.
            assert "nothing checks" in verdict.reason
        else:
            assert found[name] in verdict.reason
    assert found["whole"] == "kernel"


@pytest.mark.parametrize("version", ["0.6.3", "0.6.12", "0.7.4"])
def test_dispatch_on_sm100_reaches_the_kernel_unless_the_answer_refuses(in_flashinfer, version):
    code = _DISPATCH + (
        "f8 = torch.float8_e4m3fn\n"
        "print(json.dumps({'glm5': decode(10, 8, 192, f8), 'deepseek': decode(10, 16, 128, f8)}))"
    )
    found = json.loads(in_flashinfer(version, code).splitlines()[-1])
    for name, model in (("glm5", "glm-5"), ("deepseek", "deepseek-v3")):
        q = question(model, "b200", BESIDE.get(version, "0.5.23"), flashinfer=version)
        verdict = {v.backend: v for v in decide(q)}["trtllm_mla"]
        assert (found[name] == "kernel") is verdict.works
        if not verdict.works:
            assert found[name] in verdict.reason


@pytest.mark.parametrize("version", VERSIONS)
def test_inspection_reads_what_inspect_getsource_reads(in_flashinfer, version):
    """`plan` and `run` of a downloaded release, read from files, are the imported class's own source."""
    from kvlab import inspection

    code = (
        "import inspect, json, textwrap\n"
        "from flashinfer.mla import BatchMLAPagedAttentionWrapper as W\n"
        "read = lambda n: textwrap.dedent(inspect.getsource(inspect.unwrap(getattr(W, n))))\n"
        "print(json.dumps({n: read(n) for n in ('plan', 'run')}))"
    )
    found = json.loads(in_flashinfer(version, code).splitlines()[-1])
    wrapper = inspection.wrapper(version)
    for name, text in found.items():
        assert wrapper.method(name).source == text


# A planned wrapper over four of a pool's rows; its compiled kernel notes the rows that it would read.
_WRAPPER = """
import json, sys, torch
from types import SimpleNamespace
import flashinfer.mla
from kvlab.patch import casts
from kvlab.patch.reads import FlashInferMLA
from kvlab.patch.counters import Counters
from kvlab.patch.strategies.native import FP8Plans, Planning
from kvlab.plans.release import OnCPU

calls = []

class Kernel:
    def plan(self, *args):
        return [0]

    def run(self, *args):
        ckv, kpe, indices = args[5:8]
        calls.append(torch.cat([ckv, kpe], dim=-1).view(torch.uint8)[indices[:4].long()].view(ckv.dtype))

stand_ins = {
    "get_batch_mla_module": lambda *a, **k: Kernel(), "determine_mla_backend": lambda device: "fa2",
    "get_compute_capability": lambda device: (9, 0), "get_device_sm_count": lambda device: 132,
    "_get_fa_shared_memory_limits": lambda device: (233472, 232448),
}
for name, module in list(sys.modules.items()):
    if name.startswith("flashinfer.mla"):
        for there in stand_ins.keys() & vars(module).keys():
            setattr(module, there, stand_ins[there])

slots, heads = 64, 8
rows = torch.randn(slots, 1, 576).to(torch.float8_e4m3fn)
slots_read = torch.tensor([60, 3, 60, 41], dtype=torch.int32)
bounds = torch.tensor([0, 1, 4], dtype=torch.int32)
with OnCPU():
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(
        torch.zeros(64 << 20, dtype=torch.uint8), backend="fa2")
    runtime = SimpleNamespace(counters=Counters(), say=lambda line: None)
    plans = FP8Plans(runtime)
    planned = wrapper if WIDE else Planning(wrapper, plans, torch.float8_e4m3fn)
    planned.plan(torch.arange(3, dtype=torch.int32), bounds, slots_read, bounds.diff(), heads, 512, 64, 1,
        False, 0.1, torch.bfloat16, torch.bfloat16)
backend = SimpleNamespace(forward_metadata=SimpleNamespace(decode_wrapper=wrapper), kv_indptr=bounds)
q = torch.randn(2, heads, 576).to(torch.bfloat16)

def run(rows, wrapper=wrapper):
    wrapper.run(q[..., :512], q[..., 512:], rows[..., :512], rows[..., 512:])
"""
_SWAP = (
    "WIDE = True\n"
    + _WRAPPER
    + """
run(rows.to(torch.bfloat16))
# The first run notes that it warned of what it calls old-fashioned.
owners = [o for o in (wrapper, getattr(wrapper, "_planned_backend", None)) if o is not None]
was = [dict(vars(o)) for o in owners]
adapter = FlashInferMLA()
found = casts.slot_map(adapter.reads(backend, "decode", None, None).tables[0], slots, None)
swap = adapter.swap(backend, "decode", found.new_indices)
# Three distinct rows: fewer than the largest slot that the plan saw.
run(casts.gather(rows, torch.empty(3, 1, 576, dtype=torch.bfloat16), found))
swap.undo()
run(rows.to(torch.bfloat16))
same = lambda o, kept: all(vars(o)[k] is v for k, v in kept.items()) and vars(o).keys() == kept.keys()
print(json.dumps([
    [torch.equal(calls[0], c) for c in calls], torch.equal(calls[0], rows.bfloat16()[slots_read.long()]),
    [same(o, kept) for o, kept in zip(owners, was)]]))
"""
)
_NATIVE = (
    "WIDE = False\n"
    + _WRAPPER
    + """
from kvlab.patch.strategies.native import Native, flashinfer_refusal
call = SimpleNamespace(backend=backend, kind="decode", undo=[], facts=SimpleNamespace(fp8=rows.dtype))
Native().enter(call)
run(rows, backend.forward_metadata.decode_wrapper)
for undo in call.undo:
    undo()
is_restored = backend.forward_metadata.decode_wrapper is wrapper
# What falls back after all: stock's rows make stock's plan.
with OnCPU():
    run(rows.to(torch.bfloat16))
is_stock_s = torch.equal(calls[1], rows.bfloat16()[slots_read.long()])
print(json.dumps([
    flashinfer_refusal(), str(calls[0].dtype), torch.equal(calls[0].float(), rows[slots_read.long()].float()),
    is_restored, is_stock_s and "run" not in vars(wrapper), runtime.counters.fallbacks]))
"""
)


@pytest.mark.parametrize("version", VERSIONS)
def test_another_index_table_is_taken_for_one_call(in_flashinfer, version):
    """A planned wrapper of the release reads compact rows through the swapped table, and is as it was after.

    From 0.7.4 `run` also holds the rows to the range of pages that the plan saw.
    """
    seen, is_stock, is_restored = json.loads(in_flashinfer(version, _SWAP).splitlines()[-1])
    assert seen == [True] * 3
    assert is_stock
    assert set(is_restored) == {True}


@pytest.mark.parametrize("version", ["0.6.18.post1", "0.7.2", "0.7.4"])
def test_a_wrapper_planned_for_fp8_rows_takes_them_as_they_are(in_flashinfer, version):
    """What `native` relies on: the plan's last argument, the wrapper's word of it, the scales of `run`. Wide
    rows that come after such a plan get stock's.
    """
    refusal, dtype, is_stock, is_restored, is_again, fallbacks = json.loads(
        in_flashinfer(version, _NATIVE).splitlines()[-1]
    )
    assert (refusal, dtype) == (None, "torch.float8_e4m3fn")
    assert is_stock
    assert is_restored
    assert is_again
    assert fallbacks == {"planned for FP8 rows": 1}
