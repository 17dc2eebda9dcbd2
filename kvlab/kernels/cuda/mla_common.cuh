// What both Hopper MLA decode kernels share: parameters, PTX in C, the schedule, the load ring and the merge.
//
// Work is cut into chunks of 16 tokens. The items of a step are (request, block of NH query columns), a query
// column being one head of one query token. All items lie on one line, item after item; cluster u of a persistent
// grid takes the interval [u * span, (u + 1) * span) of it. Items are as long as their chunks and an overhead,
// or, where that costs little, padded to whole spans, so that no cluster has two. Lengths are read on the device,
// so one captured graph serves every length.
//
// The CTAs of a cluster share an interval's chunks evenly. Of the last item that a cluster takes, mostly its only
// one, they put their results into each other's shared memory, of others into global memory, and each adds up a
// slice of the dims (two that multiply many heads and have an item to themselves: half of its columns); what several
// clusters have of an item is added up, slice by slice, by whoever is last. All sums are in a fixed order.
//
// Compile-time: NH columns an item, ROPE rope dims (64 or 0), E5M2 (else e4m3), HALF (FP16 Q and out, else
// BF16), MULTI (several query tokens or more than NH heads; else an item is a request and a column a head), CAP
// (a logit cap), PAGED (a page table, else ragged), INDEX64 (table entries), PRODUCERS warps that load (2, 4 or
// 8), CLUSTER CTAs (1, 2, 4 or 8). By the file: MERGE_WARPS that do not load, PLANNER (the warp that makes the
// schedule, first or last), LEAN (few instructions for what is not a product). NVRTC compiles without any header.
//
// A step of one short request is over in some thousand cycles, and code that runs once costs about 35 cycles a
// 128-byte line to fetch: what is not in the loop over chunks is written to be short.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define RANK 512
#define ROW_BYTES (RANK + ROPE)
#define CHUNK 16
// 592 = 37 * 16: eight rows' 16-byte pieces fall into distinct banks for ldmatrix, plain and transposed.
#define ROW_PITCH 592
#define SLOT_BYTES (CHUNK * ROW_PITCH)
#define NT (NH / 8)
#define TILES (RANK / 16 * NT)
#define MAX_FAN (CLUSTER == 8 ? 16 : 8)  // more parts than this are merged in two levels
#if CLUSTER > 1
#define CLUSTER_DIMS __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTER_DIMS
#endif
#define INFINITY_F __int_as_float(0x7f800000)
// The running maximum of a column that has seen nothing: below all logits, and finite, so that no difference of
// two is NaN.
#define NOTHING -1e30f
// P is kept as 2^(x - m + P_BIAS): as far up in FP16's range as a running maximum that may lag by P_LAG allows.
#define P_BIAS 8.0f
#define P_LAG 7.0f

struct Params {
    const u16* q_nope;
    const u16* q_pe;
    const u8* rows;
    const void* table;    // kv_indices, or page_table
    const int* bounds;    // kv_indptr [bs + 1], or lengths [bs]
    const int* q_indptr;  // [bs + 1] or null: one query token a request
    u16* out;
    float* lse;       // [tokens, heads] or null
    float4* partial;  // [slots][TILES][32] accumulators in fragment order; 2 slots a CTA, then 2 a cluster
    float2* ml;       // [slots][CLUSTER][NH] running maximum and sum
    u32* tickets;     // [3][CTAs], zero between launches
    i64 table_stride;
    i64 qn_token, qn_head, qp_token, qp_head, out_token, out_head;  // in elements
    u32 row_stride;  // bytes
    int num_slots, bs, heads, tokens, page_size, causal, num_ring, overhead, slack, min_span, min_part;
    float scale;        // logits per q.k, without log2(e) where there is a cap
    float cap_log2;     // logit_cap * log2(e), 0 for none
    float lse_factor;   // ln 2 for a natural logarithm, 1 for base 2
    float v_scale;
};

// What all lanes of a warp have alike; LEAN kernels show it to the compiler, which then keeps it in the warp's own
// registers.
template <class T>
__device__ __forceinline__ T same(T x) {
#if LEAN
    return __shfl_sync(~0u, x, 0);
#else
    return x;
#endif
}
__device__ __forceinline__ u32 smem_u32(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void mbar_init(u32 bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void mbar_arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void mbar_wait(u32 bar, u32 parity) {
    u32 done;
    do {
        asm volatile(
            "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
            : "=r"(done)
            : "r"(bar), "r"(parity)
            : "memory");
    } while (!done);
}
// 16 bytes to shared memory, or 16 zeros.
__device__ __forceinline__ void copy16(u32 dst, const u8* src, bool real) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(real ? 16 : 0) : "memory");
}
__device__ __forceinline__ int cluster_rank() {
    int r;
    asm("mov.u32 %0, %cluster_ctarank;" : "=r"(r));
    return r;
}
// Say that this CTA's barriers exist; they are all that others touch before they know more.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("fence.mbarrier_init.release.cluster; barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
// Of all threads that have not ended.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// Arrive at the barrier that CTA `rank` of this cluster has where this CTA has `bar`.
__device__ __forceinline__ void mbar_arrive_at(u32 bar, int rank) {
    asm volatile(
        "{.reg .b32 a; mapa.shared::cluster.u32 a, %0, %1; mbarrier.arrive.release.cluster.shared::cluster.b64 _, [a];}" ::"r"(
            bar),
        "r"(rank)
        : "memory");
}
__device__ __forceinline__ u32 at_rank(u32 at, int rank) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
    return there;
}
__device__ __forceinline__ void store_at(u32 there, float4 x) {
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(there), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
                 : "memory");
}
__device__ __forceinline__ void store_at(u32 there, float x, float y) {
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1,%2};" ::"r"(there), "f"(x), "f"(y) : "memory");
}
__device__ __forceinline__ void mbar_wait_cluster(u32 bar, u32 parity) {
    u32 done;
    do {
        asm volatile(
            "{.reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
            : "=r"(done)
            : "r"(bar), "r"(parity)
            : "memory");
    } while (!done);
}
__device__ __forceinline__ void named_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void ldmatrix4(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at));
}
__device__ __forceinline__ void ldmatrix2(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(at));
}
__device__ __forceinline__ void ldmatrix4_trans(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at));
}
__device__ __forceinline__ u32 transpose8(u32 x) {
    u32 y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}
