"""Where does one layer's wide copy live? One buffer a device, shared by all layers, pools and draft steps.

Under CUDA graphs it lasts: the graphs hold its address, also after `remove()`. It is zeroed once, so that
slots which nobody cast are finite. Without graphs each call asks the caching allocator and gives back, as
stock does; what attention kernels may touch beside the active rows (slot 0, the tails of last pages) is
zeroed then. Never larger than stock's own: one layer of the largest pool. Beside it `gather`, and
`shadow` under graphs, keep what names a step's slots: some bytes a slot, where a wide row has a thousand.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvlab.kernels.active import ActiveSlots
from kvlab.patch import casts

# What torch.cuda.is_current_stream_capturing calls; each layer of an eager step asks.
_is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)


@dataclass
class Scratch:
    """Buffers by (device, lane): a lane per call kind where prefill and decode run at once."""

    lasting: dict[tuple[torch.device, str], torch.Tensor] = field(default_factory=dict)
    # Outgrown by a later pool, but captured graphs may still write there.
    outgrown: list[torch.Tensor] = field(default_factory=list)
    # Made inside a capture, where nothing but a replay could zero it: each call clears what it may not read.
    unclean: list[torch.Tensor] = field(default_factory=list)

    def reserve(self, device: torch.device, lane: str, nbytes: int) -> None:
        """Make the lasting buffer hold `nbytes`; raises torch.OutOfMemoryError where it cannot."""
        key = (device, lane)
        have = self.lasting.get(key)
        if have is not None and have.numel() >= nbytes:
            return
        if is_capturing(device):
            # A memset of it all would be replayed with the graph.
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
            self.unclean.append(buffer)
        else:
            buffer = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        if have is not None:
            self.outgrown.append(have)
        self.lasting[key] = buffer

    def rows(
        self, device: torch.device, lane: str, rows: int, width: int, dtype: torch.dtype, *, lasts: bool
    ) -> torch.Tensor:
        """[rows, 1, width] of `dtype`. A transient one is not cleared: see `clear_unread`."""
        if lasts or (device, lane) in self.lasting:
            nbytes = rows * width * dtype.itemsize
            self.reserve(device, lane, nbytes)
            return self.lasting[device, lane][:nbytes].view(dtype).view(rows, 1, width)
        return torch.empty((rows, 1, width), dtype=dtype, device=device)

    def nbytes(self) -> int:
        return sum(t.numel() for t in (*self.lasting.values(), *self.outgrown))

    def as_dict(self) -> dict[str, Any]:
        return {"bytes": self.nbytes(), "lanes": sorted(lane for _, lane in self.lasting)}


def clear_unread(shadow: torch.Tensor, tables: Sequence[ActiveSlots], *, is_clear: bool = False) -> None:
    """Zero what a kernel may load and mask: slot 0, unless it `is_clear`, and each last page behind its
    length. No host sync.
    """
    if not is_clear:
        shadow[0].zero_()
    for active in tables:
        if active.is_paged and active.page_size > 1:
            casts.clear_tails(shadow, active)


def is_capturing(device: torch.device) -> bool:
    """Is the current stream being captured into a CUDA graph?"""
    return device.type == "cuda" and _is_capturing()
