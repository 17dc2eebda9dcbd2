// FP8 MLA decode for many heads: NH query columns in N of wgmma.m64nNHk16, tokens (QK) and latent dims (PV) in M.
//
// Two warpgroups take tiles of 128 tokens. Each multiplies its 64 tokens of K with Q, both compute the softmax of
// their tokens against one shared running maximum and leave P in shared memory, and each multiplies its 256 dims
// of V, all 128 tokens, with P. A operands (K, V) are widened from FP8 on the way from shared memory to
// registers, B operands (Q, P) are FP16 in shared memory: nothing that was converted is written back. While the last
// of a tile's V is multiplied, the next tile's K is widened: the tensor cores idle only beside a softmax.
//
// Compile-time: those of mla_common.cuh, NH 32 or 64, REGISTERS and PRODUCER_REGISTERS, FIXED_SHARED bytes before
// the ring.

#define WARPS 8
#define MERGE_WARPS WARPS
#define THREADS ((WARPS + PRODUCERS) * 32)
#define TILE_CHUNKS 8
#define LEAN 1
#define PLANNER 0

#include "mla_common.cuh"

#define PIECES ((RANK + ROPE) / 16)
#define SWIZZLED (NH * 128)  // bytes of NH rows of 64 FP16, 128-byte swizzle
#define ACC (NH / 2)         // accumulators of m64nNH a thread
// A pair of CTAs adds up in FP16 what one sends the other, divided by its sum: an eighth of BF16's rounding.
#define SHORT_BOX (!HALF && !E5M2)

struct Shared {
    __align__(1024) u8 q[(RANK + ROPE) / 64][SWIZZLED];
    __align__(1024) u8 p[2][SWIZZLED];
    float sums[WARPS][NH];
    __align__(16) float base[NH];  // what is taken off logits: m, or 0 where nothing was seen
    __align__(16) float scale[NH];
    __align__(16) float factor[NH], shift[NH];
    float m[NH];
    int sees[NH], top[NH];
    u64 got[1 + NT / 2];  // that the other CTA's sums are here, and its results, eight columns each
    Meeting meet;
};
static_assert(sizeof(Shared) <= FIXED_SHARED, "hopper.py counts the bytes of Shared");

// A wgmma descriptor's lower half; the upper is the same for all. Rows of 128 bytes, swizzled; groups of 8 rows 1,024
// bytes apart.
__device__ __forceinline__ u64 descriptor(u32 at) { return (u64)0x40000040 << 32 | same(1u << 16 | (at & 0x3ffff) >> 4); }
// Shared memory written by ordinary stores, before wgmma reads it.
__device__ __forceinline__ void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

#define F8(d, i)                                                                                                 \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7])
__device__ __forceinline__ void wgmma(float (&d)[ACC], const u32 (&a)[4], u64 b, int accumulate) {
#if NH == 64
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %37, 0; "
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,"
        "%29,%30,%31}, {%32,%33,%34,%35}, %36, p, 1, 1, 0;}"
        : F8(d, 0), F8(d, 8), F8(d, 16), F8(d, 24)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
#else
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %21, 0; "
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, p, 1, 1, 0;}"
        : F8(d, 0), F8(d, 8)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
#endif
}