// Four FP8 bytes to two FP16 pairs, exact.
__device__ __forceinline__ void widen(u32 x, u32& lo, u32& hi) {
#if E5M2
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e5m2x2 %0, a; cvt.rn.f16x2.e5m2x2 %1, b;}"
        : "=r"(lo), "=r"(hi)
        : "r"(x));
#else
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; cvt.rn.f16x2.e4m3x2 %1, b;}"
        : "=r"(lo), "=r"(hi)
        : "r"(x));
#endif
}
__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float log2_fast(float x) {
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float rcp_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float4 load_shared4(u32 at) {
    float4 x;
    asm volatile("ld.shared::cta.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(at)
                 : "memory");
    return x;
}
__device__ __forceinline__ u32 pack_half(float lo, float hi) {
    u32 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
    return y;
}
__device__ __forceinline__ u32 pack_out(float lo, float hi) {
#if HALF
    return pack_half(lo, hi);
#else
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
    return y;
#endif
}
__device__ __forceinline__ void unpack_q(u32 x, float& lo, float& hi) {
#if HALF
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}"
        : "=f"(lo), "=f"(hi)
        : "r"(x));
#else
    lo = __uint_as_float(x << 16);
    hi = __uint_as_float(x & 0xffff0000u);
#endif
}
// A power of two that lifts a column of Q whose largest magnitude is `top` to below 2^14: exact for BF16 and
// FP16 alike, and FP16 then holds every element to 2^-30 of the largest.
__device__ __forceinline__ float lift(float top) {
    int e = (int)((__float_as_uint(top) >> 23) & 255);
    int field = e == 255 ? 127 : 267 - e;
    return __uint_as_float((u32)(field > 253 ? 253 : field) << 23);
}
__device__ __forceinline__ float unlift(float l) { return __uint_as_float((254u << 23) - __float_as_uint(l)); }

// The largest magnitude of the five pairs of pairs that the lanes of a warp hold, NaN above all.
__device__ __forceinline__ float largest(const uint2 (&x)[5]) {
    u32 most = 0;  // magnitudes order as their bits do
#pragma unroll
    for (int j = 0; j < 5; j++) {
        u32 a = x[j].x & 0x7fff7fffu, b = x[j].y & 0x7fff7fffu;
        asm("{.reg .b32 m; max.u16x2 m, %1, %2; max.u16x2 %0, %0, m;}" : "+r"(most) : "r"(a), "r"(b));
    }
    most = __reduce_max_sync(~0u, most > most << 16 ? most >> 16 : most & 0xffffu);
    float top, unused;
    unpack_q(most, top, unused);
    return top;
}

// One column of Q, eight bytes a lane: four times 32 lanes' of the latent dims, then 16 lanes' of the rope.
__device__ __forceinline__ void load_query(const Params& p, int token, int head, uint2 (&x)[5]) {
    int lane = threadIdx.x & 31;
    const uint2* nope = (const uint2*)(p.q_nope + token * p.qn_token + head * p.qn_head) + lane;
#pragma unroll
    for (int j = 0; j < 4; j++) x[j] = __ldcg(nope + 32 * j);
#if ROPE
    x[4] = __ldcg((const uint2*)(p.q_pe + token * p.qp_token + head * p.qp_head) + (lane & 15));
#else
    x[4] = x[3];
#endif
}

// Logit (times log2 e) of a raw dot product.
__device__ __forceinline__ float logit2(float dot, float scale, float cap_log2) {
    float x = dot * scale;
#if CAP
    // cap * tanh(x) as cap * (1 - 2 / (exp(2x) + 1)); `scale` holds 1 / cap then.
    x = cap_log2 * (1.f - 2.f * rcp_fast(exp2_fast(2.885390082f * x) + 1.f));
#endif
    return x;
}

struct Item {
    int request, block;   // which request, which block of NH columns
    int first, last;      // chunks of this CTA, [first, last), none maybe
    int active;           // CTAs of this cluster that have any
    int length;           // the request's tokens
    int q_start, q_len;   // query tokens
    int unit0, parts;     // first cluster that has a part, number of parts
    int start;            // of its entries in a ragged table, -1 where that is to be loaded
    __device__ __forceinline__ bool is_mine() const { return active == 1 && parts == 1; }
};

struct Plan {
    // In shared memory: where a request starts on the line [requests + 1], and its tokens; unset where requests is 0,
    // each cluster having an item of its own.
    const int *prefix, *length;
    int requests, span, overhead, lo, hi;
    int unit, rank;  // cluster, and CTA in it
};

__device__ __forceinline__ int q_begin(const Params& p, int r) {
    if (!MULTI || !p.q_indptr) return r;
    return r <= p.bs ? p.q_indptr[r] : p.tokens;
}

// Tokens of a request; of unused query tokens none.
__device__ __forceinline__ int tokens_of(const Params& p, int r) {
    if (MULTI && r >= p.bs) return 0;
    int n = PAGED ? __ldcg(p.bounds + r) : __ldcg(p.bounds + r + 1) - __ldcg(p.bounds + r);
    return n < 0 ? 0 : n;
}

__device__ __forceinline__ int warp_scan(int x) {
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
        int up = __shfl_up_sync(~0u, x, d);
        if (lane >= d) x += up;
    }
    return x;
}

// x / y for 0 <= x < 2^31, 0 < y, where the quotient is far below 2^22: a float's guess, put right.
__device__ __forceinline__ int divide(int x, int y) {
    int q = (int)((float)x * rcp_fast((float)y));
    q -= q && q * y > x;
    return q + ((q + 1) * y <= x);
}
__device__ __forceinline__ int divide_up(int x, int y) { return x ? divide(x - 1, y) + 1 : 0; }

struct Load {
    int total, items, most;  // chunks with overhead, items, chunks of the longest
};

