"""Arguments of the kernels: one clear error that names the argument and the expected shape."""

from numbers import Real
from typing import Any

import torch

from kvlab.errors import BadInput

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
WIDE_DTYPES = (torch.bfloat16, torch.float16)
INDEX_DTYPES = (torch.int32, torch.int64)
_FLOAT32_MAX = torch.finfo(torch.float32).max


def described(t: Any) -> str:
    """`torch.bfloat16 [4, 8] on cuda:0`, or the type of what is no tensor."""
    if not isinstance(t, torch.Tensor):
        return type(t).__name__
    return f"{t.dtype} {list(t.shape)} on {t.device}"


def expect(
    name: str,
    t: torch.Tensor,
    shape: str,
    *,
    dims: int | tuple[int, ...] | None = None,
    dtypes: tuple[torch.dtype, ...] | None = None,
    device: torch.device | None = None,
    sizes: tuple[int | None, ...] | None = None,
    unit_stride: bool = True,
) -> None:
    """Raise BadInput unless `t` is a tensor of these dims, dtypes, device, sizes (None: any), last stride 1.

    `shape` says in words what would be right, e.g. `[bs + 1]`.
    """

    def wrong(what: str) -> BadInput:
        kinds = " or ".join(str(d).removeprefix("torch.") for d in dtypes or ()) or "tensor"
        return BadInput(f"{name}: {what}; expected {kinds} {shape}, got {described(t)}")

    if not isinstance(t, torch.Tensor):
        raise wrong("not a tensor")
    if dtypes is not None and t.dtype not in dtypes:
        raise wrong("wrong dtype")
    if dims is not None and t.dim() not in (dims if isinstance(dims, tuple) else (dims,)):
        raise wrong("wrong number of dimensions")
    if sizes is not None and (
        len(sizes) != t.dim() or any(n is not None and n != m for n, m in zip(sizes, t.shape, strict=True))
    ):
        raise wrong("wrong shape")
    if device is not None and t.device != device:
        raise wrong(f"wrong device (the other arguments are on {device})")
    if unit_stride and t.numel() > 1 and t.dim() and t.shape[-1] > 1 and t.stride(-1) != 1:
        raise wrong(f"the last dimension must be contiguous, its stride is {t.stride(-1)}")


def number(name: str, value: float) -> float:
    """`value` as a float. Raises BadInput unless it is a real number that float32 holds.

    A tensor is none: its value would have to be waited for.
    """
    if not isinstance(value, Real) or not abs(value) <= _FLOAT32_MAX:
        told = described(value) if isinstance(value, torch.Tensor) else repr(value)
        raise BadInput(f"{name}: expected a finite number within float32, got {told}")
    return float(value)


def one_of(name: str, dtype: torch.dtype, dtypes: tuple[torch.dtype, ...]) -> None:
    """Raise BadInput unless `dtype` is one of `dtypes`."""
    if dtype not in dtypes:
        raise BadInput(f"{name}: expected {' or '.join(map(str, dtypes))}, got {dtype!r}")


def device_of(device: torch.device | str) -> torch.device:
    """A device given as torch takes it. Raises BadInput for what names none."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        raise BadInput(f"device: expected a torch.device or its name, got {device!r}") from None


def rows_2d(name: str, rows: torch.Tensor, dtypes: tuple[torch.dtype, ...] = FP8_DTYPES) -> torch.Tensor:
    """A layer's pool as [slots, row]: accepts [slots, row] and SGLang's [slots, 1, row]; no copy.

    The row stride may exceed the row; where rows are written (WIDE_DTYPES alone) it may not fall short of it.
    Raises BadInput for uint8 (view it as its FP8 dtype first).
    """
    expect(name, rows, "[slots, row] or [slots, 1, row]", dims=(2, 3), dtypes=dtypes)
    if rows.dim() == 3:
        if rows.shape[1] != 1:
            raise BadInput(f"{name}: expected [slots, 1, row], one latent head, got {described(rows)}")
        rows = rows.squeeze(1)
    if dtypes == WIDE_DTYPES and rows.shape[0] > 1 and rows.stride(0) < rows.shape[1]:
        raise BadInput(
            f"{name}: rows overlap in memory, their stride is {rows.stride(0)}; "
            f"expected {rows.shape[1]} or more"
        )
    if not rows.shape[1]:
        raise BadInput(f"{name}: expected rows of 1 value or more, got {described(rows)}")
    return rows
