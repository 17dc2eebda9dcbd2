"""What do pairs of neighbouring columns become in FP16, of FP8 rows and of queries? Even and odd ones.

Why pairs, and why FP16, says `kvlab.kernels.mla_triton`. Device code of the decode kernels.
"""

import triton
import triton.language as tl


@triton.jit
def open_pairs(x, E5M2: tl.constexpr, METHOD: tl.constexpr):
    """Pairs of codes, uint16 -> (low, high) FP16. e4m3 by `bits` comes out times 2^-8.

    METHOD `cvt`: the chip's conversion (SM89 on); `bits`: integers, two pairs at once; `plain`: the same
    integers without assembly, for the interpreter.
    """
    if METHOD == "plain":
        low = x & 0xFF
        high = x >> 8
        if E5M2:
            low_bits = low << 8
            high_bits = high << 8
        else:
            # Sign, exponent and mantissa in place; the sum carries into the exponent's top bit for NaN alone.
            low_bits = ((low & 0x80) << 8) | ((low & 0x7F) << 7) | ((((low & 0x7F) + 1) & 0x80) << 7)
            high_bits = ((high & 0x80) << 8) | ((high & 0x7F) << 7) | ((((high & 0x7F) + 1) & 0x80) << 7)
        return (
            low_bits.to(tl.uint16).to(tl.float16, bitcast=True),
            high_bits.to(tl.uint16).to(tl.float16, bitcast=True),
        )
    if E5M2:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, 0, 0x2404; and.b32 $1, $2, 0xff00ff00;",
            "=&r,=r,r",
            [x],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    if METHOD == "cvt":
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            .reg .b32 t;
            prmt.b32 t, $2, 0, 0x3120;
            mov.b32 {low, high}, t;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }""",
            "=&r,=r,r",
            [x],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return tl.inline_asm_elementwise(
        """{
            .reg .b32 a, n, s;
            and.b32 a, $2, 0x007f007f;
            add.u32 n, a, 0x00010001;
            and.b32 n, n, 0x00800080;
            or.b32 a, a, n;
            shl.b32 a, a, 7;
            shl.b32 s, $2, 8;
            and.b32 s, s, 0x80008000;
            or.b32 $0, a, s;
            shr.u32 a, $2, 8;
            and.b32 a, a, 0x007f007f;
            add.u32 n, a, 0x00010001;
            and.b32 n, n, 0x00800080;
            or.b32 a, a, n;
            shl.b32 a, a, 7;
            and.b32 s, $2, 0x80008000;
            or.b32 $1, a, s;
            }""",
        "=&r,=r,r",
        [x],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def split_q(word, BF16: tl.constexpr):
    """Two neighbouring query values in 32 bits -> (even, odd) float32."""
    if BF16:
        return (word << 16).to(tl.float32, bitcast=True), (word & 0xFFFF0000).to(tl.float32, bitcast=True)
    even = (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return even, (word >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def fp16_scale(largest):
    """From the largest |q| of a head: the power of two that takes it to near 2^15, and its inverse, float32.

    The exponent is held where both are normal numbers.
    """
    exponent = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 30), 254)
    scale = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    unscale = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    return scale, unscale


@triton.jit
def fp16_loss(q):
    """How much of q FP16 would drop. An infinity or NaN drops nothing: it stays what it is."""
    return tl.where(tl.abs(q) < 65536.0, tl.abs(q - q.to(tl.float16).to(tl.float32)), 0.0)