// Span and overhead: items whole spans long, each cluster part of one at most, where the longest spans that needs
// are little longer than even ones.
__device__ __forceinline__ int2 choose_span(const Params& p, const Load& load) {
    int ctas = gridDim.x / CLUSTER, even = divide(load.total, ctas) + 1;
    even = even < p.min_span ? p.min_span : even;
    if (load.items && load.items <= ctas) {
        int whole = divide_up(load.most, divide(ctas, load.items));
        whole = whole < p.min_span ? p.min_span : whole;
        if (whole <= even + even / 16 + p.slack) return make_int2(whole, 0);
    }
    return make_int2(even, p.overhead);
}

// What an item of `chunks` chunks takes of the line.
__device__ __forceinline__ int item_weight(int chunks, int span, int overhead) {
    if (!chunks) return 0;
    return overhead ? chunks + overhead : divide_up(chunks, span) * span;
}

// Where requests start on the line, by one warp: blocks in `prefix`, tokens in `length`; returns span and overhead.
__device__ __forceinline__ int2 lay_out(const Params& p, int* prefix, const int* length, int requests) {
    int lane = threadIdx.x & 31, each = (requests + 31) >> 5, first = lane * each;
    int last = first + each < requests ? first + each : requests;
    Load load = {0, 0, 0};
#pragma unroll 1
    for (int r = first; r < last; r++) {
        int chunks = (length[r] + CHUNK - 1) / CHUNK, blocks = chunks ? prefix[r] : 0;
        load.total += blocks * (chunks + p.overhead);
        load.items += blocks;
        load.most = load.most < chunks && blocks ? chunks : load.most;
    }
    load.total = __reduce_add_sync(~0u, load.total);
    load.items = __reduce_add_sync(~0u, load.items);
    load.most = __reduce_max_sync(~0u, load.most);
    int2 span = choose_span(p, load);
    int sum = 0;
#pragma unroll 1
    for (int r = first; r < last; r++) {
        int weight = prefix[r] * item_weight((length[r] + CHUNK - 1) / CHUNK, span.x, span.y);
        prefix[r] = weight;
        sum += weight;
    }
    int at = warp_scan(sum) - sum;
#pragma unroll 1
    for (int r = first; r < last; r++) {
        int weight = prefix[r];
        prefix[r] = at;
        at += weight;
    }
    if (lane == 31) prefix[requests] = at;
    return span;
}

// This cluster's interval of the line.
__device__ __forceinline__ Plan plan_of(const int* prefix, const int* length, int requests, int2 span, int total) {
    Plan plan;
    plan.prefix = prefix;
    plan.length = length;
    plan.requests = requests;
    plan.span = span.x;
    plan.overhead = span.y;
    plan.rank = cluster_rank();
    plan.unit = blockIdx.x / CLUSTER;
    i64 lo = (i64)plan.unit * span.x, hi = lo + span.x;
    plan.lo = lo < total ? (int)lo : total;
    plan.hi = hi < total ? (int)hi : total;
    return plan;
}

// The next item that has chunks in [pos, hi) for this cluster; false when there is none.
__device__ __forceinline__ bool next_item(const Params& p, const Plan& plan, int& pos, Item& it) {
#pragma unroll 1
    while (pos < plan.hi) {
        int lo = 0, hi = plan.requests;  // the last request with prefix <= pos, which is not empty
#pragma unroll 1
        while (hi - lo > 1) {
            int mid = (lo + hi) >> 1;
            if (plan.prefix[mid] <= pos) lo = mid;
            else hi = mid;
        }
        it.request = lo;
        it.length = plan.length[lo];
        int chunks = (it.length + CHUNK - 1) / CHUNK, weight = item_weight(chunks, plan.span, plan.overhead);
        it.block = MULTI ? divide(pos - plan.prefix[lo], weight) : 0;
        int base = plan.prefix[lo] + it.block * weight, start = base + plan.overhead;
        it.first = pos > start ? pos - start : 0;
        it.last = plan.hi - start < chunks ? plan.hi - start : chunks;
        pos = base + weight;
        if (it.last <= it.first) continue;
        it.start = -1;
        it.q_start = q_begin(p, lo);
        it.q_len = MULTI ? q_begin(p, lo + 1) - it.q_start : 1;
        it.unit0 = divide(start, plan.span);
        it.parts = divide(start + chunks - 1, plan.span) - it.unit0 + 1;
        it.active = 1;
        if (CLUSTER > 1) {
            int each = (it.last - it.first + CLUSTER - 1) / CLUSTER;
            each = each < p.min_part ? p.min_part : each;
            it.active = divide_up(it.last - it.first, each);
            int first = it.first + plan.rank * each, last = first + each;
            it.first = first < it.last ? first : it.last;
            it.last = last < it.last ? last : it.last;
        }
        return true;
    }
    return false;
}

#define BOUND_ROUNDS (CLUSTER > 1 ? 3 : 5)  // of 32 requests whose bounds one warp keeps
__device__ __forceinline__ int blocks_of(const Params& p) { return MULTI ? divide_up(p.heads, NH) : 1; }
// This cluster's request where each has an item of its own.
__device__ __forceinline__ int request_alone(int blocks) {
    int unit = blockIdx.x / CLUSTER;
    return MULTI ? divide(unit, blocks) : unit;
}
// Bounds of few requests, lane l's those of l, l + 32 ..., and last this cluster's own. One warp asks for them: all CTAs
// ask for the same few lines, and the L2 cache answers one after the other. The first look at them waits for memory.
struct Bounds {
    int from[BOUND_ROUNDS + 1], to[BOUND_ROUNDS + 1];

