// FP8 MLA decode for few heads: query columns in N of mma.m16n8k16, tokens (QK) and latent dims (PV) in M.
//
// A group of G warps takes a chunk of 16 tokens. Warp w owns 512 / G latent dims: it multiplies its dims of K
// with its dims of Q, the group adds up the partial logits through shared memory, each warp computes the same
// softmax in registers, and each multiplies its dims of V, read again from the same shared rows transposed,
// with P. NG groups run unsynchronised on different chunks, each with its own running maximum, and are merged
// once at the end of an item. Rows stay FP8 until they are in registers. Steps of short requests take a shorter way.
//
// Compile-time: those of mla_common.cuh, G, NG, Q_SHARED (Q stays in shared memory, else in registers),
// MERGE_ROUNDS, MIN_CTAS a SM, REGISTERS and PRODUCER_REGISTERS (or 0), FIXED_SHARED bytes before the ring, PROBE 1
// to load only, which tells the loads' share of the time.

#define WARPS (G * NG)
#define MERGE_WARPS WARPS
#define PLACED 1
#define THREADS ((WARPS + PRODUCERS) * 32)
#include "mla_common.cuh"

#define LATENT (RANK / 16 / G)  // 16-dim pieces a warp owns
#define ROPE_PIECES (ROPE / 16 / G)
#define PIECES (LATENT + ROPE_PIECES)
#define MERGE_TILES (TILES / MERGE_ROUNDS)

struct Shared {
    float4 exchange[NG][2][G][NT][32];
    float4 merge[NG * MERGE_TILES * 32];
    uint2 q[G * PIECES][NT][32];
    __align__(16) float2 ml[NG][NH];
    float down[NH];  // what undoes a column's lift
    u64 summed[NG];  // barriers of a group's warps: the partial logits are there
    Meeting meet;
};

static_assert(sizeof(Shared) <= FIXED_SHARED, "hopper.py counts the bytes of Shared");

struct State {
#if !Q_SHARED
    u32 q[PIECES][NT][2];
#endif
    float acc[LATENT][NT][4];
    float m[NT][2], l[NT][2], scale[NT][2];
    int sees[NT][2];
};

// Q to FP16 B fragments in shared memory, a warp a column. Within a 16-dim piece a lane's four k indices (2t,
// 2t + 1, 2t + 8, 2t + 9) stand for dims 4t ... 4t + 3, as ldmatrix delivers FP8 rows; the product does not care.
__device__ __forceinline__ void stage_q(const Params& p, const Item& it, Shared& sh, int warp) {
    int lane = threadIdx.x & 31;
#pragma unroll 1
    for (int col = warp; col < NH; col += WARPS) {
        Column c = column_of(p, it, col);
        int head = c.real ? c.head : 0, token = c.real ? c.token : it.q_start;  // any: no one reads the result
        const uint2* nope = (const uint2*)(p.q_nope + token * p.qn_token + head * p.qn_head) + lane;
        uint2 x[5];
#pragma unroll
        for (int j = 0; j < 4; j++) x[j] = __ldcg(nope + 32 * j);
#if ROPE
        x[4] = __ldcg((const uint2*)(p.q_pe + token * p.qp_token + head * p.qp_head) + (lane & 15));
#else
        x[4] = x[3];
#endif
        float up = lift(largest(x));
        if (lane == 0) sh.down[col] = unlift(up);
#pragma unroll
        for (int j = 0; j < (ROPE ? 5 : 4); j++) {
            float a, b, d, e;
            unpack_q(x[j].x, a, b);
            unpack_q(x[j].y, d, e);
            int piece = 8 * j + (lane >> 2);
            if (j < 4 || lane < 16)
                sh.q[piece][col / 8][(col & 7) * 4 + (lane & 3)] =
                    make_uint2(pack_half(a * up, b * up), pack_half(d * up, e * up));
        }
    }
    named_sync(1, WARPS * 32);
}

// A warp's piece k of its own dims, as a piece of all.
__device__ __forceinline__ int piece_of(int w, int k) {
    return k < LATENT ? w * LATENT + k : RANK / 16 + w * ROPE_PIECES + k - LATENT;
}

