"""Do the CUDA kernels take a call, and are they to? What they do not take, Triton decodes."""

import logging

import torch

from kvlab.errors import BadInput
from kvlab.kernels import choice
from kvlab.kernels.active import ActiveSlots
from kvlab.kernels.checks import rows_2d
from kvlab.kernels.chip import chip

BACKENDS = ("auto", "triton", "cuda")

_log = logging.getLogger(__name__)
# Devices where the CUDA kernels turned out not to compile, and why: Triton serves them from then on.
_failed: dict[torch.device, str] = {}


def picks_cuda(
    backend: str,
    q_nope: torch.Tensor,
    q_pe: torch.Tensor | None,
    pool: torch.Tensor,
    active: ActiveSlots,
    columns: int,
) -> bool:
    """Whether `backend`, one of BACKENDS, means the CUDA kernels here; `columns`: query columns a request.

    Raises BadInput for another name, and where "cuda" insists on kernels that do not take the call.
    """
    if backend not in BACKENDS:
        raise BadInput(f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "triton":
        return False
    reason = why_not_cuda(q_nope, q_pe, pool, active)
    if backend == "cuda":
        if reason:
            raise BadInput(f"backend: cuda does not take this call: {reason}; use auto or triton")
        return True
    return reason is None and choice.prefer(columns, active.batch, active.capacity // active.batch) == "cuda"


def why_not_cuda(
    q_nope: torch.Tensor, q_pe: torch.Tensor | None, rows: torch.Tensor, active: ActiveSlots
) -> str | None:
    """Why the CUDA kernels do not take this call; None where they do. Which is faster: kernels.choice."""
    if not _is_cuda(rows.device):
        return f"rows are on {rows.device}"
    if chip(rows.device)[0] != 90:
        return f"the CUDA kernels are for SM90, this is SM{chip(rows.device)[0]}"
    if rows.device in _failed:
        return _failed[rows.device]
    from kvlab.kernels import hopper

    return hopper.supports(q_nope, q_pe, rows_2d("rows", rows), active)


def leave_to_triton(device: torch.device, error: Exception) -> None:
    """From now on Triton decodes there; said once in the log."""
    _failed[device] = f"the CUDA kernels do not compile here: {error}"
    _log.warning("kvlab: Triton decodes, %s", _failed[device])


def _is_cuda(device: torch.device) -> bool:
    return device.type == "cuda"
