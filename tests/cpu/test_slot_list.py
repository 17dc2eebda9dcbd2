"""The list of a step's distinct slots against the reference, through the interpreter or on a GPU."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_inputs import Case, paged_case, ragged_case

from kvlab.errors import BadInput
from kvlab.kernels.active import ActiveSlots
from kvlab.kernels.slot_list import SlotList, list_for, slot_list

bounded = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def check(found: SlotList, *cases: Case) -> None:
    """Every slot that a table names, once, in the pool's order; nothing left behind for the next step."""
    first, *more = [c.active for c in cases]
    found.slots.fill_(-9)
    assert slot_list(first, found, *more) is found
    expected = torch.cat([c.active.distinct(found.num_slots) for c in cases]).unique()
    assert found.count.item() == expected.numel()
    assert found.slots[: expected.numel()].tolist() == expected.tolist()
    assert (found.slots[expected.numel() :] == -9).all()
    assert not found.seen.any()


@bounded
@given(
    lengths=st.lists(st.integers(0, 90), max_size=5),
    page_size=st.sampled_from([0, 1, 3, 16, 64, 128]),
    slots=st.sampled_from([1, 31, 32, 33, 200]),
    seed=st.integers(0, 999),
    holes=st.booleans(),
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_every_named_slot_once_in_order(lengths, page_size, slots, seed, holes, index_dtype, device):
    options = {"seed": seed, "holes": holes, "device": device}
    if page_size:
        slots = 3 * page_size + page_size // 2
        drawn = [paged_case(part, page_size, num_slots=slots, **options) for part in (lengths, lengths[::-1])]
    else:
        options["index_dtype"] = index_dtype
        drawn = [ragged_case(part, num_slots=slots, **options) for part in (lengths, lengths[:1])]
    third = ragged_case([3], num_slots=slots, seed=seed + 1, device=device)
    found = list_for(slots, torch.device(device))
    check(found, drawn[0])
    check(found, *drawn, third)
    check(found, drawn[1])


@pytest.mark.parametrize("page_size", [0, 4])
@pytest.mark.parametrize(
    "lengths",
    [[2**31 - 1, 5], [-3, 5], [-(2**31), 5], [99, 2**31 - 4], [0] * 512],
    ids=["max", "negative", "most negative", "near-max", "zeros"],
)
def test_lengths_that_no_table_holds_stay_inside_it(lengths, page_size, device):
    def i32(values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    batch = len(lengths)
    if page_size:
        pages = torch.arange(2 * batch, dtype=torch.int32, device=device).view(batch, 2) % 5
        active = ActiveSlots.paged(pages, i32(lengths), page_size)
    else:
        active = ActiveSlots.ragged(
            i32([3, 5, 3, -1, 2**31 - 1]), i32([0] * batch + [min(max(lengths), 2**31 - 1)])
        )
    check(list_for(18, torch.device(device)), Case(active, 18))


def test_a_pool_of_no_slots_and_tables_of_no_requests(device):
    nobody = paged_case([], 4, num_slots=8, seed=0, device=device)
    check(list_for(8, torch.device(device)), nobody)
    check(list_for(8, torch.device(device)), nobody, ragged_case([3], num_slots=8, seed=0, device=device))
    check(list_for(0, torch.device(device)), ragged_case([3], num_slots=5, seed=0, device=device))


def test_what_is_wrong_is_named(device):
    for wrong in (-1, 2.5, True, 2**31):
        with pytest.raises(BadInput, match="num_slots: expected the pool's slots"):
            list_for(wrong, torch.device(device))
    with pytest.raises(BadInput, match=r"device: expected a torch.device or its name, got 'abacus'"):
        list_for(8, "abacus")
    found = list_for(8, device)
    with pytest.raises(BadInput, match="found: expected what list_for"):
        slot_list(ragged_case([3], num_slots=8, seed=0, device=device).active, None)
    with pytest.raises(BadInput, match="active: expected ActiveSlots"):
        slot_list(torch.zeros(3), found)
    here = ragged_case([3], num_slots=8, seed=0, device=device).active
    elsewhere = ActiveSlots(here.table.to("meta"), here.bounds.to("meta"))
    with pytest.raises(BadInput, match="active: wrong device"):
        slot_list(elsewhere, found)
