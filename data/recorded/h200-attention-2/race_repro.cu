// Warps 0 to 7 of a block of 12 share memory across `bar.sync 1, 256`, as the PTX manual allows. With GROUPS, pairs of
// these warps also meet at named barriers 2 to 5 before. Is either a race?
struct Params { float* out; };
extern "C" __global__ void __launch_bounds__(384, 1) race_repro(const __grid_constant__ Params p) {
    __shared__ float x[256], y[256];
    int tid = threadIdx.x;
    __syncthreads();
    if (tid < 256) {
        float sum = 0.f;
        for (int i = 0; i < 4; i++) {
            if (SLEEP) __nanosleep(tid / 64 * 10000);
#if GROUPS
            for (int k = 0; k < 2 + tid / 64; k++) {
                y[tid] = tid + k;
                asm volatile("bar.sync %0, 64;" ::"r"(2 + tid / 64) : "memory");
                sum += y[tid ^ 32];
                asm volatile("bar.sync %0, 64;" ::"r"(2 + tid / 64) : "memory");
            }
#endif
            x[tid] = tid * i;
            asm volatile("bar.sync 1, 256;" ::: "memory");
            sum += x[(tid + 37) & 255];
            asm volatile("bar.sync 1, 256;" ::: "memory");
        }
        p.out[tid] = sum;
    }
}
