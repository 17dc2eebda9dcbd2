"""The patch on a device, without SGLang: bits, capture, memory, 64-bit offsets."""

import types
import warnings
from dataclasses import replace

import pytest
import torch

from kvlab.patch import hooks, selfcheck
from kvlab.patch.policy import Facts
from kvlab.patch.runtime import Runtime, Step
from kvlab.patch.sites import Site

pytestmark = pytest.mark.gpu

RANK, ROPE = 512, 64
WIDTH = RANK + ROPE
SITE = Site("fa3", "decode", "toy", "Backend", "recognised", holder="self")


def facts(**changes):
    known = Facts(
        kind="decode",
        device=torch.device("cuda", torch.cuda.current_device()),
        slots=65_536,
        width=WIDTH,
        fp8=torch.float8_e4m3fn,
        q_dtype=torch.bfloat16,
        heads=8,
        rank=RANK,
    )
    return replace(known, **changes)


@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("strategy", ["shadow", "gather"])
def test_the_bits_of_every_code_nan_included(strategy, fp8, dtype, page_size):
    assert selfcheck.check(strategy, facts(fp8=fp8, q_dtype=dtype, page_size=page_size)) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_the_kv_write_s_bytes_of_every_value(fp8, dtype):
    assert selfcheck.check_write(facts(fp8=fp8, q_dtype=dtype)) is None


def test_fused_is_within_its_tolerance():
    assert selfcheck.check("fused", facts()) is None


class Pool:
    """A pool of uint8 buffers, as SGLang's."""

    dtype, store_dtype, start_layer = torch.float8_e4m3fn, torch.uint8, 0

    def __init__(self, slots, layers):
        self.layer_num = layers
        self.kv_buffer = [
            torch.randint(0, 64, (slots, 1, WIDTH), dtype=torch.uint8, device="cuda") for _ in range(layers)
        ]

    def get_key_buffer(self, layer_id):
        return self.kv_buffer[layer_id].view(self.dtype)


class Backend:
    """Static tables and an 'attention' that sums each request's rows: it depends on every active one."""

    page_size, topk = 1, 0

    def __init__(self, slots, layers=2, requests=4, context=256):
        self.token_to_kv_pool = Pool(slots, layers)
        self.table = torch.zeros(requests, context, dtype=torch.int32, device="cuda")
        self.lengths = torch.zeros(requests, dtype=torch.int32, device="cuda")
        self.forward_metadata = types.SimpleNamespace(
            page_table=self.table, cache_seqlens_int32=self.lengths, cu_seqlens_q=None
        )

    def forward_decode(self, q, k, v, layer, forward_batch):
        wide = self.token_to_kv_pool.get_key_buffer(layer.layer_id).to(q.dtype)
        # The metadata's table, which a strategy may have swapped; past a length it may hold anything.
        table = self.forward_metadata.page_table
        is_active = torch.arange(table.shape[1], device="cuda")[None] < self.lengths[:, None]
        rows = wide[torch.where(is_active, table, 0).long(), 0].float()
        return torch.where(is_active[..., None], rows, 0).sum(1)

    def read(self, lengths):
        slots = self.token_to_kv_pool.kv_buffer[0].shape[0]
        self.table.copy_(torch.randint(1, slots, self.table.shape, device="cuda"))
        self.lengths.copy_(torch.tensor(lengths))
        return self


LAYERS = [
    types.SimpleNamespace(layer_id=i, head_dim=WIDTH, v_head_dim=RANK, tp_q_head_num=8) for i in range(2)
]
BATCH = types.SimpleNamespace(seq_lens_sum=100, spec_info=None)


@pytest.fixture
def patched():
    """`Backend` patched with a strategy."""
    done = hooks.Replacements()

    def apply(strategy):
        runtime = Runtime(strategy, is_strict=False, version="toy")
        done.set(Backend, "forward_decode", hooks._forward(runtime, SITE, Backend.forward_decode))
        return runtime

    yield apply
    done.undo()


def step(backend):
    q = torch.zeros(1, 8, WIDTH, dtype=torch.bfloat16, device="cuda")
    return [backend.forward_decode(q, None, None, layer, BATCH) for layer in LAYERS]


@pytest.mark.parametrize("strategy", ["shadow", "gather"])
def test_a_captured_step_follows_growing_lengths(strategy, patched):
    backend = Backend(20_000).read([1, 1, 1, 1])
    stock = []
    batches = [[100, 3, 0, 256], [101, 4, 7, 256], [2, 2, 2, 2]]
    tables = []
    for lengths in batches:
        backend.read(lengths)
        tables.append((backend.table.clone(), backend.lengths.clone()))
        stock.append(step(backend))
    runtime = patched(strategy)
    runtime.graphs_ready("fa3", backend)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(backend)
    torch.cuda.synchronize()
    runtime.metadata_ready("fa3", backend, Step("DECODE", 4, None, is_graph=True, is_capture=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = step(backend)
    for (table, lengths), want in zip(tables, stock, strict=True):
        backend.table.copy_(table)
        backend.lengths.copy_(lengths)
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, out, want))
    assert runtime.counters.fallbacks == {}


def peak(backend):
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        step(backend)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("lasts", [False, True], ids=["eager", "graphs"])
def test_the_peak_is_at_most_stock_s(lasts, patched):
    backend = Backend(495_616).read([100, 100, 100, 100])
    stock = peak(backend)
    runtime = patched("shadow")
    step(backend)  # the self-check's own buffers are gone before the measurement
    if lasts:
        runtime.graphs_ready("fa3", backend)
    assert peak(backend) <= stock
    assert runtime.counters.calls["fa3.decode", "shadow"] == 8


def test_offsets_past_32_bits(patched):
    """4 million slots: the last rows lie past 2^31 bytes, wide rows past 2^32."""
    slots = 4_000_000
    backend = Backend(slots, layers=2).read([3, 3, 3, 3])
    backend.table[:, :3] = torch.tensor([slots - 1, slots - 2, 1], dtype=torch.int32, device="cuda")
    want = step(backend)
    patched("shadow")
    assert all(map(torch.equal, step(backend), want))


def test_no_synchronisation_in_a_call(patched):
    backend = Backend(65_536).read([100, 3, 0, 200])
    patched("shadow")
    step(backend)
    with warnings.catch_warnings():
        # torch calls its own mode a prototype.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        step(backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")
