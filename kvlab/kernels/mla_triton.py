"""How does one kernel serve SM80 to SM120? Split-KV MLA decode in Triton, FP8 rows up to the registers.

Why it looks as it does:

- A row's bytes are loaded as 16-bit pairs, so shared memory is read with 16-bit matrix loads, straight and
  transposed: one tile is K and V. Each pair opens into two FP16 values in registers, exactly (FP16 holds
  every code of both formats), and the tile splits into its even and odd columns. Q is split alike on the way
  in, and the output put back together on the way out.
- FP16's range is no matter: Q is scaled by a power of two a head so that its largest value is near 2^15, and
  probabilities are carried times 2^15. Where a head's smaller values would be lost and could be seen in a
  logit, its block is left to the second kernel, which works in float32.
- The work, tiles of all requests laid end to end, is cut into equal shares, one a program, from lengths read
  on the device. A request that is whole within a share is finished there; the pieces of the others are merged
  by the second kernel in a fixed order, so a result depends on nothing but its input.
"""

import triton
import triton.language as tl

from kvlab.kernels.mla_attend import P_EXP, attend
from kvlab.kernels.mla_pairs import fp16_loss, fp16_scale, split_q
from kvlab.kernels.mla_record import put_record
from kvlab.kernels.mla_requests import extent
from kvlab.kernels.mla_softmax import log2_sum

# A loss of this much in a base-2 logit is far below the rounding of a probability to BF16 (2^-9).
_LOGIT_LOSS = tl.constexpr(2.0**-12)


