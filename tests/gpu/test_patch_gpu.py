"""The patch on a device, without SGLang: bits, capture, memory, 64-bit offsets."""

import types
import warnings
from dataclasses import replace

import pytest
import torch

from kvlab.kernels import direct
from kvlab.patch import calls, hooks, selfcheck, write
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
        done.set(Backend, "forward_decode", calls.through(runtime, SITE, Backend.forward_decode))
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
    runtime.metadata_ready("fa3", backend, Step("DECODE", 4, is_capture=True))
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
    else:
        torch.cuda.empty_cache()
    held = torch.cuda.memory_allocated()
    assert peak(backend) <= stock
    # Graphs off, nothing stays: no list of slots either.
    assert lasts or torch.cuda.memory_allocated() == held
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


def launched_twice(run, *made):
    """What two launches of a kind wrote, each into clones of `made`: Triton's own, then the direct one."""
    found = []
    for _ in range(2):
        its = [t.clone() for t in made]
        run(*its)
        found.append(its)
    return found


def kept(launches):
    return sum(len(one._kept) for one in launches)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_a_direct_launch_writes_what_triton_s_does(tokens, fp8, dtype):
    """KV write, with and without its clearing; cast of tables, of pages and of a list; write and cast."""
    from kvlab.kernels import cast, clear, kv_write, write_cast
    from kvlab.kernels.active import ActiveSlots

    assert direct.is_known()
    slots = 4096
    pool = torch.randint(0, 0x48, (slots, 1, WIDTH), dtype=torch.uint8, device="cuda")
    wide = torch.full((slots, 1, WIDTH), float("nan"), dtype=dtype, device="cuda")
    new = torch.randn(tokens, 1, WIDTH, device="cuda").to(dtype)
    loc = torch.randperm(slots - 1, device="cuda")[:tokens] + 1
    indices = torch.randint(1, slots, (tokens * 3,), dtype=torch.int32, device="cuda")
    ragged = ActiveSlots.ragged(indices, torch.tensor([0, tokens * 3], dtype=torch.int32, device="cuda"))
    table = torch.randint(1, slots // 64, (2, 4), dtype=torch.int32, device="cuda")
    paged = ActiveSlots.paged(table, torch.tensor([200, 65], dtype=torch.int32, device="cuda"), 64)
    listed = cast.slot_list(ragged, cast.list_for(slots, pool.device))
    nope, rope = new[..., :RANK], new[..., RANK:]

    def write(buffer, out):
        kv_write.write(buffer, loc, nope, rope, fp8, out)

    def plain(buffer, out):
        kv_write.write(buffer, loc, nope, rope, fp8)

    def cast_of(active):
        return lambda buffer, out: cast.shadow_cast(buffer.view(fp8), out, active)

    def joint(early):
        def run(buffer, out):
            write_cast.write_cast(buffer, out, listed.slots, listed.count, loc, nope, rope, fp8, early=early)

        return run

    def tails(buffer, out):
        clear.clear_tails(out, paged)

    runs = [write, plain, cast_of(ragged), cast_of(paged), cast_of(listed), tails]
    if tokens <= write_cast.MAX_WRITES:
        write_cast.without(listed.slots, listed.count, loc)
        runs += [joint(False), joint(True)]
    for run in runs:
        one, other = launched_twice(run, pool, wide)
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1].view(torch.int16), other[1].view(torch.int16))
    # Each kind was kept: what is compared above is not Triton's launch twice.
    launches = (kv_write._launch, cast._cast, clear._launch, write_cast._launch)
    before = kept(launches)
    for run in runs:
        launched_twice(run, pool, wide)
    assert kept(launches) == before >= len(runs) - 1


