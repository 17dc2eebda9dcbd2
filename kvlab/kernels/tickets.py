"""Who takes the next tile? Counters from which the programs of one launch draw.

SMs do not move bytes equally fast: of equal shares the slowest SM's ends last. A program that draws its next
tile takes what the others leave. The counters are zero between launches; who draws the last sees to it.

They stay zero unless a table's bounds change while a cast runs, which nothing does that attends rightly. Such
a cast would leave them as they are, and later ones that draw from them would leave tiles out. With CUDA
graphs they last, as the graphs do. Without, each pass begins with counters of its own (`PassTickets`).
"""

from collections.abc import Callable

import torch

from kvlab.kernels.direct import current_stream

# Of a cast's target its counters, int32 [4]; the first is drawn from.
Counters = Callable[[torch.Tensor], torch.Tensor]

# One for each stream, and for each buffer that captured casts write to; 16 bytes apart, as `Direct` wants it.
_tickets: dict[tuple[torch.device, bool, int], torch.Tensor] = {}
_unused: dict[torch.device, list[torch.Tensor]] = {}


def tickets_of(target: torch.Tensor) -> torch.Tensor:
    """int32 [4]: counters of a cast to `target`, from which no cast that runs beside it draws; they last.

    Launches of a stream follow each other. Graphs are replayed on any stream; there it is the buffer that two
    casts never share at a time, since their rows would mix.
    """
    device, on_gpu = target.device, target.device.type == "cuda"
    is_captured = on_gpu and torch.cuda.is_current_stream_capturing()
    place = current_stream(device.index) if on_gpu and not is_captured else target.data_ptr()
    found = _tickets.get((device, is_captured, place))
    if found is not None:
        return found
    unused = _unused.setdefault(device, [])
    if not unused:
        if is_captured:  # then each replay zeroes them itself
            return torch.zeros(4, dtype=torch.int32, device=device)
        # 512 bytes, the least that torch gives.
        unused.extend(torch.zeros(32, 4, dtype=torch.int32, device=device).unbind())
        if on_gpu:
            torch.cuda.current_stream(device).synchronize()
    return _tickets.setdefault((device, is_captured, place), unused.pop())


class PassTickets:
    """Counters that live as long as this object, a pass through the model: zeroed, by a launch, at its first
    cast that may draw tiles, and given back with it. Not for a cast that is captured.
    """

    def __init__(self) -> None:
        # By stream: zeroed there, drawn from there, and so the allocator's to give again there.
        self._of: dict[int, torch.Tensor] = {}

    def __call__(self, target: torch.Tensor) -> torch.Tensor:
        """int32 [4]: counters of a cast to `target` on its device's current stream."""
        stream = current_stream(target.device.index) if target.device.type == "cuda" else 0
        found = self._of.get(stream)
        if found is None:
            found = self._of[stream] = torch.zeros(4, dtype=torch.int32, device=target.device)
        return found
