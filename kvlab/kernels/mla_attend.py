"""What does a block of query columns see in some tiles of a request? Attention over them, in one pass.

The decode kernel's inner loop (`kvlab.kernels.mla_triton`): rows are read once, as K and as V.
"""

import triton
import triton.language as tl

from kvlab.kernels.mla_pairs import open_pairs
from kvlab.kernels.mla_requests import slots
from kvlab.kernels.mla_softmax import cap

# Probabilities are carried times 2^15: FP16 then drops only what is below 2^-39 of the largest.
P_EXP = tl.constexpr(15.0)


@triton.jit
def attend(
    q_even,
    q_odd,
    q_rope_even,
    q_rope_odd,
    unscale,
    last,
    t0,
    t1,
    rows,
    table,
    r,
    begin,
    length,
    num_slots,
    row_stride,
    table_stride,
    cap2,
    BLOCK_H: tl.constexpr,
    TILE: tl.constexpr,
    LATENT: tl.constexpr,
    PAIRS: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_PAIRS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    CAPPED: tl.constexpr,
    E5M2: tl.constexpr,
    METHOD: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Tiles t0 … t1 of a request: (even and odd columns of P V, largest logit, sum), all times 2^15."""
    pair = tl.arange(0, PAIRS)
    rope_pair = tl.arange(0, ROPE_PAIRS)
    lane_t = tl.arange(0, TILE)
    acc_even = tl.zeros([BLOCK_H, PAIRS], tl.float32)
    acc_odd = tl.zeros([BLOCK_H, PAIRS], tl.float32)
    m = tl.full([BLOCK_H], float("-inf"), tl.float32)
    norm = tl.zeros([BLOCK_H], tl.float32)
    for t in tl.range(t0, t1, num_stages=STAGES):
        position = t * TILE + lane_t
        within = tl.minimum(position, length - 1)
        slot, is_slot = slots(table, r, begin, within, table_stride, num_slots, PAGE_SIZE)
        row = rows + slot.to(tl.uint64)[:, None] * row_stride.to(tl.uint32)
        if LATENT == PAIRS:
            x = tl.load(row + pair[None, :], mask=is_slot[:, None], other=0)
        else:
            x = tl.load(row + pair[None, :], mask=is_slot[:, None] & (pair < LATENT)[None, :], other=0)
        k_even, k_odd = open_pairs(tl.trans(x), E5M2, METHOD)
        # Two sums, added at the end: one would be a chain of products that wait for each other.
        s = tl.dot(q_even, k_even)
        s_odd = tl.dot(q_odd, k_odd)
        if ROPE > 0:
            x_rope = tl.load(
                row + (LATENT + rope_pair)[None, :],
                mask=is_slot[:, None] & (rope_pair < ROPE)[None, :],
                other=0,
            )
            k_rope_even, k_rope_odd = open_pairs(tl.trans(x_rope), E5M2, METHOD)
            s = tl.dot(q_rope_even, k_rope_even, s)
            s_odd = tl.dot(q_rope_odd, k_rope_odd, s_odd)
        s = (s + s_odd) * unscale[:, None]
        if CAPPED:
            s = cap(s, cap2)
        seen = (is_slot & (position < length))[None, :]
        if CAUSAL:
            seen &= position[None, :] <= last[:, None]
        s = tl.where(seen, s, float("-inf"))

        m_new = tl.maximum(m, tl.max(s, 1))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s - (base - P_EXP)[:, None])
        decay = tl.exp2(m - base)
        norm = norm * decay + tl.sum(p, 1)
        m = m_new
        p16 = p.to(tl.float16)
        v_even, v_odd = open_pairs(x, E5M2, METHOD)
        acc_even = tl.dot(p16, v_even, acc_even * decay[:, None])
        acc_odd = tl.dot(p16, v_odd, acc_odd * decay[:, None])
    return acc_even, acc_odd, m, norm
