"""Who takes the next tile? Counters from which the programs of one launch draw.

SMs do not move bytes equally fast: of equal shares the slowest SM's ends last. A program that draws its next
tile takes what the others leave. The counters are zero between launches; the last program to end sees to it.
"""

import torch

from kvlab.kernels.direct import current_stream

# One for each stream, and for each buffer that captured casts write to; 16 bytes apart, as `Direct` wants it.
_tickets: dict[tuple[torch.device, bool, int], torch.Tensor] = {}
_unused: dict[torch.device, list[torch.Tensor]] = {}


def tickets_of(target: torch.Tensor) -> torch.Tensor:
    """int32 [4]: counters of a cast to `target`, from which no cast that runs beside it draws.

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
