"""The Triton kernels themselves (interpreted) behind the seam of the real backends."""

import pytest
import torch
from rig.world import ForwardMode, World

from kvlab import patch
from kvlab.patch import casts

LENGTHS = [5, 17]


@pytest.mark.parametrize(("strategy", "graphs"), [("shadow", False), ("shadow", True), ("gather", False)])
@pytest.mark.parametrize(
    ("family", "page_size", "fp8"),
    [("flashinfer_mla", 1, torch.float8_e4m3fn), ("fa3", 16, torch.float8_e5m2)],
    ids=["flashinfer_mla", "fa3"],
)
def test_the_kernels_give_stock_s_bits_and_bytes(family, page_size, fp8, strategy, graphs, monkeypatch):
    monkeypatch.setattr(casts, "INTERPRET", True)
    # All 65,536 values go through the write kernel in tests/cpu; interpreted, that is slow.
    monkeypatch.setattr("kvlab.patch.selfcheck.check_write", lambda facts: None)
    its = World(family, fp8, max_bs=4, page_size=page_size, slots=64 * page_size).fill()
    for request, n in enumerate(LENGTHS):
        its.allot(request, n)
    before = [b.clone() for b in its.pool.kv_buffer]
    for kind, mode, prefix in (
        ("decode", ForwardMode.DECODE, None),
        ("extend", ForwardMode.EXTEND, [n // 2 for n in LENGTHS]),
    ):
        batch = its.batch(mode, LENGTHS, prefix=prefix)
        tensors = its.tensors(batch)
        results = []
        for is_patched in (False, True):
            for buffer, was in zip(its.pool.kv_buffer, before, strict=True):
                buffer.copy_(was)
            with patch.applied(strategy if is_patched else "off"):
                if graphs:
                    its.graphs()
                # The second pass knows from the first that there are two layers.
                for _ in range(2):
                    its.plan(batch)
                    out = [its.attend(batch, kind, tensors, n) for n in range(2)]
                results.append((out, [b.clone() for b in its.pool.kv_buffer]))
                counters = patch.status()["counters"]
        (want, want_pool), (got, got_pool) = results
        assert all(
            torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(want, got, strict=True)
        )
        assert all(map(torch.equal, want_pool, got_pool))
        assert counters["calls"] == {f"{family}.{kind}": {strategy: 4}}
        joint = {"one launch": 1, "with the cast": 3}
        wrote = joint if graphs and kind == "decode" else {"one launch": 4}
        assert counters["kv_writes"] == wrote
        assert counters["fallbacks"] == {}
