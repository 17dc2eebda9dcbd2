"""How do the pieces of a request that was cut between programs become one result? The second decode kernel.

Pieces are merged by their LSE in a fixed order. A block whose queries FP16 would lose, which the first kernel
left out, is computed here (`mla_wide`), and padded query tokens get their zeros.
"""

import triton
import triton.language as tl

from kvlab.kernels.mla_record import (
    AT_BLOCK,
    AT_PIECES,
    AT_Q_COUNT,
    AT_Q_FIRST,
    AT_REQUEST,
    AT_SHARE,
    record_at,
)
from kvlab.kernels.mla_softmax import log2_sum
from kvlab.kernels.mla_wide import wide_column


@triton.jit(do_not_specialize=["batch", "limit", "num_slots"])
def kvlab_mla_merge(
    q_nope,
    q_pe,
    rows,
    table,
    bounds,
    q_indptr,
    out,
    lse,
    part_out,
    part_lse,
    records,
    batch,
    limit,
    num_slots,
    row_stride,
    table_stride,
    qn_token,
    qn_head,
    qp_token,
    qp_head,
    out_token,
    out_head,
    logit_scale,
    value_scale,
    cap2,
    lse_unit,
    HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
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
    CHUNK: tl.constexpr,  # pairs a program merges
    PIECES: tl.constexpr,  # pieces it reads at once
    STAGES: tl.constexpr,
    WIDE_TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge one column's pieces; or, for a block left to it, compute the column in float32.

    Tensors, strides and scales as in `kvlab_mla_decode`.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
    BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    block_id = tl.program_id(0)
    lane = tl.program_id(1)
    chunk = tl.program_id(2)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    is_pair = pair < LATENT

    if RAGGED_Q:
        token = block_id // BLOCKS
        if token >= tl.load(q_indptr + batch):
            # Padded query tokens belong to no request.
            head = (block_id % BLOCKS) * BLOCK_H + lane
            if head < HEADS:
                dest = out + token.to(tl.int64) * out_token + head * out_head + 2 * pair
                tl.store(dest, tl.zeros([CHUNK], out.dtype.element_ty), mask=is_pair)
                tl.store(dest + 1, tl.zeros([CHUNK], out.dtype.element_ty), mask=is_pair)
                if WITH_LSE:
                    tl.store(lse + token.to(tl.int64) * HEADS + head, float("-inf"))
            return

    record = record_at(records, block_id)
    pieces = tl.load(record + AT_PIECES)
    if pieces == 0:
        return
    q_first = tl.load(record + AT_Q_FIRST)
    q_count = tl.load(record + AT_Q_COUNT)
    column = tl.load(record + AT_BLOCK) * BLOCK_H + lane
    q_of = column // HEADS
    head = column % HEADS
    if q_of >= q_count:
        return
    token = (q_first + q_of).to(tl.int64)
    dest = out + token * out_token + head * out_head

    if pieces > 0:
        share = tl.load(record + AT_SHARE)
        m = tl.full([1], float("-inf"), tl.float32)
        norm = tl.zeros([1], tl.float32)
        acc_even = tl.zeros([CHUNK], tl.float32)
        acc_odd = tl.zeros([CHUNK], tl.float32)
        for start in tl.range(0, pieces, PIECES, num_stages=STAGES):
            i = start + tl.arange(0, PIECES)
            # Only the first piece is a request's beginning, kept in its share's second place.
            piece = ((share + i) * 2 + (i == 0).to(tl.int32)).to(tl.int64) * BLOCK_H + lane
            l2 = tl.load(part_lse + piece, mask=i < pieces, other=float("-inf"))
            source = part_out + piece[:, None] * (2 * PAIRS) + pair[None, :]
            even = tl.load(source, mask=(i < pieces)[:, None] & is_pair[None, :], other=0.0)
            odd = tl.load(source + PAIRS, mask=(i < pieces)[:, None] & is_pair[None, :], other=0.0)
            m_new = tl.maximum(m, tl.max(l2, 0))
            base = tl.where(m_new == float("-inf"), 0.0, m_new)
            w = tl.exp2(l2 - base)
            decay = tl.exp2(m - base)
            norm = norm * decay + tl.sum(w, 0)
            acc_even = acc_even * decay + tl.sum(w[:, None] * even, 0)
            acc_odd = acc_odd * decay + tl.sum(w[:, None] * odd, 0)
            m = m_new
        rescale = 1 / tl.where(norm == 0, 1.0, norm)
        tl.store(dest + 2 * pair, (acc_even * rescale).to(out.dtype.element_ty), mask=is_pair)
        tl.store(dest + 2 * pair + 1, (acc_odd * rescale).to(out.dtype.element_ty), mask=is_pair)
        if WITH_LSE and chunk == 0:
            tl.store(lse + token * HEADS + head + tl.arange(0, 1), log2_sum(m, norm) * lse_unit)
    elif chunk == 0:
        wide_column(
            q_nope + token * qn_token + head * qn_head,
            q_pe + token * qp_token + head * qp_head,
            rows,
            table,
            bounds,
            q_indptr,
            dest,
            lse + token * HEADS + head,
            tl.load(record + AT_REQUEST),
            q_of,
            limit,
            num_slots,
            row_stride,
            table_stride,
            logit_scale,
            value_scale,
            cap2,
            lse_unit,
            LATENT,
            PAIRS,
            ROPE,
            ROPE_PAIRS,
            PAGE_SIZE,
            RAGGED_Q,
            CAUSAL,
            CAPPED,
            WITH_LSE,
            BF16,
            E5M2,
            WIDE_TILE,
        )