__device__ __forceinline__ void store_matrix_trans(u32 at, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(a), "r"(b), "r"(c),
                 "r"(d)
                 : "memory");
}
// Arrive at the cluster's barrier for cluster_wait. All that was read is in registers, and nothing written is handed over
// but that `got` exists, behind serve's fence.
__device__ __forceinline__ void cluster_leave() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
// Into another CTA's shared memory, whose barrier `tell` counts the bytes.
__device__ __forceinline__ void send(u32 there, float4 x, u32 tell) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(there),
                 "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(tell)
                 : "memory");
}
__device__ __forceinline__ void send(u32 there, float x, float y, u32 tell) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1,%2}, [%3];" ::"r"(there), "f"(x),
                 "f"(y), "r"(tell)
                 : "memory");
}
__device__ __forceinline__ void mbar_expect(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void unpack_half(u32 x, float& lo, float& hi) {
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}" : "=f"(lo), "=f"(hi) : "r"(x));
}
__device__ __forceinline__ bool any_of_all(bool x) {
    u32 y;
    asm volatile(
        "{.reg .pred p, q; setp.ne.b32 p, %1, 0; barrier.cta.red.or.pred q, 1, 256, p; selp.u32 %0, 1, 0, q;}"
        : "=r"(y)
        : "r"((u32)x)
        : "memory");
    return y;
}
// 2^x to 3e-6 of it by FMAs, 0 below 2^-127, NaN of NaN: 2^n * p(f) where x = n + f, n the last bits of x + 1.5 * 2^23.
// A quarter are made so: the unit that exp2_fast uses does 16 a cycle and is most of what a softmax waits for.
__device__ __forceinline__ float exp2_fma(float x) {
    float y;
    asm("{.reg .f32 c, t, f, p; .reg .b32 e; max.NaN.f32 c, %1, 0fC2FE0000; add.f32 t, c, 0f4B400000; "
        "sub.f32 f, t, 0f4B400000; sub.f32 f, c, f; fma.rn.f32 p, f, 0f3C1D0166, 0f3D64FE23; "
        "fma.rn.f32 p, p, f, 0f3E7601BC; fma.rn.f32 p, p, f, 0f3F317096; fma.rn.f32 p, p, f, 0f3F800000; "
        "mov.b32 e, t; shl.b32 e, e, 23; add.s32 e, e, 0x3f800000; mov.b32 t, e; mul.f32 %0, p, t;}"
        : "=f"(y)
        : "f"(x));
    return y;
}
// Floats as integers of the same order.
__device__ __forceinline__ int ordered(float x) {
    int b = __float_as_int(x);
    return b ^ (b >> 31 & 0x7fffffff);
}
__device__ __forceinline__ float unordered(int b) { return __int_as_float(b ^ (b >> 31 & 0x7fffffff)); }

// The column of its item that a CTA of a pair has first: each finishes those that it has in its first half.
__device__ __forceinline__ int first_half(const Sink& to) { return to.rank ? NH / 2 : 0; }

// Two of Q times a power of two, as FP16: BF16 is multiplied as it is, which is exact.
__device__ __forceinline__ u32 lifted(u32 x, float up) {
    float lo, hi;
#if HALF
    unpack_q(x, lo, hi);
    return pack_half(lo * up, hi * up);
#else
    u32 y, twice = __byte_perm(__float_as_uint(up), 0, 0x3232);
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(x), "r"(twice));
    unpack_q(y, lo, hi);
    return pack_half(lo, hi);
#endif
}

// Q to FP16 in shared memory, NH rows, dims in pieces of 16 whose four k indices 2t, 2t + 1, 2t + 8, 2t + 9 stand
// for dims 4t ... 4t + 3, as ldmatrix delivers FP8 rows; the product does not care. Row c is column c ^ flip.
__device__ __forceinline__ void stage_q(const Params& p, const Item& it, Shared& sh, int warp, int flip) {
    int lane = threadIdx.x & 31;
    constexpr int columns = NH / WARPS;
    // A warp's columns are every WARPS-th, so all have one swizzle; a lane's pieces lie two of sh.q apart.
    u32 at = smem_u32(sh.q[lane >> 4]) + warp * 128 + ((2 * (lane >> 2 & 3) ^ warp) << 4) + 4 * (lane & 3);
    u32 other = at ^ 16;
    uint2 x[columns][5];  // all before the first is looked at: while rows are on their way, each wait is long
#pragma unroll
    for (int i = 0; i < columns; i++) {
        Column c = column_of(p, it, (warp + i * WARPS) ^ flip);
        load_query(p, c.real ? c.token : it.q_start, c.real ? c.head : 0, x[i]);  // any: no one reads the result
    }
    float own = 0.f;  // what lifted the column that this lane speaks for
    if (p.heads)  // always: else the compiler looks at the first before it asks for the last
#pragma unroll
    for (int i = 0; i < columns; i++) {
        float up = lift(largest(x[i]));
        if (lane == i) own = up;
#pragma unroll
        for (int j = 0; j < (ROPE ? 5 : 4); j++) {
            constexpr int row = WARPS * 128;
            if (j < 4 || lane < 16) {
                u32 first = lifted(x[i][j].x, up), second = lifted(x[i][j].y, up);
                asm volatile("st.shared.u32 [%0], %1;" ::"r"(at + i * row + j * 2 * SWIZZLED), "r"(first));
                asm volatile("st.shared.u32 [%0], %1;" ::"r"(other + i * row + j * 2 * SWIZZLED), "r"(second) : "memory");
            }
        }
    }
    if (lane < columns) {
        int col = warp + lane * WARPS;
        sh.scale[col] = p.scale * unlift(own);
        sh.sees[col] = column_of(p, it, col ^ flip).sees;
        sh.m[col] = NOTHING;
        sh.base[col] = 0.f;
        sh.top[col] = ordered(-INFINITY_F);
    }
    proxy_fence();
    named_sync(1, WARPS * 32);
}

