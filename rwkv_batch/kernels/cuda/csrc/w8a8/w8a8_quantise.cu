// Rows in 8 bits for up to 3 W8A8 GEMMs, each with its own inputs (w8a8_rows.cuh has the formula).
//
// in     x        [M, T, K]   fp16
//        factors  [K] fp32    of each GEMM, in the order of x
//        order    [K] u16     of each GEMM: the channel at a position; null: x is in the order of positions
//
// out    codes    [M, T, K]   s8; u8 with relu_squared
//        scales   [M, pitch]  fp32
//        ratios   [M, pitch]  s32
//
// A CTA takes one row. With at most one CTA per SM it loads the factors before the previous kernel ends.
//
// Grid: (rows, GEMMs).
// Block: K / 8 threads up to K = 4,096; then K / 16 for at most one CTA per SM, else K / 32.
// Shared memory: below 1 KB; by order K bytes more.
// Bound: memory, 3 K bytes per row; with few rows the latency of one load and a barrier, 2 to 3 us.
// Made for: K % 128 == 0, K <= 16,384.
#include "w8a8_rows.cuh"

struct W8A8QuantiseArgs {
    const float* factors[MAX_W8A8_GEMMS];
    const uint16_t* order[MAX_W8A8_GEMMS];
    const __half* x;
    uint2* codes;
    float* scales;
    int* ratios;
    int count, rows, k, pitch, relu_squared, unused;
};

template <int OCTETS, int THREADS, int CTAS, bool RELU_SQUARED, bool IN_ORDER>
__global__ void __launch_bounds__(THREADS, CTAS) w8a8_quantise_kernel(const __grid_constant__ W8A8QuantiseArgs a) {
    constexpr bool PRELOADED = CTAS == 1;
    __shared__ W8A8Maxima maxima;
    __shared__ __align__(8) uint8_t codes_of_row[IN_ORDER ? 8 : OCTETS * THREADS * 8];
    const int gemm = blockIdx.y;
    const int64_t at_row = static_cast<int64_t>(gemm) * a.rows + blockIdx.x;
    const auto channel = [&](int i) { return (i * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * 8; };
    W8A8Octet held[PRELOADED ? OCTETS : 1];
    if constexpr (PRELOADED) {
#pragma unroll
        for (int i = 0; i < OCTETS; ++i) {
            if (channel(i) < a.k) held[i].load(a.factors[gemm], channel(i));
        }
    }
    const auto octet_of = [&](int i) {
        W8A8Octet octet = held[PRELOADED ? i : 0];
        if (!PRELOADED) octet.load(a.factors[gemm], channel(i));
        return octet;
    };
    allow_next_kernel();
    wait_for_previous_kernel();
    uint4 x[OCTETS];
#pragma unroll
    for (int i = 0; i < OCTETS; ++i) {
        if (channel(i) < a.k) x[i] = load16(a.x + at_row * a.k + channel(i));
    }
    float v[8];
    W8A8Largest largest;
#pragma unroll
    for (int i = 0; i < OCTETS; ++i) {
        if (channel(i) >= a.k) continue;
        const W8A8Octet octet = octet_of(i);
        octet.template scale<RELU_SQUARED>(x[i], v);
        largest.add(octet, v);
    }
    maxima.add(largest);
    __syncthreads();
    const W8A8Largest of_all = maxima.of_row();
    const W8A8Row<RELU_SQUARED> of_row(of_all.rest, of_all.of_large());
    if (threadIdx.x == 0) {
        a.scales[gemm * a.pitch + blockIdx.x] = of_row.scale;
        a.ratios[gemm * a.pitch + blockIdx.x] = of_row.ratio;
    }
    uint2* const codes = a.codes + at_row * (a.k / 8);
#pragma unroll
    for (int i = 0; i < OCTETS; ++i) {
        if (channel(i) >= a.k) continue;
        const W8A8Octet octet = octet_of(i);
        octet.template scale<RELU_SQUARED>(x[i], v);
        const uint2 eight = octet.template codes<RELU_SQUARED>(v, of_row.inverses());
        if (IN_ORDER) {
            codes[channel(i) / 8] = eight;
        } else {
            *reinterpret_cast<uint2*>(codes_of_row + channel(i)) = eight;
        }
    }
    if constexpr (!IN_ORDER) {
        __syncthreads();
        for (int p = threadIdx.x; p < SEGMENT; p += blockDim.x) swap_codes(codes_of_row, p, __ldg(a.order[gemm] + p));
        __syncthreads();
#pragma unroll
        for (int i = 0; i < OCTETS; ++i) {
            if (channel(i) < a.k) codes[channel(i) / 8] = *reinterpret_cast<const uint2*>(codes_of_row + channel(i));
        }
    }
}

template <int OCTETS, int THREADS, int CTAS>
void launch_w8a8_quantise(const W8A8QuantiseArgs& a, void* stream) {
    const int threads = (a.k / 8 + OCTETS * 32 - 1) / (OCTETS * 32) * 32;
    const bool in_order = a.order[0] == nullptr;
    const auto run = [&](auto kernel) { launch(kernel, dim3(a.rows, a.count), threads, stream, a); };
    if (a.relu_squared) {
        in_order ? run(w8a8_quantise_kernel<OCTETS, THREADS, CTAS, true, true>) : run(w8a8_quantise_kernel<OCTETS, THREADS, CTAS, true, false>);
    } else {
        in_order ? run(w8a8_quantise_kernel<OCTETS, THREADS, CTAS, false, true>) : run(w8a8_quantise_kernel<OCTETS, THREADS, CTAS, false, false>);
    }
}

RWKV_API int rwkv_w8a8_quantise(const W8A8QuantiseArgs* a, void* stream) {
    if (a->rows == 0) return 0;
    if (a->k % SEGMENT != 0 || a->k > 16384 || a->count > MAX_W8A8_GEMMS) return static_cast<int>(cudaErrorInvalidValue);
    const bool few = a->rows * a->count <= device_info().num_sms;
    if (a->k <= 4096) {
        few ? launch_w8a8_quantise<1, 512, 1>(*a, stream) : launch_w8a8_quantise<1, 512, 3>(*a, stream);
    } else {
        few ? launch_w8a8_quantise<2, 1024, 1>(*a, stream) : launch_w8a8_quantise<4, 512, 3>(*a, stream);
    }
    return launch_result();
}