__device__ __forceinline__ void load_q(const Params& p, const Item& it, Shared& sh, State& st, int w) {
    int lane = threadIdx.x & 31, t = lane & 3;
#pragma unroll
    for (int n = 0; n < NT; n++) {
#if !Q_SHARED
#pragma unroll
        for (int k = 0; k < PIECES; k++) {
            uint2 x = sh.q[piece_of(w, k)][n][lane];
            st.q[k][n][0] = x.x;
            st.q[k][n][1] = x.y;
        }
#endif
#pragma unroll
        for (int i = 0; i < 2; i++) {
            st.scale[n][i] = p.scale * sh.down[8 * n + 2 * t + i];
            st.sees[n][i] = column_of(p, it, 8 * n + 2 * t + i).sees;
        }
    }
}

__device__ __forceinline__ void qk_piece(float (&s)[NT][4], const Shared& sh, const State& st, int w, int k, u32 r0,
                                         u32 r1) {
    u32 a[4];
    widen(r0, a[0], a[2]);
    widen(r1, a[1], a[3]);
#pragma unroll
    for (int n = 0; n < NT; n++) {
#if Q_SHARED
        uint2 q = sh.q[piece_of(w, k)][n][threadIdx.x & 31];
        mma(s[n], a, q.x, q.y);
#else
        mma(s[n], a, st.q[k][n][0], st.q[k][n][1]);
#endif
    }
}

// One chunk: rows at shared address `rows` (this lane's ldmatrix row and column added), tokens from `token` on.
__device__ __forceinline__ void chunk(const Params& p, Shared& sh, State& st, u32 rows, u32 mask, int token, int group,
                                      int w, int round) {
    int lane = threadIdx.x & 31, g = lane >> 2;
    float s[2][NT][4];
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) s[h][n][i] = 0.f;
    u32 latent = rows + w * LATENT * 16, rope = rows + RANK + w * ROPE_PIECES * 16;
#pragma unroll
    for (int k = 0; k < LATENT; k += 2) {
        u32 r[4];
        ldmatrix4(r, latent + k * 16);
        qk_piece(s[0], sh, st, w, k, r[0], r[1]);
        qk_piece(s[1], sh, st, w, k + 1, r[2], r[3]);
    }
#if ROPE
#pragma unroll
    for (int k = 0; k < ROPE_PIECES; k += 2) {
        u32 r[4];
        if (k + 1 < ROPE_PIECES) ldmatrix4(r, rope + k * 16);
        else ldmatrix2(r, rope + k * 16);
        qk_piece(s[0], sh, st, w, LATENT + k, r[0], r[1]);
        if (k + 1 < ROPE_PIECES) qk_piece(s[1], sh, st, w, LATENT + k + 1, r[2], r[3]);
    }
#endif
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) s[0][n][i] += s[1][n][i];
    if (G > 1) {
#pragma unroll
        for (int n = 0; n < NT; n++)
            sh.exchange[group][round][w][n][lane] = make_float4(s[0][n][0], s[0][n][1], s[0][n][2], s[0][n][3]);
        // Not a named barrier: with several in use at once, racecheck reports accesses on two sides of one.
        u32 bar = smem_u32(&sh.summed[group]);
        mbar_arrive(bar);
        mbar_wait(bar, round ^ 1);
#pragma unroll
        for (int n = 0; n < NT; n++) {
            float4 sum = sh.exchange[group][round][0][n][lane];
#pragma unroll
            for (int i = 1; i < G; i++) {
                float4 x = sh.exchange[group][round][i][n][lane];
                sum.x += x.x;
                sum.y += x.y;
                sum.z += x.z;
                sum.w += x.w;
            }
            s[0][n][0] = sum.x;
            s[0][n][1] = sum.y;
            s[0][n][2] = sum.z;
            s[0][n][3] = sum.w;
        }
    }
    // Columns are heads: a lane holds tokens g and g + 8 of columns 2t and 2t + 1, here as in the output.
    bool low = mask >> g & 1, high = mask >> (g + 8) & 1, lags = false;
    float top[NT][2];
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float x = logit2(s[0][n][i], st.scale[n][i], p.cap_log2);
            float y = logit2(s[0][n][i + 2], st.scale[n][i], p.cap_log2);
            x = low && token + g < st.sees[n][i] ? x : -INFINITY_F;
            y = high && token + g + 8 < st.sees[n][i] ? y : -INFINITY_F;
            s[0][n][i] = x;
            s[0][n][i + 2] = y;
            top[n][i] = fmaxf(x, y);
        }
