"""How does a token get into the FP8 pool in one launch, with the bytes that stock writes?

Stock casts with `tensor.to(fp8)`. What that does past the format's range has changed: torch up to 2.11 gives
NaN for e4m3, 2.13 saturates (torch/headeronly/util/Float8_e4m3fn.h); NaN's sign differs by device. So torch
itself is asked, once a device and before capture, and the kernel, which rounds in integers, writes what it
answered.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from kvlab.kernels.chip import early_launch, starts_early
from kvlab.kernels.direct import Direct

_INTEGER = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
# The largest number, Inf and a quiet NaN.
_BITS = {
    torch.bfloat16: (0x7F7F, 0x7F80, 0x7FC0),
    torch.float16: (0x7BFF, 0x7C00, 0x7E00),
    torch.float32: (0x7F7FFFFF, 0x7F800000, 0x7FC00000),
}


@triton.jit
def fp8_bits(
    x,
    E5M2: tl.constexpr,
    OVER: tl.constexpr,
    INF: tl.constexpr,
    NAN: tl.constexpr,
    NEGATIVE_NAN: tl.constexpr,
):
    """float32 -> FP8 codes, to nearest even. OVER, INF, NAN: the codes of what the format cannot hold."""
    MANTISSA: tl.constexpr = 21 if E5M2 else 20
    BIAS: tl.constexpr = 15 if E5M2 else 7
    # The smallest normal of the format, and the float whose last bit is worth the smallest subnormal.
    NORMAL: tl.constexpr = (113 << 23) if E5M2 else (121 << 23)
    MAGIC: tl.constexpr = (134 << 23) if E5M2 else (141 << 23)
    # 65536 and 480; rounding may carry into the code after the largest number.
    TOO_LARGE: tl.constexpr = (143 << 23) if E5M2 else (1087 << 20)
    AFTER_LARGEST: tl.constexpr = 0x7C if E5M2 else 0x7F
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits & 0x80000000) >> 24
    bits = bits & 0x7FFFFFFF
    is_small = bits < NORMAL
    magic = tl.full(bits.shape, MAGIC, tl.uint32)
    shifted = tl.where(is_small, bits, 0).to(tl.float32, bitcast=True) + magic.to(tl.float32, bitcast=True)
    small = shifted.to(tl.uint32, bitcast=True) - magic
    fits = tl.where(bits < TOO_LARGE, bits, NORMAL)
    odd = (fits >> MANTISSA) & 1
    rounded = (fits - ((127 - BIAS) << 23) + ((1 << (MANTISSA - 1)) - 1) + odd) >> MANTISSA
    code = tl.where(is_small, small, rounded)
    code = tl.where((bits >= TOO_LARGE) | (code >= AFTER_LARGEST), OVER, code)
    code = tl.where(bits == 0x7F800000, INF, code) | sign
    nan = tl.where(sign != 0, NEGATIVE_NAN, NAN)
    return tl.where(bits > 0x7F800000, nan, code).to(tl.uint8)


@triton.jit
def new_row(
    loc,
    nope,
    rope,
    token,
    part,
    nope_stride,
    rope_stride,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK: tl.constexpr,
    E5M2: tl.constexpr,
    OVER: tl.constexpr,
    INF: tl.constexpr,
    NAN: tl.constexpr,
    NEGATIVE_NAN: tl.constexpr,
):
    """One new token (int64): its slot, BLOCK columns from `part` on, which of them a row has, and their FP8
    codes.
    """
    slot = tl.load(loc + token).to(tl.int64)
    column = part + tl.arange(0, BLOCK)
    is_nope = column < NOPE
    is_rope = (column >= NOPE) & (column < NOPE + ROPE)
    a = tl.load(nope + token * nope_stride + column, mask=is_nope, other=0).to(tl.float32)
    b = tl.load(rope + token * rope_stride + (column - NOPE), mask=is_rope, other=0).to(tl.float32)
    code = fp8_bits(tl.where(is_nope, a, b), E5M2, OVER, INF, NAN, NEGATIVE_NAN)
    return slot, column, is_nope | is_rope, code


@triton.jit
def kvlab_kv_write(
    out,
    loc,
    nope,
    rope,
    wide,
    out_stride,
    nope_stride,
    rope_stride,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK: tl.constexpr,
    E5M2: tl.constexpr,
    OVER: tl.constexpr,
    INF: tl.constexpr,
    NAN: tl.constexpr,
    NEGATIVE_NAN: tl.constexpr,
    EARLY: tl.constexpr,
    CLEAR: tl.constexpr,
):
    """EARLY: launched while the kernel before ends, as SGLang's own write is; it waits before it reads.

    CLEAR: one program more, behind the tokens, zeroes the first row of `wide`.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    if CLEAR:  # noqa: SIM102 -- decided at compile time
        if token == tl.num_programs(0) - 1:
            column = tl.arange(0, BLOCK)
            nothing = tl.zeros([BLOCK], tl.float32).to(wide.dtype.element_ty)
            tl.store(wide + column, nothing, mask=column < NOPE + ROPE)
            return
    slot, column, is_row, code = new_row(
        loc,
        nope,
        rope,
        token,
        0,
        nope_stride,
        rope_stride,
        NOPE,
        ROPE,
        BLOCK,
        E5M2,
        OVER,
        INF,
        NAN,
        NEGATIVE_NAN,
    )
    tl.store(out + slot * out_stride + column, code, mask=is_row)