// Over the 8 lanes that share columns: x[n][e], a lane's values for columns 8n + 2t + e, to the one n a lane is in
// charge of (NH / 8 of them; with 32 columns, two lanes each).
template <bool MAX>
__device__ __forceinline__ void reduce_columns(float (&x)[NT][2], float (&out)[2]) {
    int lane = threadIdx.x & 31;
    auto both = [](float a, float b) { return MAX ? fmaxf(a, b) : a + b; };
#pragma unroll
    for (int width = NT / 2, d = 16; width; width >>= 1, d >>= 1) {
        bool upper = lane & d;
#pragma unroll
        for (int n = 0; n < width; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float keep = upper ? x[n + width][e] : x[n][e], give = upper ? x[n][e] : x[n + width][e];
                x[n][e] = both(keep, __shfl_xor_sync(~0u, give, d));
            }
    }
#pragma unroll
    for (int e = 0; e < 2; e++) {
        out[e] = x[0][e];
        if (NT == 4) out[e] = both(out[e], __shfl_xor_sync(~0u, out[e], 4));
    }
}
__device__ __forceinline__ int my_column() {  // the first of the two that reduce_columns leaves a lane
    int lane = threadIdx.x & 31;
    return 8 * (NT == 8 ? lane >> 2 : lane >> 3) + 2 * (lane & 3);
}

#define K_UNITS (PIECES / 2)  // of 32 dims
// 32 dims of this warp's 16 tokens of K, as A fragments.
__device__ __forceinline__ void widen_k(u32 (&a)[2][4], const u32 (&r)[4]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        widen(r[2 * i], a[i][0], a[i][2]);
        widen(r[2 * i + 1], a[i][1], a[i][3]);
    }
}
// Those times Q: logits of tokens g and g + 8, columns 8n + 2t and 8n + 2t + 1.
__device__ __forceinline__ void issue_k(float (&s)[ACC], const u32 (&a)[2][4], u64 q, int accumulate) {
    wgmma_fence();
    wgmma(s, a[0], q, accumulate);
    wgmma(s, a[1], q + 32 / 16, 1);
    wgmma_commit();
}
// K of an item's first tile times Q, in short code. As in the loop over tiles, rows are read a step ahead of their
// conversion and products are three deep, so that the tensor cores wait for neither.
__device__ __forceinline__ void multiply_first_k(float (&s)[ACC], u64 q, u32 rows) {
    constexpr int body = K_UNITS % 6 ? 4 : 6;  // units a round, which waits for its last
    u32 a[3][2][4], r[4];
    ldmatrix4(r, rows);
#pragma unroll
    for (int i = 0; i < ACC; i++) s[i] = 0.f;
#pragma unroll 1
    for (int k = 0; k < K_UNITS; k += body) {
#pragma unroll
        for (int i = 0; i < body; i++) {
            if (i > 2) wgmma_wait<2>();
            widen_k(a[i % 3], r);
            rows += 32;
            if (i + 1 < body || k + body < K_UNITS) ldmatrix4(r, rows);
            issue_k(s, a[i % 3], q + (i / 2 * SWIZZLED + i % 2 * 64) / 16, 1);
        }
        q += body / 2 * SWIZZLED / 16;
        wgmma_wait<0>();
    }
}