#pragma unroll
    for (int d = 4; d < 32; d <<= 1)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) top[n][i] = fmaxf(top[n][i], __shfl_xor_sync(~0u, top[n][i], d));
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) lags |= top[n][i] > st.m[n][i] + (P_BIAS + P_LAG);
    if (__any_sync(~0u, lags)) {
#pragma unroll
        for (int n = 0; n < NT; n++) {
            float f[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float m = top[n][i] > st.m[n][i] + P_BIAS ? top[n][i] - P_BIAS : st.m[n][i];
                f[i] = exp2_fast(st.m[n][i] - m);
                st.m[n][i] = m;
                st.l[n][i] *= f[i];
            }
#pragma unroll
            for (int k = 0; k < LATENT; k++)
#pragma unroll
                for (int i = 0; i < 4; i++) st.acc[k][n][i] *= f[i & 1];
        }
    }
    u32 b[NT][2];
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            s[0][n][i] = exp2_fast(s[0][n][i] - st.m[n][i]);
            s[0][n][i + 2] = exp2_fast(s[0][n][i + 2] - st.m[n][i]);
            st.l[n][i] += s[0][n][i] + s[0][n][i + 2];
        }
        b[n][0] = transpose8(pack_half(s[0][n][0], s[0][n][1]));
        b[n][1] = transpose8(pack_half(s[0][n][2], s[0][n][3]));
    }
    // The same bytes as V, transposed: a lane gets tokens 2t and 2t + 1 of dims 2g and 2g + 1, and two byte
    // shuffles and four conversions make them the rows g and g + 8 of an A fragment.
#pragma unroll
    for (int k = 0; k < LATENT; k += 2) {
        u32 r[4], a[4];
        ldmatrix4_trans(r, latent + k * 16);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            widen(__byte_perm(r[2 * h], 0, 0x3120), a[0], a[1]);
            widen(__byte_perm(r[2 * h + 1], 0, 0x3120), a[2], a[3]);
#pragma unroll
            for (int n = 0; n < NT; n++) mma(st.acc[k + h][n], a, b[n][0], b[n][1]);
        }
    }
}

// Add the groups' results up; the item's result goes to `out`, or this CTA's part of it to `partial`.
__device__ __forceinline__ void finish_item(const Params& p, const Item& it, Shared& sh, State& st, const Sink& to,
                                            int group, int w) {
    int lane = threadIdx.x & 31, t = lane & 3, warp = group * G + w;
#pragma unroll
    for (int d = 4; d < 32; d <<= 1)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) st.l[n][i] += __shfl_xor_sync(~0u, st.l[n][i], d);
    if (w == 0 && lane < 4)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) sh.ml[group][8 * n + 2 * t + i] = make_float2(st.m[n][i], st.l[n][i]);
    constexpr int per_round = LATENT / MERGE_ROUNDS;  // pieces of each warp
#pragma unroll
    for (int r = 0; r < MERGE_ROUNDS; r++) {
        if (r) named_sync(1, WARPS * 32);
#pragma unroll
        for (int k = 0; k < per_round; k++)
#pragma unroll
            for (int n = 0; n < NT; n++) {
                const float(&a)[4] = st.acc[r * per_round + k][n];
                sh.merge[((group * G + w) * per_round * NT + k * NT + n) * 32 + lane] =
                    make_float4(a[0], a[1], a[2], a[3]);
            }
        named_sync(1, WARPS * 32);
        if (r == 0 && to.boxed) cluster_sync();  // all rings of the cluster are empty
        // This round's tiles, spread over all warps; a warp's are all of the same 8 columns.
        int n = warp % NT, col = 8 * n + 2 * t;
        float m0 = NOTHING, m1 = NOTHING, l0 = 0.f, l1 = 0.f, f[NG][2];
        float4 ml[NG];
#pragma unroll
        for (int j = 0; j < NG; j++) {
            ml[j] = *(const float4*)&sh.ml[j][col];
            m0 = fmaxf(m0, ml[j].x);
            m1 = fmaxf(m1, ml[j].z);
        }
#pragma unroll
        for (int j = 0; j < NG; j++) {
            f[j][0] = weight_of(ml[j].x, m0);
            f[j][1] = weight_of(ml[j].z, m1);
            l0 += f[j][0] * ml[j].y;
            l1 += f[j][1] * ml[j].w;
        }
        float i0 = inverse_sum(p, l0), i1 = inverse_sum(p, l1);
        Target out = target_of(p, it, col);
#pragma unroll 1
        for (int q = warp / NT; q < MERGE_TILES / NT; q += WARPS / NT) {
            int mt = q / per_round * LATENT + r * per_round + q % per_round;
            float4 o = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
            for (int j = 0; j < NG; j++) {
                float4 x = sh.merge[(j * MERGE_TILES + q * NT + n) * 32 + lane];
                o.x += f[j][0] * x.x;
                o.y += f[j][1] * x.y;
                o.z += f[j][0] * x.z;
                o.w += f[j][1] * x.w;
            }
            put_tile(p, to, out, mt, n, o, i0, i1);
        }
        if (r == 0 && warp < NT) {
            float4 sums = make_float4(m0, l0, m1, l1);
            if (to.boxed) {  // lanes of one t hold the same: CTA i's box is for lanes 4i ... 4i + 3
                if (lane < 4 * CLUSTER) store_at(at_rank(to.ml + (to.rank * NH + col) * 8, lane >> 2), sums);
            } else if (lane < 4) {
                if (to.whole) {
                    store_lse(p, it, col, m0, l0);
                    store_lse(p, it, col + 1, m1, l1);
                } else {
                    *(float4*)(p.ml + (i64)to.slot * CLUSTER * NH + col) = sums;
                }
            }
        }
    }
}

