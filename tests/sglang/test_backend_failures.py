"""The installed SGLang itself refuses and misreads what kvlab.backends says it does."""

import inspect
from importlib import metadata

import pytest

try:
    metadata.version("sglang")
except metadata.PackageNotFoundError:
    pytest.skip("needs a real SGLang release (make test-sglang)", allow_module_level=True)

# Before SGLang: what importing it on a CPU needs, and the state that its pools ask for.
import rig.environment  # noqa: F401
import torch
from rig import world  # noqa: F401
from sglang.srt.configs import model_config
from sglang.srt.mem_cache import memory_pool

from kvlab.backends import decide, decided_by, question, rules

RELEASE = metadata.version("sglang")


def pool(page_size, kv_cache_dim):
    """The release's own pool of a DSA model."""
    cls = getattr(memory_pool, "DSATokenToKVPool", None) or memory_pool.NSATokenToKVPool
    options = {
        "size": 256,
        "page_size": page_size,
        "kv_lora_rank": 512,
        "dtype": torch.float8_e4m3fn,
        "qk_rope_head_dim": 64,
        "layer_num": 1,
        "device": "cpu",
        "index_head_dim": 128,
        "enable_memory_saver": False,
        "kv_cache_dim": kv_cache_dim,
    }
    known = inspect.signature(cls.__init__).parameters
    return cls(**{k: v for k, v in options.items() if k in known})


def answer(backend, model="glm-5", gpu="h200"):
    return next(v for v in decide(question(model, gpu, RELEASE)) if v.backend == backend)


def test_the_answers_come_from_the_installed_release():
    assert decided_by(question("glm-5", "h200", RELEASE))[f"sglang {RELEASE}"] == "installed"


def test_the_pool_dies_of_the_page_size_that_cutlass_mla_brings():
    """`cutlass_mla` means pages of 128; the DSA pool asserts 64, at the line that is quoted."""
    with pytest.raises(AssertionError) as raised:
        pool(128, 576)
    frame = raised.traceback[-1]
    rule = rules.load("sglang", RELEASE)["dsa"]["pool_page"]
    assert str(frame.path).endswith(rule["file"])
    assert frame.lineno + 1 == rule["line"]
    if "cutlass_mla" in rules.load("sglang", RELEASE)["registered"]:
        verdict = answer("cutlass_mla")
        assert verdict.works is False
        assert (rule["file"], rule["line"]) in {(e.file, e.line) for e in verdict.evidence}


@pytest.mark.parametrize("width", [576, 656])
def test_a_dense_backend_is_handed_rows_of_the_width_that_the_sub_backends_chose(width):
    """656 bytes: 512 FP8 values, 16 of scales, 128 of BF16. Only 576 fits a dense backend."""
    rows = pool(64, width).get_key_buffer(0)
    assert rows.shape[-1] == width
    assert rows.dtype == torch.float8_e4m3fn
    flags = answer("flashinfer").flags
    assert any(f.endswith("-decode-backend trtllm") for f in flags)


def test_the_release_calls_glm5_a_dsa_model():
    is_dsa = getattr(model_config, "is_deepseek_dsa", None) or model_config.is_deepseek_nsa
    config = type("Config", (), {"architectures": ["GlmMoeDsaForCausalLM"], "index_topk": 2048})()
    assert is_dsa(config)
    assert answer("flashinfer").attends == "dense"
    name = rules.load("sglang", RELEASE)["dsa"]["name"]
    assert answer(name).attends == "sparse"
