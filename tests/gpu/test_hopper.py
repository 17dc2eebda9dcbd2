"""The CUDA decode on a Hopper GPU: every variant and specialisation equals the reference, replayed too."""

import dataclasses
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kvlab.kernels import hopper, nvrtc
from kvlab.kernels.active import ActiveSlots
from kvlab.kernels.reference import mla_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="no Hopper device",
    ),
]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SLOTS = 60_000
SCALE = 192**-0.5
HEADS = (1, 8, 12, 16, 20, 32, 64, 128)
LENGTHS = [
    [1],
    [100],
    [128, 16, 17],
    [9_000],
    [2_500, 0, 1, 777, 15, 0],
    [30_000] + [100] * 15,
    [1_000] * 20,
    [300, 0, 50] * 30,
]


def pool(fmt: torch.dtype = E4M3, width: int = 576, padding: int = 0) -> torch.Tensor:
    """NaN bytes in slots 0 … 99, which no table here names."""
    g = torch.Generator("cuda").manual_seed(0)
    rows = torch.zeros(SLOTS, width + padding, dtype=torch.uint8, device="cuda").view(fmt)[:, :width]
    rows.copy_(torch.randn(SLOTS, width, generator=g, device="cuda"))
    rows.view(torch.uint8)[:100] = 0x7F
    return rows


def queries(tokens: int, heads: int, dtype: torch.dtype = torch.bfloat16, rope: int = 64) -> tuple:
    g = torch.Generator("cuda").manual_seed(tokens * 131 + heads)
    q = torch.randn(tokens, heads, 512 + rope, generator=g, device="cuda").to(dtype)
    return q[..., :512], q[..., 512:] if rope else None


def ragged(lengths: list[int], dtype: torch.dtype = torch.int32, holes: bool = False) -> ActiveSlots:
    g = torch.Generator("cuda").manual_seed(sum(lengths))
    table = torch.randint(100, SLOTS, (sum(lengths) + 40,), generator=g, device="cuda").to(dtype)
    if holes:
        table[torch.rand(table.shape, generator=g, device="cuda") < 0.2] = -1
        table[5:9] = SLOTS + 7
    table[sum(lengths) :] = 0
    bounds = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    return ActiveSlots.ragged(table, bounds)


