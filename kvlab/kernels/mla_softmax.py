"""What is a capped logit, and what the LSE of a sum that was taken past the largest logit? All in base 2.

Device code of the decode kernels.
"""

import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def cap(logit, cap2):
    """cap2 * tanh(logit / cap2), in base-2 logits."""
    return cap2 - 2 * cap2 / (1 + tl.exp2(logit * (2 * _LOG2E / cap2)))


@triton.jit
def log2_sum(m, norm):
    """log2 of sum(2^logit) from the largest logit and the sum past it; -inf where nothing was seen."""
    return m + tl.log2(tl.where(norm == 0, 1.0, norm))