// `rows` less a lap where chunk number i is the first of the ring: a compare and a predicated subtraction.
__device__ __forceinline__ void wrap(u32& rows, int i, int room, u32 lap) {
    asm volatile("{.reg .pred p; setp.eq.s32 p, %1, %2; @p sub.u32 %0, %0, %3;}" : "+r"(rows) : "r"(room), "r"(i), "r"(lap));
}
// Half of 16 tokens of V: this warp's 16 dims of two of its warpgroup's four 64-dim tiles, as A fragments.
__device__ __forceinline__ void widen_v(u32 (&a)[2][4], const u32 (&r)[4]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        widen(__byte_perm(r[2 * i], 0, 0x3120), a[i][0], a[i][1]);
        widen(__byte_perm(r[2 * i + 1], 0, 0x3120), a[i][2], a[i][3]);
    }
}

__device__ __forceinline__ void multiply_v(float (&o)[4][ACC], int half, const u32 (&a)[2][4], u64 weights) {
    wgmma_fence();
    wgmma(o[2 * half], a[0], weights, 1);
    wgmma(o[2 * half + 1], a[1], weights, 1);
    wgmma_commit();
}

// A chunk of the running maximum's columns lags behind: raise it, and bring what was summed up to it.
__device__ __forceinline__ void raise_maximum(Shared& sh, float (&s)[ACC], float (&o)[4][ACC], float (&l)[NT][2],
                                              bool& blank, bool is_first) {
    int lane = threadIdx.x & 31, t = lane & 3;
    float x[NT][2], top[2];
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) x[n][e] = fmaxf(s[4 * n + e], s[4 * n + e + 2]);
    reduce_columns<true>(x, top);
#pragma unroll
    for (int e = 0; e < 2; e++) atomicMax(&sh.top[my_column() + e], ordered(top[e]));
    named_sync(1, WARPS * 32);
    if (threadIdx.x < NH) {
        float m = sh.m[threadIdx.x], base = sh.base[threadIdx.x], top = unordered(sh.top[threadIdx.x]) + base;
        float up = top > m + P_BIAS ? top - P_BIAS : m, next = up == NOTHING ? 0.f : up;
        sh.factor[threadIdx.x] = exp2_fast(m - up);
        sh.shift[threadIdx.x] = next - base;
        sh.m[threadIdx.x] = up;
        sh.base[threadIdx.x] = next;
        sh.top[threadIdx.x] = ordered(-INFINITY_F);
    }
    named_sync(1, WARPS * 32);
    blank = false;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            int col = 8 * n + 2 * t + e;
            float d = sh.shift[col];
            blank |= sh.m[col] == NOTHING;
            s[4 * n + e] -= d;
            s[4 * n + e + 2] -= d;
        }
    if (is_first) return;  // sums are 0
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float f = sh.factor[8 * n + 2 * t + e];
            l[n][e] *= f;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                o[j][4 * n + e] *= f;
                o[j][4 * n + e + 2] *= f;
            }
        }
}

// Of what all warps have left there, in their order.
__device__ __forceinline__ float sum_of(const Shared& sh, int col) {
    float sum = 0.f;
    for (int i = 0; i < WARPS; i++) sum += sh.sums[i][col];
    return sum;
}

