// Steps that need no schedule, of mla_few_heads.cu.
//
// What a short step takes is one load's latency behind another, so Q's are under way before the lengths are known, and
// no plan is made: lone CTAs or clusters share a request evenly, as long as PASSES times 128 tokens are enough for each
// CTA. It takes its tokens in passes of 128, of which two are under way, a warp 16 of a pass for the scores and 64 of
// the dims for the output. The CTAs of a cluster add their results up slice by slice; what several have of a request
// goes through memory, and the last to be done adds it up. Items of 8 columns are the quickest; where there are not
// enough CTAs to have them in one pass, they are of all NH.

#define PASS (CHUNK * WARPS)
#define RING_CHUNKS 12  // of the two passes' 16 lie in the ring, the others in ShortShared

static_assert(WARPS == 8 && (CLUSTER > 1 || NT == 1), "a warp has 64 dims, a lone CTA one block of columns");

struct ShortShared {
    uint2 p[WARPS][NT][32];  // B fragments
    __align__(16) float top[WARPS][NH], sum[WARPS][NH];
    float4 box[CLUSTER][SLICE][NT][32];  // of each CTA, this one's slice of the dims
    __align__(16) u8 rows[2 * WARPS - RING_CHUNKS][SLOT_BYTES];
};
static_assert(sizeof(ShortShared) <= sizeof(Shared::exchange) + sizeof(Shared::merge), "neither is used then");

// What a CTA has to do.
struct Share {
    Item it;
    int head;         // the first of its columns
    int rank;         // of this CTA in its cluster, 0 where the cluster does not share
    int base, count;  // its tokens: [base, base + count)
    i64 start;        // of the request in the table
};

// As for any item, but a column is a head, of the request's one query token.
__device__ __forceinline__ Target target_of(const Params& p, const Share& my, int col) {
    int head = my.head + col;
    u16* at = p.out + my.it.request * p.out_token + head * p.out_head + 2 * ((threadIdx.x & 31) >> 2);
    return {head < p.heads ? at : 0, head + 1 < p.heads ? at + p.out_head : 0};
}
__device__ __forceinline__ void store_lse(const Params& p, const Share& my, int col, float m, float l) {
    int head = my.head + col;
    if (!p.lse || head >= p.heads) return;
    p.lse[(i64)my.it.request * p.heads + head] = l == 0.f ? -INFINITY_F : (m + log2_fast(l)) * p.lse_factor;
}

// Are `units` clusters enough, `share` chunks for each? `chunks` of request number lane; so are the clusters it takes,
// `parts` for each block of columns, and `end`, where they end.
__device__ __forceinline__ bool is_enough(const Params& p, int chunks, int blocks, int units, int share, int& parts,
                                          int& end) {
    parts = chunks ? divide_up(chunks, share) : (threadIdx.x & 31) < p.bs;
    end = warp_scan(parts * blocks);
    return __shfl_sync(~0u, end, 31) <= units;
}

