// How many of an instruction does an SM complete a cycle? Chains of it in registers, nothing else in the loop.
//
// Compile-time: KIND 0 cvt e4m3x2 -> f16x2, 1 the same on to bf16x2 through float32, 2 PRMT, 3 mma.m16n8k16,
// 4 ldmatrix.x4, 5 ldmatrix.x4.trans. One block an SM; writes the cycles of each block.

typedef unsigned int u32;

struct RateParams {
    u32* sink;
    long long* cycles;
    int rounds;
    u32 seed;
};

extern "C" __global__ void __launch_bounds__(512) rates(const __grid_constant__ RateParams p) {
    __shared__ __align__(128) unsigned char rows[32 * 592];
    u32 x[8];
    float c[8][4];
    for (int i = 0; i < 8; i++) {
        x[i] = KIND < 4 ? p.seed * (threadIdx.x + 37 * i + 1) : 0;
        for (int j = 0; j < 4; j++) c[i][j] = 0.f;
    }
    for (int i = threadIdx.x; i < (int)sizeof(rows) / 4; i += blockDim.x) ((u32*)rows)[i] = 0;
    u32 at = (u32)__cvta_generic_to_shared(rows) + (threadIdx.x & 15) * 592 + (threadIdx.x >> 4 & 1) * 16;
    __syncthreads();
    long long start = clock64();
    for (int r = 0; r < p.rounds; r++) {
#pragma unroll
        for (int u = 0; u < 4; u++)
#pragma unroll
            for (int i = 0; i < 8; i++) {
#if KIND == 0
                asm volatile("{.reg .b16 a, b; mov.b32 {a, b}, %0; cvt.rn.f16x2.e4m3x2 %0, a;}" : "+r"(x[i]));
#elif KIND == 1
                asm volatile(
                    "{.reg .b16 a, b; .reg .b32 h; .reg .f32 f, g; mov.b32 {a, b}, %0; cvt.rn.f16x2.e4m3x2 h, a;"
                    " mov.b32 {a, b}, h; cvt.f32.f16 f, a; cvt.f32.f16 g, b; cvt.rn.bf16x2.f32 %0, g, f;}"
                    : "+r"(x[i]));
#elif KIND == 2
                asm volatile("prmt.b32 %0, %0, %0, 0x3120;" : "+r"(x[i]));
#elif KIND == 3
                asm volatile(
                    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%4,%5}, {%4,%5}, "
                    "{%0,%1,%2,%3};"
                    : "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
                    : "r"(x[0]), "r"(x[1]));
#elif KIND == 4
                u32 a, b, d;
                asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                             : "=r"(x[i]), "=r"(a), "=r"(b), "=r"(d)
                             : "r"(at + i * 32 + x[i]));  // zeros: each waits for the one before
#else
                u32 a, b, d;
                asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                             : "=r"(x[i]), "=r"(a), "=r"(b), "=r"(d)
                             : "r"(at + i * 32 + x[i]));  // zeros: each waits for the one before
#endif
            }
    }
    __syncthreads();
    long long took = clock64() - start;
    u32 all = 0;
    for (int i = 0; i < 8; i++) all ^= x[i] ^ __float_as_uint(c[i][0] + c[i][1] + c[i][2] + c[i][3]);
    if (all == 0x12345678u) *p.sink = all;
    if (threadIdx.x == 0) p.cycles[blockIdx.x] = took;
}
