// In-place activations, 16 bytes per thread.
//
//   relu_square    x -> max(x, 0)^2
//   low_rank_act   w -> tanh(w), g -> sigmoid(g), in one launch
//
// inout  x  [n]   fp16
//        w  [nw]  fp16
//        g  [ng]  fp16
//
// Grid: one thread per 8 elements; relu_square at most 8,192 CTAs, which loop.
// Block: 256 threads.
// Shared memory: none.
// Bound: memory; 4 bytes per element. Share of 4.8 TB/s (H200): relu_square [4,096, 16,384] 88 %; low_rank_act of the
// gate, [4,096, 512], 67 %; with few rows the latency of a launch, 1.2 us.
// Made for: sizes that are multiples of 8.
#include "common.cuh"
#include "relu.cuh"

template <typename F>
__device__ __forceinline__ void apply8(__half* p, F f) {
    float v[8];
    unpack8(load16(p), v);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = f(v[i]);
    store16(p, pack8(v));
}

__global__ void relu_square_kernel(__half* x, int64_t groups) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < groups; i += step) {
        apply8(x + i * 8, [](float v) { return relu_square(v); });
    }
}

__global__ void low_rank_act_kernel(__half* w, int64_t w_groups, __half* g, int64_t g_groups) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < w_groups) {
        apply8(w + i * 8, [](float v) { return tanh_exp(v); });
    } else if (i - w_groups < g_groups) {
        apply8(g + (i - w_groups) * 8, [](float v) { return sigmoidf(v); });
    }
}

RWKV_API int rwkv_relu_square(void* x, int64_t count, void* stream) {
    const int64_t groups = count / 8, blocks = (groups + 255) / 256;
    const dim3 grid(static_cast<unsigned>(blocks < 8192 ? blocks : 8192));
    launch(relu_square_kernel, grid, 256, stream, static_cast<__half*>(x), groups);
    return launch_result();
}

RWKV_API int rwkv_low_rank_act(void* w, int64_t w_count, void* g, int64_t g_count, void* stream) {
    const dim3 grid(static_cast<unsigned>(((w_count + g_count) / 8 + 255) / 256));
    launch(low_rank_act_kernel, grid, 256, stream, static_cast<__half*>(w), w_count / 8, static_cast<__half*>(g), g_count / 8);
    return launch_result();
}
