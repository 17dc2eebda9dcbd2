"""The cast on a GPU: every code bit for bit as `tensor.to()`, real pool sizes, replayed graphs."""

import itertools
import random

import pytest
import torch
from cast_checks import check_gather, check_shadow
from kernel_inputs import (
    FORMATS,
    UNTOUCHED,
    WIDE,
    Case,
    paged_case,
    ragged_case,
    random_pool,
    untouched,
)

from kvlab.kernels import kv_write
from kvlab.kernels.active import ActiveSlots
from kvlab.kernels.cast import (
    Tuning,
    gather_cast,
    list_for,
    map_workspace,
    shadow_cast,
    slot_list,
    slot_map,
)
from kvlab.kernels.write_cast import without, write_cast

ROW = 576


def cuts() -> list[Tuning]:
    """Both ways to widen, both widths of access, in tiles so small that 400 rows are many."""
    return [Tuning(128, unit, 4, 1, native) for native in (True, False) for unit in (8, 16)]


@pytest.mark.parametrize(("fmt", "dtype"), [*itertools.product(FORMATS, WIDE)])
def test_every_code_is_bit_identical_to_stock(fmt, dtype, device):
    codes = torch.arange(256, dtype=torch.uint8, device=device).repeat(900).view(400, ROW).view(fmt)
    for n in (4, 400):
        active = ActiveSlots.ragged(
            torch.arange(n, dtype=torch.int32, device=device),
            torch.tensor([0, n], dtype=torch.int32, device=device),
        )
        for cut in [None, *cuts()]:
            check_shadow(codes, Case(active, 400), dtype, cut=cut)
        check_gather(codes, Case(active, 400), dtype, steps=1, cut=cuts()[1])


@pytest.mark.parametrize(("index_dtype", "padding"), [(torch.int32, 64), (torch.int64, 5)])
def test_reduced_ragged(index_dtype, padding, device):
    """Small enough for compute-sanitizer; rows that lie at odd addresses too."""
    case = ragged_case(
        [170, 0, 33], num_slots=161, seed=1, index_dtype=index_dtype, holes=True, device=device
    )
    rows = random_pool(161, ROW, torch.float8_e4m3fn, seed=2, device=device, padding=padding)
    for cut in (None, cuts()[1]):
        check_shadow(rows, case, torch.bfloat16, cut=cut)
        check_shadow(rows, case, torch.bfloat16, cut=cut, listed=True)
        check_gather(rows, case, torch.bfloat16, cut=cut)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 128])
def test_reduced_paged(page_size, device):
    slots = 5 * page_size + page_size // 2
    case = paged_case([130, 0, 7], page_size, num_slots=slots, seed=page_size, holes=True, device=device)
    rows = random_pool(slots, ROW, torch.float8_e5m2, seed=3, device=device)
    for cut in (None, cuts()[3]):
        check_shadow(rows, case, torch.float16, cut=cut)
        check_shadow(rows, case, torch.float16, cut=cut, listed=True)
        check_gather(rows, case, torch.float16, cut=cut)