    __device__ __forceinline__ void load(const Params& p, int i, int request) {
        request = request < p.bs ? request : p.bs - 1;
        from[i] = __ldcg(p.bounds + request);
        to[i] = PAGED ? 0 : __ldcg(p.bounds + request + 1);
    }
    __device__ __forceinline__ void load(const Params& p, int own) {
        load(p, BOUND_ROUNDS, own);
#pragma unroll
        for (int i = 0; i < BOUND_ROUNDS; i++) {
            from[i] = to[i] = 0;
            if (!i || 32 * i < p.bs) load(p, i, (threadIdx.x & 31) + 32 * i);
        }
    }
    __device__ __forceinline__ int tokens(int i) const {
        int n = PAGED ? from[i] : to[i] - from[i];
        return n < 0 ? 0 : n;
    }
    __device__ __forceinline__ int chunks(int i) const { return (tokens(i) + CHUNK - 1) / CHUNK; }
};
// What lay_out and next_item come to where items are whole and more than half as many as clusters: each cluster has its
// own. False where they are not.
__device__ __forceinline__ bool plan_alone(const Params& p, const Bounds& of, Plan& plan, Item& it, bool& more) {
    int units = gridDim.x / CLUSTER, unit = blockIdx.x / CLUSTER, blocks = blocks_of(p), items = p.bs * blocks;
    if (items > units || units >= 2 * items) return false;
    int total = 0, most = 0;
    bool empty = false;
#pragma unroll
    for (int i = 0; i < BOUND_ROUNDS; i++) {
        int chunks = of.chunks(i);
        bool real = (int)(threadIdx.x & 31) + 32 * i < p.bs;
        total += real ? chunks : 0;
        most = most < chunks ? chunks : most;
        empty |= real && !chunks;
    }
    total = (__reduce_add_sync(~0u, total) + p.bs * p.overhead) * blocks;
    most = __reduce_max_sync(~0u, most);
    int even = divide(total, units) + 1, whole = most < p.min_span ? p.min_span : most;
    even = even < p.min_span ? p.min_span : even;
    if (__any_sync(~0u, empty) || whole > even + even / 16 + p.slack) return false;
    int request = request_alone(blocks), chunks = of.chunks(BOUND_ROUNDS), each = (chunks + CLUSTER - 1) / CLUSTER;
    each = each < p.min_part ? p.min_part : each;
    more = request < p.bs;
    plan.requests = 0;  // none without tokens
    plan.span = whole;
    plan.overhead = 0;
    plan.rank = cluster_rank();
    plan.unit = unit;
    plan.lo = unit * whole;
    plan.hi = plan.lo + whole;
    it.request = request;
    it.block = MULTI ? unit - request * blocks : 0;
    it.length = of.tokens(BOUND_ROUNDS);
    it.start = PAGED ? -1 : of.from[BOUND_ROUNDS];
    it.q_start = request;
    it.q_len = 1;
    it.unit0 = unit;
    it.parts = 1;
    it.active = CLUSTER == 1 ? 1 : CLUSTER == 2 ? 1 + (chunks > each) : divide_up(chunks, each);
    int first = plan.rank * each, last = first + each;
    it.first = CLUSTER == 1 ? 0 : first < chunks ? first : chunks;
    it.last = CLUSTER == 1 ? chunks : last < chunks ? last : chunks;
    return true;
}
// This CTA's share of an item's Q, for which it asks soon, into L2: else it waits behind the rows.
__device__ __forceinline__ void prefetch_q(const Params& p, int request, int block, int thread, int threads) {
    constexpr int lines = (RANK + ROPE) * 2 / 128;
#pragma unroll 1
    for (int i = cluster_rank() * threads + thread; i < NH * lines; i += CLUSTER * threads) {
        int head = block * NH + i / lines, line = i % lines;
        if (head >= p.heads) return;
        const u16* at = line < RANK / 64 ? p.q_nope + request * p.qn_token + head * p.qn_head + line * 64
                                         : p.q_pe + request * p.qp_token + head * p.qp_head;
        asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
    }
}

#if INDEX64
typedef i64 Entry;
#else
typedef int Entry;
#endif

// The table's entry for a token, as it is: looked at only when it is used, or loading it ahead is no use.
__device__ __forceinline__ Entry entry_of(const Params& p, const Item& it, i64 start, int token) {
    if (token >= it.length) return -1;
    return ((const Entry*)p.table)[start + (PAGED ? token / p.page_size : token)];
}
// Its slot in the pool, -1 for none.
__device__ __forceinline__ int slot_of(const Params& p, Entry entry, int token) {
    i64 slot = entry;
    if (PAGED) slot = entry < 0 ? -1 : (i64)entry * p.page_size + token % p.page_size;
    return slot < p.num_slots && slot >= 0 ? (int)slot : -1;
}

// The ring: num_ring slots of CHUNK rows, filled by halves of 8 rows. A half's mask says which of its rows are
// tokens; the others are zeroed. Whoever loads or reads a slot does so on every turn of the ring: a barrier's
// parity tells one turn from the next, not from the one after.
struct Ring {
    u32 data, full, empty;  // shared addresses
    u8* mask;               // [slots][2]
    int slots;
};
#define FULL_ARRIVALS (2 * 33)  // of each half: 32 lanes when their copies land, one for the mask

__device__ __forceinline__ const u8* row_at(const Params& p, int slot) {
    return p.rows + (u64)(u32)(slot < 0 ? 0 : slot) * p.row_stride;
}

#if LEAN
// 16 bytes of a row, AT bytes behind `src` and `dst`; zeros where slot is negative.
template <int AT>
__device__ __forceinline__ void copy_piece(u32 dst, u64 src, int slot) {
    asm volatile(
        "{.reg .pred p; setp.lt.s32 p, %2, 0; cp.async.cg.shared.global [%0+%3], [%1+%3], 16, p;}" ::"r"(dst), "l"(src),
        "r"(slot), "n"(AT)
        : "memory");
}
// Where a row is, from row 0's address; anywhere for a negative slot, which no one reads.
__device__ __forceinline__ u64 row_from(u64 base, u32 stride, int slot) {
    u64 at;
    asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(at) : "r"(slot), "r"(stride), "l"(base));
    return at;
}
#endif