def paged(lengths: list[int], size: int) -> ActiveSlots:
    g = torch.Generator("cuda").manual_seed(size)
    pages = max(-(-n // size) for n in lengths) + 2
    table = torch.randint(
        100 // size + 1, SLOTS // size, (len(lengths), pages), generator=g, device="cuda"
    ).int()
    for row, n in zip(table, lengths, strict=True):
        row[-(-n // size) :] = -1
    return ActiveSlots.paged(table, torch.tensor(lengths, device="cuda").int(), size)


def check(q_nope, q_pe, rows, active, *, variant=None, **options):
    options = {"sm_scale": SCALE} | options
    out = torch.full(q_nope.shape, torch.nan, dtype=q_nope.dtype, device="cuda")
    lse = torch.full(q_nope.shape[:2], torch.nan, device="cuda")
    hopper.mla_decode(q_nope, q_pe, rows, active, out=out, lse=lse, variant=variant, **options)
    want, want_lse = mla_attention(q_nope, q_pe, rows, active, dtype=torch.float64, **options)
    if want.abs().sum() > 0:
        assert ((out.double() - want).norm() / want.norm()).item() < 2e-3
    else:
        assert out.abs().sum().item() == 0
    seen = ~want_lse.isneginf()
    assert torch.equal(lse.isneginf(), ~seen)
    torch.testing.assert_close(lse[seen].double(), want_lse[seen], rtol=1e-5, atol=3e-5)
    return out


def variants() -> list[hopper.Variant]:
    chosen = [hopper.choose(columns, n) for columns in (8, 16, 32, 64) for n in (1, 17, 67)]
    return [dataclasses.replace(v, cluster=c) for v in dict.fromkeys(chosen) for c in (v.cluster, 4)]


def short_variants() -> list[hopper.Variant]:
    lone = [dataclasses.replace(hopper.choose(8, 8), cluster=c) for c in (1, 2, 8)]
    return [*lone, hopper.choose(16, 1), hopper.choose(16, 17)]


def name_of(v: hopper.Variant) -> str:
    return f"{v.columns}c{v.cluster}"


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Everything below, compiled side by side."""
    flags = [{}, {"multi": True}]
    every = dict.fromkeys([*variants(), *short_variants()])
    work = [v.source(64, False, False, **f) for v in every for f in flags]
    odd = [{"paged": True}, {"index64": True}, {"cap": True}]
    for heads in (8, 16, 64):
        v = hopper.choose(heads, 3)
        many = {"multi": heads > v.columns}
        work += [v.source(64, False, False, **f, **many) for f in odd]
        work += [v.source(64, True, True, **many), v.source(0, False, False, **many)]
    with ThreadPoolExecutor() as several:
        list(several.map(nvrtc.build, work))


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda n: f"{len(n)}x{n[0]}")
@pytest.mark.parametrize("heads", HEADS)
def test_equals_the_reference(heads, lengths):
    check(*queries(len(lengths), heads), pool(), ragged(lengths))


@pytest.mark.parametrize("variant", variants(), ids=name_of)
def test_every_cluster_size_merges_right(variant):
    for lengths in ([40_000], [5_000, 0, 900, 2], [700] * 40):
        check(*queries(len(lengths), variant.columns), pool(), ragged(lengths), variant=variant)


@pytest.mark.parametrize("variant", variants(), ids=name_of)
def test_reduced(variant):
    """Small enough for compute-sanitizer: items whole and split, an empty one, clusters that merge."""
    check(*queries(4, variant.columns), pool(), ragged([600, 3, 0, 40]), variant=variant)


@pytest.mark.parametrize("clusters", [1, 2])
@pytest.mark.parametrize("variant", [v for v in variants() if v.columns > 16 and v.cluster < 4], ids=name_of)
def test_several_tiles_a_block(variant, clusters, monkeypatch):
    """A block has items of several tiles of 128 tokens, and its load ring goes round more than twice."""
    monkeypatch.setattr(hopper, "_grid", lambda v, *_: clusters * v.cluster)
    tile = 128 * variant.cluster
    lengths = [tile, 0, 6 * tile + 100, 17 * variant.cluster, 3 * tile]
    check(*queries(len(lengths), variant.columns), pool(), ragged(lengths), variant=variant)


@pytest.mark.parametrize("variant", [*variants(), *short_variants()], ids=name_of)
def test_an_item_for_each_cluster(variant, monkeypatch):
    """Three items and four clusters, one of which has nothing; twice as many heads, six and seven."""
    lengths = [600 * variant.cluster - n for n in (0, 5, 17)]
    for heads, clusters in ((variant.columns, 4), (2 * variant.columns, 7)):
        monkeypatch.setattr(hopper, "_grid", lambda v, *_, n=clusters: n * v.cluster)
        for active in (ragged(lengths), paged(lengths, 64)):
            check(*queries(3, heads), pool(), active, variant=variant)


@pytest.mark.parametrize("variant", short_variants(), ids=name_of)
@pytest.mark.parametrize("heads", [1, 8, 20, 64])
def test_short_steps(heads, variant):
    """Up to 128 tokens a request, or 512 a CTA, there is no schedule; one token more, and there is."""
    some = ([1], [128], [129], [0], [100, 0, 3, 128, 16, 17], [5] * 15, [128] * 33)
    more = (
        [1_024],
        [1_025],
        [1_000, 0, 17, 130],
        [260, 1_024],
        [8_192],
        [9_000],
        [2_100, 0, 5, 4_000],
        [1_100] * 4,
        [20_000],
        [30_000, 0, 7],
        [7_000] * 4,
        [1_500] * 17,
    )
    for lengths in (*some, *more):
        check(*queries(len(lengths), heads), pool(), ragged(lengths), variant=variant)
    late = ragged([20_000, 700])
    for gone in (200, 19_990):
        late.table[:gone] = -1
        check(*queries(2, heads), pool(), late, variant=variant)
    options = {"variant": variant, "logit_cap": 5.0, "k_scale": 0.5}
    for size in (1, 3, 64):
        check(*queries(3, heads, torch.float16), pool(E5M2), paged([90, 0, 128], size), **options)
    check(*queries(3, heads, torch.float16), pool(E5M2), paged([9_000, 0, 12_000], 64), **options)
    for lengths in ([70, 128], [18_000, 900]):
        check(*queries(2, heads), pool(), ragged(lengths, torch.int64, holes=True), variant=variant)
        check(*queries(2, heads, rope=0), pool(width=512), ragged(lengths), variant=variant)


@pytest.mark.parametrize("variant", short_variants(), ids=name_of)
def test_reduced_short(variant):
    """Small enough for compute-sanitizer."""
    check(*queries(4, 8), pool(), ragged([100, 3, 0, 40]), variant=variant)


@pytest.mark.parametrize("variant", short_variants(), ids=name_of)
def test_reduced_passes(variant, monkeypatch):
    """Three passes, all columns at once, a request that two of three clusters share."""
    monkeypatch.setattr(hopper, "_grid", lambda v, *_: 3 * v.cluster)
    lengths = [600 * variant.cluster, 200 * variant.cluster]
    check(*queries(2, variant.columns), pool(), ragged(lengths), variant=variant)


@pytest.mark.parametrize("order", ["up", "down", "saw"])
@pytest.mark.parametrize("heads", [8, 16, 32, 64])
def test_a_maximum_that_moves_all_the_way(heads, order):
    """Logits that grow, fall or saw along the request, each head at its own pace."""
    g = torch.Generator("cuda").manual_seed(heads)
    for n in (70, 3_000, 20_000):
        along = torch.arange(n, device="cuda") / n
        pace = {"up": along, "down": 1 - along, "saw": along * (torch.arange(n, device="cuda") % 97) / 97}[
            order
        ]
        axis = torch.randn(576, generator=g, device="cuda").sign()
        noise = torch.randn(n + 1, 576, generator=g, device="cuda")
        rows = torch.zeros(n + 1, 576, device="cuda")
        rows[1:] = 8 * pace[:, None] * axis + 0.3 * noise[1:]
        steep = torch.linspace(-1, 1, heads, device="cuda")[:, None]
        q = (steep * axis + 0.2 * noise[:heads]).bfloat16()[None]
        active = ActiveSlots.ragged(
            torch.arange(1, n + 1, dtype=torch.int32, device="cuda"),
            torch.tensor([0, n], dtype=torch.int32, device="cuda"),
        )
        check(q[..., :512], q[..., 512:], rows.to(E4M3), active)


@pytest.mark.parametrize("heads", [8, 16, 64])
def test_every_kind_of_table(heads):
    lengths = [700, 65, 0, 1]
    for size in (1, 3, 16, 64, 128):
        check(*queries(4, heads), pool(), paged(lengths, size))
    check(*queries(4, heads), pool(), ragged(lengths, torch.int64))
    check(*queries(4, heads), pool(), ragged(lengths, holes=True))


@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
def test_tokens_that_come_late(heads):
    """A request whose first slots are none: for whole tiles its heads see nothing, then all at once."""
    nope, pe = queries(2, heads)
    for gone in (60, 200, 2_999):
        active = ragged([3_000, 700])
        active.table[:gone] = -1
        for steep in (1, 30):
            check(nope * steep, pe * steep, pool(), active)


@pytest.mark.parametrize("heads", [8, 16, 64])
def test_formats_strides_scales_and_caps(heads):
    active = ragged([700, 65, 0])
    check(*queries(3, heads, torch.float16), pool(E5M2, padding=64), active, k_scale=0.5)
    check(*queries(3, heads, rope=0), pool(width=512), active)
    check(*queries(3, heads), pool(), active, logit_cap=5.0)
    nope, pe = queries(3, heads)
    scale = torch.tensor([1e30, 1e-30, 3e4], device="cuda").bfloat16()[:, None, None]
    check(nope * scale, pe * scale, pool(), ragged([700, 65, 3]), sm_scale=2e-31)


@pytest.mark.parametrize("heads", [8, 16, 64, 128])
@pytest.mark.parametrize("causal", [True, False])
def test_several_query_tokens(heads, causal):
    bounds = torch.tensor([0, 4, 5, 5, 8], dtype=torch.int32, device="cuda")
    active = ragged([2_000, 3, 40, 2])
    check(*queries(8, heads), pool(), active, q_indptr=bounds, causal=causal)


def test_tokens_behind_the_last_request_are_zero():
    nope, pe = queries(9, 8)
    bounds = torch.tensor([0, 4, 6], dtype=torch.int32, device="cuda")
    out = check(nope, pe, pool(), ragged([500, 20]), q_indptr=bounds)
    assert out[6:].abs().sum().item() == 0


@pytest.mark.parametrize("heads", [8, 16, 64])
def test_one_graph_serves_every_length_and_repeats_its_bits(heads):
    batch, most = 24, 3_000
    rng = random.Random(heads)
    rows, (nope, pe) = pool(), queries(batch, heads)
    table = torch.randint(100, SLOTS, (batch * most,), device="cuda").int()
    bounds = torch.zeros(batch + 1, dtype=torch.int32, device="cuda")
    active, out = ActiveSlots.ragged(table, bounds), torch.empty_like(nope)
    workspace = torch.zeros(
        hopper.workspace_bytes(rows.device, heads, batch), dtype=torch.uint8, device="cuda"
    )

    def step():
        hopper.mla_decode(nope, pe, rows, active, sm_scale=SCALE, out=out, workspace=workspace)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for turn in range(200):
        lengths = [rng.choice([0, 1, 16, rng.randint(1, 100), rng.randint(1, most)]) for _ in range(batch)]
        bounds.copy_(torch.tensor([0, *lengths]).cumsum(0))
        out.fill_(torch.nan)
        graph.replay()
        first = out.clone()
        graph.replay()
        assert torch.equal(first, out)
        if turn % 8 == 0:
            want, _ = mla_attention(nope, pe, rows, active, sm_scale=SCALE, dtype=torch.float64)
            assert ((out.double() - want).norm() / want.norm().clamp(min=1e-9)).item() < 2e-3
        assert bool(out.isfinite().all())
    assert workspace[: hopper.TICKET_BYTES].count_nonzero().item() == 0


def test_graphs_that_share_a_workspace_repeat_their_bits():
    """As a server's: one graph a batch size, whose kernels differ, replayed in any order on other lengths."""
    rng, rows = random.Random(1), pool()
    shapes = [(8, 1), (8, 2), (8, 16), (16, 40), (64, 2), (64, 16), (64, 70)]
    need = max(hopper.workspace_bytes(rows.device, heads, batch) for heads, batch in shapes)
    workspace = torch.zeros(need, dtype=torch.uint8, device="cuda")
    graphs = []
    for heads, batch in shapes:
        nope, pe = queries(batch, heads)
        table = torch.randint(100, SLOTS, (batch * 3_000,), device="cuda").int()
        bounds = torch.zeros(batch + 1, dtype=torch.int32, device="cuda")
        out = torch.empty_like(nope)
        call = {"q_nope": nope, "q_pe": pe, "rows": rows, "active": ActiveSlots.ragged(table, bounds)}
        call |= {"sm_scale": SCALE, "out": out, "workspace": workspace}
        hopper.mla_decode(**call)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            hopper.mla_decode(**call)
        graphs.append((graph, call))  # which keeps its tensors alive
    seen = {}
    steps = [(i, j) for i in range(len(graphs)) for j in range(3)] * 4
    rng.shuffle(steps)
    for i, j in steps:
        graph, call = graphs[i]
        bounds, out = call["active"].bounds, call["out"]
        lengths = random.Random(100 * i + j).choices([0, 1, 90, 350, 3_000], k=bounds.numel() - 1)
        bounds.copy_(torch.tensor([0, *lengths]).cumsum(0))
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(seen.setdefault((i, j), out.clone()), out)
    assert workspace[: hopper.TICKET_BYTES].count_nonzero().item() == 0


def test_nan_in_an_active_row_reaches_its_request_only():
    rows, active = pool(), ragged([50, 400])
    rows.view(torch.uint8)[active.table[77].long(), 3] = 0xFF
    for heads in (8, 64):
        out, _ = hopper.mla_decode(*queries(2, heads), rows, active, sm_scale=SCALE)
        assert bool(out[0].isfinite().all())
        assert bool(out[1].isnan().all())


def test_slots_past_32_bits():
    slots = 3_800_000  # 576 bytes each: past 2^31
    rows = torch.zeros(slots, 576, dtype=torch.uint8, device="cuda").view(E4M3)
    rows[-4_000:] = torch.randn(4_000, 576, device="cuda").to(E4M3)
    table = (slots - 4_000 + torch.randperm(4_000, device="cuda")).int()
    active = ActiveSlots.ragged(table, torch.tensor([0, 4_000], dtype=torch.int32, device="cuda"))
    for heads in (8, 64):
        check(*queries(1, heads), rows, active)
