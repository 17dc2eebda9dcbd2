"""The cast kernels against the reference: through Triton's interpreter, or on a GPU where there is one."""

import dataclasses
import itertools

import pytest
import torch
from cast_checks import check_gather, check_shadow
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_inputs import (
    FORMATS,
    UNTOUCHED,
    WIDE,
    Case,
    bits,
    most_undrawn,
    paged_case,
    poison,
    ragged_case,
    random_pool,
    stock_bits,
    untouched,
)

from kvlab.errors import BadInput
from kvlab.kernels import reference
from kvlab.kernels.active import ActiveSlots
from kvlab.kernels.cast import (
    gather_cast,
    list_for,
    map_workspace,
    shadow_cast,
    slot_list,
    slot_map,
)
from kvlab.kernels.cast_cut import DRAWN, Tuning, constants, may_draw, programs
from kvlab.kernels.slot_map import compact_rows
from kvlab.kernels.tickets import tickets_of

WIDTH = 80
bounded = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
lengths = st.lists(st.integers(0, 9), max_size=4)


@pytest.mark.parametrize(("fmt", "dtype"), [*itertools.product(FORMATS, WIDE)])
def test_every_code_widens_as_stock(fmt, dtype, device):
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(16, 16).view(fmt)
    case = Case(
        ActiveSlots.ragged(
            torch.arange(16, dtype=torch.int32, device=device),
            torch.tensor([0, 16], dtype=torch.int32, device=device),
        ),
        16,
    )
    check_shadow(codes, case, dtype)
    check_gather(codes, case, dtype, steps=1)


@bounded
@given(
    lengths=lengths,
    seed=st.integers(0, 999),
    fmt=st.sampled_from(FORMATS),
    dtype=st.sampled_from(WIDE),
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
    padding=st.sampled_from([0, 16, 5]),
    holes=st.booleans(),
    latent_head=st.booleans(),
)
def test_ragged(lengths, seed, fmt, dtype, index_dtype, padding, holes, latent_head, device):
    case = ragged_case(lengths, num_slots=13, seed=seed, index_dtype=index_dtype, holes=holes, device=device)
    rows = random_pool(13, WIDTH, fmt, seed=seed, device=device, padding=padding, latent_head=latent_head)
    check_shadow(rows, case, dtype, listed=bool(seed % 2))
    check_gather(rows, case, dtype)


@bounded
@given(
    lengths=st.lists(st.integers(0, 140), max_size=3),
    page_size=st.sampled_from([1, 3, 16, 64, 128]),
    seed=st.integers(0, 999),
    fmt=st.sampled_from(FORMATS),
    dtype=st.sampled_from(WIDE),
    holes=st.booleans(),
)
def test_paged(lengths, page_size, seed, fmt, dtype, holes, device):
    num_slots = 3 * page_size + page_size // 2
    case = paged_case(lengths, page_size, num_slots=num_slots, seed=seed, holes=holes, device=device)
    rows = random_pool(num_slots, 16, fmt, seed=seed, device=device)
    check_shadow(rows, case, dtype, listed=bool(seed % 2))
    check_gather(rows, case, dtype)


@pytest.mark.parametrize("page_size", [0, 16])
def test_nan_bytes_that_nobody_reads_stay_out_of_attention(page_size, device):
    lengths, slots, rank, rope = [21, 0, 3], 96, 32, 16
    if page_size:
        case = paged_case(lengths, page_size, num_slots=slots, seed=3, device=device)
    else:
        case = ragged_case(lengths, num_slots=slots, seed=3, device=device)
    a = case.active
    rows = poison(random_pool(slots, rank + rope, torch.float8_e4m3fn, seed=4, device=device), a)
    assert rows.float().isnan().any(dim=-1).sum() >= slots - sum(lengths)
    g = torch.Generator().manual_seed(5)
    q = torch.randn(3, 4, rank + rope, generator=g).to(device, torch.bfloat16)
    call = {"sm_scale": 0.2, "dtype": torch.float64}
    out, lse = reference.mla_attention(q[..., :rank], q[..., rank:], rows, a, **call)
    assert out.isfinite().all()

    shadow = shadow_cast(rows, torch.zeros(rows.shape, dtype=torch.bfloat16, device=device), a)
    assert shadow.isfinite().all()
    from_shadow = reference.mla_attention(q[..., :rank], q[..., rank:], shadow, a, **call)
    found = slot_map(a, slots)
    compact = torch.zeros(found.rows, 1, rank + rope, dtype=torch.bfloat16, device=device)
    gather_cast(rows, compact, found)
    moved = ActiveSlots(found.new_indices, a.bounds, a.page_size, a.is_paged)
    from_compact = reference.mla_attention(q[..., :rank], q[..., rank:], compact, moved, **call)
    for other in (from_shadow, from_compact):
        assert torch.equal(other[0], out)
        assert torch.equal(other[1], lse)


