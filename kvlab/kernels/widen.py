"""What does an FP8 code mean in BF16 or FP16, bit for bit as CUDA's `tensor.to()` writes it?

Both formats fit both dtypes exactly, so only NaN leaves a choice: `tensor.to()` on a CUDA device writes
0x7FFF for every NaN of either sign. Two ways lead there. `NATIVE` reads FP8-typed pointers and uses the
chip's conversions (SM89 on). The other reads the same bytes as uint8 and needs integers and one
multiplication: it runs on SM80, which Triton gives no e4m3, and in the interpreter, which decodes NaN and Inf
wrongly.
"""

import triton
import triton.language as tl

NAN_BITS = 0x7FFF
_NAN = tl.constexpr(NAN_BITS)
# e4m3's exponent bias is 7, float32's 127 and float16's 15: shifting the fields into place is off by these
# powers.
_E4M3_TO_F32 = tl.constexpr(2.0**120)
_E4M3_TO_F16 = tl.constexpr(2.0**8)


@triton.jit
def _from_bytes(x, E5M2: tl.constexpr, BF16: tl.constexpr):
    code = x.to(tl.uint32)
    magnitude = code & 0x7F
    sign = (code & 0x80) << 8
    if E5M2:
        # e5m2 is the upper half of a float16.
        half = magnitude << 8
        if BF16:
            wide = half.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
            bits = wide.to(tl.uint32, bitcast=True) >> 16
        else:
            bits = half
        is_nan = magnitude > 0x7C
    else:
        # Subnormals come out right because the multiplication normalises them.
        if BF16:
            wide = (magnitude << 20).to(tl.float32, bitcast=True) * _E4M3_TO_F32
            bits = wide.to(tl.uint32, bitcast=True) >> 16
        else:
            half = (magnitude << 7).to(tl.uint16).to(tl.float16, bitcast=True) * _E4M3_TO_F16
            bits = half.to(tl.uint16, bitcast=True).to(tl.uint32)
        is_nan = magnitude == 0x7F
    bits = tl.where(is_nan, _NAN, bits | sign).to(tl.uint16)
    return bits.to(tl.bfloat16 if BF16 else tl.float16, bitcast=True)


@triton.jit
def widen(x, E5M2: tl.constexpr, BF16: tl.constexpr, NATIVE: tl.constexpr):
    """FP8 (`NATIVE`) or uint8 codes of any shape -> bfloat16 (`BF16`) or float16, exact."""
    if NATIVE:
        # Through float16: one instruction for two codes of either format, NaN and Inf as PTX defines them.
        # Triton's own e5m2 to bfloat16 scales the bits and makes Inf finite.
        wide = x.to(tl.float16)
        if BF16:
            wide = wide.to(tl.float32).to(tl.bfloat16)
    else:
        wide = _from_bytes(x, E5M2, BF16)
    return wide


def _words(fp8: str, bf16: bool) -> str:
    """PTX: the codes of one word ($2), two by two through float16 as `widen` does, to two words ($0, $1)."""
    half = [f"cvt.rn.f16x2.{fp8}x2 {to}, {code};" for to, code in (("a", "l"), ("b", "h"))]
    wide = "mov.b32 {{l, h}}, {0}; cvt.f32.f16 f, l; cvt.f32.f16 g, h; cvt.rn.bf16x2.f32 {1}, g, f;"
    last = [
        wide.format(*pair) if bf16 else f"mov.b32 {pair[1]}, {pair[0]};"
        for pair in (("a", "$0"), ("b", "$1"))
    ]
    declared = "{.reg .b16 l, h; .reg .b32 a, b; .reg .f32 f, g; mov.b32 {l, h}, $2;"
    return " ".join([declared, *half, *last, "}"])


_E4M3_BF16 = tl.constexpr(_words("e4m3", True))
_E4M3_FP16 = tl.constexpr(_words("e4m3", False))
_E5M2_BF16 = tl.constexpr(_words("e5m2", True))
_E5M2_FP16 = tl.constexpr(_words("e5m2", False))


@triton.jit
def widen_words(x, E5M2: tl.constexpr, BF16: tl.constexpr):
    """Words of four codes, int32 [n, m] -> [n, 2 m] of two values each: what `widen` does where NATIVE.

    Bytes that a loop carries take a register each; four in a word take one (SM89 on; not in the interpreter).
    """
    if E5M2:
        how: tl.constexpr = _E5M2_BF16 if BF16 else _E5M2_FP16
    else:
        how: tl.constexpr = _E4M3_BF16 if BF16 else _E4M3_FP16
    low, high = tl.inline_asm_elementwise(
        how, "=r,=r,r", [x], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
    )
    return tl.interleave(low, high)
