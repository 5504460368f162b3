// Rows as int8 in two segments: the 128 large channels, which come first, and the rest.
//
//   v          = f(x[t, c]) * factors[c]               f: identity, or relu(x)^2
//   unit       = max(max |v| of the rest, max |v| of the large channels * (16 / MAX_RATIO))
//   ratio      = min(max(ceil(16 * (max |v| of the large channels / unit)), 16), MAX_RATIO)     MAX_RATIO 511 (s8), or 255 (u8)
//   scale      = unit / MAX                             MAX 127 (s8), or 255 (u8, of relu^2)
//   codes[t, positions[c]] = sat(rint(v * (MAX / unit)))             rest
//                            sat(rint(v * (MAX / (unit * (ratio / 16)))))   large channels
//
// in     x          [T, K]   fp16 or fp32
//        factors    [K]      fp32, nullable   smoothing that is not folded into norm or mix
//        positions  [K]      u16, nullable    below 128: the large channels
//
// out    codes      [T, K]   s8 or u8
//        scales     [T]      fp32; NaN where the row has a NaN, so that y is NaN too
//        ratios     [T]      s32
//
// One CTA per row, 8 channels a thread at a time. Codes are permuted in shared memory and stored 16 bytes at a time.
// Bytes: T * K * (2 or 4 + 1). K is 4096 or 16384.
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "hopper.cuh"

#define INT8_API extern "C" __attribute__((visibility("default")))

constexpr int QUANTISE_THREADS = 512, LARGE_CHANNELS = 128;

struct QuantiseArgs {
    const void* x;
    const float* factors;
    const uint16_t* positions;
    uint8_t* codes;
    float* scales;
    int* ratios;
    int rows, k, is_float, relu_squared, early;
};

__device__ __forceinline__ void load8(float (&v)[8], const __half* x) {
    const uint4 raw = *reinterpret_cast<const uint4*>(x);
    const __half2* pairs = reinterpret_cast<const __half2*>(&raw);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 pair = __half22float2(pairs[i]);
        v[2 * i] = pair.x, v[2 * i + 1] = pair.y;
    }
}
__device__ __forceinline__ void load8(float (&v)[8], const float* x) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float4 four = reinterpret_cast<const float4*>(x)[i];
        v[4 * i] = four.x, v[4 * i + 1] = four.y, v[4 * i + 2] = four.z, v[4 * i + 3] = four.w;
    }
}

template <typename Input, bool RELU_SQUARED, int VECTORS>
__global__ void __launch_bounds__(QUANTISE_THREADS) quantise_rows_kernel(const QuantiseArgs p) {
    constexpr float MAX = RELU_SQUARED ? 255.0f : 127.0f;
    constexpr float MAX_RATIO = RELU_SQUARED ? 255.0f : 511.0f;
    constexpr int K = VECTORS * QUANTISE_THREADS * 8;
    __shared__ __align__(16) uint8_t row_codes[K];
    __shared__ uint32_t maxima[2][QUANTISE_THREADS / 32];
    const int row = blockIdx.x, thread = threadIdx.x;
    float v[VECTORS][8];
    uint4 at[VECTORS];  // 8 positions
    uint32_t largest[2] = {};
    hopper::launch_dependents();
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int channel = (i * QUANTISE_THREADS + thread) * 8;
        if (p.positions != nullptr) {
            at[i] = __ldg(reinterpret_cast<const uint4*>(p.positions + channel));
        } else {
            const uint32_t pair = channel | (channel + 1) << 16;
            at[i] = make_uint4(pair, pair + 0x20002, pair + 0x40004, pair + 0x60006);
        }
    }
    hopper::wait_for_inputs();
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int channel = (i * QUANTISE_THREADS + thread) * 8;
        load8(v[i], static_cast<const Input*>(p.x) + static_cast<int64_t>(row) * p.k + channel);
    }
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int channel = (i * QUANTISE_THREADS + thread) * 8;
        if (RELU_SQUARED) {
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float positive = v[i][j] <= 0.0f ? 0.0f : v[i][j];  // NaN stays
                v[i][j] = __fmul_rn(positive, positive);
            }
        }
        if (p.factors != nullptr) {
            float factors[8];
            load8(factors, p.factors + channel);
#pragma unroll
            for (int j = 0; j < 8; ++j) v[i][j] = __fmul_rn(v[i][j], factors[j]);
        }
        const uint32_t words[4] = {at[i].x, at[i].y, at[i].z, at[i].w};
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const int position = words[j / 2] >> j % 2 * 16 & 0xffff;
            const uint32_t bits = __float_as_uint(v[i][j]) & 0x7fffffff;  // ordered like |v|, NaN above all
            const bool is_large = position < LARGE_CHANNELS;
            largest[0] = max(largest[0], is_large ? 0 : bits), largest[1] = max(largest[1], is_large ? bits : 0);
        }
    }
