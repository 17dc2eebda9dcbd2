"""`kvlab bench step` hands SGLang requests whose context is cached: SGLang's own batch must take them so."""

from importlib import metadata, util
from types import SimpleNamespace

import pytest

try:
    metadata.version("sglang")
except metadata.PackageNotFoundError:
    pytest.skip("needs a real SGLang release (make test-sglang)", allow_module_level=True)

# Before SGLang: what importing it on a CPU needs.
import rig.environment  # noqa: F401

if util.find_spec("sglang.benchmark") is None or util.find_spec("sglang.benchmark.one_batch") is None:
    pytest.skip(
        "bench step drives sglang.benchmark.one_batch, which this release lacks", allow_module_level=True
    )

import dataclasses

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.mem_cache import common
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, ReqToTokenPool
from sglang.srt.server_args import ServerArgs

from kvlab.bench.sglang_rank import TAIL, Rank, Setup, prompt, requests, server_args

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(not hasattr(Req, "set_extend_range"), reason="this release's requests differ"),
]
SLOTS, LAYERS = 4096, 3
SETUP = Setup("rank", "exact", SLOTS, (1, 16))


@pytest.fixture
def rank(monkeypatch):
    """Real pools, allocator and request table; the device's table writer becomes SGLang's own CPU one."""
    few = SimpleNamespace(
        enable_mamba_extra_buffer=lambda: False,
        speculative_algorithm=None,
        page_size=1,
        enable_deterministic_inference=False,
        enable_custom_logit_processor=False,
    )
    for module in ("managers.schedule_batch", "mem_cache.common", "sampling.sampling_batch_info"):
        monkeypatch.setattr(f"sglang.srt.{module}.get_global_server_args", lambda: few)
    monkeypatch.setattr(common, "support_triton", lambda backend: False)
    pool = MLATokenToKVPool(SLOTS, 1, torch.float8_e4m3fn, 512, 64, LAYERS, "cpu", False)
    runner = SimpleNamespace(
        token_to_kv_pool=pool,
        token_to_kv_pool_allocator=TokenToKVPoolAllocator(SLOTS, pool.dtype, "cpu", pool, False),
        req_to_token_pool=ReqToTokenPool(server_args(SETUP)["max_running_requests"], 2048, "cpu", False),
        max_total_num_tokens=SLOTS,
    )
    return Rank(SETUP, runner)


def extended(rank, prompts, prefixes):
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    runner = rank.runner
    tree = SimpleNamespace(
        page_size=1,
        device="cpu",
        token_to_kv_pool_allocator=rank.allocator,
        supports_swa=lambda: False,
        supports_mamba=lambda: False,
        is_chunk_cache=lambda: False,
        is_tree_cache=lambda: True,
        evict=lambda params: None,
    )
    batch = ScheduleBatch.init_new(
        reqs=requests(prompts, prefixes),
        req_to_token_pool=runner.req_to_token_pool,
        token_to_kv_pool_allocator=rank.allocator,
        tree_cache=tree,
        model_config=SimpleNamespace(is_encoder_decoder=False, vocab_size=9_500),
        enable_overlap=False,
        spec_algorithm=SpeculativeAlgorithm.NONE,
    )
    batch.prepare_for_extend()
    return batch


def table(rank, req, length):
    return rank.runner.req_to_token_pool.req_to_token[req.req_pool_idx, :length].long()


def test_a_cached_context_is_read_and_only_its_tail_extended(rank):
    prefixes = list(rank.prefix(3 * 96).split(96))
    batch = extended(rank, [prompt(TAIL, i) for i in range(3)], prefixes)
    assert batch.prefix_lens == [96] * 3
    assert batch.extend_lens == [TAIL] * 3
    assert batch.seq_lens.tolist() == [100] * 3
    for req, cached in zip(batch.reqs, prefixes, strict=True):
        assert torch.equal(table(rank, req, 96), cached)
    read = torch.cat([table(rank, r, 100) for r in batch.reqs])
    assert read.unique().numel() == 300
    batch.input_ids = torch.zeros(3, dtype=torch.int64)
    batch.prepare_for_decode()
    assert batch.seq_lens.tolist() == [101] * 3


def test_requests_may_share_their_cached_slots(rank):
    cached = rank.prefix(512)
    batch = extended(rank, [prompt(1 + i, i) for i in range(4)], [cached] * 4)
    for req in batch.reqs:
        assert torch.equal(table(rank, req, 512), cached)
    own = torch.cat([table(rank, r, 513 + i)[512:] for i, r in enumerate(batch.reqs)])
    assert own.unique().numel() == own.numel() == 10


def test_a_request_runs_beside_the_largest_batch(rank):
    largest = extended(rank, [prompt(TAIL, i) for i in range(16)], list(rank.prefix(16 * 96).split(96)))
    beside = extended(rank, [prompt(TAIL)], [rank.prefix(96)])
    slots = [table(rank, r, 100) for r in (*largest.reqs, *beside.reqs)]
    assert torch.cat(slots).unique().numel() == 17 * 100


def test_cached_rows_are_seeded_finite_and_of_unit_size(rank):
    slots = rank.prefix(200, seed=3)
    rows = [b[slots].view(torch.float8_e4m3fn).float() for b in rank.pool.kv_buffer]
    assert all(r.isfinite().all() for r in rows)
    assert rows[0].std().item() == pytest.approx(1, abs=0.02)
    assert not torch.equal(rows[0], rows[1])
    rank.clear()
    again = rank.prefix(200, seed=3)
    assert torch.equal(again, slots)
    assert torch.equal(rank.pool.kv_buffer[0][again].view(torch.float8_e4m3fn).float(), rows[0])


def test_burnt_slots_are_nobodys(rank):
    rank.burn = 4000
    rank.clear()
    assert rank.prefix(50).min() > 4000
    assert "slots of a pool" in rank.fits(1, 90, 50)
    assert not rank.fits(1, 40, 20)


def test_every_argument_is_one_that_this_release_has():
    known = {f.name for f in dataclasses.fields(ServerArgs)}
    assert set(server_args(Setup("rank", "stock", SLOTS, (1,)))) <= known
