"""The Hopper kernels compile with NVRTC on a host without a GPU, and fit the chip."""

import re

import pytest
import torch

from kvlab.kernels import hopper, nvrtc
from kvlab.kernels.aot import REGISTERS_PER_SM, SHARED_PER_BLOCK

CASES = [
    (8, 1, {}),
    (8, 67, {"multi": True, "cap": True, "paged": True}),
    (16, 1, {"multi": True}),
    (16, 17, {"index64": True}),
    (32, 17, {}),
    (64, 17, {}),
    (64, 67, {}),
    (64, 1, {"multi": True, "paged": True}),
]


@pytest.mark.parametrize(("columns", "batch", "flags"), CASES)
def test_compiles_and_fits(columns, batch, flags, monkeypatch):
    # What NVRTC finds in its own cache on a GPU host it has nothing to say of.
    monkeypatch.setenv("CUDA_CACHE_DISABLE", "1")
    variant = hopper.choose(columns, batch)
    cubin, log = nvrtc.compile_source(variant.source(64, False, False, **flags))
    assert cubin[:4] == b"\x7fELF"
    registers = int(re.search(r"Used (\d+) registers", log)[1])
    assert registers * variant.threads <= REGISTERS_PER_SM
    # What is spilled lies outside the loop over chunks.
    assert max(int(n) for n in re.findall(r"(\d+) bytes spill stores", log)) <= 256
    assert "C75" not in log  # setmaxnreg ignored, wgmma serialised
    for requests in (1, batch, 512, hopper.MAX_BATCH):
        ring, shared = variant.layout(requests)
        assert ring >= 8
        assert ring % variant.ring_step == 0
        assert shared <= SHARED_PER_BLOCK[90]


def test_half_queries_e5m2_rows_without_rope_compile():
    for columns in (8, 64):
        nvrtc.compile_source(hopper.choose(columns, 1).source(0, True, True))


def test_rates_compile():
    cubin, _ = nvrtc.compile_source(nvrtc.Source("rates.cu", "rates", (("KIND", 0),)))
    assert cubin


def test_a_cubin_is_compiled_once(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path))
    source = nvrtc.Source("rates.cu", "rates", (("KIND", 2),))
    first = nvrtc.build(source)
    monkeypatch.setattr(nvrtc, "compile_source", lambda _: pytest.fail("compiled again"))
    assert nvrtc.build(source) == first
    assert [f.suffix for f in tmp_path.iterdir()] == [".cubin"]


def test_an_error_of_the_compiler_is_shown():
    with pytest.raises(nvrtc.CompileError, match=r"(?s)rates.cu.*KIND"):
        nvrtc.compile_source(nvrtc.Source("rates.cu", "rates", (("KIND", "}"),)))


@pytest.mark.parametrize("columns", [1, 8, 12, 16, 40, 64, 128, 512])
def test_a_workspace_serves_whatever_is_chosen(columns, monkeypatch):
    monkeypatch.setattr(hopper, "_sms", lambda _: 132)
    device = torch.device("cuda", 0)
    any_batch = hopper.workspace_bytes(device, columns)
    for batch in (1, 4, 5, 32, 33, 66, 67, hopper.MAX_BATCH):
        kept = hopper.workspace_bytes(device, columns, batch)
        for room in (1, 2048, 2049, 1 << 20):
            variant = hopper.choose(columns, batch, room)
            assert variant.workspace_bytes(0) <= kept <= any_batch
            assert variant.layout(batch)[1] <= SHARED_PER_BLOCK[90]
            assert 3 * variant.most_ctas(0) * 4 <= hopper.TICKET_BYTES
            if dict(variant.macros).get("PASSES"):
                assert variant.layout(32)[0] >= 12  # RING_CHUNKS, or there is no way without a schedule