// One item's chunks, of which `done` lie before it in this CTA.
__device__ __forceinline__ void consume(const Params& p, const Item& it, const Ring& ring, Shared& sh, const Sink& to,
                                        int done, int& round) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = warp / G, w = warp % G;
    u32 lane_at = (lane & 15) * ROW_PITCH + (lane >> 4) * 16;
    State st;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            st.m[n][i] = NOTHING;
            st.l[n][i] = 0.f;
#pragma unroll
            for (int k = 0; k < LATENT; k++) st.acc[k][n][i] = st.acc[k][n][i + 2] = 0.f;
        }
    stage_q(p, it, sh, warp);
    load_q(p, it, sh, st, w);
    // This CTA's chunk n goes to group n % NG; the ring's slots are a multiple of NG.
    int skip = (group - done % NG + NG) % NG, n = done + skip, turn = divide(n, ring.slots);
    int slot = n - turn * ring.slots;
    u32 phase = turn & 1;
#pragma unroll 1
    for (int c = it.first + skip; c < it.last; c += NG) {
        mbar_wait(ring.full + slot * 8, phase);
#if !PROBE
        round ^= 1;
        chunk(p, sh, st, ring.data + slot * SLOT_BYTES + lane_at, *(volatile u16*)(ring.mask + 2 * slot), c * CHUNK,
              group, w, round);
#endif
        __syncwarp();
        if (lane == 0) mbar_arrive(ring.empty + slot * 8);
        slot += NG;
        if (slot >= ring.slots) {
            slot -= ring.slots;
            phase ^= 1;
        }
    }
    finish_item(p, it, sh, st, to, group, w);
}

#define SHORT (NH == 8 && WARPS == 8)
#if SHORT
// Steps whose requests all have 128 tokens at most need no schedule, and no partial results: a CTA takes a request's
// block of columns, a warp 16 of its tokens for the scores and 64 of the dims for the output. What such a step
// takes is one load's latency behind another, so Q's are under way before the lengths are known. Longer requests are
// served in the same way as long as there is a CTA for every 128 tokens: in clusters of 8 a CTA takes an eighth of 1,024
// tokens, and its rank's 64 dims of what all have summed up; clusters or lone CTAs that share a request leave theirs in
// memory, and the last to do so adds them up.
#define SHORT_TOKENS (CHUNK * WARPS)

struct ShortShared {
    uint2 p[WARPS][32];  // B fragments
    __align__(16) float top[WARPS][NH], sum[WARPS][NH];
};
static_assert(sizeof(ShortShared) <= sizeof(Shared::exchange), "the exchange is not used then");

