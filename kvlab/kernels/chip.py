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


def starts_early(device: torch.device) -> bool:
    """Has the chip programmatic dependent launch (SM90 on): a kernel starts while the one before it ends?"""
    return chip(device)[0] >= 90


def early_launch(is_early: bool) -> dict[str, bool]:
    """Triton's launch option for that; the kernel waits itself (`gdc_wait`) for what it reads."""
    return {"launch_pdl": True} if is_early else {}