// N blocks of 8 columns, whose Q `x` has, a warp a column. Everybody of the cluster calls it, if `spread`.
template <int N>
__device__ __forceinline__ void attend(const Params& p, Shared& sh, u8* ring, const Share& my, const uint2 (&x)[N][5],
                                       bool spread) {
    int thread = thread_now(), lane = thread & 31, warp = thread >> 5, g = lane >> 2, t = lane & 3;
    ShortShared& box = *(ShortShared*)&sh;
    auto rows_of = [&](int chunk) {  // of the two passes
        return chunk < RING_CHUNKS ? smem_u32(ring) + chunk * SLOT_BYTES : smem_u32(box.rows[chunk - RING_CHUNKS]);
    };
    auto look_up = [&](int pass) {
        int own = PASS * pass + CHUNK * warp + (lane & 15);
        return own < my.count ? entry_of(p, my.it, my.start, my.base + own) : (Entry)-1;
    };
    auto fetch = [&](int pass, Entry entry) {  // which of the warp's tokens are any
        int own = PASS * pass + CHUNK * warp, slot = slot_of(p, entry, my.base + own + (lane & 15));
        if (own < my.count) {
            u32 rows = rows_of((pass & 1) * WARPS + warp);
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
        return __ballot_sync(~0u, slot >= 0);
    };
    auto commit = [] { asm volatile("cp.async.commit_group;" ::: "memory"); };
    Entry entry = look_up(0), later = look_up(1);
#pragma unroll
    for (int n = 0; n < N; n++) {
        float up = lift(largest(x[n]));
        if (lane == 0) sh.down[8 * n + warp] = unlift(up);
#pragma unroll
        for (int j = 0; j < (ROPE ? 5 : 4); j++) {
            float a, b, d, e;
            unpack_q(x[n][j].x, a, b);
            unpack_q(x[n][j].y, d, e);
            if (j < 4 || lane < 16)
                sh.q[8 * j + g][n][warp * 4 + t] = make_uint2(pack_half(a * up, b * up), pack_half(d * up, e * up));
        }
    }
    u32 valid = fetch(0, entry), valid_next = 0;
    commit();
    if (my.count > PASS) {
        valid_next = fetch(1, later);
        later = look_up(2);
    }
    commit();
    named_sync(1, WARPS * 32);

    u32 lane_at = (lane & 15) * ROW_PITCH + (lane >> 4) * 16;
    float o[4][N][4] = {}, m[N][2], l[N][2];
#pragma unroll
    for (int n = 0; n < N; n++) {
        m[n][0] = m[n][1] = NOTHING;
        l[n][0] = l[n][1] = 0.f;
    }
    auto one_pass = [&](int pass) {
        int left = my.count - PASS * pass;  // tokens from this pass on
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        __syncwarp();
        float s[2][N][4] = {};
        if (CHUNK * warp < left) {
            u32 rows = rows_of((pass & 1) * WARPS + warp) + lane_at;
#pragma unroll 4
            for (int k = 0; k < (RANK + ROPE) / 16; k += 2) {
                u32 r[4], a[4];
                ldmatrix4(r, rows + k * 16);
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    widen(r[2 * h], a[0], a[2]);
                    widen(r[2 * h + 1], a[1], a[3]);
#pragma unroll
                    for (int n = 0; n < N; n++) {
                        uint2 q = sh.q[k + h][n][lane];
                        mma(s[h][n], a, q.x, q.y);
                    }
                }
            }
        }
#pragma unroll
        for (int n = 0; n < N; n++) {
            float2 down = *(const float2*)&sh.down[8 * n + 2 * t];
            float top[2];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float y = logit2(s[0][n][i] + s[1][n][i], p.scale * (i & 1 ? down.y : down.x), p.cap_log2);
                s[0][n][i] = valid >> (g + 4 * (i & 2)) & 1 ? y : -INFINITY_F;
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                top[i] = fmaxf(s[0][n][i], s[0][n][i + 2]);
#pragma unroll
                for (int d = 4; d < 32; d <<= 1) top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], d));
            }
            if (lane < 4) *(float2*)&box.top[warp][8 * n + 2 * t] = make_float2(top[0], top[1]);
        }
        named_sync(1, WARPS * 32);
#pragma unroll
        for (int n = 0; n < N; n++) {
            float f[2] = {m[n][0], m[n][1]};
#pragma unroll
            for (int i = 0; i < WARPS; i++) {
                float2 y = *(const float2*)&box.top[i][8 * n + 2 * t];
                m[n][0] = fmaxf(m[n][0], y.x - P_BIAS);
                m[n][1] = fmaxf(m[n][1], y.y - P_BIAS);
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                s[0][n][i] = exp2_fast(s[0][n][i] - m[n][i]);
                s[0][n][i + 2] = exp2_fast(s[0][n][i + 2] - m[n][i]);
                if (pass) {
                    f[i] = exp2_fast(f[i] - m[n][i]);
                    l[n][i] *= f[i];
#pragma unroll
                    for (int k = 0; k < 4; k++) {
                        o[k][n][i] *= f[i];
                        o[k][n][i + 2] *= f[i];
                    }
                }
                l[n][i] += s[0][n][i] + s[0][n][i + 2];
            }
            if (left <= PASS) {
                float sum[2] = {l[n][0], l[n][1]};
#pragma unroll
                for (int i = 0; i < 2; i++)
#pragma unroll
                    for (int d = 4; d < 32; d <<= 1) sum[i] += __shfl_xor_sync(~0u, sum[i], d);
                if (lane < 4) *(float2*)&box.sum[warp][8 * n + 2 * t] = make_float2(sum[0], sum[1]);
            }
            box.p[warp][n][lane] = make_uint2(transpose8(pack_half(s[0][n][0], s[0][n][1])),
                                              transpose8(pack_half(s[0][n][2], s[0][n][3])));
        }
        named_sync(1, WARPS * 32);