// False where the step is none of those; then `known` is the tokens of request number lane, if they were read.
__device__ __forceinline__ bool serve_short(const Params& p, Shared& sh, u8* ring, int& known) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    int first = 0, n = 0, blocks = MULTI ? divide_up(p.heads, NH) : 1;
    if (p.bs > 32 || (MULTI && p.q_indptr) || p.bs * blocks > gridDim.x || p.num_ring < WARPS) return false;
    if (lane < p.bs) {
        if (!PAGED) first = __ldcg(p.bounds + lane);
        n = __ldcg(p.bounds + lane + (PAGED ? 0 : 1));
    }
    Item it;
    uint2 x[5];
    auto load = [&](int request, int block) {
        load_query(p, request, block * NH + warp < p.heads ? block * NH + warp : 0, x);
    };
    // As if CTA i had item i, which is so where all requests are short enough for one.
    it.request = MULTI ? divide(blockIdx.x, blocks) : blockIdx.x;
    it.block = MULTI ? blockIdx.x - it.request * blocks : 0;
    bool mine = it.request < p.bs && warp < WARPS;
    if (mine) load(it.request, it.block);
    known = n = n < first ? 0 : n - first;
    bool spread = (CLUSTER == 1 || CLUSTER == 8) && __any_sync(~0u, n > SHORT_TOKENS);
    int rank = 0, unit = blockIdx.x, base = 0, count;  // this CTA's tokens of the item: [base, base + count)
    it.unit0 = unit;
    it.parts = 1;
    if (spread) {
        rank = CLUSTER > 1 ? cluster_rank() : 0;
        unit /= CLUSTER;
        int parts = n ? (n + CLUSTER * SHORT_TOKENS - 1) / (CLUSTER * SHORT_TOKENS) : lane < p.bs;
        int end = warp_scan(parts * blocks), total = __shfl_sync(~0u, end, 31);
        if (total > gridDim.x / CLUSTER) return false;
        if (unit >= total || warp >= WARPS) return true;
        it.request = __ffs(__ballot_sync(~0u, end > unit)) - 1;
        it.parts = __shfl_sync(~0u, parts, it.request);
        unit -= __shfl_sync(~0u, end - parts * blocks, it.request);  // among the request's
        it.block = MULTI ? divide(unit, it.parts) : 0;
        it.unit0 = blockIdx.x / CLUSTER - (unit - it.block * it.parts);
        load(it.request, it.block);
    } else {
        if (__any_sync(~0u, n > SHORT_TOKENS)) return false;
        if (!mine) return true;
    }
    it.q_start = it.request;
    it.q_len = 1;
    it.length = __shfl_sync(~0u, n, it.request);
    i64 start = PAGED ? it.request * p.table_stride : __shfl_sync(~0u, first, it.request);
    count = it.length;
    if (spread) {  // whole chunks for all but the last
        int chunks = divide_up(divide_up(it.length, CHUNK), it.parts), each = (chunks + CLUSTER - 1) / CLUSTER;
        int part = blockIdx.x / CLUSTER - it.unit0, from = rank * each;
        from = from < chunks ? from : chunks;
        int to = from + each < chunks ? from + each : chunks;
        base = (part * chunks + from) * CHUNK;
        count = (to - from) * CHUNK;
        count = it.length - base < count ? it.length - base : count;
    }
    int own = CHUNK * warp + (lane & 15), token = base + own;
    Entry entry = own < count ? entry_of(p, it, start, token) : (Entry)-1;

    float up = lift(largest(x));
    if (lane == 0) sh.down[warp] = unlift(up);
#pragma unroll
    for (int j = 0; j < (ROPE ? 5 : 4); j++) {
        float a, b, d, e;
        unpack_q(x[j].x, a, b);
        unpack_q(x[j].y, d, e);
        if (j < 4 || lane < 16)
            sh.q[8 * j + g][0][warp * 4 + t] = make_uint2(pack_half(a * up, b * up), pack_half(d * up, e * up));
    }
    int slot = slot_of(p, entry, token);
    u32 valid = __ballot_sync(~0u, slot >= 0), rows = smem_u32(ring) + warp * SLOT_BYTES;
    bool some = CHUNK * warp < count;
    if (some) {
#pragma unroll 4
        for (int r = 0; r < CHUNK; r++) {
            int at = __shfl_sync(~0u, slot, r);
            copy16(rows + r * ROW_PITCH + lane * 16, row_at(p, at) + lane * 16, at >= 0);
        }
#if ROPE
#pragma unroll
        for (int r = 0; r < CHUNK; r += 8) {
            int at = __shfl_sync(~0u, slot, r + g);
            copy16(rows + (r + g) * ROW_PITCH + RANK + t * 16, row_at(p, at) + RANK + t * 16, at >= 0);
        }
#endif
    }
    named_sync(1, WARPS * 32);
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp();

    u32 lane_at = (lane & 15) * ROW_PITCH + (lane >> 4) * 16;
    float s[2][4] = {};
    if (some) {
#pragma unroll 4
        for (int k = 0; k < (RANK + ROPE) / 16; k += 2) {
            u32 r[4], a[4];
            ldmatrix4(r, rows + lane_at + k * 16);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                uint2 q = sh.q[k + h][0][lane];
                widen(r[2 * h], a[0], a[2]);
                widen(r[2 * h + 1], a[1], a[3]);
                mma(s[h], a, q.x, q.y);
            }
        }
    }
    ShortShared& box = *(ShortShared*)sh.exchange;
    float2 down = *(const float2*)&sh.down[2 * t];
    float top[2], m[2], l[2];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float y = logit2(s[0][i] + s[1][i], p.scale * (i & 1 ? down.y : down.x), p.cap_log2);
        s[0][i] = valid >> (g + 4 * (i & 2)) & 1 ? y : -INFINITY_F;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        top[i] = fmaxf(s[0][i], s[0][i + 2]);
