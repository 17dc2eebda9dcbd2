"""`--load-format dummy` of this SGLang takes kvlab's seeded weights; its own leave no value in the cache."""

from importlib import metadata

import pytest

try:
    metadata.version("sglang")
except metadata.PackageNotFoundError:
    pytest.skip("needs a real SGLang release (make test-sglang)", allow_module_level=True)

# Before SGLang: what importing it on a CPU needs.
import rig.environment  # noqa: F401
import torch
from sglang.srt.model_loader import loader

from kvlab import dummy

pytestmark = pytest.mark.sglang


def model():
    return torch.nn.Sequential(torch.nn.RMSNorm(64), torch.nn.Linear(64, 64, bias=False)).to(torch.bfloat16)


def test_the_dummy_loader_calls_the_function_that_is_swapped():
    assert "initialize_dummy_weights" in loader.DummyModelLoader.load_model.__code__.co_names
    stock = loader.initialize_dummy_weights
    with dummy.seeded_dummy_weights(7):
        assert loader.initialize_dummy_weights is not stock
    assert loader.initialize_dummy_weights is stock


def test_stock_dummy_weights_vanish_in_fp8_and_seeded_ones_do_not():
    x = torch.randn(16, 64, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(1))
    fp8 = {}
    for name in ("stock", "seeded", "again"):
        made = model()
        if name == "stock":
            loader.initialize_dummy_weights(made)
        else:
            with dummy.seeded_dummy_weights(7):
                loader.initialize_dummy_weights(made)
        fp8[name] = made(x).to(torch.float8_e4m3fn).view(torch.uint8)
    # 0x80 is FP8's negative zero: stock's rows hold no value at all.
    assert not (fp8["stock"] & 0x7F).any()
    assert (fp8["seeded"] & 0x7F).bool().float().mean() > 0.99
    assert torch.equal(fp8["seeded"], fp8["again"])