#if CLUSTER == 2
// Both CTAs of a cluster have a part of an item, no one else has. Each sends the other its results of the columns that
// it has last, a warp to the same warp, to where Q was, and adds up those that it has first.
__device__ __forceinline__ void finish_pair(const Params& p, const Item& it, Shared& sh, const Sink& to,
                                            float (&o)[4][ACC], int warp) {
    constexpr int half = NH / 2, boxes = 4 / (1 + SHORT_BOX);  // of a lane, for eight columns
    int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, other = to.rank ^ 1;
    u32 here = smem_u32(sh.q[0]) + (warp * boxes * NT / 2 * 32 + lane) * 16, there = at_rank(here, other);
    u32 got = smem_u32(sh.got), tell = at_rank(got, other);
    float2* ml = sh.meet.box[other];
    cluster_wait();  // both have multiplied all K
    float sum = sum_of(sh, half + lane % half), by = sum == 0.f ? 0.f : rcp_fast(sum);
    if (warp == 0 && lane < half)
        send(at_rank(smem_u32(sh.meet.box[to.rank] + lane), other), sh.m[half + lane], sum, tell);
#pragma unroll
    for (int n = 0; n < NT / 2; n++) {
        float by0 = __shfl_sync(~0u, by, 8 * n + 2 * t), by1 = __shfl_sync(~0u, by, 8 * n + 2 * t + 1);
#pragma unroll
        for (int i = 0; i < boxes; i++) {
            const float *x = o[4 / boxes * i] + ACC / 2 + 4 * n, *y = o[4 / boxes * i + SHORT_BOX] + ACC / 2 + 4 * n;
            float4 z = make_float4(x[0], x[1], x[2], x[3]);
            if (SHORT_BOX)
                z = make_float4(__uint_as_float(pack_half(x[0] * by0, x[1] * by1)),
                                __uint_as_float(pack_half(x[2] * by0, x[3] * by1)),
                                __uint_as_float(pack_half(y[0] * by0, y[1] * by1)),
                                __uint_as_float(pack_half(y[2] * by0, y[3] * by1)));
            send(there + (n * boxes + i) * 512, z, tell + (1 + n) * 8);
        }
    }
    // By column, where P was: weights of what is here and of what was sent, and at which byte of `out` it starts, or -1.
    float2* weight = (float2*)sh.p[0];
    i64* row = (i64*)sh.p[1];
    bool adds = warp == 1 && lane < half;
    float top, all;
    if (adds) {
        float m = sh.m[lane], l = sum_of(sh, lane);
        mbar_wait_cluster(got, 0);
        float2 d = ml[lane];
        top = fmaxf(m, d.x);
        float f = weight_of(m, top), g = weight_of(d.x, top);
        all = f * l + g * d.y;
        float inv = inverse_sum(p, all);
        weight[lane] = make_float2(f * inv, (SHORT_BOX ? g * d.y : g) * inv);
    } else if (warp == 2 && lane < half) {
        Column c = column_of(p, it, first_half(to) + lane);
        row[lane] = c.real ? 2 * (c.token * p.out_token + c.head * p.out_head) : -1;
    }
    named_sync(1, WARPS * 32);
    u8* out = (u8*)(p.out + 256 * (warp >> 2) + 16 * (warp & 3) + 2 * g);
#pragma unroll
    for (int n = 0; n < NT / 2; n++) {
        float4 by = *(const float4*)&weight[8 * n + 2 * t], sent[boxes];
        i64 a = row[8 * n + 2 * t], b = row[8 * n + 2 * t + 1];
        mbar_wait_cluster(got + (1 + n) * 8, 0);
#pragma unroll
        for (int i = 0; i < boxes; i++) sent[i] = load_shared4(here + (n * boxes + i) * 512);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float* x = o[j] + 4 * n;
            float4 y = sent[j * boxes / 4];
            if (SHORT_BOX) {
                u32 lo = __float_as_uint(j % 2 ? y.z : y.x), hi = __float_as_uint(j % 2 ? y.w : y.y);
                unpack_half(lo, y.x, y.y);
                unpack_half(hi, y.z, y.w);
            }
            u32 first = pack_out(x[0] * by.x + y.x * by.y, x[2] * by.x + y.z * by.y);
            u32 second = pack_out(x[1] * by.z + y.y * by.w, x[3] * by.z + y.w * by.w);
            if (a >= 0) *(u32*)(out + a + 128 * j) = first;
            if (b >= 0) *(u32*)(out + b + 128 * j) = second;
        }
    }
    if (adds) store_lse(p, it, first_half(to) + lane, top, all);
}
#endif

