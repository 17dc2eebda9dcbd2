"""The Triton kernel of the KV write, apart so that importing the patch does not import Triton."""

import torch
import triton
import triton.language as tl


@triton.jit
def fp8_bits(x, E5M2: tl.constexpr):
    """float32 -> the FP8 code torch's `.to()` gives: round to nearest even, overflow to NaN (e4m3) or Inf (e5m2)."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits & 0x80000000) >> 24
    bits = bits & 0x7FFFFFFF
    MANTISSA: tl.constexpr = 21 if E5M2 else 20
    BIAS: tl.constexpr = 15 if E5M2 else 7
    # The smallest normal of the format, and the float whose last bit is worth its smallest subnormal.
    NORMAL: tl.constexpr = (113 << 23) if E5M2 else (121 << 23)
    MAGIC: tl.constexpr = (134 << 23) if E5M2 else (141 << 23)
    OVER: tl.constexpr = (143 << 23) if E5M2 else (1087 << 20)
    magic = tl.full(bits.shape, MAGIC, tl.uint32)
    small = (bits.to(tl.float32, bitcast=True) + magic.to(tl.float32, bitcast=True)).to(
        tl.uint32, bitcast=True
    ) - magic
    odd = (bits >> MANTISSA) & 1
    rounded = (bits - ((127 - BIAS) << 23) + ((1 << (MANTISSA - 1)) - 1) + odd) >> MANTISSA
    if E5M2:
        over = tl.where(bits > 0x7F800000, 0x7F, 0x7C)
    else:
        over = tl.full(bits.shape, 0x7F, tl.uint32)
    code = tl.where(bits >= OVER, over.to(tl.uint32), tl.where(bits < NORMAL, small, rounded))
    return (code | sign).to(tl.uint8)


@triton.jit
def _write(
    out,
    loc,
    nope,
    rope,
    out_stride,
    nope_stride,
    rope_stride,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK: tl.constexpr,
    E5M2: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(loc + token).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_nope = column < NOPE
    is_rope = (column >= NOPE) & (column < NOPE + ROPE)
    a = tl.load(nope + token * nope_stride + column, mask=is_nope, other=0).to(tl.float32)
    b = tl.load(rope + token * rope_stride + (column - NOPE), mask=is_rope, other=0).to(tl.float32)
    code = fp8_bits(tl.where(is_nope, a, b), E5M2)
    tl.store(out + slot * out_stride + column, code, mask=is_nope | is_rope)


def launch(
    buffer: torch.Tensor, loc: torch.Tensor, nope: torch.Tensor, rope: torch.Tensor, *, is_e5m2: bool
) -> None:
    """One program a token."""
    width = nope.shape[1] + rope.shape[1]
    _write[(loc.numel(),)](
        buffer,
        loc,
        nope,
        rope,
        buffer.stride(0),
        nope.stride(0),
        rope.stride(0),
        NOPE=nope.shape[1],
        ROPE=rope.shape[1],
        BLOCK=triton.next_power_of_2(width),
        E5M2=is_e5m2,
        num_warps=4,
    )
