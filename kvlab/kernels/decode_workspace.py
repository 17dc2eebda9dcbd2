"""How much scratch does a decode step take, and what lies where in it?"""

import torch

from kvlab.errors import BadInput
from kvlab.kernels.checks import device_of
from kvlab.kernels.chip import chip
from kvlab.kernels.decode_cut import Tuning, columns_of, pairs_held, tuning
from kvlab.kernels.mla_record import RECORD

# The CUDA kernels keep tickets at a workspace's start that every call must leave zero.
_HEADER_BYTES = 8192


def workspace_for(
    tokens: int,
    heads: int,
    device: torch.device | str,
    *,
    batch: int | None = None,
    kv_lora_rank: int = 512,
    tune: Tuning | None = None,
) -> torch.Tensor:
    """Scratch for `mla_decode`, uint8, for up to `tokens` query tokens; calls in sequence may share it."""
    need = workspace_bytes(tokens, heads, device, batch=batch, kv_lora_rank=kv_lora_rank, tune=tune)
    return torch.zeros(need, dtype=torch.uint8, device=device)


def workspace_bytes(
    tokens: int,
    heads: int,
    device: torch.device | str,
    *,
    batch: int | None = None,
    kv_lora_rank: int = 512,
    tune: Tuning | None = None,
) -> int:
    """Bytes of scratch for `tokens` query tokens of `batch` requests (None: one each) on `device`."""
    for name, n in (("tokens", tokens), ("heads", heads)):
        if n < 0:
            raise BadInput(f"{name}: expected 0 or more, got {n}")
    device = device_of(device)
    capability, sms = chip(device)
    columns = columns_of(tokens, heads, batch or tokens)
    tune = tune or tuning(capability, columns, batch or tokens)
    need = sum(section_bytes(tokens, heads, kv_lora_rank, sms, tune))
    if capability == 90:
        from kvlab.kernels import hopper

        need = max(need, *(hopper.workspace_bytes(device, c) for c in (heads, columns)))
    return need


def section_bytes(tokens: int, heads: int, rank: int, sms: int, tune: Tuning) -> tuple[int, ...]:
    """Bytes of the workspace's parts: header, records, pieces' LSE, pieces."""
    pieces = 2 * sms * tune.shares * tune.block_h
    records = 4 * RECORD * tokens * -(-heads // tune.block_h)
    return (
        _HEADER_BYTES,
        -(-records // 256) * 256,
        -(-4 * pieces // 256) * 256,
        8 * pieces * pairs_held(rank),
    )