@lru_cache
def edge_codes(fp8: torch.dtype, dtype: torch.dtype, device: torch.device) -> tuple[int, int, int, int]:
    """What `.to(fp8)` writes there for the largest number, Inf, NaN and -NaN of `dtype`. Reads the device,
    once.
    """
    # By their bits: a conversion on the way may turn a NaN's sign.
    largest, infinite, quiet = _BITS[dtype]
    width, sign = dtype.itemsize * 8, 1 << (dtype.itemsize * 8 - 1)
    bits = [largest, infinite, quiet, (quiet | sign) - (1 << width)]
    values = torch.tensor(bits, dtype=_INTEGER[dtype], device=device).view(dtype)
    over, inf, nan, negative = values.to(fp8).view(torch.uint8).tolist()
    return over, inf, nan, negative


_launch = Direct(kvlab_kv_write)


def write(
    buffer: torch.Tensor,
    loc: torch.Tensor,
    nope: torch.Tensor,
    rope: torch.Tensor,
    fp8: torch.dtype,
    clear: torch.Tensor | None = None,
) -> None:
    """Token i of `nope` [tokens, rank] and `rope` [tokens, rope] goes to `buffer[loc[i]]`, as codes of `fp8`.

    buffer uint8 [slots, 1, rank + rope], slot stride free; loc int32 or int64 [tokens]; one program a token.
    Both may have a dimension of one in the middle. Equal to `torch.cat([nope, rope], 1).to(fp8)` on that
    device, byte for byte. `clear`: a wide layer [slots, 1, rank + rope], whose slot 0 becomes zero.
    """
    device, dtype = buffer.device, nope.dtype
    key, grid, strides = _kind(buffer, loc, nope, rope, fp8, clear)
    rank, width = nope.shape[-1], rope.shape[-1]

    def constants() -> dict[str, Any]:
        over, inf, nan, negative = edge_codes(fp8, dtype, device)
        early = starts_early(device)
        return {
            "NOPE": rank,
            "ROPE": width,
            "BLOCK": triton.next_power_of_2(rank + width),
            "E5M2": fp8 == torch.float8_e5m2,
            "OVER": over,
            "INF": inf,
            "NAN": nan,
            "NEGATIVE_NAN": negative,
            "EARLY": early,
            "CLEAR": clear is not None,
            "num_warps": 4,
            **early_launch(early),
        }

    _launch(key, grid, (buffer, loc, nope, rope, nope if clear is None else clear), strides, constants)


def prepared(
    buffer: torch.Tensor,
    loc: torch.Tensor,
    nope: torch.Tensor,
    rope: torch.Tensor,
    fp8: torch.dtype,
    clear: torch.Tensor | None = None,
) -> tuple[Any, ...] | None:
    """The launch of such a `write` that was made before (`Direct.prepared`), or None."""
    return _launch.prepared(*_kind(buffer, loc, nope, rope, fp8, clear))


def _kind(
    buffer: torch.Tensor,
    loc: torch.Tensor,
    nope: torch.Tensor,
    rope: torch.Tensor,
    fp8: torch.dtype,
    clear: torch.Tensor | None,
) -> tuple[tuple[Any, ...], int, tuple[int, ...]]:
    """What tells kinds of launches apart, programs, and the kernel's numbers."""
    strides = buffer.stride()[0], nope.stride()[0], rope.stride()[0]
    wide_dtype = None if clear is None else clear.dtype
    shapes = nope.shape[-1], rope.shape[-1]
    key = (buffer.device.index, fp8, nope.dtype, loc.dtype, wide_dtype, shapes, strides)
    return key, loc.numel() + (clear is not None), strides
