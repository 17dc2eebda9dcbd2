// FP8 MLA decode for few heads: query columns in N of mma.m16n8k16, tokens (QK) and latent dims (PV) in M.
//
// A group of G warps takes a chunk of 16 tokens. Warp w owns 512 / G latent dims: it multiplies its dims of K
// with its dims of Q, the group adds up the partial logits through shared memory, each warp computes the same
// softmax in registers, and each multiplies its dims of V, read again from the same shared rows transposed,
// with P. NG groups run unsynchronised on different chunks, each with its own running maximum, and are merged
// once at the end of an item. Rows stay FP8 until they are in registers. Steps with little to read take a shorter way.
//
// Compile-time: those of mla_common.cuh, G, NG, Q_SHARED (Q stays in shared memory, else in registers),
// MERGE_ROUNDS, MIN_CTAS a SM, REGISTERS and PRODUCER_REGISTERS (or 0), FIXED_SHARED bytes before the ring, PASSES a
// CTA makes at most without a schedule (0: there always is one), PROBE 1 to load only, which tells the loads' share of
// the time.

#define WARPS (G * NG)
#define MERGE_WARPS WARPS
#define LEAN 0
#define PLANNER (THREADS / 32 - 1)  // that has no Q to load
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

// threadIdx.x, read again: what is needed here and there gets spilled where registers are few.
__device__ __forceinline__ int thread_now() {
    int x;
    asm volatile("mov.u32 %0, %tid.x;" : "=r"(x));
    return x;
}

// Q to FP16 B fragments in shared memory, a warp a column. Within a 16-dim piece a lane's four k indices (2t,
// 2t + 1, 2t + 8, 2t + 9) stand for dims 4t ... 4t + 3, as ldmatrix delivers FP8 rows; the product does not care.
__device__ __forceinline__ void stage_q(const Params& p, const Item& it, Shared& sh, int warp, int lane) {
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

__device__ __forceinline__ void load_q(const Params& p, const Item& it, Shared& sh, State& st, int w, int lane) {
    int t = lane & 3;
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

// What of a thread's place the loop over chunks needs. Opaque, or the compiler makes it anew in every turn.
struct Spot {
    int lane, g, group, w;
    int mail;          // what the group exchanges, as float4s of one round: what this lane reads first
    u32 latent, rope;  // of this lane's ldmatrix row and column, and the warp's dims, in the ring's first slot

    __device__ __forceinline__ static int kept(int x) {
        asm volatile("" : "+r"(x));
        return x;
    }
    __device__ __forceinline__ Spot(const Ring& ring) {
        int thread = thread_now(), warp = thread >> 5;
        lane = kept(thread & 31);
        g = kept(lane >> 2);
        group = kept(warp / G);
        w = kept(warp % G);
        mail = kept(group * 2 * G * NT * 32 + lane);
        u32 at = ring.data + (lane & 15) * ROW_PITCH + (lane >> 4) * 16;
        latent = kept(at + w * LATENT * 16);
        rope = kept(at + RANK + w * ROPE_PIECES * 16);
    }
};

// One chunk: rows `rows` bytes behind the ring's first, tokens from `token` on.
__device__ __forceinline__ void chunk(const Params& p, Shared& sh, State& st, u32 rows, u32 mask, int token,
                                      const Spot& my, int round) {
    int g = my.g, w = my.w;
    float s[2][NT][4];
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) s[h][n][i] = 0.f;
    u32 latent = rows + my.latent;
#pragma unroll
    for (int k = 0; k < LATENT; k += 2) {
        u32 r[4];
        ldmatrix4(r, latent + k * 16);
        qk_piece(s[0], sh, st, w, k, r[0], r[1]);
        qk_piece(s[1], sh, st, w, k + 1, r[2], r[3]);
    }
#if ROPE
    u32 rope = rows + my.rope;
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
        float4* mail = &sh.exchange[0][0][0][0][0] + my.mail + round * (G * NT * 32);
#pragma unroll
        for (int n = 0; n < NT; n++)
            mail[(w * NT + n) * 32] = make_float4(s[0][n][0], s[0][n][1], s[0][n][2], s[0][n][3]);
        // Not a named barrier: with several in use at once, racecheck reports accesses on two sides of one.
        u32 bar = smem_u32(&sh.summed[my.group]);
        mbar_arrive(bar);
        mbar_wait(bar, round ^ 1);
#pragma unroll
        for (int n = 0; n < NT; n++) {
            float4 sum = mail[n * 32];
#pragma unroll
            for (int i = 1; i < G; i++) {
                float4 x = mail[(i * NT + n) * 32];
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
                                            int group, int w, int lane) {
    int t = lane & 3, warp = group * G + w;
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
    Spot my(ring);
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
    stage_q(p, it, sh, my.group * G + my.w, my.lane);
    load_q(p, it, sh, st, my.w, my.lane);
    // This CTA's chunk n goes to group n % NG; the ring's slots are a multiple of NG.
    int skip = (my.group - done % NG + NG) % NG, n = done + skip, turn = divide(n, ring.slots);
    int slot = n - turn * ring.slots;
    u32 phase = turn & 1;
    int last = it.last;  // apart: the item lies in shared memory
#pragma unroll 1
    for (int c = it.first + skip; c < last; c += NG) {
        mbar_wait(ring.full + slot * 8, phase);
#if !PROBE
        round ^= 1;
        chunk(p, sh, st, slot * SLOT_BYTES, *(volatile u16*)(ring.mask + 2 * slot), c * CHUNK, my, round);
#endif
        __syncwarp();
        if (my.lane == 0) mbar_arrive(ring.empty + slot * 8);
        slot += NG;
        if (slot >= ring.slots) {
            slot -= ring.slots;
            phase ^= 1;
        }
    }
    finish_item(p, it, sh, st, to, my.group, my.w, my.lane);
}

#if PASSES
#include "mla_few_short.cuh"
#endif

extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(THREADS, MIN_CTAS)
    kvlab_mla_few_heads(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) u8 dynamic[];
    Shared& sh = *(Shared*)dynamic;
    int round = 0;
    auto serve = [&](const Bounds& bounds) {
#if PASSES
        if (serve_short(p, sh, dynamic + FIXED_SHARED, bounds)) return true;
#endif
        if (threadIdx.x < NG) mbar_init(smem_u32(&sh.summed[threadIdx.x]), G * 32);
        return false;
    };
    run(p, sh.meet, dynamic + FIXED_SHARED, G, serve, [&](const Item& it, const Ring& ring, const Sink& to, int done) {
        consume(p, it, ring, sh, to, done, round);
        return to.whole;
    });
}
