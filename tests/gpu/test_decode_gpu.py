"""`mla_decode` on a real GPU: both backends, full width, CUDA-graph replay, all codes."""

import pytest
import torch
import triton
import triton.language as tl

from kvlab.kernels import decode
from kvlab.kernels.active import ActiveSlots
from kvlab.kernels.mla_pairs import open_pairs
from kvlab.kernels.reference import mla_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCALE = 576**-0.5


@triton.jit
def open_codes(x, low, high, IS_E5M2: tl.constexpr, METHOD: tl.constexpr):
    i = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    a, b = open_pairs(tl.load(x + i), IS_E5M2, METHOD)
    tl.store(low + i, a)
    tl.store(high + i, b)


@pytest.fixture(params=["triton", "cuda"])
def backend(request):
    if request.param == "cuda":
        probe = torch.zeros(1, 8, 512, dtype=torch.bfloat16, device="cuda")
        rows = torch.zeros(8, 576, dtype=torch.uint8, device="cuda").view(E4M3)
        one = torch.zeros(2, dtype=torch.int32, device="cuda")
        if reason := decode.why_not_cuda(probe, probe[..., :64], rows, ActiveSlots.ragged(one, one)):
            pytest.skip(reason)
    return request.param


@pytest.fixture(scope="module")
def pool():
    """[100,000, 576] e4m3, slot 0 NaN bytes."""
    g = torch.Generator("cuda").manual_seed(0)
    rows = torch.randn(100_000, 576, generator=g, device="cuda").to(E4M3)
    rows.view(torch.uint8)[0] = 0x7F
    return rows


def queries(tokens, heads, dtype=torch.bfloat16):
    g = torch.Generator("cuda").manual_seed(tokens * heads)
    q = torch.randn(tokens, heads, 576, generator=g, device="cuda").to(dtype)
    return q[..., :512].contiguous(), q[..., 512:].contiguous()


def ragged(lengths, slots, seed=0):
    g = torch.Generator("cuda").manual_seed(seed)
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    table = torch.randint(1, slots, (sum(lengths) + 8,), generator=g, device="cuda", dtype=torch.int32)
    return ActiveSlots.ragged(table, bounds)


def check(backend, q_nope, q_pe, rows, active, *, bound=2e-3, **options):
    options = {"sm_scale": SCALE} | options
    out, lse = decode.mla_decode(q_nope, q_pe, rows, active, return_lse=True, backend=backend, **options)
    want, want_lse = mla_attention(q_nope, q_pe, rows, active, dtype=torch.float64, **options)
    error = ((out.double() - want).norm() / want.norm()).item()
    assert error < bound
    seen = ~want_lse.isneginf()
    assert torch.equal(lse.isneginf(), ~seen)
    torch.testing.assert_close(lse[seen].double(), want_lse[seen], rtol=1e-5, atol=3e-5)
    return out