// One item's chunks, of which `done` lie before it in this CTA. Returns whether nothing is left to be added up.
__device__ __forceinline__ bool consume(const Params& p, const Item& it, const Ring& ring, Shared& sh, const Sink& to,
                                        int done) {
    int first = it.first, last = it.last;
    int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    int warp = same(threadIdx.x >> 5), group = warp >> 2, w = warp & 3;
    float o[4][ACC], l[NT][2];  // l: this lane's part of the sums of columns 8n + 2t + e
    bool paired = CLUSTER == 2 && to.boxed && it.parts == 1;  // both CTAs of the cluster have tokens, no one else has
    bool blank = true;          // has any of them seen nothing?
    if (paired && threadIdx.x < 1 + NT / 2)
        mbar_expect(smem_u32(sh.got + threadIdx.x), threadIdx.x ? 8 * RANK * (SHORT_BOX ? 2 : 4) : NH / 2 * 8);
    stage_q(p, it, sh, warp, paired ? first_half(to) : 0);
    u32 k_at = (lane & 15) * ROW_PITCH + (lane >> 4) * 16;
    u32 v_at = (lane & 15) * ROW_PITCH + (lane >> 4) * 64 + group * 256 + w * 16;
    // stmatrix: lane i names row i % 8 (a column of the item) of matrix i / 8 (tokens 0-7 and 8-15, twice)
    u32 p_at = smem_u32(sh.p[group]) + ((lane >> 4) * 8 + (lane & 7)) * 128 +
               (((2 * w + (lane >> 3 & 1)) ^ (lane & 7)) << 4);
    u64 queries = descriptor(smem_u32(sh.q[0])), weights = descriptor(smem_u32(sh.p[0]));
    int turn = divide(done, ring.slots), slot0 = done - turn * ring.slots;
    turn = same(turn);
    slot0 = same(slot0);

    int mine = 4 * group + w, c = first;
    float s[ACC], total[2];
    u32 mask;
    auto slot_at = [&](int i) { return slot0 + i < ring.slots ? slot0 + i : slot0 + i - ring.slots; };
    // Where this warp's rows of the tile from chunk c on are, once they are there. A warp that has no tokens takes any:
    // they are masked.
    auto rows_of_k = [&] {
        int chunks = last - c < TILE_CHUNKS ? last - c : TILE_CHUNKS, i = mine < chunks ? mine : chunks - 1;
        int at = slot_at(i);
        mbar_wait(ring.full + at * 8, (turn + (slot0 + i >= ring.slots)) & 1);
        mask = 0;
        if (mine < chunks) mask = *(volatile u16*)(ring.mask + 2 * at);
        __syncwarp();
        return ring.data + at * SLOT_BYTES + k_at;
    };
    auto rows_of_v = [&](int i) { return ring.data + slot_at(i) * SLOT_BYTES + v_at; };
    auto weights_of = [&](int i) { return weights + (i / 4 * SWIZZLED + i % 4 * 32) / 16; };
    multiply_first_k(s, queries, rows_of_k());
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
        for (int i = 0; i < ACC; i++) o[j][i] = 0.f;
#pragma unroll
    for (int n = 0; n < NT; n++) l[n][0] = l[n][1] = 0.f;
#pragma unroll 1
    while (true) {
        if (paired && c + TILE_CHUNKS >= last) cluster_leave();  // Q is read
        // Logits less the maximum so far, or less nothing.
#pragma unroll
        for (int n = 0; n < NT; n++) {
            int col = 8 * n + 2 * t;
            float2 scale = *(const float2*)&sh.scale[col], base = *(const float2*)&sh.base[col];
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float by = e & 1 ? scale.y : scale.x, less = e & 1 ? base.y : base.x;
                s[4 * n + e] = CAP ? logit2(s[4 * n + e], by, p.cap_log2) - less : fmaf(s[4 * n + e], by, -less);
            }
        }
        if (mask != 0xffff || (MULTI && p.causal)) {
            bool low = mask >> g & 1, high = mask >> (g + 8) & 1;
            int token = (c + mine) * CHUNK + g;
#pragma unroll
            for (int n = 0; n < NT; n++) {
                int2 sees = MULTI ? *(const int2*)&sh.sees[8 * n + 2 * t] : make_int2(0x7fffffff, 0x7fffffff);
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    if (!low || token >= (e ? sees.y : sees.x)) s[4 * n + e] = -INFINITY_F;
                    if (!high || token + 8 >= (e ? sees.y : sees.x)) s[4 * n + e + 2] = -INFINITY_F;
                }
            }
        }
        float some[4], most;
