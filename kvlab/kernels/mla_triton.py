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

_LOG2E = tl.constexpr(1.4426950408889634)
# Probabilities are carried times 2^15: FP16 then drops only what is below 2^-39 of the largest.
_P_EXP = tl.constexpr(15.0)
# A loss of this much in a base-2 logit is far below the rounding of a probability to BF16 (2^-9).
_LOGIT_LOSS = tl.constexpr(2.0**-12)
# Words of a block's record: pieces (0: finished, -1: left to float32), first share, request, query tokens of
# the request (first, count), block of its columns.
RECORD = 8
_RECORD = tl.constexpr(RECORD)


@triton.jit
def _open_pairs(x, E5M2: tl.constexpr, METHOD: tl.constexpr):
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
def _split_q(word, BF16: tl.constexpr):
    """Two neighbouring query values in 32 bits -> (even, odd) float32."""
    if BF16:
        return (word << 16).to(tl.float32, bitcast=True), (word & 0xFFFF0000).to(tl.float32, bitcast=True)
    even = (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return even, (word >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _power(exponent):
    """2^(exponent - 127), float32, from the biased exponent."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def _range_exponent(largest):
    """Biased exponent of the largest |q| of a head, held where both scale and inverse are normal numbers."""
    return tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 30), 254)


@triton.jit
def _fp16_loss(q):
    """How much of q FP16 would drop. An infinity or NaN drops nothing: it stays what it is."""
    return tl.where(tl.abs(q) < 65536.0, tl.abs(q - q.to(tl.float16).to(tl.float32)), 0.0)


@triton.jit
def _cap(logit, cap2):
    """cap2 * tanh(logit / cap2), in base-2 logits."""
    return cap2 - 2 * cap2 / (1 + tl.exp2(logit * (2 * _LOG2E / cap2)))


@triton.jit
def _lse2(m, norm):
    """log2 of sum(2^logit) from the largest logit and the sum past it; -inf where nothing was seen."""
    return m + tl.log2(tl.where(norm == 0, 1.0, norm))


@triton.jit
def _extent(r, bounds, q_indptr, limit, PAGED: tl.constexpr, RAGGED_Q: tl.constexpr, mask):
    """Of request(s) r: first table entry (ragged), tokens, first query token, query tokens."""
    if PAGED:
        begin = r * 0
        length = tl.load(bounds + r, mask=mask, other=0)
    else:
        begin = tl.load(bounds + r, mask=mask, other=0)
        length = tl.load(bounds + r + 1, mask=mask, other=0) - begin
    length = tl.maximum(tl.minimum(length, limit - begin), 0)
    if RAGGED_Q:
        q_first = tl.load(q_indptr + r, mask=mask, other=0)
        q_count = tl.maximum(tl.load(q_indptr + r + 1, mask=mask, other=0) - q_first, 0)
    else:
        q_first = r
        q_count = r * 0 + 1
    return begin, length, q_first, q_count


@triton.jit
def _slots(table, r, begin, position, table_stride, num_slots, PAGE_SIZE: tl.constexpr):
    """Slots at these positions of a request, uint32, and which are real. PAGE_SIZE 0: token-level.

    Callers hold positions within the request, so nothing here is masked: a row past its end would be a
    repeated one, whose loads cost less than a mask carried through the pipeline for every row and thread.
    Comparisons are unsigned: one tells both a negative entry and one past the pool.
    """
    if PAGE_SIZE == 0:
        entry = tl.load(table + begin + position)
        if entry.dtype == tl.int64:
            is_slot = entry.to(tl.uint64) < num_slots.to(tl.uint64)
        else:
            is_slot = entry.to(tl.uint32) < num_slots.to(tl.uint32)
        slot = entry.to(tl.uint32)
    else:
        page = tl.load(table + r.to(tl.int64) * table_stride + position // PAGE_SIZE).to(tl.uint32)
        slot = page * PAGE_SIZE + (position % PAGE_SIZE).to(tl.uint32)
        is_slot = page <= ((num_slots - 1) // PAGE_SIZE).to(tl.uint32)
        if PAGE_SIZE > 1:
            is_slot &= slot < num_slots.to(tl.uint32)
    return slot, is_slot


@triton.jit
def _attend(
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
        slot, is_slot = _slots(table, r, begin, within, table_stride, num_slots, PAGE_SIZE)
        row = rows + slot.to(tl.uint64)[:, None] * row_stride.to(tl.uint32)
        if LATENT == PAIRS:
            x = tl.load(row + pair[None, :], mask=is_slot[:, None], other=0)
        else:
            x = tl.load(row + pair[None, :], mask=is_slot[:, None] & (pair < LATENT)[None, :], other=0)
        k_even, k_odd = _open_pairs(tl.trans(x), E5M2, METHOD)
        # Two sums, added at the end: one would be a chain of products that wait for each other.
        s = tl.dot(q_even, k_even)
        s_odd = tl.dot(q_odd, k_odd)
        if ROPE > 0:
            x_rope = tl.load(
                row + (LATENT + rope_pair)[None, :],
                mask=is_slot[:, None] & (rope_pair < ROPE)[None, :],
                other=0,
            )
            k_rope_even, k_rope_odd = _open_pairs(tl.trans(x_rope), E5M2, METHOD)
            s = tl.dot(q_rope_even, k_rope_even, s)
            s_odd = tl.dot(q_rope_odd, k_rope_odd, s_odd)
        s = (s + s_odd) * unscale[:, None]
        if CAPPED:
            s = _cap(s, cap2)
        seen = (is_slot & (position < length))[None, :]
        if CAUSAL:
            seen &= position[None, :] <= last[:, None]
        s = tl.where(seen, s, float("-inf"))

        m_new = tl.maximum(m, tl.max(s, 1))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s - (base - _P_EXP)[:, None])
        decay = tl.exp2(m - base)
        norm = norm * decay + tl.sum(p, 1)
        m = m_new
        p16 = p.to(tl.float16)
        v_even, v_odd = _open_pairs(x, E5M2, METHOD)
        acc_even = tl.dot(p16, v_even, acc_even * decay[:, None])
        acc_odd = tl.dot(p16, v_odd, acc_odd * decay[:, None])
    return acc_even, acc_odd, m, norm


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
    _, lengths, _, counts = _extent(lanes, bounds, q_indptr, limit, PAGED, RAGGED_Q, lanes < batch)
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
        begin, length, q_first, q_count = _extent(r, bounds, q_indptr, limit, PAGED, RAGGED_Q, True)
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
            even, odd = _split_q(qn, BF16)
            largest = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), 1)
            if ROPE > 0:
                qp = tl.load(
                    q_pe + (token * qp_token + head * qp_head)[:, None] + rope_pair[None, :],
                    mask=is_column[:, None] & (rope_pair < ROPE)[None, :],
                    other=0,
                )
                rope_even, rope_odd = _split_q(qp, BF16)
                largest = tl.maximum(largest, tl.max(tl.maximum(tl.abs(rope_even), tl.abs(rope_odd)), 1))
            exponent = _range_exponent(largest)
            scale = _power(268 - exponent)[:, None]
            unscale = _power(exponent - 14) * logit_scale
            even *= scale
            odd *= scale
            loss = tl.sum(_fp16_loss(even) + _fp16_loss(odd), 1)
            q_even = even.to(tl.float16)
            q_odd = odd.to(tl.float16)
            q_rope_even = q_even
            q_rope_odd = q_odd
            if ROPE > 0:
                rope_even *= scale
                rope_odd *= scale
                loss += tl.sum(_fp16_loss(rope_even) + _fp16_loss(rope_odd), 1)
                q_rope_even = rope_even.to(tl.float16)
                q_rope_odd = rope_odd.to(tl.float16)
            is_wide = tl.max(loss * tl.abs(unscale), 0) * CODE_MAX > _LOGIT_LOSS
            unscale *= FOLD

            last = length - q_count + q_of
            t1 = tl.where(is_wide | (length == 0), t0, t0 + taken)
            # A pipeline as deep as a long share wants only delays one of a tile or two.
            if SHALLOW > 0 and t1 - t0 <= SHALLOW:
                acc_even, acc_odd, m, norm = _attend(
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
                acc_even, acc_odd, m, norm = _attend(
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
            lse2 = _lse2(m, norm) - _P_EXP
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
                word = tl.arange(0, _RECORD)
                record = tl.where(word == 0, pieces, 0)
                record = tl.where(word == 1, share, record)
                record = tl.where(word == 2, r, record)
                record = tl.where(word == 3, q_first, record)
                record = tl.where(word == 4, q_count, record)
                record = tl.where(word == 5, block, record)
                at = q_first * BLOCKS + block
                tl.store(records + at.to(tl.int64) * _RECORD + word, record)
                # Several query tokens in one block leave records unused: say so.
                if RAGGED_Q:
                    at += blocks
                    while at < (q_first + q_count) * BLOCKS:
                        tl.store(records + at.to(tl.int64) * _RECORD + word, word * 0)
                        at += blocks
            tile += taken
        if tile >= first + tiles * blocks:
            first += tiles * blocks
            r += 1


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
    """Merge one column's pieces; or, for a block left to it, compute the column in float32."""
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

    record = records + block_id.to(tl.int64) * _RECORD
    pieces = tl.load(record)
    if pieces == 0:
        return
    q_first = tl.load(record + 3)
    q_count = tl.load(record + 4)
    column = tl.load(record + 5) * BLOCK_H + lane
    q_of = column // HEADS
    head = column % HEADS
    if q_of >= q_count:
        return
    token = (q_first + q_of).to(tl.int64)
    dest = out + token * out_token + head * out_head

    if pieces > 0:
        share = tl.load(record + 1)
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
            tl.store(lse + token * HEADS + head + tl.arange(0, 1), _lse2(m, norm) * lse_unit)
    elif chunk == 0:
        _wide_column(
            q_nope + token * qn_token + head * qn_head,
            q_pe + token * qp_token + head * qp_head,
            rows,
            table,
            bounds,
            q_indptr,
            dest,
            lse + token * HEADS + head,
            tl.load(record + 2),
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


@triton.jit
def _wide_column(
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
    begin, length, _, q_count = _extent(r, bounds, q_indptr, limit, PAGE_SIZE > 0, RAGGED_Q, True)
    pair = tl.arange(0, PAIRS)
    is_pair = pair < LATENT
    even, odd = _split_q(tl.load(q_nope + pair, mask=is_pair, other=0), BF16)
    largest = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), 0)
    rope_pair = tl.arange(0, ROPE_PAIRS)
    if ROPE > 0:
        rope_even, rope_odd = _split_q(tl.load(q_pe + rope_pair, mask=rope_pair < ROPE, other=0), BF16)
        largest = tl.maximum(largest, tl.max(tl.maximum(tl.abs(rope_even), tl.abs(rope_odd)), 0))
    exponent = _range_exponent(largest)
    scale = _power(268 - exponent)
    unscale = _power(exponent - 14) * logit_scale * FOLD
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
        slot, is_slot = _slots(table, r, begin, within, table_stride, num_slots, PAGE_SIZE)
        row = rows + slot.to(tl.uint64)[:, None] * row_stride.to(tl.uint32)
        x = tl.load(row + pair[None, :], mask=is_slot[:, None] & is_pair[None, :], other=0)
        k_even, k_odd = _open_pairs(x, E5M2, "plain")
        k_even = k_even.to(tl.float32)
        k_odd = k_odd.to(tl.float32)
        s = tl.sum(k_even * even[None, :] + k_odd * odd[None, :], 1)
        if ROPE > 0:
            x_rope = tl.load(
                row + (LATENT + rope_pair)[None, :],
                mask=is_slot[:, None] & (rope_pair < ROPE)[None, :],
                other=0,
            )
            k_rope_even, k_rope_odd = _open_pairs(x_rope, E5M2, "plain")
            s += tl.sum(
                k_rope_even.to(tl.float32) * rope_even[None, :]
                + k_rope_odd.to(tl.float32) * rope_odd[None, :],
                1,
            )
        s *= unscale
        if CAPPED:
            s = _cap(s, cap2)
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
        tl.store(lse + tl.arange(0, 1), _lse2(m, norm) * lse_unit)