// Eight rows, whose slots lanes `from` to from + 7 hold, to shared memory. Where loads are all there is, a row at a
// time; a LEAN kernel gives eight lanes a row, so that a lane's addresses are two for all latent dims and one for the
// rope: what its loads spend on arithmetic is taken from those who multiply.
__device__ __forceinline__ void copy_rows(const Params& p, u32 into, int slots, int from) {
    int lane = threadIdx.x & 31;
#if LEAN
    u64 latent = (u64)p.rows + (lane & 7) * 16;
    u32 to = into + (lane >> 3) * ROW_PITCH + (lane & 7) * 16;
#pragma unroll
    for (int half = 0; half < 2; half++, to += 4 * ROW_PITCH) {
        int slot = __shfl_sync(~0u, slots, from + 4 * half + (lane >> 3));
        u64 row = row_from(latent, p.row_stride, slot);
        copy_piece<0>(to, row, slot);
        copy_piece<128>(to, row, slot);
        copy_piece<256>(to, row, slot);
        copy_piece<384>(to, row, slot);
    }
#if ROPE
    int slot = __shfl_sync(~0u, slots, from + (lane >> 2));
    copy_piece<RANK>(into + (lane >> 2) * ROW_PITCH + (lane & 3) * 16,
                 row_from((u64)p.rows + (lane & 3) * 16, p.row_stride, slot), slot);
#endif
#else
#pragma unroll 4
    for (int r = 0; r < 8; r++) {
        int at = __shfl_sync(~0u, slots, from + r);
        copy16(into + r * ROW_PITCH + lane * 16, row_at(p, at) + lane * 16, at >= 0);
    }
#if ROPE
    int at = __shfl_sync(~0u, slots, from + (lane >> 2));
    copy16(into + (lane >> 2) * ROW_PITCH + RANK + (lane & 3) * 16, row_at(p, at) + RANK + (lane & 3) * 16, at >= 0);
#endif
#endif
}

// PRODUCERS warps load this CTA's chunks in order, warp w every PRODUCERS-th half, 16 bytes a lane and copy; here
// those of one item. `done` chunks of this CTA lie before it.
// (A bulk copy a row costs its one warp some 100 cycles: three times what the memory needs for a row.)
__device__ __forceinline__ void produce(const Params& p, const Item& it, const Ring& ring, int w, int done) {
    int lane = threadIdx.x & 31;
    i64 start = PAGED ? (i64)it.request * p.table_stride : it.start < 0 ? __ldcg(p.bounds + it.request) : it.start;
    // A ring slot always belongs to the same warps: this CTA's chunk n to those of halves 2n and 2n + 1.
    int half = same(2 * it.first + ((w - 2 * done) & (PRODUCERS - 1))), end = same(2 * it.last);
    // Lane l holds the slot of row l % 8 of this warp's half number l / 8 from here; two loads ahead.
    int token = 8 * (half + PRODUCERS * (lane >> 3)) + (lane & 7);
    Entry next = entry_of(p, it, start, token), later = entry_of(p, it, start, token + 32 * PRODUCERS);
    int n = done + (half >> 1) - it.first, turn = same(divide(n, ring.slots)), slot = same(n - turn * ring.slots);
    u32 phase = (turn & 1) ^ 1;  // a fresh barrier counts as having completed the phase before
#pragma unroll 1
    while (half < end) {
        int now = slot_of(p, next, token);
        next = later;
        token += 32 * PRODUCERS;
        later = entry_of(p, it, start, token + 32 * PRODUCERS);
        u32 valid = __ballot_sync(~0u, now >= 0);
        constexpr int step = LEAN ? 8 : 1;  // as each was measured: how u counts decides which registers are taken
#pragma unroll 1
        for (int u = 0; u < 4 * step && half < end; u += step) {
            u32 full = ring.full + slot * 8;
            mbar_wait(ring.empty + slot * 8, phase);
            copy_rows(p, ring.data + slot * SLOT_BYTES + (w & 1) * 8 * ROW_PITCH, now, 8 / step * u);
            asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(full) : "memory");
            if (lane == 0) {
                ring.mask[2 * slot + (w & 1)] = (u8)(valid >> (8 / step * u));
                mbar_arrive(full);
            }
            half += PRODUCERS;
            slot += PRODUCERS / 2;
            if (slot >= ring.slots) {
                slot -= ring.slots;
                phase ^= 1;
            }
        }
    }
}

// What one column of an item is: its query token and head, and how many of the request's tokens it sees.
struct Column {
    bool real;
    int token, head, sees;
};
__device__ __forceinline__ Column column_of(const Params& p, const Item& it, int col) {
    Column c;
    int n = it.block * NH + col, j = MULTI && p.q_indptr ? n / p.heads : 0;
    c.real = n < it.q_len * p.heads;
    c.head = n - j * p.heads;
    c.token = it.q_start + j;
    c.sees = MULTI && p.causal ? it.length - it.q_len + 1 + j : it.length;
    return c;
}

// Where a lane's part of the final output goes: dims 2g and 2g + 1 of columns 8n + 2t and 8n + 2t + 1, or null.
struct Target {
    u16 *a, *b;
};
__device__ __forceinline__ Target target_of(const Params& p, const Item& it, int col) {
    int lane = threadIdx.x & 31;
    Column a = column_of(p, it, col), b = column_of(p, it, col + 1);
    u16* at = p.out + 2 * (lane >> 2);
    return {a.real ? at + a.token * p.out_token + a.head * p.out_head : 0,
            b.real ? at + b.token * p.out_token + b.head * p.out_head : 0};
}
__device__ __forceinline__ void store_out(const Target& to, int mt, float4 o, float s0, float s1) {
    if (to.a) *(u32*)(to.a + 16 * mt) = pack_out(o.x * s0, o.z * s0);
    if (to.b) *(u32*)(to.b + 16 * mt) = pack_out(o.y * s1, o.w * s1);
}
__device__ __forceinline__ void store_lse(const Params& p, const Item& it, int col, float m, float l) {
    Column c = column_of(p, it, col);
    if (!p.lse || !c.real) return;
    p.lse[(i64)c.token * p.heads + c.head] = l == 0.f ? -INFINITY_F : (m + log2_fast(l)) * p.lse_factor;
}
__device__ __forceinline__ float inverse_sum(const Params& p, float l) {
    return l == 0.f ? 0.f : p.v_scale * rcp_fast(l);
}

__device__ __forceinline__ float weight_of(float m, float top) { return exp2_fast(m - top); }

// Zeros for requests without tokens, whose queries see nothing; spread over all CTAs.
__device__ __noinline__ void zero_empty(const Params& p, const Plan& plan, int thread, int threads) {
    for (int r = blockIdx.x; r < plan.requests; r += gridDim.x) {
        if (plan.length[r]) continue;
        int start = q_begin(p, r), columns = (MULTI ? q_begin(p, r + 1) - start : 1) * p.heads;
        for (int i = thread; i < columns * (RANK / 2); i += threads) {
            int column = i / (RANK / 2), token = start + column / p.heads, head = column % p.heads;
            *(u32*)(p.out + token * p.out_token + head * p.out_head + i % (RANK / 2) * 2) = 0;
            if (p.lse && i % (RANK / 2) == 0) p.lse[(i64)token * p.heads + head] = -INFINITY_F;
        }
    }
}