#pragma unroll
        for (int i = 0; i < ACC; i++) some[i & 3] = i < 4 ? s[i] : fmaxf(some[i & 3], s[i]);
        most = fmaxf(fmaxf(some[0], some[1]), fmaxf(some[2], some[3]));
        // Also the point behind which no one reads the last tile's P.
        if (any_of_all(most > P_BIAS + P_LAG || blank)) raise_maximum(sh, s, o, l, blank, c == first);
#pragma unroll
        for (int n = 0; n < NT; n += 2) {
            u32 packed[4];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float* v = s + 4 * (n + i);
#pragma unroll
                for (int e = 0; e < 4; e++) v[e] = e < 3 ? exp2_fast(v[e]) : exp2_fma(v[e]);
                l[n + i][0] += v[0] + v[2];
                l[n + i][1] += v[1] + v[3];
                packed[2 * i] = pack_half(v[0], v[1]);
                packed[2 * i + 1] = pack_half(v[2], v[3]);
            }
            store_matrix_trans(p_at + n * 1024, packed[0], packed[1], packed[2], packed[3]);
        }
        proxy_fence();
        named_sync(1, WARPS * 32);
        u32 a[3][2][4], r[2][4], rows = rows_of_v(0);
        ldmatrix4_trans(r[0], rows);
        ldmatrix4_trans(r[1], rows + 128);
        if (last - c < TILE_CHUNKS) {
#pragma unroll 1
            for (int i = 0; i < last - c; i++) {
                widen_v(a[0], r[0]);
                widen_v(a[1], r[1]);
                __syncwarp();  // all lanes have read
                if (lane == 0) mbar_arrive(ring.empty + slot_at(i) * 8);
                if (i + 1 < last - c) {
                    rows = rows_of_v(i + 1);
                    ldmatrix4_trans(r[0], rows);
                    ldmatrix4_trans(r[1], rows + 128);
                }
                multiply_v(o, 0, a[0], weights_of(i));
                multiply_v(o, 1, a[1], weights_of(i));
                wgmma_wait<0>();
            }
            reduce_columns<false>(l, total);
            break;
        }
        // Chunk i's rows are i slots behind `rows`, and lane i tells that they are read.
        u32 own = ring.empty + slot_at(lane & 7) * 8, lap = ring.slots * SLOT_BYTES;
        int room = ring.slots - slot0;
#pragma unroll
        for (int i = 0; i < TILE_CHUNKS; i++) {
            if (i + 1 < TILE_CHUNKS) wrap(rows, i + 1, room, lap);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                u32(&x)[2][4] = a[(2 * i + half) % 3];
                if (2 * i + half > 2) wgmma_wait<2>();
                widen_v(x, r[half]);
                if (i + 1 < TILE_CHUNKS) ldmatrix4_trans(r[half], rows + (i + 1) * SLOT_BYTES + half * 128);
                multiply_v(o, half, x, weights_of(i));
            }
            __syncwarp();
            if (lane == i) mbar_arrive(own);
        }
        c += TILE_CHUNKS;
        if (c >= last) {
            reduce_columns<false>(l, total);  // beside the last products
            wgmma_wait<0>();
            break;
        }
        slot0 += TILE_CHUNKS;
        if (slot0 >= ring.slots) {
            slot0 -= ring.slots;
            turn++;
        }
        float next[ACC];  // apart from s, which is not needed from here on
        rows = rows_of_k();
        ldmatrix4(r[0], rows);
