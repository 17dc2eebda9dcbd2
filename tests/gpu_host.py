"""Is there a GPU for the tests' kernels? Asked once, by all conftests."""

import os
import warnings
from functools import cache
from pathlib import Path

# Where a driver is, on Linux and below Windows: without either, torch need not be imported to answer.
_DRIVER = ("/dev/nvidiactl", "/dev/dxg")


@cache
def has_gpu() -> bool:
    """Not where CUDA_VISIBLE_DEVICES names none, nor where torch is a CPU build, whatever nvidia-smi says."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "" or not any(Path(p).exists() for p in _DRIVER):
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a driver too old for this torch
        import torch

        return torch.cuda.is_available()