def test_a_map_that_outgrows_its_rows_says_so_and_stays_inside(device):
    case = ragged_case([6, 6], num_slots=64, seed=1, device=device)
    distinct = case.active.distinct(64).numel()
    listed = torch.full((9,), -5, dtype=torch.int32, device=device)
    workspace = dataclasses.replace(map_workspace(case.active, 64, rows=4), slots=listed[:4])
    found = slot_map(case.active, 64, workspace)
    assert (listed[4:] == -5).all()
    assert found.overflow.item() == distinct > 4
    assert found.count.item() == 4
    rows = random_pool(64, WIDTH, torch.float8_e4m3fn, seed=1, device=device)
    compact = untouched(8, 1, WIDTH, dtype=torch.float16, device=device)
    gather_cast(rows, compact, found)
    assert (compact[4:].view(torch.int16) == UNTOUCHED).all()
    table = case.active.table[:12]
    fits = torch.isin(table, found.slots)
    assert torch.equal(found.slots[found.new_indices[:12][fits].long()], table[fits])
    assert (found.new_indices[:12][~fits] == 0).all()

    case.active.bounds.fill_(0)
    slot_map(case.active, 64, workspace)
    assert found.count.item() == 0
    assert found.overflow.item() == distinct, "sticky until its reader zeroes it"


@pytest.mark.parametrize("page_size", [0, 4])
def test_a_map_remembers_nothing_of_the_step_before(page_size, device):
    """One workspace, its tables refilled in place: each step's map is what a fresh workspace gives."""
    draw = torch.Generator().manual_seed(4)
    if page_size:
        active = ActiveSlots.paged(i32([[0] * 5] * 3, device), i32([0] * 3, device), page_size)
    else:
        active = ActiveSlots.ragged(i32([0] * 15, device), i32([0] * 4, device))
    workspace = map_workspace(active, 40)
    for _ in range(6):
        active.table.copy_(torch.randint(0, 9, active.table.shape, generator=draw))
        lengths = torch.randint(0, 6 * max(page_size, 1), (3,), generator=draw).clamp(
            max=5 * max(page_size, 1)
        )
        active.bounds.copy_(lengths if page_size else torch.tensor([0, *lengths]).cumsum(0))
        found, fresh = slot_map(active, 40, workspace), slot_map(active, 40)
        n = fresh.count.item()
        assert found.count.item() == n
        assert torch.equal(found.slots[:n], fresh.slots[:n])
        assert torch.equal(found.slots_filled[:n], fresh.slots_filled[:n]) or not page_size


def test_a_page_that_the_pool_holds_in_part_is_no_page_of_a_map(device):
    active = ActiveSlots.paged(i32([[2, 1], [2, 0]], device), i32([8, 6], device), 4)
    found = slot_map(active, 11)
    assert found.count.item() == 2
    assert found.slots[:2].tolist() == [1, 0]
    assert found.new_indices.tolist() == [[2, 0], [2, 1]]


def test_a_map_of_pages_overflows_by_pages(device):
    active = ActiveSlots.paged(i32([[0, 1, 2]], device), i32([12], device), 4)
    found = slot_map(active, 40, map_workspace(active, 40, rows=8))
    assert (found.count.item(), found.overflow.item()) == (2, 3)
    assert map_workspace(active, 8, rows=400).rows == 8


def test_compact_never_outgrows_the_pool(device):
    shared = torch.arange(10, dtype=torch.int32, device=device).repeat(50)
    indptr = torch.arange(0, 501, 10, dtype=torch.int32, device=device)
    active = ActiveSlots.ragged(shared, indptr)
    assert compact_rows(active, 12) == 12
    found = slot_map(active, 12)
    assert found.count.item() == 10
    assert found.new_indices.tolist() == list(range(10)) * 50