#pragma unroll
        for (int k = 0; k < K_UNITS; k++) {
            u32(&x)[2][4] = a[(2 * TILE_CHUNKS + k) % 3];
            wgmma_wait<2>();
            widen_k(x, r[0]);
            if (k + 1 < K_UNITS) ldmatrix4(r[0], rows + (k + 1) * 32);
            issue_k(next, x, queries + (k / 2 * SWIZZLED + k % 2 * 64) / 16, k > 0);
        }
        wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < ACC; i++) s[i] = next[i];
    }

    // The item's result goes to `out`, or this CTA's part of it to `partial`.
    if (NT == 8 || !(lane & 4)) *(float2*)&sh.sums[warp][my_column()] = make_float2(total[0], total[1]);
    named_sync(1, WARPS * 32);
#if CLUSTER == 2
    if (paired) {
        finish_pair(p, it, sh, to, o, warp);
        return true;
    }
#endif
    if (threadIdx.x < NH) {
        float sum = sum_of(sh, threadIdx.x), m = sh.m[threadIdx.x];
        if (to.whole) {
            store_lse(p, it, threadIdx.x, m, sum);
        } else if (to.boxed) {
            for (int i = 0; i < CLUSTER; i++) store_at(at_rank(to.ml + (to.rank * NH + threadIdx.x) * 8, i), m, sum);
        } else {
            p.ml[(i64)to.slot * CLUSTER * NH + threadIdx.x] = make_float2(m, sum);
        }
        sh.scale[threadIdx.x] = inverse_sum(p, sum);
    }
    named_sync(1, WARPS * 32);
    // A loop each: what is fetched once should be short.
    if (to.whole) {
#pragma unroll
        for (int n = 0; n < NT; n++) {
            int col = 8 * n + 2 * t;
            float2 inv = *(const float2*)&sh.scale[col];
            Target out = target_of(p, it, col);
#pragma unroll
            for (int j = 0; j < 4; j++)
                store_out(out, 16 * group + 4 * j + w,
                          make_float4(o[j][4 * n], o[j][4 * n + 1], o[j][4 * n + 2], o[j][4 * n + 3]), inv.x, inv.y);
        }
    } else if (to.boxed) {
        cluster_sync();  // all rings of the cluster are empty
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int mt = 16 * group + 4 * j + w;
            u32 at = at_rank(to.data, mt / SLICE) + ((to.rank * SLICE + mt % SLICE) * NT * 32 + lane) * 16;
#pragma unroll
            for (int n = 0; n < NT; n++)
                store_at(at + n * 512, make_float4(o[j][4 * n], o[j][4 * n + 1], o[j][4 * n + 2], o[j][4 * n + 3]));
        }
    } else {
        float4* at = p.partial + ((i64)to.slot * TILES + (16 * group + w) * NT) * 32 + lane;
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int n = 0; n < NT; n++)
                at[(4 * j * NT + n) * 32] = make_float4(o[j][4 * n], o[j][4 * n + 1], o[j][4 * n + 2], o[j][4 * n + 3]);
    }
    named_sync(1, WARPS * 32);
    return to.whole;
}

extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(THREADS, 1)
    kvlab_mla_many_heads(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) u8 dynamic[];
    Shared& sh = *(Shared*)dynamic;
    auto serve = [&](const Bounds&) {
        if (threadIdx.x < 1 + NT / 2) {
            mbar_init(smem_u32(sh.got + threadIdx.x), 1);
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        return false;
    };
    auto use = [&](const Item& it, const Ring& ring, const Sink& to, int done) {
        return consume(p, it, ring, sh, to, done);
    };
    run(p, sh.meet, dynamic + FIXED_SHARED, WARPS, serve, use);
}