@pytest.mark.parametrize("heads", [1, 8, 16, 32, 64, 128])
@pytest.mark.parametrize("lengths", [[100], [2048, 1, 0, 777], [131_072 // 4] + [100] * 15])
def test_equals_the_reference(backend, pool, heads, lengths):
    check(backend, *queries(len(lengths), heads), pool, ragged(lengths, pool.shape[0]))


def test_fp16_queries_e5m2_rows_pages_of_64(backend, pool):
    pages = torch.randint(1, 1500, (5, 20), dtype=torch.int32, device="cuda")
    lengths = torch.tensor([1200, 64, 0, 65, 700], dtype=torch.int32, device="cuda")
    rows = pool.float().nan_to_num().to(E5M2)
    active = ActiveSlots.paged(pages, lengths, 64)
    check(backend, *queries(5, 8, torch.float16), rows, active, bound=5e-4, logit_cap=30.0)


def test_speculative_verify(backend, pool):
    q_indptr = torch.arange(0, 4 * 5 + 1, 4, dtype=torch.int32, device="cuda")
    active = ragged([900, 4, 3, 0, 5000], pool.shape[0])
    check(backend, *queries(20, 8), pool, active, q_indptr=q_indptr)


def test_huge_queries_that_meet_zeros(backend, pool):
    rows = pool.clone()
    rows.view(torch.uint8)[:, 7] = 0
    q_nope, q_pe = queries(2, 8)
    # The CUDA kernels hold Q to 2^-30 of a column's largest value; the portable ones turn to float32 there.
    q_nope[:, :5, 7] = 2.0**100 if backend == "triton" else 2.0**18
    table = torch.randperm(rows.shape[0] - 1, device="cuda")[:600].int() + 1
    bounds = torch.tensor([0, 100, 600], dtype=torch.int32, device="cuda")
    check(backend, q_nope, q_pe, rows, ActiveSlots.ragged(table, bounds))


def test_nan_reaches_its_request_and_no_other(backend, pool):
    rows = pool.clone()
    rows.view(torch.uint8)[5, 9] = 0xFF
    table = torch.arange(1, 201, dtype=torch.int32, device="cuda")
    bounds = torch.tensor([0, 100, 200], dtype=torch.int32, device="cuda")
    out, lse = decode.mla_decode(
        *queries(2, 8),
        rows,
        ActiveSlots.ragged(table, bounds),
        sm_scale=SCALE,
        return_lse=True,
        backend=backend,
    )
    assert out[0].isnan().all()
    assert lse[0].isnan().all()
    assert torch.isfinite(out[1]).all()


@pytest.mark.parametrize("heads", [8, 64])
def test_one_graph_serves_every_length(backend, pool, heads):
    """200 replays: random lengths, empty requests, padded entries; each equals the reference, bit-stable."""
    batch, most = 16, 1500
    q_nope, q_pe = queries(batch, heads)
    table = torch.zeros(batch * most, dtype=torch.int32, device="cuda")
    bounds = torch.zeros(batch + 1, dtype=torch.int32, device="cuda")
    bounds[1:] = torch.arange(1, batch + 1)
    active = ActiveSlots.ragged(table, bounds)
    out = torch.empty_like(q_nope)
    lse = torch.empty(batch, heads, dtype=torch.float32, device="cuda")
    workspace = decode.workspace_for(batch, heads, q_nope.device)

    def step():
        decode.mla_decode(
            q_nope,
            q_pe,
            pool,
            active,
            sm_scale=SCALE,
            out=out,
            lse=lse,
            workspace=workspace,
            backend=backend,
        )

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    g = torch.Generator().manual_seed(heads)
    wrong = torch.zeros((), dtype=torch.bool, device="cuda")
    for replay in range(200):
        lengths = torch.randint(0, most, (batch,), generator=g)
        lengths[torch.rand(batch, generator=g) < 0.3] = 0
        if replay % 3 == 0:  # one long request beside short ones
            lengths = lengths.clamp(max=90)
            lengths[replay % batch] = most
        ends = lengths.cumsum(0).int()
        bounds[1:] = ends.cuda()
        total = int(ends[-1])
        table[:total] = torch.randint(1, pool.shape[0], (total,), generator=g, dtype=torch.int32).cuda()
        table[total:] = 0  # the padding slot: NaN bytes
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        graph.replay()
        if replay % 10 == 0:
            want, want_lse = mla_attention(q_nope, q_pe, pool, active, sm_scale=SCALE, dtype=torch.float64)
            assert (out.double() - want).norm() / want.norm().clamp(min=1e-9) < 2e-3
            torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=3e-5)
        first = out.clone()
        graph.replay()
        wrong |= ~torch.isfinite(out).all() | (first != out).any()
        wrong |= out[(lengths == 0).cuda()].any()
    assert not wrong


@pytest.mark.parametrize("e5m2", [False, True])
@pytest.mark.parametrize("method", ["cvt", "bits"])
def test_opening_pairs_is_exact_for_every_code(e5m2, method):
    codes = torch.arange(65536, device="cuda").to(torch.uint16)
    low, high = (torch.empty(65536, dtype=torch.float16, device="cuda") for _ in range(2))
    open_codes[(64,)](codes, low, high, e5m2, method)
    want = codes.view(torch.uint8).view(E5M2 if e5m2 else E4M3).to(torch.float16).view(-1, 2)
    fold = 256.0 if method == "bits" and not e5m2 else 1.0
    for got, expected in ((low, want[:, 0]), (high, want[:, 1])):
        nan = expected.isnan()
        assert torch.equal(got.isnan(), nan)
        # The fold is a power of two: exact.
        assert torch.equal((got.float() * fold)[~nan], expected.float()[~nan])