@triton.jit(do_not_specialize=["batch", "limit", "num_slots", "min_tiles"])
def kvlab_mla_decode(
    q_nope,  # uint32: pairs of BF16 or FP16
    q_pe,
    rows,  # uint16: pairs of codes
    table,
    bounds,
    q_indptr,
    out,
    lse,
    part_out,  # float32 [shares, 2, BLOCK_H, 2, PAIRS]
    part_lse,  # float32 [shares, 2, BLOCK_H], base 2
    records,  # int32 [tokens * blocks a token, RECORD]
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
    min_tiles,
    HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    TILE: tl.constexpr,
    LATENT: tl.constexpr,  # pairs of kv_lora_rank, and the power of two that holds them
    PAIRS: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_PAIRS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BATCH: tl.constexpr,
    RAGGED_Q: tl.constexpr,
    CAUSAL: tl.constexpr,
    CAPPED: tl.constexpr,
    WITH_LSE: tl.constexpr,
    BF16: tl.constexpr,
    E5M2: tl.constexpr,
    METHOD: tl.constexpr,
    STAGES: tl.constexpr,
    SHALLOW: tl.constexpr,
    PDL: tl.constexpr,
):
    """One share of the batch's tiles: attention over them, finished or left as a piece. See mla_decode."""
    if PDL:
        # Launched while the kernel before still runs: wait for what it wrote. The second kernel waits alike.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    share = tl.program_id(0)
    PAGED: tl.constexpr = PAGE_SIZE > 0
    CODE_MAX: tl.constexpr = 57344.0 if E5M2 else 448.0
    FOLD: tl.constexpr = 1.0 if E5M2 or METHOD == "cvt" else 256.0
    BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H

    lanes = tl.arange(0, BATCH)
    _, lengths, _, counts = extent(lanes, bounds, q_indptr, limit, PAGED, RAGGED_Q, lanes < batch)
    # An empty request keeps one tile: that is who writes its zeros.
    tiles_of = tl.maximum((lengths + TILE - 1) // TILE, 1) * ((counts * HEADS + BLOCK_H - 1) // BLOCK_H)
    tiles_of = tl.where(lanes < batch, tiles_of, 0)
    ends = tl.cumsum(tiles_of, 0)
    total = tl.sum(tiles_of, 0)
    width = tl.maximum((total + tl.num_programs(0) - 1) // tl.num_programs(0), min_tiles)
    tile = share * width
    stop = tl.minimum(tile + width, total)
    r = tl.sum((ends <= tile).to(tl.int32), 0)
    first = tl.max(tl.where(ends <= tile, ends, 0), 0)

    pair = tl.arange(0, PAIRS)
    rope_pair = tl.arange(0, ROPE_PAIRS)
    lane_h = tl.arange(0, BLOCK_H)

    while tile < stop:
        begin, length, q_first, q_count = extent(r, bounds, q_indptr, limit, PAGED, RAGGED_Q, True)
        tiles = tl.maximum((length + TILE - 1) // TILE, 1)
        blocks = (q_count * HEADS + BLOCK_H - 1) // BLOCK_H
        block = (tile - first) // tiles
        if block < blocks:
            t0 = (tile - first) % tiles
            taken = tl.minimum(tiles - t0, stop - tile)

            column = block * BLOCK_H + lane_h
            q_of = column // HEADS
            head = column % HEADS
            is_column = q_of < q_count
            token = (q_first + q_of).to(tl.int64)

            qn = tl.load(
                q_nope + (token * qn_token + head * qn_head)[:, None] + pair[None, :],
                mask=is_column[:, None] & (pair < LATENT)[None, :],
                other=0,
            )
            even, odd = split_q(qn, BF16)
            largest = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), 1)
            if ROPE > 0:
                qp = tl.load(
                    q_pe + (token * qp_token + head * qp_head)[:, None] + rope_pair[None, :],
                    mask=is_column[:, None] & (rope_pair < ROPE)[None, :],
                    other=0,
                )
                rope_even, rope_odd = split_q(qp, BF16)
                largest = tl.maximum(largest, tl.max(tl.maximum(tl.abs(rope_even), tl.abs(rope_odd)), 1))
            scale, unscale = fp16_scale(largest)
            scale = scale[:, None]
            unscale *= logit_scale
            even *= scale
            odd *= scale
            loss = tl.sum(fp16_loss(even) + fp16_loss(odd), 1)
            q_even = even.to(tl.float16)
            q_odd = odd.to(tl.float16)
            q_rope_even = q_even
            q_rope_odd = q_odd
            if ROPE > 0:
                rope_even *= scale
                rope_odd *= scale
                loss += tl.sum(fp16_loss(rope_even) + fp16_loss(rope_odd), 1)
                q_rope_even = rope_even.to(tl.float16)
                q_rope_odd = rope_odd.to(tl.float16)
            is_wide = tl.max(loss * tl.abs(unscale), 0) * CODE_MAX > _LOGIT_LOSS
            unscale *= FOLD

            last = length - q_count + q_of
            t1 = tl.where(is_wide | (length == 0), t0, t0 + taken)
            # A pipeline as deep as a long share wants only delays one of a tile or two.
            if SHALLOW > 0 and t1 - t0 <= SHALLOW:
                acc_even, acc_odd, m, norm = attend(
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
                    BLOCK_H,
                    TILE,
                    LATENT,
                    PAIRS,
                    ROPE,
                    ROPE_PAIRS,
                    PAGE_SIZE,
                    CAUSAL,
                    CAPPED,
                    E5M2,
                    METHOD,
                    2,
                )
            else:
                acc_even, acc_odd, m, norm = attend(
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
                    BLOCK_H,
                    TILE,
                    LATENT,
                    PAIRS,
                    ROPE,
                    ROPE_PAIRS,
                    PAGE_SIZE,
                    CAUSAL,
                    CAPPED,
                    E5M2,
                    METHOD,
                    STAGES,
                )

            rescale = (value_scale * FOLD / tl.where(norm == 0, 1.0, norm))[:, None]
            acc_even *= rescale
            acc_odd *= rescale
            lse2 = log2_sum(m, norm) - P_EXP
            is_whole = taken == tiles
            if is_whole:
                if not is_wide:
                    dest = out + (token * out_token + head * out_head)[:, None]
                    full = tl.arange(0, 2 * PAIRS)
                    tl.store(
                        dest + full[None, :],
                        tl.interleave(acc_even, acc_odd).to(out.dtype.element_ty),
                        mask=is_column[:, None] & (full < 2 * LATENT)[None, :],
                    )
                    if WITH_LSE:
                        tl.store(lse + token * HEADS + head, lse2 * lse_unit, mask=is_column)
            else:
                # A share's first piece may be a request's end, its last one a request's beginning.
                piece = (share * 2 + (t0 == 0).to(tl.int32)).to(tl.int64) * BLOCK_H + lane_h
                dest = part_out + piece[:, None] * (2 * PAIRS) + pair[None, :]
                tl.store(dest, acc_even)
                tl.store(dest + PAIRS, acc_odd)
                tl.store(part_lse + piece, lse2)

            if t0 == 0:
                pieces = (first + (block + 1) * tiles - 1) // width - share + 1
                pieces = tl.where(is_wide, -1, tl.where(is_whole, 0, pieces))
                put_record(records, pieces, share, r, q_first, q_count, block, blocks, BLOCKS, RAGGED_Q)
            tile += taken
        if tile >= first + tiles * blocks:
            first += tiles * blocks
            r += 1