@pytest.fixture(scope="module")
def huge(device):
    """A real pool past both limits of 32-bit offsets: 3.9 million slots, 2.2 GB of FP8 and 4.5 GB of BF16."""
    slots = 3_900_000
    need = slots * ROW * 5
    if torch.cuda.mem_get_info()[0] < need:
        pytest.skip(f"needs {need} bytes of GPU memory free")
    rows = torch.randint(0, 256, (slots, 1, ROW), dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    return rows, untouched(slots, 1, ROW, dtype=torch.bfloat16, device=device)


def wide_bits(rows: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return rows.view(torch.uint8)[slots].view(rows.dtype).to(dtype).view(torch.int16)


def test_offsets_past_32_bits(huge):
    rows, shadow = huge
    far = [0, 1_864_135, 1_864_136, 3_728_270, 3_728_271, rows.shape[0] - 2, rows.shape[0] - 1]
    slots = torch.tensor(far, device=rows.device)
    indptr = torch.tensor([0, len(far)], dtype=torch.int32, device=rows.device)
    active = ActiveSlots.ragged(slots.to(torch.int32), indptr)
    shadow_cast(rows, shadow, active)
    assert torch.equal(shadow.view(torch.int16)[slots], wide_bits(rows, slots, torch.bfloat16))
    written = (shadow.view(torch.int16) != UNTOUCHED).any(dim=-1).nonzero()[:, 0]
    assert written.tolist() == far

    pages = torch.tensor([[rows.shape[0] // 64 - 1, 58_253]], dtype=torch.int32, device=rows.device)
    paged = ActiveSlots.paged(pages, torch.tensor([100], dtype=torch.int32, device=rows.device), 64)
    shadow.view(torch.int16).fill_(UNTOUCHED)
    shadow_cast(rows, shadow, paged)
    slots = paged.distinct(rows.shape[0])
    assert torch.equal(shadow.view(torch.int16)[slots], wide_bits(rows, slots, torch.bfloat16))
    assert (shadow.view(torch.int16) != UNTOUCHED).any(dim=-1).sum() == 100


def test_a_list_past_32_bits(huge):
    rows, shadow = huge
    slots = torch.randperm(rows.shape[0], device=rows.device)[:1_000_000]
    indptr = torch.tensor([0, slots.numel()], dtype=torch.int32, device=rows.device)
    active = ActiveSlots.ragged(slots.to(torch.int32), indptr)
    found = slot_list(active, list_for(rows.shape[0], rows.device))
    assert torch.equal(found.slots[: found.count.item()].long(), slots.sort().values)
    shadow.view(torch.int16).fill_(UNTOUCHED)
    shadow_cast(rows, shadow, found)
    for part in slots.split(100_000):
        assert torch.equal(shadow.view(torch.int16)[part], wide_bits(rows, part, torch.bfloat16))
    assert (shadow.view(torch.int16)[:, 0, 0] != UNTOUCHED).sum() == slots.numel()


def test_gather_from_and_to_past_32_bits(huge):
    """Compact rows past 1.86 million, from a pool past 3.73 million."""
    rows, compact = huge
    n = 1_900_000
    slots = torch.randperm(rows.shape[0], device=rows.device)[:n]
    indptr = torch.tensor([0, n // 2, n], dtype=torch.int32, device=rows.device)
    active = ActiveSlots.ragged(slots.to(torch.int32), indptr)
    found = slot_map(active, rows.shape[0])
    assert found.count.item() == n
    assert torch.equal(found.new_indices, torch.arange(n, dtype=torch.int32, device=rows.device))
    gather_cast(rows, compact[:n], found)
    for part, got in zip(slots.split(100_000), compact.view(torch.int16).split(100_000), strict=False):
        assert torch.equal(got, wide_bits(rows, part, torch.bfloat16))


@pytest.mark.parametrize("way", ["ragged", "pages of 64 requests", "list"])
def test_programs_draw_their_tiles_on_any_stream_and_in_graphs(way, device):
    """Casts side by side on two streams, then a graph, then one more: none leaves a row out."""
    slots, n = 200_000, 150_016
    rows = torch.randint(0, 256, (slots, 1, ROW), dtype=torch.uint8, device=device).view(torch.float8_e5m2)
    at = torch.randperm(slots, device=device, dtype=torch.int32)[:n]
    active = ActiveSlots.ragged(at, torch.tensor([0, n], dtype=torch.int32, device=device))
    if way == "list":
        active = slot_list(active, list_for(slots, rows.device))
    elif way != "ragged":
        each = torch.full((64,), n // 64, dtype=torch.int32, device=device)
        active = ActiveSlots.paged(at.view(64, -1), each, 1)
    one, two = (untouched(slots, 1, ROW, dtype=torch.float16, device=device) for _ in range(2))
    wanted = untouched(slots, 1, ROW, dtype=torch.float16, device=device).view(torch.int16)
    wanted[at.long()] = wide_bits(rows, at.long(), torch.float16)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for _ in range(4):
        shadow_cast(rows, one, active)
        with torch.cuda.stream(side):
            shadow_cast(rows, two, active)
    torch.cuda.synchronize()
    for shadow in (one, two):
        assert torch.equal(shadow.view(torch.int16), wanted)
        shadow.view(torch.int16).fill_(UNTOUCHED)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        shadow_cast(rows, one, active)
        shadow_cast(rows, two, active)
    for _ in range(3):
        graph.replay()
    for shadow in (one, two):
        assert torch.equal(shadow.view(torch.int16), wanted)
        shadow.view(torch.int16).fill_(UNTOUCHED)
    shadow_cast(rows, one, active)
    assert torch.equal(one.view(torch.int16), wanted)


@pytest.mark.parametrize("new", [1, 64])
def test_new_rows_are_written_while_others_are_drawn(new, device):
    """One launch for both, begun early in a graph, has the bits of two launches, each time."""
    slots, n, fp8 = 200_000, 150_016, torch.float8_e4m3fn
    rows = torch.randint(0, 256, (slots, 1, ROW), dtype=torch.uint8, device=device)
    at = (torch.randperm(slots - 1, device=device) + 1)[:n]
    active = ActiveSlots.ragged(at.to(torch.int32), torch.tensor([0, n], dtype=torch.int32, device=device))
    loc, made = at[-new:].clone(), torch.randn(new, ROW, device=device).to(torch.bfloat16)
    wanted, apart = rows.clone(), untouched(slots, 1, ROW, dtype=torch.bfloat16, device=device)
    kv_write.write(wanted, loc, made[:, :512], made[:, 512:], fp8)
    shadow_cast(wanted.view(fp8), apart, active)
    found = slot_list(active, list_for(slots, rows.device))
    without(found.slots, found.count, loc)
    shadow, given = untouched(slots, 1, ROW, dtype=torch.bfloat16, device=device), torch.empty_like(made)

    def layer(early: bool) -> None:
        torch.mul(made, 1, out=given)
        write_cast(
            rows, shadow, found.slots, found.count, loc, given[:, :512], given[:, 512:], fp8, early=early
        )

    layer(False)
    graph = torch.cuda.CUDAGraph()
    layer(True)
    with torch.cuda.graph(graph):
        layer(True)
        layer(True)
    for replay in [lambda: layer(False), *[graph.replay] * 3]:
        shadow.view(torch.int16).fill_(UNTOUCHED)
        given.fill_(0)
        replay()
        assert torch.equal(rows, wanted)
        assert torch.equal(shadow.view(torch.int16), apart.view(torch.int16))


def test_layers_that_are_slices_of_one_pool(device):
    pool = torch.randint(0, 256, (500, 3, ROW), dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    case = ragged_case([300, 200], num_slots=500, seed=7, device=device)
    for layer in range(3):
        check_shadow(pool[:, layer], case, torch.bfloat16)
        check_gather(pool[:, layer : layer + 1], case, torch.bfloat16, steps=1)


def test_a_shared_prefix_is_cast_once(device):
    requests, shared, own, slots = 64, 2048, 100, 20_000
    drawn = torch.randperm(slots, device=device, dtype=torch.int32)
    prefix, rest = drawn[:shared], drawn[shared : shared + requests * own].view(requests, own)
    indices = torch.cat([torch.cat([prefix, r]) for r in rest])
    indptr = torch.arange(requests + 1, dtype=torch.int32, device=device) * (shared + own)
    active = ActiveSlots.ragged(indices, indptr)
    found = slot_map(active, slots)
    assert found.count.item() == shared + requests * own
    assert found.rows == slots < active.capacity
    rows = random_pool(slots, ROW, FORMATS[0], seed=1, device=device)
    check_gather(rows, Case(active, slots), WIDE[0])
    check_shadow(rows, Case(active, slots), WIDE[0], listed=True)
    check_shadow(rows, Case(active, slots), WIDE[0])


@pytest.mark.parametrize("batch", [1, 3, 64, 500])
@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 128])
def test_many_pages_of_many_requests(page_size, batch, device):
    """More tiles than programs: each walks over a share, across requests that are long, short and empty."""
    slots = 60_000
    draw = random.Random(batch)
    lengths = [draw.choice([0, 1, draw.randint(0, 60_000 // batch)]) for _ in range(batch)]
    lengths[-1] = 50_000 // batch
    case = paged_case(lengths, page_size, num_slots=slots, seed=batch, holes=True, device=device)
    rows = random_pool(slots, ROW, FORMATS[0], seed=2, device=device)
    check_shadow(rows, case, WIDE[0])
    check_shadow(rows, case, WIDE[0], listed=True)


@pytest.mark.parametrize("page_size", [0, 64])
def test_one_graph_serves_every_length(page_size, device):
    """200 replays, lengths drawn anew each time: requests of length 0, padded entries (slot 0)."""
    slots, batch, longest = 20_480, 16, 600
    rows = random_pool(slots, ROW, torch.float8_e4m3fn, seed=1, device=device)
    shadow = untouched(slots, 1, ROW, dtype=torch.bfloat16, device=device)
    if page_size:
        pages = -(-longest // page_size)
        table = torch.full((batch, pages), -1, dtype=torch.int32, device=device)
        active = ActiveSlots.paged(table, torch.zeros(batch, dtype=torch.int32, device=device), page_size)
    else:
        table = torch.zeros(batch * longest, dtype=torch.int32, device=device)
        active = ActiveSlots.ragged(table, torch.zeros(batch + 1, dtype=torch.int32, device=device))
    workspace = map_workspace(active, slots)
    compact = untouched(workspace.rows, 1, ROW, dtype=torch.bfloat16, device=device)
    memory, from_list = list_for(slots, rows.device), torch.empty_like(shadow)

    def step() -> None:
        shadow_cast(rows, shadow, active)
        shadow_cast(rows, from_list, slot_list(active, memory))
        gather_cast(rows, compact, slot_map(active, slots, workspace))

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    draw = random.Random(5)
    for _ in range(200):
        live = draw.randint(0, batch)
        lengths = [draw.choice([0, 1, draw.randint(1, longest), longest]) for _ in range(live)]
        lengths += [draw.choice([0, 1])] * (batch - live)
        case = fill(active, lengths, live, slots, draw.randint(0, 10**6))
        shadow.view(torch.int16).fill_(UNTOUCHED)
        compact.view(torch.int16).fill_(UNTOUCHED)
        from_list.view(torch.int16).fill_(UNTOUCHED)
        graph.replay()

        used = case.distinct(slots)
        expected = torch.full_like(shadow.view(torch.int16), UNTOUCHED)
        expected[used] = wide_bits(rows, used, torch.bfloat16)
        assert torch.equal(shadow.view(torch.int16), expected)
        assert torch.equal(from_list.view(torch.int16), expected)
        old = torch.cat(case.slots())
        moved = ActiveSlots(workspace.new_indices, active.bounds, active.page_size, active.is_paged)
        new = torch.cat(moved.slots())
        assert torch.equal(compact.view(torch.int16)[new], expected[old])
        assert (compact.view(torch.int16) != UNTOUCHED).any(dim=-1).sum() == used.numel()


def fill(active: ActiveSlots, lengths: list[int], live: int, slots: int, seed: int) -> ActiveSlots:
    """Refill the static buffers as a scheduler does, a stale tail behind; padded requests read slot 0."""
    kind = paged_case if active.is_paged else ragged_case
    args = (lengths, active.page_size) if active.is_paged else (lengths,)
    drawn = kind(*args, num_slots=slots, seed=seed, device=active.device.type).active
    if active.is_paged:
        width = min(active.table.shape[1], drawn.table.shape[1])
        active.table[:, :width] = drawn.table[:, :width]
        active.table[live:, 0] = 0
    else:
        n = min(active.table.numel(), drawn.table.numel())
        active.table[:n] = drawn.table[:n]
        active.table[sum(lengths[:live]) : sum(lengths)] = 0
    active.bounds.copy_(drawn.bounds)
    return active
