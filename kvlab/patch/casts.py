"""Triton on CUDA, plain torch elsewhere: the same casts either way, imported when first used."""

import functools
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from kvlab.kernels.active import ActiveSlots

# Tests run the Triton kernels on a CPU through Triton's interpreter.
INTERPRET = False


def on_device(device: torch.device) -> bool:
    """Do the Triton kernels run there?"""
    return device.type == "cuda" or INTERPRET


@functools.cache
def kernels(name: str) -> ModuleType:
    """`kvlab.kernels.NAME`, imported at its first use. An import statement costs every call more."""
    return importlib.import_module(f"kvlab.kernels.{name}")


def shadow(rows: torch.Tensor, out: torch.Tensor, active: Any, tickets: Any = None) -> torch.Tensor:
    """Active rows, of tables or of a `slot_list`, to their own places in `out`, which is shaped as `rows`.

    `tickets`: whose counters are drawn from (`kernels.tickets`), None: those that last.
    """
    if on_device(rows.device):
        given = {} if tickets is None else {"tickets": tickets}
        return kernels("cast").shadow_cast(rows, out, active, **given)
    from kvlab.kernels import reference

    return reference.shadow_cast(rows, out, active)


def clear_tails(shadow: torch.Tensor, active: ActiveSlots) -> None:
    """Zero what lies behind each request in its last page; `active` is paged, `shadow` a wide layer."""
    if on_device(shadow.device):
        kernels("clear").clear_tails(shadow, active)
        return
    size = active.page_size
    if active.table.shape[1] == 0:
        return
    lengths = active.bounds.long().clamp(min=0, max=active.table.shape[1] * size)
    last = (lengths - 1).clamp(min=0) // size
    page = active.table.long().gather(1, last[:, None])
    offset = torch.arange(size, device=shadow.device)
    is_tail = (offset[None] >= (lengths - last * size)[:, None]) & (page >= 0) & (lengths > 0)[:, None]
    slots = (page * size + offset[None])[is_tail]
    shadow[slots[slots < shadow.shape[0]]] = 0


def slot_list(tables: Sequence[ActiveSlots], slots: int, last: Any = None) -> Any:
    """The distinct slots of these tables, or None where no kernel can list them. `last`: a list to refill."""
    device = tables[0].device
    if not on_device(device):
        return None
    lists = kernels("slot_list")
    if last is None or last.num_slots != slots or last.slots.device != device:
        last = lists.list_for(slots, device)
    return lists.slot_list(tables[0], last, *tables[1:])


def without(found: Any, loc: torch.Tensor) -> None:
    """Take the slots `loc` off a `slot_list`: `write_shadow` writes them."""
    kernels("write_cast").without(found.slots, found.count, loc)


def write_shadow(found: Any, out: torch.Tensor, new: Any, *, early: bool = False) -> torch.Tensor:
    """Write the `new` rows to pool and `out`, and cast the other slots of the list, in one launch.

    `early`: the kernel before made neither the list nor the rows that it names.
    """
    return kernels("write_cast").write_cast(
        new.buffer, out, found.slots, found.count, new.loc, new.nope, new.rope, new.fp8, early=early
    )


def most_joint_writes(device: torch.device) -> int:
    """Tokens that `write_shadow` may write, 0 where there is no kernel for it."""
    if not on_device(device):
        return 0
    return int(kernels("write_cast").MAX_WRITES)


@dataclass
class Map:
    """Which compact row each distinct slot gets. `rows`: the most that the tables can name, so none
    overflows.
    """

    active: ActiveSlots
    rows: int
    new_indices: torch.Tensor
    kernel: Any = None
    workspace: Any = None


def slot_map(active: ActiveSlots, slots: int, last: Map | None = None) -> Map:
    """The map of these tables. `last`: a map of tables of the same shape whose memory may be used again."""
    if on_device(active.device):
        from kvlab.kernels import slot_map as maps

        workspace = last.workspace if last is not None and _same(last, active, slots) else None
        workspace = workspace or maps.map_workspace(active, slots)
        found = maps.slot_map(active, slots, workspace)
        return Map(active, found.rows, found.new_indices, found, workspace)
    from kvlab.kernels import reference

    blank = torch.zeros((slots, 1), dtype=torch.uint8, device=active.device).view(torch.float8_e4m3fn)
    most = min(active.table.numel(), slots // active.page_size) * active.page_size
    return Map(active, most, reference.gather_cast(blank, active, torch.bfloat16)[1])


def gather(rows: torch.Tensor, compact: torch.Tensor, found: Map) -> torch.Tensor:
    """Each distinct active row once, to its place in `compact` [found.rows or more, 1, row]."""
    if found.kernel is not None:
        from kvlab.kernels import cast

        return cast.gather_cast(rows, compact, found.kernel)
    from kvlab.kernels import reference

    dense, _ = reference.gather_cast(rows, found.active, compact.dtype)
    compact[: dense.shape[0]] = dense
    return compact


def _same(last: Map, active: ActiveSlots, slots: int) -> bool:
    w = last.workspace
    return (
        w is not None
        and (w.num_slots, w.page_size, w.is_paged) == (slots, active.page_size, active.is_paged)
        and w.new_indices.shape == active.table.shape
        and w.new_indices.dtype == active.table.dtype
    )
