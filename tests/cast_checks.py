"""What a cast must write and what it must leave alone, checked bit by bit."""

import torch
from kernel_inputs import UNTOUCHED, Case, bits, stock_bits, untouched

from kvlab.kernels import reference
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


def check_shadow(
    rows: torch.Tensor, case: Case, dtype: torch.dtype, *, listed: bool = False, cut: Tuning | None = None
) -> None:
    """Active slots as stock casts them; every other byte of the buffer as it was."""
    flat = rows.view(rows.shape[0], -1)
    shadow = untouched(*rows.shape, dtype=dtype, device=rows.device)
    expected = bits(shadow).view(flat.shape)
    active = case.active.distinct(case.num_slots)
    expected[active] = stock_bits(flat, dtype)[active]
    source = slot_list(case.active, list_for(case.num_slots, rows.device)) if listed else case.active
    got = shadow_cast(rows, shadow, source, cut=cut)
    assert got is shadow
    assert torch.equal(bits(shadow).view(flat.shape), expected)


def check_gather(
    rows: torch.Tensor, case: Case, dtype: torch.dtype, *, steps: int = 2, cut: Tuning | None = None
) -> None:
    """Each distinct slot once, in order of first use; new indices that lead there; nothing else written."""
    workspace, width = map_workspace(case.active, case.num_slots), rows.shape[-1]
    for _ in range(steps):
        workspace.new_indices.fill_(-77)
        found = slot_map(case.active, case.num_slots, workspace)
        compact = untouched(found.rows, *rows.shape[1:], dtype=dtype, device=rows.device)
        gather_cast(rows, compact, found, cut=cut)
        expected, indices = reference.gather_cast(rows, case.active, dtype)
        n = found.count.item() * case.active.page_size
        assert n == expected.shape[0] <= case.num_slots
        assert found.overflow.item() == 0
        if case.active.is_paged:
            assert (found.slots_filled[: found.count.item()] <= case.active.page_size).all()
        used = torch.cat([torch.zeros(0, dtype=torch.long, device=rows.device), *flat_slots(found, case)])
        read = torch.zeros(found.rows, dtype=torch.bool, device=rows.device)
        read[used] = True
        wide = stock_bits(rows.reshape(case.num_slots, width), dtype)
        source = source_rows(case)
        assert torch.equal(bits(compact).view(-1, width)[used], wide[source])
        assert (bits(compact).view(-1, width)[~read] == UNTOUCHED).all()
        in_table = valid_entries(case.active)
        assert torch.equal(found.new_indices[in_table], indices[in_table])
        assert (found.new_indices[~in_table] == -77).all()


def named(slots: torch.Tensor, num_slots: int) -> torch.Tensor:
    return slots[(slots >= 0) & (slots < num_slots)]


def source_rows(case: Case) -> torch.Tensor:
    slots = [
        named(s, case.num_slots // case.active.page_size * case.active.page_size) for s in case.active.slots()
    ]
    return torch.cat([torch.zeros(0, dtype=torch.long, device=case.active.device), *slots])


def flat_slots(found, case: Case) -> list[torch.Tensor]:
    """Where each request's tokens stand in compact rows, holes left out."""
    a = case.active
    limit = case.num_slots // a.page_size * a.page_size
    new = ActiveSlots(found.new_indices, a.bounds, a.page_size, a.is_paged)
    return [n[(old >= 0) & (old < limit)] for n, old in zip(new.slots(), a.slots(), strict=True)]


def valid_entries(active: ActiveSlots) -> torch.Tensor:
    mask = torch.zeros(active.table.shape, dtype=torch.bool, device=active.device)
    if active.is_paged:
        for row, e in zip(mask, active.entries(), strict=True):
            row[: e.numel()] = True
    else:
        mask[: active.bounds[-1]] = True
    return mask