#pragma unroll 1
        for (int c = 0; c < WARPS && CHUNK * c < left; c++) {
            u32 latent = rows_of((pass & 1) * WARPS + c) + lane_at + warp * 64;
#pragma unroll
            for (int k = 0; k < 4; k += 2) {
                u32 r[4], a[4];
                ldmatrix4_trans(r, latent + k * 16);
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    widen(__byte_perm(r[2 * h], 0, 0x3120), a[0], a[1]);
                    widen(__byte_perm(r[2 * h + 1], 0, 0x3120), a[2], a[3]);
#pragma unroll
                    for (int n = 0; n < N; n++) {
                        uint2 b = box.p[c][n][lane];
                        mma(o[k + h][n], a, b.x, b.y);
                    }
                }
            }
        }
    };
    one_pass(0);  // apart from the others, so that the only one of most steps lies in one piece
#pragma unroll 1
    for (int pass = 1; PASS * pass < my.count; pass++) {
        valid = valid_next;
        if (PASS * (pass + 1) < my.count) {
            named_sync(1, WARPS * 32);  // all have read the rows of the pass before
            valid_next = fetch(pass + 1, later);
            later = look_up(pass + 2);
        }
        commit();
        one_pass(pass);
    }
#pragma unroll
    for (int n = 0; n < N; n++) {
        l[n][0] = l[n][1] = 0.f;
#pragma unroll
        for (int i = 0; i < WARPS; i++) {
            float2 y = *(const float2*)&box.sum[i][8 * n + 2 * t];
            l[n][0] += y.x;
            l[n][1] += y.y;
        }
    }
    if (!spread) {
#pragma unroll
        for (int n = 0; n < N; n++) {
            int col = 8 * n + 2 * t;
            Target to = target_of(p, my, col);
            float i0 = inverse_sum(p, l[n][0]), i1 = inverse_sum(p, l[n][1]);
#pragma unroll
            for (int k = 0; k < 4; k++)
                store_out(to, 4 * warp + k, make_float4(o[k][n][0], o[k][n][1], o[k][n][2], o[k][n][3]), i0, i1);
            if (warp == n && lane < 4) {
                store_lse(p, my, col, m[n][0], l[n][0]);
                store_lse(p, my, col + 1, m[n][1], l[n][1]);
            }
        }
        return;
    }
#if CLUSTER > 1
    cluster_wait();  // the others have begun: `run` arrived
    constexpr int sources = WARPS / CLUSTER;  // warps that have dims of one slice
    u32 there = at_rank(smem_u32(box.box[my.rank][warp % sources * 4][0] + lane), warp / sources);
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
        for (int n = 0; n < N; n++)
            store_at(there + (k * NT + n) * 512, make_float4(o[k][n][0], o[k][n][1], o[k][n][2], o[k][n][3]));
    if (lane < 4 && warp < CLUSTER)
#pragma unroll
        for (int n = 0; n < N; n++)
            store_at(at_rank(smem_u32(&sh.meet.box[my.rank][8 * n + 2 * t]), warp),
                     make_float4(m[n][0], l[n][0], m[n][1], l[n][1]));
    cluster_sync();
    // A warp's tiles of this CTA's slice, all of the same 8 columns.
    constexpr int adders = SLICE * N < WARPS ? SLICE * N : WARPS, tiles = SLICE * N / adders, step = adders / N;
    if (warp >= adders) return;
    int nt = warp % N, tile0 = my.rank * SLICE + warp / N;
#else
    constexpr int adders = WARPS, tiles = 4, step = 1;
    int nt = 0, tile0 = 4 * warp;
