"""How do only the active slots of a layer become BF16 or FP16? Two outputs, one kernel.

`shadow_cast` writes each active slot to its own place in a pool-shaped buffer, so indices and page tables
stay; given a `slot_list`, made once a step, it takes each distinct slot once, in the pool's order.
`gather_cast` writes compact rows, each distinct slot once; `slot_map` finds them and the new indices once a
step.

How many slots there are is read on the device and the grid is fixed: a captured CUDA graph does work in
proportion to the lengths it is replayed with. Nothing else is written or, past the index buffers, read. Both
equal `kvlab.kernels.reference`, and `tensor.to()` on the device bit for bit.
"""

from typing import Any

import torch

from kvlab.errors import BadInput
from kvlab.kernels.active import ActiveSlots
from kvlab.kernels.cast_cut import Tuning, constants, may_draw, programs, requests_held, tuning
from kvlab.kernels.cast_kernel import kvlab_cast
from kvlab.kernels.checks import WIDE_DTYPES, described, expect, rows_2d
from kvlab.kernels.chip import chip
from kvlab.kernels.direct import Direct
from kvlab.kernels.slot_list import SlotList, list_for, slot_list
from kvlab.kernels.slot_map import SlotMap, check_table, map_workspace, slot_map
from kvlab.kernels.tickets import Counters, tickets_of

__all__ = [
    "Tuning",
    "gather_cast",
    "list_for",
    "map_workspace",
    "shadow_cast",
    "slot_list",
    "slot_map",
    "tuning",
]

_cast = Direct(kvlab_cast)
# Layouts of rows and shadow that were found right: every layer of every step comes with the same two.
_right: set[tuple[Any, ...]] = set()


def shadow_cast(
    rows: torch.Tensor,
    shadow: torch.Tensor,
    active: ActiveSlots | SlotList,
    *,
    cut: Tuning | None = None,
    tickets: Counters = tickets_of,
) -> torch.Tensor:
    """Cast the active slots of `rows` into their own places in `shadow`.

    rows [slots, row] or [slots, 1, row], FP8 e4m3fn or e5m2, row stride free; shadow of the same shape, BF16
    or FP16. Nothing else is written. From tables, a slot is cast once for each request that reads it; given
    the step's `SlotList`, once: so no sharing costs more than the pool. Allocate `shadow` zeroed: attention
    multiplies the tail of a last page by zero. `tickets`: whose counters are drawn from, where tiles may be.
    Returns `shadow`.
    """
    _check_layers(rows, shadow)
    if isinstance(active, SlotList):
        _check_list(active, rows)
    else:
        check_table(active, rows.device, " or a SlotList")
    _launch(rows, shadow, active, compact=False, cut=cut, tickets=tickets)
    return shadow


def _check_layers(rows: torch.Tensor, shadow: torch.Tensor) -> None:
    layout: tuple[Any, ...] = ()
    if isinstance(rows, torch.Tensor) and isinstance(shadow, torch.Tensor):
        layout = (rows.device, rows.dtype, rows.shape, rows.stride())
        layout = (*layout, shadow.device, shadow.dtype, shadow.shape, shadow.stride())
        if layout in _right:
            return
    source = rows_2d("rows", rows)
    target = rows_2d("shadow", shadow, WIDE_DTYPES)
    expect("shadow", target, f"{list(source.shape)} as rows", sizes=tuple(source.shape), device=source.device)
    _right.add(layout)


def gather_cast(
    rows: torch.Tensor, compact: torch.Tensor, slot_map: SlotMap, *, cut: Tuning | None = None
) -> torch.Tensor:
    """Cast each distinct slot of `slot_map` into its compact row; attention reads `slot_map.new_indices`.

    rows as in `shadow_cast`; compact [rows, row] or [rows, 1, row] BF16 or FP16, at least `slot_map.rows`
    rows. Paged: a page's tail that no request reads is not written, so allocate zeroed. Returns `compact`.
    """
    source = rows_2d("rows", rows)
    target = rows_2d("compact", compact, WIDE_DTYPES)
    _check_map(slot_map, source)
    if target.shape[0] < slot_map.rows or target.shape[1] != source.shape[1]:
        raise BadInput(
            f"compact: expected [{slot_map.rows} or more, {source.shape[1]}], got {described(compact)}"
        )
    expect("compact", target, "[rows, row]", device=source.device)
    _launch(source, target, slot_map, compact=True, cut=cut, tickets=tickets_of)
    return compact


