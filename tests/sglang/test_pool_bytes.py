"""The real pool classes of this SGLang allocate and log what kvlab.memory says, to the byte."""

import inspect
import logging
import re
from importlib import metadata

import pytest

try:
    metadata.version("sglang")
except metadata.PackageNotFoundError:
    pytest.skip("needs a real SGLang release (make test-sglang)", allow_module_level=True)

# Before SGLang: what importing it on a CPU needs.
import rig.environment  # noqa: F401
import torch
from sglang.srt.mem_cache import memory_pool

from kvlab import memory, models

pytestmark = pytest.mark.sglang

GLM5 = models.load("glm-5")
# The last five layers: of GLM-5.2 they are four that reuse a top-k and one that does not.
LAYERS = 5


def small(dtype, slots, page_size, *, geometry=GLM5, **options):
    """The pool of a pipeline stage that has LAYERS layers, small enough for a CPU."""
    partition = [geometry.attention_layers - LAYERS, LAYERS]
    stage = {"pp": 2, "pp_rank": 1, "partition": partition}
    return memory.pool(geometry, slots, kv_dtype=dtype, page_size=page_size, **stage, **options)


def build(cls, p, dtype, **options):
    options = {
        "size": p.tokens,
        "page_size": p.page_size,
        "dtype": dtype,
        "kv_lora_rank": p.geometry.kv_lora_rank,
        "qk_rope_head_dim": p.geometry.qk_rope_head_dim,
        "layer_num": p.rank.layers,
        "device": "cpu",
        "enable_memory_saver": False,
    } | options
    known = inspect.signature(cls.__init__).parameters
    return cls(**{key: value for key, value in options.items() if key in known})


def allocated(pool):
    arenas = [pool.kv_buffer]
    arenas += [
        getattr(pool, name)
        for name in ("kv_scale_buffer", "index_k_with_scale_buffer")
        if hasattr(pool, name)
    ]
    return sum(t.nbytes for arena in arenas if arena is not None for t in arena)


def logged(caplog):
    found = re.findall(r"#tokens: (\d+), KV size: ([0-9.]+) GB", caplog.text)
    assert len(found) == 1, caplog.text
    return int(found[0][0]), float(found[0][1])


@pytest.mark.parametrize(
    ("name", "dtype", "cls"),
    [
        ("fp8_e4m3", torch.float8_e4m3fn, "MLATokenToKVPool"),
        ("fp8_e5m2", torch.float8_e5m2, "MLATokenToKVPool"),
        ("bf16", torch.bfloat16, "MLATokenToKVPool"),
        ("fp4", getattr(torch, "float4_e2m1fn_x2", torch.bfloat16), "MLATokenToKVPoolFP4"),
    ],
)
@pytest.mark.parametrize(("slots", "page_size"), [(4096, 1), (32_000, 64)])
def test_mla_pools(caplog, name, dtype, cls, slots, page_size):
    p = small(name, slots, page_size)
    with caplog.at_level(logging.INFO):
        pool = build(getattr(memory_pool, cls), p, dtype)
    assert allocated(pool) == p.allocated_bytes
    assert logged(caplog) == (p.tokens, p.sglang_logs_gb)
    if name.startswith("fp8"):
        assert pool.get_key_buffer(0).shape[-1] * pool.get_key_buffer(0).element_size() == p.row_bytes


DSA_POOL = getattr(memory_pool, "DSATokenToKVPool", None) or memory_pool.NSATokenToKVPool


def build_dsa(p, **options):
    # With its size given, no release asks for the context-parallel width to derive it from.
    size = {"index_buf_size": p.tokens, "index_head_dim": p.geometry.index_head_dim}
    return build(DSA_POOL, p, torch.float8_e4m3fn, kv_cache_dim=p.row_bytes, **size, **options)


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_dsa"])
def test_dsa_pools_with_their_indexer(caplog, name):
    p = small(name, 40_000, 64, indexer=True)
    with caplog.at_level(logging.INFO):
        pool = build_dsa(p)
    assert allocated(pool) == p.allocated_bytes
    assert logged(caplog) == (p.tokens, p.sglang_logs_gb)


def test_layers_that_reuse_a_top_k_have_no_indexer_rows(caplog):
    if "skip_topk_layers" not in inspect.signature(DSA_POOL.__init__).parameters:
        pytest.skip("this release gives every layer indexer rows")
    from types import SimpleNamespace

    from sglang.srt.configs.model_config import dsa_layer_skips_topk

    glm52 = models.load("glm-5.2")
    p = small("fp8_e4m3", 40_000, 64, geometry=glm52, indexer=True, skip_shared_indexers=True)
    config = SimpleNamespace(
        architectures=[glm52.architecture], index_topk=2048, index_topk_freq=4, index_skip_topk_offset=3
    )
    skips = [dsa_layer_skips_topk(config, i) for i in range(glm52.attention_layers)]
    assert tuple(i for i, skip in enumerate(skips) if skip) == glm52.shared_indexer_layers
    with caplog.at_level(logging.INFO):
        pool = build_dsa(p, skip_topk_layers=skips[p.rank.first_layer : p.rank.end_layer])
    assert p.indexer_layers == 1
    assert allocated(pool) == p.allocated_bytes
    assert logged(caplog) == (p.tokens, p.sglang_logs_gb)


@pytest.mark.parametrize(("layers", "pp"), [(78, 1), (78, 4), (61, 4), (61, 8), (7, 7)])
def test_pipeline_stages(layers, pp):
    from sglang.srt.distributed import utils

    theirs = [utils.get_pp_indices(layers, i, pp) for i in range(pp)]
    assert theirs == [(stage.start, stage.stop) for stage in models.pp_stages(layers, pp)]