#endif
    int col = 8 * nt + 2 * t, unit0 = my.it.unit0;
    float4 sum[tiles];
    float m0, m1, l0, l1;
    auto begin = [&] {
        m0 = m1 = NOTHING;
        l0 = l1 = 0.f;
#pragma unroll
        for (int k = 0; k < tiles; k++) sum[k] = make_float4(0.f, 0.f, 0.f, 0.f);
    };
    auto add = [&](float4 c, const float4(&y)[tiles]) {
        float t0 = fmaxf(m0, c.x), t1 = fmaxf(m1, c.z);
        float f0 = weight_of(c.x, t0), f1 = weight_of(c.z, t1), g0 = weight_of(m0, t0), g1 = weight_of(m1, t1);
        m0 = t0;
        m1 = t1;
        l0 = l0 * g0 + f0 * c.y;
        l1 = l1 * g1 + f1 * c.w;
#pragma unroll
        for (int k = 0; k < tiles; k++) {
            sum[k].x = sum[k].x * g0 + f0 * y[k].x;
            sum[k].y = sum[k].y * g1 + f1 * y[k].y;
            sum[k].z = sum[k].z * g0 + f0 * y[k].z;
            sum[k].w = sum[k].w * g1 + f1 * y[k].w;
        }
    };
#if CLUSTER > 1
    begin();
#pragma unroll
    for (int i = 0; i < CLUSTER; i++) {
        float4 y[tiles];
#pragma unroll
        for (int k = 0; k < tiles; k++) y[k] = box.box[i][warp / N + k * step][nt][lane];
        add(*(const float4*)&sh.meet.box[i][col], y);
    }
#else
    m0 = m[0][0];
    m1 = m[0][1];
    l0 = l[0][0];
    l1 = l[0][1];
#pragma unroll
    for (int k = 0; k < tiles; k++) sum[k] = make_float4(o[k][0][0], o[k][0][1], o[k][0][2], o[k][0][3]);
#endif
    if (my.it.parts > 1) {
        auto part_at = [&](int i) { return p.partial + ((i64)(unit0 + i) * TILES + tile0 * NT + nt) * 32 + lane; };
        auto sums_at = [&](int i) { return (float4*)(p.ml + ((unit0 + i) * CLUSTER + my.rank) * NH + col); };
        int part = blockIdx.x / CLUSTER - unit0;
#pragma unroll
        for (int k = 0; k < tiles; k++) part_at(part)[k * step * NT * 32] = sum[k];
        if (warp < N && lane < 4) *sums_at(part) = make_float4(m0, l0, m1, l1);
        named_sync(2, adders * 32);
        if (threadIdx.x == 0) {
            u32 before, *ticket = p.tickets + unit0 * CLUSTER + my.rank;
            asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(ticket) : "memory");
            if (before == (u32)(my.it.parts - 1)) *ticket = 0;  // for the next launch
            sh.meet.flag = before == (u32)(my.it.parts - 1);
        }
        named_sync(2, adders * 32);
        if (!sh.meet.flag) return;
        begin();
#pragma unroll 4
        for (int i = 0; i < my.it.parts; i++) {
            float4 y[tiles];
#pragma unroll
            for (int k = 0; k < tiles; k++) y[k] = __ldcg(part_at(i) + k * step * NT * 32);
            add(__ldcg(sums_at(i)), y);
        }
    }
    Target to = target_of(p, my, col);
    float i0 = inverse_sum(p, l0), i1 = inverse_sum(p, l1);
#pragma unroll
    for (int k = 0; k < tiles; k++) store_out(to, tile0 + k * step, sum[k], i0, i1);
    if (my.rank == 0 && warp < N && lane < 4) {
        store_lse(p, my, col, m0, l0);
        store_lse(p, my, col + 1, m1, l1);
    }
}