#pragma unroll
    for (int s = 0; s < 2; ++s) {
        const uint32_t of_warp = __reduce_max_sync(0xffffffff, largest[s]);
        if (thread % 32 == 0) maxima[s][thread / 32] = of_warp;
    }
    __syncthreads();
    uint32_t tops[2];
#pragma unroll
    for (int s = 0; s < 2; ++s) tops[s] = __reduce_max_sync(0xffffffff, maxima[s][thread % (QUANTISE_THREADS / 32)]);
    const float of_large = __uint_as_float(tops[1]);
    const float unit = __uint_as_float(max(tops[0], __float_as_uint(__fmul_rn(of_large, 16.0f / MAX_RATIO))));  // NaN stays
    const float ratio = unit > 0.0f ? fminf(fmaxf(ceilf(__fmul_rn(16.0f, __fdiv_rn(of_large, unit))), 16.0f), MAX_RATIO) : 16.0f;
    const float inverse[2] = {unit > 0.0f ? fminf(__fdiv_rn(MAX, unit), 3e38f) : 0.0f,
                              unit > 0.0f ? fminf(__fdiv_rn(MAX, __fmul_rn(unit, ratio * 0.0625f)), 3e38f) : 0.0f};
    if (thread == 0) p.scales[row] = __fmul_rn(unit, 1.0f / MAX), p.ratios[row] = static_cast<int>(ratio);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const uint32_t words[4] = {at[i].x, at[i].y, at[i].z, at[i].w};
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const int position = words[j / 2] >> j % 2 * 16 & 0xffff;
            const float scaled = __fmul_rn(v[i][j], position < LARGE_CHANNELS ? inverse[1] : inverse[0]);
            int code;
            if (RELU_SQUARED) {
                asm("cvt.rni.sat.u8.f32 %0, %1;" : "=r"(code) : "f"(scaled));
            } else {
                asm("cvt.rni.sat.s8.f32 %0, %1;" : "=r"(code) : "f"(scaled));
            }
            row_codes[position] = static_cast<uint8_t>(code);
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = thread; i < K / 16; i += QUANTISE_THREADS)
        reinterpret_cast<uint4*>(p.codes + static_cast<int64_t>(row) * p.k)[i] = reinterpret_cast<const uint4*>(row_codes)[i];
}

template <typename Input, bool RELU_SQUARED, int VECTORS>
int launch_quantise(const QuantiseArgs& args, void* stream) {
    cudaLaunchAttribute early = {};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(args.rows), config.blockDim = dim3(QUANTISE_THREADS);
    config.stream = static_cast<cudaStream_t>(stream), config.attrs = &early, config.numAttrs = args.early ? 1 : 0;
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization, early.val.programmaticStreamSerializationAllowed = 1;
    const cudaError_t error = cudaLaunchKernelEx(&config, quantise_rows_kernel<Input, RELU_SQUARED, VECTORS>, args);
    return error != cudaSuccess ? error : cudaGetLastError();
}

INT8_API int int8_quantise_rows(const QuantiseArgs* args, void* stream) {
    const auto launch = [&](auto input) {
        using Input = decltype(input);
        if (args->k == 4096) return args->relu_squared ? launch_quantise<Input, true, 1>(*args, stream) : launch_quantise<Input, false, 1>(*args, stream);
        if (args->k == 16384) return args->relu_squared ? launch_quantise<Input, true, 4>(*args, stream) : launch_quantise<Input, false, 4>(*args, stream);
        return static_cast<int>(cudaErrorInvalidValue);
    };
    return args->is_float ? launch(float()) : launch(__half());
}

// Ceiling of memory bandwidth: reads `bytes` once.
__global__ void read_kernel(const uint4* from, int64_t count, uint32_t* sink) {
    uint32_t all = 0;
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    for (; i + 7 * step < count; i += 8 * step) {
        uint4 v[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = __ldcs(from + i + j * step);
#pragma unroll
        for (int j = 0; j < 8; ++j) all ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
    }
    for (; i < count; i += step) all ^= from[i].x;
    if (all == 0x12345678) *sink = all;
}

INT8_API int int8_read(const void* from, long long bytes, void* sink, void* stream) {
    read_kernel<<<132 * 4, 512, 0, static_cast<cudaStream_t>(stream)>>>(static_cast<const uint4*>(from), bytes / 16, static_cast<uint32_t*>(sink));
    return cudaGetLastError();
}
