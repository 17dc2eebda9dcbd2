"""Which chip does a kernel run on, and how many SMs has it?"""

from functools import lru_cache

import torch


@lru_cache
def chip(device: torch.device) -> tuple[int, int]:
    """(compute capability, SMs); (0, 2) stands for the interpreter on a CPU."""
    if device.type != "cuda":
        return 0, 2
    p = torch.cuda.get_device_properties(device)
    return 10 * p.major + p.minor, p.multi_processor_count