// False where the step is none of those. Warp PLANNER has the bounds.
__device__ __forceinline__ bool serve_short(const Params& p, Shared& sh, u8* ring, const Bounds& bounds) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, blocks = MULTI || NT > 1 ? divide_up(p.heads, 8) : 1;
    if (p.bs > 32 || (MULTI && p.q_indptr) || p.num_ring < RING_CHUNKS) return false;
    Share my;
    Item& it = my.it;
    int block = 0;  // of 8 columns
    uint2 x[1][5];
    auto load = [&](uint2(&to)[5], int of) {
        int head = 8 * of + warp;
        load_query(p, it.request, head < p.heads ? head : 0, to);
    };
    // As if CTA i had block i, which is so where all requests are short enough for one.
    it.request = blocks > 1 ? divide(blockIdx.x, blocks) : blockIdx.x;
    if (blocks > 1) block = blockIdx.x - it.request * blocks;
    bool mine = it.request < p.bs && warp < WARPS;
    if (mine) load(x[0], block);
    int2* requests = (int2*)sh.ml;  // where each starts in a ragged table, and its tokens
    static_assert(sizeof(sh.ml) >= 32 * sizeof(int2), "no one else uses them here");
    if (warp == PLANNER) requests[lane] = make_int2(bounds.from[0], lane < p.bs ? bounds.tokens(0) : 0);
    __syncthreads();
    int tokens = requests[lane].y;
    int unit = blockIdx.x / CLUSTER, units = gridDim.x / CLUSTER, parts = 1, end;
    bool spread = __any_sync(~0u, tokens > PASS), wide = false;
    my.rank = my.base = 0;
    it.parts = 1;
    it.unit0 = unit;
    if (spread) {
        int chunks = (tokens + CHUNK - 1) / CHUNK;
        if (!is_enough(p, chunks, blocks, units, CLUSTER * WARPS, parts, end)) {
            constexpr int most = CLUSTER * WARPS * PASSES;
            if (__any_sync(~0u, chunks > most * units)) return false;
            wide = NT > 1;
            if (wide) blocks = (blocks + NT - 1) / NT;
            int share = divide_up(__reduce_add_sync(~0u, chunks) * blocks, units);
            share = share < CLUSTER * WARPS ? CLUSTER * WARPS : share;
#pragma unroll 1
            while (true) {
                share = (share + CLUSTER - 1) / CLUSTER * CLUSTER;
                if (share > most) return false;
                if (is_enough(p, chunks, blocks, units, share, parts, end)) break;
                // The least share with which some request has a part less, and some more: lengths may all differ.
                int next = __reduce_min_sync(~0u, parts > 1 ? divide_up(chunks, parts - 1) : most + 1);
                share += share / 16;
                share = share < next ? next : share;
            }
        }
        if (unit >= __shfl_sync(~0u, end, 31) || warp >= WARPS) return true;
        my.rank = CLUSTER > 1 ? cluster_rank() : 0;
        it.request = __ffs(__ballot_sync(~0u, end > unit)) - 1;
        it.parts = __shfl_sync(~0u, parts, it.request);
        unit -= __shfl_sync(~0u, end - parts * blocks, it.request);  // among the request's
        block = blocks > 1 ? divide(unit, it.parts) : 0;
        it.unit0 = blockIdx.x / CLUSTER - (unit - block * it.parts);
        if (wide) block *= NT;
        else load(x[0], block);
    } else {
        if (p.bs * blocks > gridDim.x) return false;
        if (!mine) return true;
    }
    my.head = 8 * block;
    it.length = requests[it.request].y;
    my.start = PAGED ? it.request * p.table_stride : requests[it.request].x;
    my.count = it.length;
    if (spread) {  // whole chunks for all but the last
        int chunks = divide_up(divide_up(it.length, CHUNK), it.parts), each = (chunks + CLUSTER - 1) / CLUSTER;
        int part = blockIdx.x / CLUSTER - it.unit0, from = my.rank * each;
        from = from < chunks ? from : chunks;
        int to = from + each < chunks ? from + each : chunks;
        my.base = (part * chunks + from) * CHUNK;
        my.count = (to - from) * CHUNK;
        my.count = it.length - my.base < my.count ? it.length - my.base : my.count;
    }
#if NT > 1
    if (wide) {
        uint2 all[NT][5];
#pragma unroll
        for (int n = 0; n < NT; n++) load(all[n], block + n);
        attend<NT>(p, sh, ring, my, all, spread);
        return true;
    }
#endif
    attend<1>(p, sh, ring, my, x, spread);
    return true;
}