// Where this CTA leaves its result of an item that others have a part of: its own slots in turn, or, where there
// are no clusters, straight the cluster's.
__device__ __forceinline__ int unit_slot(const Item& it, int unit) {
    return (CLUSTER > 1 ? 2 * gridDim.x : 0) + 2 * unit + (unit == it.unit0 ? 1 : 0);
}
__device__ __forceinline__ int part_slot(const Plan& plan, const Item& it, int merges) {
    return CLUSTER > 1 ? 2 * blockIdx.x + (merges & 1) : unit_slot(it, plan.unit);
}

#define SLICE (RANK / 16 / CLUSTER)
#define MAX_RING 32
// Where a CTA's result of an item goes: whole to `out`, to the boxes of its cluster, or to slot `slot`.
//
// Boxes are for the last item that a cluster takes: the ring is empty behind it, and has room for each CTA's
// slice of the dims, [CTA][tile of the slice][NT][32], so that nothing goes through memory.
struct Sink {
    bool whole, boxed;
    int slot, rank;
    u32 data, ml;  // shared addresses
};
// Where all warps begin, and those that do not load stand, kept in shared memory: their registers are full, and a stack
// of all their threads does not fit into L1.
struct Place {
    Plan plan;
    Item it;
    Sink sink;
    int pos, done, merges;
    bool more;  // is there an item?
};

// The small things in shared memory that both kernels have. Their addresses are known when compiling.
struct Meeting {
    __align__(16) float2 box[CLUSTER][NH];  // running maxima and sums, by CTA
    u64 full[MAX_RING], empty[MAX_RING];    // the ring's barriers
    u64 ready;                              // that a cluster's parts are in memory
    u8 mask[MAX_RING][2];
    int flag;
    __align__(16) Place places[3];  // the first item's, then by turns
};

__device__ __forceinline__ void put_tile(const Params& p, const Sink& to, const Target& out, int mt, int nt, float4 x,
                                         float s0, float s1) {
    int lane = threadIdx.x & 31, box = (to.rank * SLICE + mt % SLICE) * NT + nt;
    if (to.whole) store_out(out, mt, x, s0, s1);
    else if (to.boxed) store_at(at_rank(to.data, mt / SLICE) + (box * 32 + lane) * 16, x);
    else p.partial[((i64)to.slot * TILES + mt * NT + nt) * 32 + lane] = x;
}

// Add up `n` partial results in order: slots `from`, from + step + bump, from + 2 * step + bump ...; this CTA's slice
// of the dims. All MERGE_WARPS warps call it; the result goes to `out` when `to_slot` is negative, else to that
// slot. A part's sums and its accumulators are loaded at once, so the running maximum is raised on the way.
#define OWN_TILES (SLICE * NT / MERGE_WARPS)  // of a warp
#define BATCH (OWN_TILES < 2 ? 1 : OWN_TILES < 8 ? OWN_TILES : 8)
#define AT_ONCE (BATCH > 4 ? 2 : BATCH > 1 ? 4 : 8)  // parts; with BATCH, what a lane loads before it waits
__device__ __noinline__ void merge_parts(const Params& p, const Item& it, int from, int step, int bump, int n, int rank,
                                         int ml_rank, int to_slot, int warp) {
    int lane = threadIdx.x & 31, nt = warp % NT, col = 8 * nt + 2 * (lane & 3);
    Target to = target_of(p, it, col);
    float m0 = NOTHING, m1 = NOTHING, l0 = 0.f, l1 = 0.f;
#pragma unroll 1
    for (int base = warp / NT; base < SLICE; base += BATCH * (MERGE_WARPS / NT)) {
        float4 o[BATCH];
        m0 = m1 = NOTHING;
        l0 = l1 = 0.f;
#pragma unroll
        for (int j = 0; j < BATCH; j++) o[j] = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
        for (int k0 = 0; k0 < n; k0 += AT_ONCE) {
            float4 c[AT_ONCE], x[AT_ONCE][BATCH];
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) {
                int kk = k0 + k < n ? k0 + k : n - 1;
                i64 slot = from + kk * step + (kk ? bump : 0);
                const float4* part = p.partial + (slot * TILES + rank * SLICE * NT + nt) * 32 + lane;
                c[k] = __ldcg((const float4*)(p.ml + (slot * CLUSTER + ml_rank) * NH + col));
#pragma unroll
                for (int j = 0; j < BATCH; j++) {
                    int mt = base + j * (MERGE_WARPS / NT);
                    x[k][j] = mt < SLICE ? __ldcg(part + mt * NT * 32) : o[j];
                }
            }
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) {
                if (k0 + k >= n) break;
                float t0 = fmaxf(m0, c[k].x), t1 = fmaxf(m1, c[k].z);
                float f0 = weight_of(c[k].x, t0), f1 = weight_of(c[k].z, t1), g0 = weight_of(m0, t0),
                      g1 = weight_of(m1, t1);
                m0 = t0;
                m1 = t1;
                l0 = l0 * g0 + f0 * c[k].y;
                l1 = l1 * g1 + f1 * c[k].w;
#pragma unroll
                for (int j = 0; j < BATCH; j++) {
                    o[j].x = o[j].x * g0 + f0 * x[k][j].x;
                    o[j].z = o[j].z * g0 + f0 * x[k][j].z;
                    o[j].y = o[j].y * g1 + f1 * x[k][j].y;
                    o[j].w = o[j].w * g1 + f1 * x[k][j].w;
                }
            }
        }
        float i0 = inverse_sum(p, l0), i1 = inverse_sum(p, l1);