#pragma unroll
        for (int d = 4; d < 32; d <<= 1) top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], d));
    }
    if (lane < 4) *(float2*)&box.top[warp][2 * t] = make_float2(top[0], top[1]);
    named_sync(1, WARPS * 32);
    m[0] = m[1] = NOTHING;
#pragma unroll
    for (int i = 0; i < WARPS; i++) {
        float2 y = *(const float2*)&box.top[i][2 * t];
        m[0] = fmaxf(m[0], y.x - P_BIAS);
        m[1] = fmaxf(m[1], y.y - P_BIAS);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        s[0][i] = exp2_fast(s[0][i] - m[i]);
        s[0][i + 2] = exp2_fast(s[0][i + 2] - m[i]);
        l[i] = s[0][i] + s[0][i + 2];
#pragma unroll
        for (int d = 4; d < 32; d <<= 1) l[i] += __shfl_xor_sync(~0u, l[i], d);
    }
    if (lane < 4) *(float2*)&box.sum[warp][2 * t] = make_float2(l[0], l[1]);
    box.p[warp][lane] =
        make_uint2(transpose8(pack_half(s[0][0], s[0][1])), transpose8(pack_half(s[0][2], s[0][3])));
    named_sync(1, WARPS * 32);

    float o[4][4] = {};
    u32 latent = smem_u32(ring) + lane_at + warp * 64;
#pragma unroll 1
    for (int c = 0; c < count; c += CHUNK, latent += SLOT_BYTES) {
        uint2 b = box.p[c / CHUNK][lane];
#pragma unroll
        for (int k = 0; k < 4; k += 2) {
            u32 r[4], a[4];
            ldmatrix4_trans(r, latent + k * 16);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                widen(__byte_perm(r[2 * h], 0, 0x3120), a[0], a[1]);
                widen(__byte_perm(r[2 * h + 1], 0, 0x3120), a[2], a[3]);
                mma(o[k + h], a, b.x, b.y);
            }
        }
    }
    l[0] = l[1] = 0.f;
