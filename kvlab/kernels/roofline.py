"""What does a decode over FP8 rows cost at least? Bytes over bandwidth, instructions over their rates."""

from dataclasses import dataclass

# Multiply-adds an SM of Hopper completes a cycle in FP16 with float32 sums, at most: four tensor cores of 512
# (NVIDIA H100 white paper). `kvlab.kernels.rates` measures what mma.sync reaches of it.
TENSOR_PEAK = 2048
# The clock behind the data sheet's tensor peak: 989.4 Tflop/s over 132 SMs of 2 x 2048 a cycle.
CLOCK_GHZ = 1.83
MMA_M, MMA_N, MMA_K = 16, 8, 16  # mma.sync of FP16
WGMMA_M = 64  # rows that a warpgroup's matrix instruction always has


@dataclass(frozen=True)
class Floor:
    """Microseconds that each resource is busy at least, all SMs evenly; they overlap, so the largest bounds.

    `fp16_us`, `bf16_us`: widening each code once as K and once as V. `heads_in_n_us`: mma.sync, heads padded
    to 8; `wgmma_us`: wgmma with heads in N, padded to 8; `heads_in_m_us`: wgmma with heads in its 64 rows.
    """

    bytes: int
    conversions: int
    multiply_adds: int
    memory_us: float
    fp16_us: float
    bf16_us: float
    heads_in_n_us: float
    wgmma_us: float
    heads_in_m_us: float


def padded(heads: int, to: int) -> int:
    """Heads rounded up to whole multiples of `to`."""
    return -(-heads // to) * to


def floor(
    tokens: int,
    heads: int,
    *,
    bandwidth: float,
    sms: int,
    cvt_fp16: float,
    cvt_bf16: float,
    mma: float,
    kv_lora_rank: int = 512,
    qk_rope_head_dim: int = 64,
    clock_ghz: float = CLOCK_GHZ,
) -> Floor:
    """Of one layer's decode attention over `tokens` cached tokens in all, one query token a request.

    `bandwidth` in bytes a second; `cvt_*` elements and `mma` multiply-adds that an SM completes a cycle.
    """
    row = kv_lora_rank + qk_rope_head_dim
    codes = tokens * (row + kv_lora_rank)
    cycle_us = 1e-3 / (clock_ghz * sms)
    return Floor(
        bytes=tokens * row,
        conversions=codes,
        multiply_adds=codes * heads,
        memory_us=tokens * row / bandwidth * 1e6,
        fp16_us=codes / cvt_fp16 * cycle_us,
        bf16_us=codes / cvt_bf16 * cycle_us,
        heads_in_n_us=codes * padded(heads, MMA_N) / mma * cycle_us,
        wgmma_us=codes * padded(heads, MMA_N) / TENSOR_PEAK * cycle_us,
        heads_in_m_us=codes * padded(heads, WGMMA_M) / TENSOR_PEAK * cycle_us,
    )