@pytest.mark.parametrize("batch", [1, 16, 64])
def test_the_layers_of_a_step_decode_as_each_alone(batch):
    """Also where a layer's tensors are laid out otherwise than the last one's, or the step is another."""
    from kvlab.kernels import decode
    from kvlab.kernels.active import ActiveSlots

    heads, slots, device = 8, 8192, torch.device("cuda", torch.cuda.current_device())
    pools = torch.randn(3, slots, 1, WIDTH, device=device).to(torch.float8_e4m3fn)
    strided = torch.randn(slots, 1, WIDTH + 64, device=device).to(torch.float8_e4m3fn)[..., :WIDTH]
    layers = decode.Layers()
    launches = []
    for context in (100, 700):
        bounds = torch.arange(batch + 1, dtype=torch.int32, device=device) * context
        indices = torch.randint(1, slots, (batch * context,), dtype=torch.int32, device=device)
        active = ActiveSlots.ragged(indices, bounds)
        workspace = decode.workspace_for(batch, heads, device)
        for rows in (*pools, strided, pools[0]):
            q = torch.randn(batch, heads, WIDTH, device=device).bfloat16()
            both = (q[..., :RANK], q[..., RANK:]), (q[..., :RANK].contiguous(), q[..., RANK:].contiguous())
            for q_nope, q_pe in both:
                for cap in (0.0, 30.0):
                    known = {"sm_scale": WIDTH**-0.5, "logit_cap": cap}
                    want, _ = decode.mla_decode(q_nope, q_pe, rows, active, **known)
                    for _ in range(2):
                        got = layers(q_nope, q_pe, rows, active, workspace=workspace, **known)
                        assert torch.equal(got, want)
                launches.append(layers._launch)
    # On Hopper they are CUDA's, launched again without a check.
    if torch.cuda.get_device_capability() == (9, 0):
        assert any(one is not None for one in launches)


@pytest.mark.parametrize("page_size", [1, 64])
def test_the_launches_of_a_layer_are_made_again_for_those_laid_out_alike(page_size):
    """And for no others: what is written and cast is each layer's own, whatever came before it."""
    from kvlab.kernels import cast, kv_write, layers
    from kvlab.kernels.active import ActiveSlots

    slots, fp8, dtype = 4096, torch.float8_e4m3fn, torch.bfloat16
    pools = torch.randint(0, 0x48, (3, slots, 1, WIDTH), dtype=torch.uint8, device="cuda")
    strided = torch.randint(0, 0x48, (slots, 1, WIDTH + 64), dtype=torch.uint8, device="cuda")[..., :WIDTH]
    its = layers.WriteAndCast()
    made = []
    for step in range(2):
        ints = {"dtype": torch.int32, "device": "cuda"}
        if page_size == 1:
            active = ActiveSlots.ragged(
                torch.randint(1, slots, (300,), **ints), torch.tensor([0, 300], **ints)
            )
        else:
            table = torch.randint(1, slots // 64, (2, 4), **ints)
            active = ActiveSlots.paged(table, torch.tensor([200, 65], **ints), 64)
        for number, pool in enumerate((*pools, strided, pools[0], pools[1])):
            tokens = 2 + (number == 5)
            new = torch.randn(tokens, 1, WIDTH, device="cuda").to(dtype)
            loc = torch.randperm(slots - 1, device="cuda")[:tokens] + 1
            nope, rope = new[..., :RANK], new[..., RANK:]
            found = []
            for again in (True, False):
                buffer = (
                    pool.clone()
                    if pool is not strided
                    else torch.empty_strided(
                        pool.shape, pool.stride(), dtype=pool.dtype, device="cuda"
                    ).copy_(pool)
                )
                out = torch.full((slots, 1, WIDTH), 7, dtype=dtype, device="cuda")
                given = write.NewRows(buffer, loc, nope, rope, fp8, write.laid_out(buffer, loc, nope, rope))
                if again and its.again(given, buffer.view(fp8), out, active):
                    made.append((step, number))
                else:
                    kv_write.write(buffer, loc, nope, rope, fp8, out)
                    cast.shadow_cast(buffer.view(fp8), out, active)
                    its.note(given, buffer.view(fp8), out, active)
                found.append((buffer, out.view(torch.int16)))
            assert all(map(torch.equal, *found))
    assert (0, 1) in made
    assert (0, 2) in made