#pragma unroll
    for (int i = 0; i < WARPS; i++) {
        float2 y = *(const float2*)&box.sum[i][2 * t];
        l[0] += y.x;
        l[1] += y.y;
    }
    // From here on o holds tiles tile0 ... of 16 dims each, `tiles` of them, of this CTA's dims.
    Target to = target_of(p, it, 2 * t);
    constexpr int tiles = CLUSTER == 8 ? 1 : 4;
    int tile0 = 4 * warp, part = blockIdx.x / CLUSTER - it.unit0;
    auto begin = [&] {
        m[0] = m[1] = NOTHING;
        l[0] = l[1] = 0.f;
#pragma unroll
        for (int k = 0; k < tiles; k++)
#pragma unroll
            for (int i = 0; i < 4; i++) o[k][i] = 0.f;
    };
    auto add = [&](float4 c, const float4(&y)[tiles]) {
        float t0 = fmaxf(m[0], c.x), t1 = fmaxf(m[1], c.z);
        float f0 = weight_of(c.x, t0), f1 = weight_of(c.z, t1), g0 = weight_of(m[0], t0), g1 = weight_of(m[1], t1);
        m[0] = t0;
        m[1] = t1;
        l[0] = l[0] * g0 + f0 * c.y;
        l[1] = l[1] * g1 + f1 * c.w;
#pragma unroll
        for (int k = 0; k < tiles; k++) {
            o[k][0] = o[k][0] * g0 + f0 * y[k].x;
            o[k][1] = o[k][1] * g1 + f1 * y[k].y;
            o[k][2] = o[k][2] * g0 + f0 * y[k].z;
            o[k][3] = o[k][3] * g1 + f1 * y[k].w;
        }
    };
    if (CLUSTER == 8 && spread) {
        cluster_wait();  // the others have begun: `run` arrived
        u32 there = at_rank(smem_u32(sh.merge), warp) + (rank * 4 * 32 + lane) * 16;
#pragma unroll
        for (int k = 0; k < 4; k++) store_at(there + k * 512, make_float4(o[k][0], o[k][1], o[k][2], o[k][3]));
        if (lane < 4)
            store_at(at_rank(smem_u32(&sh.meet.box[rank % CLUSTER][2 * t]), warp), make_float4(m[0], l[0], m[1], l[1]));
        cluster_sync();
        if (warp >= 4) return true;
        tile0 = 4 * rank + warp;
        begin();
#pragma unroll
        for (int i = 0; i < CLUSTER; i++) {
            float4 y[tiles] = {sh.merge[(i * 4 + warp) * 32 + lane]};
            add(*(const float4*)&sh.meet.box[i][2 * t], y);
        }
    }
    if ((CLUSTER == 1 || CLUSTER == 8) && it.parts > 1) {
        constexpr int threads = CLUSTER == 8 ? 4 * 32 : WARPS * 32;  // that are still here
        auto part_at = [&](int i) { return p.partial + ((it.unit0 + i) * (RANK / 16) + tile0) * 32 + lane; };
        auto sums_at = [&](int i) { return (float4*)(p.ml + ((it.unit0 + i) * CLUSTER + rank) * NH + 2 * t); };
#pragma unroll
        for (int k = 0; k < tiles; k++) part_at(part)[k * 32] = make_float4(o[k][0], o[k][1], o[k][2], o[k][3]);
        if (warp == 0 && lane < 4) *sums_at(part) = make_float4(m[0], l[0], m[1], l[1]);
        named_sync(2, threads);
        if (threadIdx.x == 0) {
            u32 before, *ticket = p.tickets + it.unit0 * CLUSTER + rank;
            asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(ticket) : "memory");
            if (before == (u32)(it.parts - 1)) *ticket = 0;  // for the next launch
            sh.meet.flag = before == (u32)(it.parts - 1);
        }
        named_sync(2, threads);
        if (!sh.meet.flag) return true;
        begin();
#pragma unroll 4
        for (int i = 0; i < it.parts; i++) {
            float4 y[tiles];
#pragma unroll
            for (int k = 0; k < tiles; k++) y[k] = __ldcg(part_at(i) + k * 32);
            add(__ldcg(sums_at(i)), y);
        }
    }
    float i0 = inverse_sum(p, l[0]), i1 = inverse_sum(p, l[1]);
    auto put = [&](int k) { store_out(to, tile0 + k, make_float4(o[k][0], o[k][1], o[k][2], o[k][3]), i0, i1); };
#pragma unroll
    for (int k = 0; k < tiles; k++) put(k);
    if (CLUSTER == 8 && !spread)
#pragma unroll
        for (int k = 1; k < 4; k++) put(k);
    if (rank == 0 && warp == 0 && lane < 4) {
        store_lse(p, it, 2 * t, m[0], l[0]);
        store_lse(p, it, 2 * t + 1, m[1], l[1]);
    }
    return true;
}
#endif

extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(THREADS, MIN_CTAS)
    kvlab_mla_few_heads(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) u8 dynamic[];
    Shared& sh = *(Shared*)dynamic;
    int round = 0;
    if (threadIdx.x < NG) mbar_init(smem_u32(&sh.summed[threadIdx.x]), G * 32);
    auto serve = [&](int& known) {
#if SHORT
        return serve_short(p, sh, dynamic + FIXED_SHARED, known);
#else
        return false;
#endif
    };
    run(p, sh.meet, dynamic + FIXED_SHARED, G, serve, [&](const Item& it, const Ring& ring, const Sink& to, int done) {
        consume(p, it, ring, sh, to, done, round);
        return to.whole;
    });
}
