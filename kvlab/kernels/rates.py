"""What does an SM do in a cycle? The instruction rates that bound a decode over FP8 rows, measured."""

import ctypes
from dataclasses import dataclass

import torch

from kvlab.kernels import nvrtc

ROUNDS = 512
UNROLLED = 32  # instructions a round, a warp
WARPS = 16


@dataclass(frozen=True)
class Rate:
    """`per_cycle` of `unit`s that one SM completes in a cycle."""

    name: str
    unit: str
    per_cycle: float


# name, unit, units one warp's instruction does
_KINDS = (
    ("cvt e4m3x2 to f16x2", "elements", 64),
    ("cvt e4m3x2 to bf16x2", "elements", 64),
    ("prmt", "threads", 32),
    ("mma m16n8k16 f16", "multiply-adds", 16 * 8 * 16),
    ("ldmatrix.x4", "bytes", 512),
    ("ldmatrix.x4.trans", "bytes", 512),
)


class _Params(ctypes.Structure):
    _fields_ = (
        ("sink", ctypes.c_void_p),
        ("cycles", ctypes.c_void_p),
        ("rounds", ctypes.c_int),
        ("seed", ctypes.c_uint),
    )


def measure(device: torch.device) -> list[Rate]:
    """One block of 16 warps on every SM; the median block's cycles. Needs compute capability 9.0."""
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    cycles = torch.zeros(sms + 1, dtype=torch.int64, device=device)
    found = []
    with torch.cuda.device(device):
        params = _Params(cycles.data_ptr() + 8 * sms, cycles.data_ptr(), ROUNDS, 3)
        stream = torch.cuda.current_stream(device).cuda_stream
        for kind, (name, unit, each) in enumerate(_KINDS):
            kernel = nvrtc.load(nvrtc.Source("rates.cu", "rates", (("KIND", kind),)), device.index)
            for _ in range(2):
                kernel.launch(sms, 32 * WARPS, 0, stream, params)
            took = cycles[:sms].median().item()
            found.append(Rate(name, unit, each * UNROLLED * ROUNDS * WARPS / took))
    return found