def _check_map(found: SlotMap, rows: torch.Tensor) -> None:
    if not isinstance(found, SlotMap):
        raise BadInput(f"slot_map: expected what slot_map() returns, got {described(found)}")
    _check_list(found, rows)


def _check_list(found: SlotMap | SlotList, rows: torch.Tensor) -> None:
    if found.num_slots != rows.shape[0] or found.slots.device != rows.device:
        name = "slot_map" if isinstance(found, SlotMap) else "active"
        raise BadInput(
            f"{name}: expected one of {rows.shape[0]} slots on {rows.device} as rows, "
            f"got {found.num_slots} slots on {found.slots.device}"
        )


def are_aligned(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Do rows of both start at multiples of 16 bytes, each of them?"""
    return all(t.data_ptr() % 16 == 0 and t.stride(0) * t.element_size() % 16 == 0 for t in (source, target))


def _launch(
    source: torch.Tensor,
    target: torch.Tensor,
    active: ActiveSlots | SlotMap | SlotList,
    *,
    compact: bool,
    cut: Tuning | None,
    tickets: Counters,
) -> None:
    arguments = _arguments(source, target, active, compact=compact, cut=cut, tickets=tickets)
    if arguments is not None:
        _cast(*arguments)


def prepared(
    rows: torch.Tensor, shadow: torch.Tensor, active: ActiveSlots, tickets: Counters = tickets_of
) -> tuple[tuple[Any, ...], torch.Tensor] | None:
    """The launch of such a `shadow_cast` that was made before (`Direct.prepared`) and its counters, or None.

    The counters are `active.bounds` where no tile can be drawn: they are left alone then.
    """
    arguments = _arguments(rows, shadow, active, compact=False, cut=None, tickets=tickets)
    if arguments is None:
        return None
    key, grid, tensors, numbers, _ = arguments
    made = _cast.prepared(key, grid, numbers)
    return None if made is None else (made, tensors[-1])


def _arguments(
    source: torch.Tensor,
    target: torch.Tensor,
    active: ActiveSlots | SlotMap | SlotList,
    *,
    compact: bool,
    cut: Tuning | None,
    tickets: Counters,
) -> tuple[Any, ...] | None:
    """What `Direct` is called with; None where there is nothing to do. `source` [slots, width] or
    [slots, 1, width], as `target`.
    """
    filled, batch, paged, page_size = None, 0, False, 1
    if isinstance(active, SlotList):
        table, bounds, limit = active.slots, active.count, active.num_slots
    elif isinstance(active, SlotMap):
        table, bounds, limit, page_size = active.slots, active.count, active.rows, active.page_size
        filled = active.slots_filled if active.is_paged else None
    else:
        table, bounds, batch, paged = active.table, active.bounds, active.batch, active.is_paged
        page_size = active.page_size
        limit = table.shape[1] * page_size if paged else table.numel()
        if paged and not batch:
            return None
    device, width = source.device, source.shape[-1]
    cut = cut or tuning(device)
    batches = requests_held(batch) if paged else 0
    strides = source.stride()[0], target.stride()[0]

    def compiled_with() -> dict[str, Any]:
        return {
            **constants(cut, width, are_aligned(source, target)),
            "PAGE_SIZE": page_size,
            "BATCH": batches,
            "FILLED": filled is not None,
            "COMPACT": compact,
            "E5M2": source.dtype == torch.float8_e5m2,
            "BF16": target.dtype == torch.bfloat16,
        }

    dtypes = source.dtype, target.dtype, table.dtype, bounds.dtype
    most = cut.grid * chip(device)[1]
    # Nothing that is not drawn from needs memory: any other int32 of the launch stands for the counters.
    draws = bounds.dtype != torch.int32 or may_draw(cut, width, most, batch if paged else 1, limit)
    return (
        (device.index, cut, dtypes, strides, width, page_size, batches, filled is not None, compact),
        programs(cut, width, most, batch if paged else 0, limit),
        (
            source if cut.native else source.view(torch.uint8),
            target,
            table,
            bounds,
            table if filled is None else filled,
            tickets(target) if draws else bounds,
        ),
        (*strides, table.stride(0) if paged else 0, source.shape[0], batch, limit),
        compiled_with,
    )
