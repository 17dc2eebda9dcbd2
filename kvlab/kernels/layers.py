"""How does each layer of an eager step get its new rows written and its active ones cast, for two launches?

What tells one such call from the next layer's are addresses. `WriteAndCast` keeps the two launches of a layer
and makes them again for a layer whose tensors are laid out alike: eager serving is bound by the host, and
most of what a launch costs it is finding out what to launch.
"""

from typing import Any, Protocol

import torch

from kvlab.kernels import cast, kv_write
from kvlab.kernels.active import ActiveSlots
from kvlab.kernels.direct import current_stream, has_hooks
from kvlab.kernels.tickets import PassTickets


class NewRows(Protocol):
    """What `kv_write.write` writes. `layout`: all that these tensors are but where, () where nobody asked."""

    buffer: torch.Tensor
    loc: torch.Tensor
    nope: torch.Tensor
    rope: torch.Tensor
    fp8: torch.dtype
    layout: tuple[Any, ...]


class WriteAndCast:
    """Of a step: `kv_write.write(…, clear=wide)` and `cast.shadow_cast(rows, wide, active)`."""

    def __init__(self) -> None:
        # Counters of this step's casts that draw tiles.
        self.tickets = PassTickets()
        self._new: tuple[Any, ...] = ()
        self._layout: tuple[Any, ...] = ()
        self._active: ActiveSlots | None = None
        self._launches: tuple[Any, Any, int] | None = None
        # The tables' addresses and, of a stream, the counters'.
        self._tables: tuple[int, int] = (0, 0)
        self._draws = False
        self._counters: tuple[int | None, int] = (None, 0)

    def again(self, new: NewRows, rows: torch.Tensor, wide: torch.Tensor, active: ActiveSlots) -> bool:
        """Launch both, if these tensors are laid out as those that were `noted`; else nothing. True if so.

        Not while a graph is captured, which has counters of its own.
        """
        launches = self._launches
        if (
            launches is None
            or active is not self._active
            or not (new.layout is self._new or new.layout == self._new)
            or self._layout != _layout(rows, wide, active)
            or has_hooks()
        ):
            return False
        at = (
            *(new.buffer.data_ptr(), new.loc.data_ptr(), new.nope.data_ptr(), new.rope.data_ptr()),
            wide.data_ptr(),
        )
        codes = rows.data_ptr()
        if (at[0] | at[1] | at[2] | at[3] | at[4] | codes) % 16:
            return False
        (run, function, packed, grid, rest), (run_2, function_2, packed_2, grid_2, rest_2), device = launches
        table, bounds = self._tables
        stream = current_stream(device)
        if stream != self._counters[0]:
            self._counters = stream, self.tickets(wide).data_ptr() if self._draws else bounds
        run(grid, 1, 1, stream, function, packed, None, None, None, *at, *rest)
        run_2(
            *(grid_2, 1, 1, stream, function_2, packed_2, None, None, None),
            *(codes, at[4], table, bounds, table, self._counters[1], *rest_2),
        )
        return True

    def note(self, new: NewRows, rows: torch.Tensor, wide: torch.Tensor, active: ActiveSlots) -> None:
        """Both were launched one by one for these tensors: keep them, where they can be made again."""
        write = kv_write.prepared(new.buffer, new.loc, new.nope, new.rope, new.fp8, wide)
        made = cast.prepared(rows, wide, active, self.tickets)
        tables = active.table.data_ptr(), active.bounds.data_ptr()
        self._launches = None
        if (
            write is not None
            and made is not None
            and new.loc.numel()
            and new.layout
            and not (tables[0] | tables[1]) % 16
        ):
            self._new, self._layout, self._active = new.layout, _layout(rows, wide, active), active
            self._tables, self._counters = tables, (None, 0)
            launch, counters = made
            self._draws = counters is not active.bounds
            self._launches = write, launch, new.buffer.device.index


def _layout(rows: torch.Tensor, wide: torch.Tensor, active: ActiveSlots) -> tuple[Any, ...]:
    """All that the launches depend on but addresses and new rows. The tables are the very same: `active`."""
    return (
        *(rows.dtype, rows.shape, rows.stride(), wide.dtype, wide.shape, wide.stride()),
        *(active.table.shape, active.bounds.shape),
    )
