"""What of queries whose values FP16 would lose? Their columns are computed in float32, one after the other.

Hardly any query has them, so this is slow and right: it costs `kvlab_mla_merge` few registers. Device code.
"""

import triton
import triton.language as tl

from kvlab.kernels.mla_pairs import fp16_scale, open_pairs, split_q
from kvlab.kernels.mla_requests import extent, slots
from kvlab.kernels.mla_softmax import cap, log2_sum


@triton.jit
def wide_column(
    q_nope,
    q_pe,
    rows,
    table,
    bounds,
    q_indptr,
    out,
    lse,
    r,
    q_of,
    limit,
    num_slots,
    row_stride,
    table_stride,
    logit_scale,
    value_scale,
    cap2,
    lse_unit,
    LATENT: tl.constexpr,
    PAIRS: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_PAIRS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    RAGGED_Q: tl.constexpr,
    CAUSAL: tl.constexpr,
    CAPPED: tl.constexpr,
    WITH_LSE: tl.constexpr,
    BF16: tl.constexpr,
    E5M2: tl.constexpr,
    TILE: tl.constexpr,
):
    """One query token's head over its whole request, in float32."""
    FOLD: tl.constexpr = 1.0 if E5M2 else 256.0
    begin, length, _, q_count = extent(r, bounds, q_indptr, limit, PAGE_SIZE > 0, RAGGED_Q, True)
    pair = tl.arange(0, PAIRS)
    is_pair = pair < LATENT
    even, odd = split_q(tl.load(q_nope + pair, mask=is_pair, other=0), BF16)
    largest = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), 0)
    rope_pair = tl.arange(0, ROPE_PAIRS)
    if ROPE > 0:
        rope_even, rope_odd = split_q(tl.load(q_pe + rope_pair, mask=rope_pair < ROPE, other=0), BF16)
        largest = tl.maximum(largest, tl.max(tl.maximum(tl.abs(rope_even), tl.abs(rope_odd)), 0))
    scale, unscale = fp16_scale(largest)
    unscale = unscale * logit_scale * FOLD
    even *= scale
    odd *= scale
    if ROPE > 0:
        rope_even *= scale
        rope_odd *= scale
    if CAUSAL:
        length = tl.maximum(length - q_count + q_of + 1, 0)

    m = tl.full([1], float("-inf"), tl.float32)
    norm = tl.zeros([1], tl.float32)
    acc_even = tl.zeros([PAIRS], tl.float32)
    acc_odd = tl.zeros([PAIRS], tl.float32)
    for start in range(0, length, TILE):
        position = start + tl.arange(0, TILE)
        within = tl.minimum(position, length - 1)
        slot, is_slot = slots(table, r, begin, within, table_stride, num_slots, PAGE_SIZE)
        row = rows + slot.to(tl.uint64)[:, None] * row_stride.to(tl.uint32)
        x = tl.load(row + pair[None, :], mask=is_slot[:, None] & is_pair[None, :], other=0)
        k_even, k_odd = open_pairs(x, E5M2, "plain")
        k_even = k_even.to(tl.float32)
        k_odd = k_odd.to(tl.float32)
        s = tl.sum(k_even * even[None, :] + k_odd * odd[None, :], 1)
        if ROPE > 0:
            x_rope = tl.load(
                row + (LATENT + rope_pair)[None, :],
                mask=is_slot[:, None] & (rope_pair < ROPE)[None, :],
                other=0,
            )
            k_rope_even, k_rope_odd = open_pairs(x_rope, E5M2, "plain")
            s += tl.sum(
                k_rope_even.to(tl.float32) * rope_even[None, :]
                + k_rope_odd.to(tl.float32) * rope_odd[None, :],
                1,
            )
        s *= unscale
        if CAPPED:
            s = cap(s, cap2)
        s = tl.where(is_slot & (position < length), s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 0))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s - base)
        decay = tl.exp2(m - base)
        norm = norm * decay + tl.sum(p, 0)
        acc_even = acc_even * decay + tl.sum(p[:, None] * k_even, 0)
        acc_odd = acc_odd * decay + tl.sum(p[:, None] * k_odd, 0)
        m = m_new
    rescale = value_scale * FOLD / tl.where(norm == 0, 1.0, norm)
    tl.store(out + 2 * pair, (acc_even * rescale).to(out.dtype.element_ty), mask=is_pair)
    tl.store(out + 2 * pair + 1, (acc_odd * rescale).to(out.dtype.element_ty), mask=is_pair)
    if WITH_LSE:
        tl.store(lse + tl.arange(0, 1), log2_sum(m, norm) * lse_unit)