@pytest.mark.parametrize("batch", [0, 3])
def test_nothing_active_writes_nothing(batch, device):
    rows = random_pool(8, WIDTH, torch.float8_e4m3fn, seed=0, device=device)
    for case in (
        ragged_case([0] * batch, num_slots=8, seed=0, device=device),
        paged_case([0] * batch, 4, num_slots=8, seed=0, device=device),
    ):
        check_shadow(rows, case, torch.bfloat16)
        check_gather(rows, case, torch.bfloat16)


def i32(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("page_size", [0, 4])
@pytest.mark.parametrize(
    "lengths",
    [[2**31 - 1, 5], [-3, 5], [-(2**31), 5], [99, 2**31 - 4], [0] * 512],
    ids=["max", "negative", "most negative", "near-max", "zeros"],
)
def test_lengths_that_no_table_holds_stay_inside_it(lengths, page_size, device):
    batch = len(lengths)
    if page_size:
        pages = torch.arange(2 * batch, dtype=torch.int32, device=device).view(batch, 2) % 4
        active = ActiveSlots.paged(pages, i32(lengths, device), page_size)
    else:
        end = min(max(lengths), 2**31 - 1)
        active = ActiveSlots.ragged(i32([3, 5, 3, -1, 2**31 - 1], device), i32([0] * batch + [end], device))
    rows = random_pool(16, WIDTH, torch.float8_e4m3fn, seed=2, device=device)
    for listed in (False, True):
        check_shadow(rows, Case(active, 16), torch.bfloat16, listed=listed)
    check_gather(rows, Case(active, 16), torch.bfloat16)


def test_a_negative_length_names_nothing(device):
    for active in (
        ActiveSlots.paged(i32([[3, 4, 5], [1, 2, 0]], device), i32([-9, 3], device), 2),
        ActiveSlots.ragged(i32([3, 4, 5], device), i32([1, -1, 1], device)),
    ):
        assert [e.tolist() for e in active.entries()] == ([[], [1, 2]] if active.is_paged else [[], []])
        assert [e.tolist() for e in active.slots()] == ([[], [2, 3, 4]] if active.is_paged else [[], []])


def test_a_negative_entry_is_slot_minus_one(device):
    assert ActiveSlots.ragged(i32([3, -7, 5], device), i32([0, 3], device)).slots()[0].tolist() == [3, -1, 5]
    paged = ActiveSlots.paged(i32([[2, -4]], device), i32([4], device), 2)
    assert paged.slots()[0].tolist() == [4, 5, -1, -1]
    assert paged.capacity == 4


@pytest.mark.parametrize("stride", [0, 1, 3, 9])
def test_a_page_table_may_have_any_row_stride(stride, device):
    """One row for all requests (`expand`, radix-shared prefixes), rows that overlap, rows far apart."""
    flat = torch.arange(40, dtype=torch.int32, device=device) % 7
    table = flat.as_strided((4, 3), (stride, 1))
    active = ActiveSlots.paged(table, i32([6, 5, 4, 0], device), 2)
    rows = random_pool(14, WIDTH, torch.float8_e5m2, seed=2, device=device)
    check_shadow(rows, Case(active, 14), torch.float16)
    check_shadow(rows, Case(active, 14), torch.float16, listed=True)
    check_gather(rows, Case(active, 14), torch.float16)


@pytest.mark.parametrize("bounds", [[0, 4, 2], [2, 4, 6], [0, -4], [0, 4, 40], [0, 4, 2**31 - 1]])
def test_broken_bounds_write_only_slots_of_the_table(bounds, device):
    """kv_indptr falls, starts late or ends outside: what is written is still a slot that the table names."""
    # What lies behind the table in memory names other slots.
    table = i32([1, 2, 3, 4, 5, 6, *[9, 10, 11] * 30], device)[:6]
    active = ActiveSlots.ragged(table, i32(bounds, device))
    rows = random_pool(16, WIDTH, torch.float8_e4m3fn, seed=2, device=device)
    for source in (active, slot_list(active, list_for(16, rows.device))):
        shadow = untouched(16, 1, WIDTH, dtype=torch.bfloat16, device=device)
        shadow_cast(rows, shadow, source)
        others = torch.ones(16, dtype=torch.bool, device=device)
        others[table.long()] = False
        assert (bits(shadow)[others] == UNTOUCHED).all()


@pytest.mark.parametrize("tokens", [40, 90, 330], ids=["one way", "another", "long way"])
@pytest.mark.parametrize("page_size", [0, 3])
def test_more_rows_than_a_tile_a_program(tokens, page_size, device):
    """Each program walks over several tiles; the last is not full."""
    slots = 400
    if page_size:
        case = paged_case([tokens - 9, 0, 9], page_size, num_slots=slots, seed=5, holes=True, device=device)
    else:
        case = ragged_case([tokens - 9, 0, 9], num_slots=slots, seed=5, holes=True, device=device)
    rows = random_pool(slots, WIDTH, torch.float8_e4m3fn, seed=2, device=device)
    check_shadow(rows, case, torch.bfloat16)
    check_shadow(rows, case, torch.bfloat16, listed=True)
    check_gather(rows, case, torch.bfloat16, steps=1)


@pytest.mark.parametrize("listed", [False, True])
def test_a_cast_leaves_its_counters_to_the_next(listed, device):
    """So many tiles that programs draw them: nothing is left out the second time, nor the third."""
    tokens = most_undrawn(WIDTH, device) * 3 // 2
    slots = 2 * tokens
    case = ragged_case([tokens], num_slots=slots, seed=5, device=device)
    rows = random_pool(slots, WIDTH, torch.float8_e4m3fn, seed=2, device=device)
    source = slot_list(case.active, list_for(slots, rows.device)) if listed else case.active
    shadow = untouched(slots, 1, WIDTH, dtype=torch.bfloat16, device=device)
    for _ in range(3):
        shadow.view(torch.int16).fill_(UNTOUCHED)
        shadow_cast(rows, shadow, source)
        written = (bits(shadow).view(slots, WIDTH) != UNTOUCHED).any(dim=1).nonzero()[:, 0]
        assert torch.equal(written, case.active.distinct(slots))
        assert not tickets_of(shadow).any()


@pytest.mark.parametrize("beyond", [-50, -4, 4, 130])
@pytest.mark.parametrize("kind", ["tables", "pages", "list"])
def test_who_draws_no_tile_needs_no_counters(kind, beyond, device):
    """Whether tiles may be drawn is known from what the tables can hold. Without counters of its own a cast
    that draws none leaves what stands for them, the bounds, as it was.
    """
    most = most_undrawn(WIDTH, device)
    tokens = most + beyond
    slots = tokens + 9
    if kind == "pages":
        case = paged_case([tokens], 1, num_slots=slots, seed=5, device=device)
    else:
        case = ragged_case([tokens], num_slots=slots, seed=5, device=device)
    rows = random_pool(slots, WIDTH, torch.float8_e4m3fn, seed=2, device=device)
    source = slot_list(case.active, list_for(slots, rows.device)) if kind == "list" else case.active
    bounds = (source.count if kind == "list" else source.bounds).clone()
    given = []

    def counters(target):
        given.append(torch.zeros(4, dtype=torch.int32, device=device))
        return given[-1]

    for _ in range(2):
        shadow = untouched(slots, 1, WIDTH, dtype=torch.bfloat16, device=device)
        shadow_cast(rows, shadow, source, tickets=counters)
        at = case.active.distinct(slots)
        assert torch.equal(bits(shadow)[at], stock_bits(rows, torch.bfloat16)[at])
        assert torch.equal(source.count if kind == "list" else source.bounds, bounds)
    assert not any(t.any() for t in given)
    # In the interpreter 25 rows a tile and two programs: the ninth tile is drawn.
    assert device != "cpu" or most == 200
    room = slots if kind == "list" else source.table.numel()
    assert bool(given) == (room > most)


@given(
    lengths=st.lists(st.integers(0, 5000), min_size=1, max_size=6)
    | st.builds(lambda n, times: [n] * times, st.integers(0, 5000), st.integers(1, 6)),
    width=st.sampled_from([48, 64, 576]),
    programs=st.integers(1, 40),
    native=st.booleans(),
)
@bounded
def test_a_cast_that_may_not_draw_has_no_tile_to_draw(lengths, width, programs, native):
    """What the kernel counts on the device, for any lengths up to what the host knows of them."""
    cut = Tuning(lanes=1024 if native else 128, unit=8, warps=8, grid=1, native=native)
    compiled = constants(cut, width, False)
    rows = compiled["LANES"] // (width // compiled["UNIT"])
    most = max(lengths)
    tiles = sum(-(-n // rows) for n in lengths)
    is_drawn = tiles > DRAWN * programs
    assert may_draw(cut, width, programs, len(lengths), most) >= is_drawn
    if min(lengths) == most:
        assert may_draw(cut, width, programs, len(lengths), most) == is_drawn


@given(
    rows=st.integers(0, 3000),
    batch=st.integers(0, 5),
    width=st.sampled_from([48, 576]),
    most=st.integers(1, 600),
)
@bounded
def test_fewer_programs_than_fit_have_a_tile_each_at_most(rows, batch, width, most):
    """However many of the rows that a table can hold are active."""
    cut = Tuning(lanes=1024, unit=8, warps=8, grid=3, native=True, few=256)
    its = constants(cut, width, True)
    tiles = max(batch, 1) * -(-rows // (its["FEW_LANES"] // (width // its["FEW_UNIT"])))
    launched = programs(cut, width, most, batch, rows)
    assert tiles <= launched <= most or launched == most


@pytest.mark.parametrize("page_size", [1, 3])
def test_long_requests_among_short_and_idle_ones(page_size, device):
    """A program's next tile is many requests on, the last ones are padding."""
    lengths = [0, 0, 61, *[1, 0, 2] * 4, 130, 0, 3, 27, 90, 1, 1, 1, 0, 0]
    case = paged_case(lengths, page_size, num_slots=400, seed=5, device=device)
    rows = random_pool(400, WIDTH, torch.float8_e4m3fn, seed=2, device=device)
    check_shadow(rows, case, torch.bfloat16)
    check_shadow(rows, case, torch.bfloat16, listed=True)


def test_stale_lengths_on_the_long_way_stay_inside_the_table(device):
    draw = torch.Generator().manual_seed(6)
    pages = torch.randint(0, 140, (6, 40), generator=draw, dtype=torch.int32).to(device)
    active = ActiveSlots.paged(pages, i32([-7, 119, 2**31 - 1, -(2**31), 300, 9], device), 3)
    rows = random_pool(400, WIDTH, torch.float8_e4m3fn, seed=2, device=device)
    check_shadow(rows, Case(active, 400), torch.bfloat16)


@pytest.mark.parametrize("page_size", [0, 3, 64])
def test_slots_where_32_bit_offsets_end(page_size, device):
    """Of rows of 576 values FP8 bytes end at slot 3,728,270, BF16 values too; BF16 bytes at half of it."""
    slots, width = 3_800_000, 576
    try:
        # Memory that is never touched costs nothing.
        rows = torch.empty(slots, 1, width, dtype=torch.uint8, device=device)
        shadow = torch.empty(slots, 1, width, dtype=torch.bfloat16, device=device)
    except RuntimeError:
        pytest.skip(f"this machine does not promise {slots * width * 3 / 1e9:.1f} GB")
    far = [1, 1_864_130, 1_864_200, 3_728_190, 3_728_300, slots - 66]
    if page_size:
        pages = [s // page_size for s in far]
        active = ActiveSlots.paged(i32([[p] for p in pages], device), i32([1] * len(far), device), page_size)
        far = [p * page_size for p in pages]
    else:
        active = ActiveSlots.ragged(i32(far, device), i32([0, len(far)], device))
    at = torch.tensor(far, device=device)
    drawn = torch.Generator().manual_seed(1)
    rows[at] = torch.randint(0, 256, (len(far), 1, width), generator=drawn, dtype=torch.uint8).to(device)
    rows = rows.view(torch.float8_e4m3fn)
    shadow.view(torch.int16)[at] = UNTOUCHED
    shadow_cast(rows, shadow, active)
    want = stock_bits(rows.view(torch.uint8)[at].view(rows.dtype), torch.bfloat16)
    assert torch.equal(bits(shadow[at]), want)
    found = slot_map(active, slots)
    compact = untouched(found.rows, 1, width, dtype=torch.bfloat16, device=device)
    gather_cast(rows, compact, found)
    assert torch.equal(bits(compact)[:: active.page_size], want)


@pytest.mark.parametrize("width", [1, 20, 65, 72])
def test_rows_of_any_width(width, device):
    case = ragged_case([30, 9], num_slots=50, seed=5, device=device)
    rows = random_pool(50, width, torch.float8_e4m3fn, seed=2, device=device)
    check_shadow(rows, case, torch.bfloat16)
    check_gather(rows, case, torch.bfloat16, steps=1)


def test_what_is_written_may_be_a_slice(device):
    case = ragged_case([30, 9], num_slots=50, seed=5, device=device)
    rows = random_pool(50, WIDTH, torch.float8_e4m3fn, seed=2, device=device)
    found = slot_map(case.active, 50)
    for write in (lambda out: shadow_cast(rows, out, case.active), lambda out: gather_cast(rows, out, found)):
        plain = untouched(50, 1, WIDTH, dtype=torch.bfloat16, device=device)
        wide = untouched(50, 3, WIDTH, dtype=torch.bfloat16, device=device)
        write(plain)
        write(wide[:, 1:2])
        assert torch.equal(bits(wide)[:, 1:2], bits(plain))
        assert (bits(wide)[:, ::2] == UNTOUCHED).all()


def test_an_empty_pool_is_cast_to_nothing(device):
    rows = random_pool(0, WIDTH, torch.float8_e4m3fn, seed=0, device=device)
    active = ActiveSlots.ragged(i32([1, 2], device), i32([0, 2], device))
    found = slot_map(active, 0)
    assert found.count.item() == found.overflow.item() == found.rows == 0
    for source in (active, slot_list(active, list_for(0, rows.device))):
        shadow = torch.zeros(0, 1, WIDTH, dtype=torch.bfloat16, device=device)
        assert shadow_cast(rows, shadow, source) is shadow


def a_call(device, **changed):
    rows = random_pool(8, WIDTH, torch.float8_e4m3fn, seed=0, device=device)
    case = ragged_case([3], num_slots=8, seed=0, device=device)
    good = {"rows": rows, "shadow": torch.zeros(rows.shape, dtype=torch.bfloat16, device=device)}
    good |= {"active": case.active} | changed
    return shadow_cast(good["rows"], good["shadow"], good["active"])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rows": torch.zeros(8, 1, 80, dtype=torch.uint8)}, r"rows: wrong dtype; expected float8_e4m3fn"),
        ({"rows": torch.zeros(8, 2, 80).to(torch.float8_e5m2)}, r"rows: expected \[slots, 1, row\]"),
        ({"rows": torch.zeros(80).to(torch.float8_e5m2)}, r"rows: wrong number of dimensions"),
        ({"rows": torch.zeros(80, 8).to(torch.float8_e5m2).t()}, r"rows: the last dimension must be contig"),
        ({"shadow": torch.zeros(8, 1, 80)}, r"shadow: wrong dtype; expected bfloat16 or float16"),
        (
            {"shadow": torch.zeros(7, 1, 80, dtype=torch.float16)},
            r"shadow: wrong shape; .* \[8, 80\] as rows",
        ),
        ({"rows": torch.zeros(8, 1, 0).to(torch.float8_e5m2)}, r"rows: expected rows of 1 value or more"),
        (
            {
                "shadow": lambda device: torch.zeros(1, 1, 80, dtype=torch.float16, device=device).expand(
                    8, 1, 80
                )
            },
            r"shadow: rows overlap in memory, their stride is 0; expected 80 or more",
        ),
        ({"active": torch.zeros(3)}, r"active: expected ActiveSlots or a SlotList, got torch.float32 \[3\]"),
        (
            {"shadow": torch.zeros(8, 1, 80, dtype=torch.float16, device="meta")},
            r"shadow: wrong device",
        ),
    ],
)
def test_a_wrong_argument_is_named(changed, message, device):
    moved = {
        # A tensor that overlaps itself is whole where it is copied to.
        k: v(device) if callable(v) else v.to(device) if v.device.type == "cpu" else v
        for k, v in changed.items()
    }
    with pytest.raises(BadInput, match=message):
        a_call(device, **moved)


def test_wrong_tables_and_maps_are_named(device):
    i32 = {"dtype": torch.int32, "device": device}
    with pytest.raises(BadInput, match=r"kv_indices: wrong dtype; expected int32 or int64 \[capacity\]"):
        ActiveSlots.ragged(torch.zeros(3, device=device), torch.zeros(2, **i32))
    with pytest.raises(BadInput, match=r"kv_indptr: wrong dtype; expected int32 \[bs \+ 1\]"):
        ActiveSlots.ragged(torch.zeros(3, **i32), torch.zeros(2, device=device))
    with pytest.raises(
        BadInput, match=r"kv_indptr: expected int32 \[bs \+ 1\], .* at least one entry, got \[0\]"
    ):
        ActiveSlots.ragged(torch.zeros(3, **i32), torch.zeros(0, **i32))
    with pytest.raises(BadInput, match=r"lengths: wrong shape; expected int32 \[2\]"):
        ActiveSlots.paged(torch.zeros(2, 4, **i32), torch.zeros(3, **i32), 16)
    for wrong in (0, -1, True, 2.0, None):
        with pytest.raises(BadInput, match=rf"page_size: expected a whole number .*, 1 or more, got {wrong}"):
            ActiveSlots.paged(torch.zeros(2, 4, **i32), torch.zeros(2, **i32), wrong)
    with pytest.raises(BadInput, match=r"page_table: expected fewer than 2\^30 tokens a row"):
        slot_map(ActiveSlots.paged(torch.zeros(2, 4, **i32), torch.zeros(2, **i32), 2**28), 8)
    for wrong in (-3, 3.5):
        with pytest.raises(BadInput, match=r"num_slots: expected the pool's slots"):
            slot_map(ActiveSlots.ragged(torch.zeros(3, **i32), torch.zeros(2, **i32)), wrong)
    active = ragged_case([3], num_slots=8, seed=0, device=device).active
    with pytest.raises(
        BadInput, match=r"workspace: expected what map_workspace\(\) returns, got torch.float32"
    ):
        slot_map(active, 8, torch.zeros(3))
    with pytest.raises(BadInput, match=r"active: expected ActiveSlots, got list"):
        map_workspace([1, 2], 8)
    with pytest.raises(BadInput, match=r"workspace: expected one made for 9 slots, ragged, page_size 1"):
        slot_map(active, 9, map_workspace(active, 8))
    rows = random_pool(9, WIDTH, torch.float8_e4m3fn, seed=0, device=device)
    for slots in (8, 10):
        with pytest.raises(BadInput, match=r"active: expected one of 9 slots"):
            shadow_cast(rows, torch.zeros_like(rows, dtype=torch.float16), list_for(slots, rows.device))
    compact = torch.zeros(9, 1, WIDTH, dtype=torch.float16, device=device)
    with pytest.raises(BadInput, match=r"slot_map: expected one of 9 slots"):
        gather_cast(rows, compact, slot_map(active, 8))
    with pytest.raises(
        BadInput, match=r"compact: expected \[8 or more, 80\], got torch.float16 \[2, 1, 80\]"
    ):
        gather_cast(rows, compact[:2], slot_map(active, 9))
    with pytest.raises(BadInput, match=r"active: expected fewer than 2\^30 entries"):
        slot_map(ActiveSlots(torch.zeros(1, **i32).expand(2**30), torch.zeros(2, **i32)), 8)
    paged = paged_case([3], 1, num_slots=8, seed=0, device=device).active
    flat = ActiveSlots.ragged(paged.table[0].contiguous(), torch.zeros(2, **i32))
    with pytest.raises(BadInput, match=r"workspace: expected one made for 8 slots, ragged, page_size 1"):
        slot_map(flat, 8, map_workspace(paged, 8))
    with pytest.raises(BadInput, match=r"rows: expected a multiple of page_size 1, 0 or more, got -1"):
        map_workspace(flat, 8, rows=-1)
    elsewhere = ActiveSlots(flat.table.to("meta"), flat.bounds.to("meta"))
    with pytest.raises(BadInput, match=r"active: wrong device; expected tensors on .*, got .* on meta"):
        a_call(device, active=elsewhere)
    with pytest.raises(BadInput, match=r"rows: expected a multiple of page_size 4"):
        map_workspace(paged_case([9], 4, num_slots=32, seed=0, device=device).active, 32, rows=6)