#pragma unroll
        for (int j = 0; j < BATCH; j++) {
            int mt = base + j * (MERGE_WARPS / NT);
            if (mt >= SLICE) break;
            mt += rank * SLICE;
            if (to_slot < 0) store_out(to, mt, o[j], i0, i1);
            else p.partial[((i64)to_slot * TILES + mt * NT + nt) * 32 + lane] = o[j];
        }
    }
    named_sync(1, MERGE_WARPS * 32);  // everyone has read the sums, which may be where the result's go
    if (warp < NT && lane < 4) {
        if (to_slot >= 0) {
            *(float4*)(p.ml + ((i64)to_slot * CLUSTER + rank) * NH + col) = make_float4(m0, l0, m1, l1);
        } else if (rank == 0) {
            store_lse(p, it, col, m0, l0);
            store_lse(p, it, col + 1, m1, l1);
        }
    }
}

// Add up what the boxes of this CTA hold: its slice of the dims, to `out` or to the cluster's slot.
__device__ __noinline__ void merge_box(const Params& p, const Item& it, const Sink& from, int to_slot, int warp) {
    int lane = threadIdx.x & 31, nt = warp % NT, col = 8 * nt + 2 * (lane & 3);
    Target to = target_of(p, it, col);
    float m0 = NOTHING, m1 = NOTHING, l0 = 0.f, l1 = 0.f;
    constexpr int step = MERGE_WARPS / NT, batch = SLICE / step < 1 ? 1 : SLICE / step < 4 ? SLICE / step : 4;
#pragma unroll 1
    for (int q0 = warp / NT; q0 < SLICE; q0 += batch * step) {
        float4 o[batch];
        m0 = m1 = NOTHING;
        l0 = l1 = 0.f;
#pragma unroll
        for (int j = 0; j < batch; j++) o[j] = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
        for (int k = 0; k < it.active; k++) {
            u32 at = from.data + (((k * SLICE + q0) * NT + nt) * 32 + lane) * 16;
            float4 c = load_shared4(from.ml + (k * NH + col) * 8), x[batch];
#pragma unroll
            for (int j = 0; j < batch; j++) x[j] = load_shared4(at + j * step * NT * 512);
            float t0 = fmaxf(m0, c.x), t1 = fmaxf(m1, c.z);
            float f0 = weight_of(c.x, t0), f1 = weight_of(c.z, t1), g0 = weight_of(m0, t0), g1 = weight_of(m1, t1);
            m0 = t0;
            m1 = t1;
            l0 = l0 * g0 + f0 * c.y;
            l1 = l1 * g1 + f1 * c.w;
#pragma unroll
            for (int j = 0; j < batch; j++) {
                o[j].x = o[j].x * g0 + f0 * x[j].x;
                o[j].z = o[j].z * g0 + f0 * x[j].z;
                o[j].y = o[j].y * g1 + f1 * x[j].y;
                o[j].w = o[j].w * g1 + f1 * x[j].w;
            }
        }
        float i0 = inverse_sum(p, l0), i1 = inverse_sum(p, l1);
        int mt = from.rank * SLICE + q0;
        if (to_slot < 0) {
#pragma unroll
            for (int j = 0; j < batch; j++) store_out(to, mt + j * step, o[j], i0, i1);
        } else {
            float4* part = p.partial + ((i64)to_slot * TILES + mt * NT + nt) * 32 + lane;
#pragma unroll
            for (int j = 0; j < batch; j++) part[j * step * NT * 32] = o[j];
        }
    }
    if (warp < NT && lane < 4) {
        if (to_slot >= 0) {
            *(float4*)(p.ml + ((i64)to_slot * CLUSTER + from.rank) * NH + col) = make_float4(m0, l0, m1, l1);
        } else if (from.rank == 0) {
            store_lse(p, it, col, m0, l0);
            store_lse(p, it, col + 1, m1, l1);
        }
    }
}

// Is this CTA the last of `n` to arrive at `ticket`? All MERGE_WARPS warps get the answer.
__device__ __forceinline__ bool last_to_arrive(u32* ticket, int n, int* flag, bool leader) {
    named_sync(1, MERGE_WARPS * 32);
    if (leader) {
        u32 before;
        asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(ticket) : "memory");
        if (before == (u32)(n - 1)) *ticket = 0;  // for the next launch: no one else touches it in this one
        *flag = before == (u32)(n - 1);
    }
    named_sync(1, MERGE_WARPS * 32);
    return *flag;
}

// After this CTA left its part, if it had one. `merges`: how often this cluster did so before.
__device__ __noinline__ void finish_parts(const Params& p, const Plan& plan, const Item& it, Meeting& meet,
                                          const Sink& sink, int merges, int warp) {
    int rank = plan.rank, unit = plan.unit, *flag = &meet.flag;
    if (CLUSTER > 1) {
        int to_slot = it.parts > 1 ? unit_slot(it, unit) : -1;
        if (sink.boxed) {
            cluster_sync();  // all parts are there
            merge_box(p, it, sink, to_slot, warp);
        } else {
            u32 ready = smem_u32(&meet.ready);
            named_sync(1, MERGE_WARPS * 32);
            if (threadIdx.x < CLUSTER) mbar_arrive_at(ready, threadIdx.x);
            mbar_wait_cluster(ready, merges & 1);
            merge_parts(p, it, 2 * (blockIdx.x - rank) + (merges & 1), 2, 0, it.active, rank, 0, to_slot, warp);
        }
        if (it.parts == 1) return;
    }
    // One ticket a slice. More than MAX_FAN parts merge in two levels.
    int part = unit - it.unit0, fan = it.parts, units = gridDim.x / CLUSTER;
    bool leader = threadIdx.x == 0;
    int first = unit_slot(it, it.unit0);
    if (it.parts > MAX_FAN) {
        fan = MAX_FAN;
        while (fan * fan < it.parts) fan++;
        int group = part / fan, head = it.unit0 + group * fan, groups = (it.parts + fan - 1) / fan;
        int n = it.parts - group * fan < fan ? it.parts - group * fan : fan, slot = unit_slot(it, head);
        if (!last_to_arrive(p.tickets + (2 * head + (group == 0)) * CLUSTER + rank, n, flag, leader)) return;
        merge_parts(p, it, slot, 2, group ? 0 : -1, n, rank, rank, slot, warp);
        if (!last_to_arrive(p.tickets + (2 * units + it.unit0) * CLUSTER + rank, groups, flag, leader)) return;
        merge_parts(p, it, first, 2 * fan, -1, groups, rank, rank, -1, warp);
    } else if (last_to_arrive(p.tickets + (2 * it.unit0 + 1) * CLUSTER + rank, fan, flag, leader)) {
        merge_parts(p, it, first, 2, -1, fan, rank, rank, -1, warp);
    }
}

