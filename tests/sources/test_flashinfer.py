"""The real flashinfer, imported: its checks on CPU answer what the rules answer."""

import json

import pytest

from kvlab.backends import decide, question, rules

pytestmark = pytest.mark.sglang

VERSIONS = ["0.6.3", "0.6.12", "0.7.2"]

# Meta tensors and a stand-in for the device's capability: everything up to the kernel's launch is the
# release's own.
_CALL = """
import inspect, json, torch
import flashinfer, flashinfer.mla
core = inspect.getmodule(inspect.unwrap(flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla))
check = core._check_trtllm_gen_mla_shape
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
module = core.__dict__
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
    }
    held = {k: v for k, v in stand_ins.items() if k in module}
    import flashinfer.xqa as xqa, sys
    xqa = sys.modules["flashinfer.xqa"]
    held_xqa = {k: v for k, v in {
        "get_compute_capability": lambda *_: (major, 0), "is_sm12x_supported": lambda *_: major == 12,
        "get_xqa_module_mla": reach}.items() if k in xqa.__dict__}
    with mock.patch.dict(module, held), mock.patch.dict(xqa.__dict__, held_xqa):
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
    sglang = {"0.6.3": "0.5.9", "0.6.12": "0.5.15.post1", "0.7.2": "0.5.23"}[version]
    for name, model in (("glm5", "glm-5"), ("deepseek", "deepseek-v3")):
        verdict = {v.backend: v for v in decide(question(model, "rtx-pro-6000", sglang))}["trtllm_mla"]
        assert verdict.works is False
        if found[name] == "kernel":
            # 0.6.3 starts its 128-head kernel on any number of heads: the answer says that nothing checks.
            assert "nothing checks" in verdict.reason
        else:
            assert found[name] in verdict.reason
    assert found["whole"] == "kernel"


@pytest.mark.parametrize("version", ["0.6.3", "0.6.12"])
def test_dispatch_on_sm100_reaches_the_kernel_unless_the_answer_refuses(in_flashinfer, version):
    code = _DISPATCH + (
        "f8 = torch.float8_e4m3fn\n"
        "print(json.dumps({'glm5': decode(10, 8, 192, f8), 'deepseek': decode(10, 16, 128, f8)}))"
    )
    found = json.loads(in_flashinfer(version, code).splitlines()[-1])
    sglang = {"0.6.3": "0.5.9", "0.6.12": "0.5.15.post1"}[version]
    for name, model in (("glm5", "glm-5"), ("deepseek", "deepseek-v3")):
        verdict = {v.backend: v for v in decide(question(model, "b200", sglang))}["trtllm_mla"]
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