// A CTA's life: `readers` arrivals free a slot of the ring, which starts at `at`; `consume(item, ring, sink, done)`
// takes an item's chunks, of which `done` lie before it in this CTA, puts its result into the sink and says whether
// nothing is left to be added up. `serve(bounds)` may do the whole step in another way; where requests are few, warp
// PLANNER has the bounds.
template <class Serve, class Consume>
__device__ __forceinline__ void run(const Params& p, Meeting& meet, u8* at, int readers, Serve serve, Consume consume) {
    Ring ring;
    ring.slots = p.num_ring;
    ring.data = smem_u32(at);
    at += p.num_ring * SLOT_BYTES;
    ring.full = smem_u32(meet.full);
    ring.empty = smem_u32(meet.empty);
    ring.mask = meet.mask[0];
    int *prefix = (int*)at, *length = prefix + p.bs + 2;
    Sink sink;
    sink.data = ring.data;
    sink.ml = smem_u32(meet.box);

    int warp = same(threadIdx.x >> 5);
    // What everyone waits for, first of all.
    bool is_few = p.bs <= 32 * BOUND_ROUNDS && !(MULTI && p.q_indptr);
    Bounds bounds;
    if (is_few && warp == PLANNER) bounds.load(p, request_alone(blocks_of(p)));
    if ((threadIdx.x & 31) == 0)  // spread over the warps: each takes its time
#pragma unroll 1
        for (int i = warp; i < p.num_ring; i += THREADS / 32) {
            mbar_init(ring.full + i * 8, FULL_ARRIVALS);
            mbar_init(ring.empty + i * 8, readers);
        }
    if (CLUSTER > 1) {
        if (threadIdx.x == 0) mbar_init(smem_u32(&meet.ready), CLUSTER);
        cluster_arrive();
    }
    if (serve(bounds)) return;
    Place& start = meet.places[0];
    auto is_boxed = [&](const Plan& plan, const Item& it, int pos) {
        return CLUSTER > 1 && pos >= plan.hi && !it.is_mine() && p.num_ring * SLOT_BYTES >= TILES * 512;
    };
    auto keep = [&](Place& at, const Plan& plan, const Item& it, int pos, bool more, int done, int merges) {
        sink.rank = plan.rank;
        sink.whole = it.is_mine();
        sink.boxed = is_boxed(plan, it, pos);
        sink.slot = part_slot(plan, it, merges);
        at = {plan, it, sink, pos, done, merges, more};
    };
    int requests = p.bs + (MULTI && p.q_indptr ? 1 : 0);
    auto note = [&](int r, int n) {
        length[r] = n;
        prefix[r] = MULTI ? divide_up((q_begin(p, r + 1) - q_begin(p, r)) * p.heads, NH) : 1;  // blocks, for now
    };
    if (!is_few) {
#pragma unroll 1
        for (int r = threadIdx.x; r < requests; r += THREADS) note(r, tokens_of(p, r));
        __syncthreads();
    }
    if (warp == PLANNER) {
        int lane = threadIdx.x - 32 * PLANNER;
        Plan plan;
        Item it;
        int pos;
        bool more;
        if (is_few && plan_alone(p, bounds, plan, it, more)) {
            pos = plan.hi;
        } else {
            if (is_few) {
#pragma unroll
                for (int i = 0; i < BOUND_ROUNDS; i++)
                    if (lane + 32 * i < p.bs) note(lane + 32 * i, bounds.tokens(i));
                __syncwarp();
            }
            int2 span = lay_out(p, prefix, length, requests);
            __syncwarp();
            plan = plan_of(prefix, length, requests, span, prefix[requests]);
            pos = plan.lo;
            more = next_item(p, plan, pos, it);
        }
        if (lane == 0) keep(start, plan, it, pos, more, 0, 0);
    } else if (is_few) {
        int blocks = blocks_of(p), request = request_alone(blocks), units = gridDim.x / CLUSTER;
        int thread = PLANNER ? threadIdx.x : threadIdx.x - 32;  // of those who do not plan
        if (request < p.bs && units < 2 * p.bs * blocks)
            prefetch_q(p, request, blockIdx.x / CLUSTER - request * blocks, thread, THREADS - 32);
    }
    __syncthreads();
    bool more = same((int)start.more);
    if (CLUSTER > 1 && more) cluster_wait();  // the others' barriers exist
    if (warp >= MERGE_WARPS) {
#if REGISTERS
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
#endif
        bool boxed = false;
        Item it = start.it;
        int pos = start.pos, done = 0;
        while (more) {
            produce(p, it, ring, warp - MERGE_WARPS, done);
            done += it.last - it.first;
            Plan plan = start.plan;
            boxed = is_boxed(plan, it, pos);
            more = same((int)next_item(p, plan, pos, it));
        }
        if (CLUSTER > 1 && boxed) {  // two rounds with those who use the boxes
            cluster_sync();
            cluster_sync();
        }
    } else {
#if REGISTERS
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#endif
        int turn = 0;
        while (more) {
            const Place& at = meet.places[turn];
            bool finished = at.sink.whole;
            if (at.it.last > at.it.first) finished = consume(at.it, ring, at.sink, at.done);
            else if (at.sink.boxed) cluster_sync();
            if (!finished) finish_parts(p, at.plan, at.it, meet, at.sink, at.merges, warp);
            if (at.pos >= at.plan.hi) break;
            turn = turn == 1 ? 2 : 1;
            if (threadIdx.x == 0) {
                Item it;
                int pos = at.pos;
                bool more = next_item(p, at.plan, pos, it);
                keep(meet.places[turn], at.plan, it, pos, more, at.done + at.it.last - at.it.first,
                     at.merges + !at.sink.whole);
            }
            named_sync(1, MERGE_WARPS * 32);
            more = same((int)meet.places[turn].more);
        }
        zero_empty(p, start.plan, threadIdx.x, MERGE_WARPS * 32);
    }
}
