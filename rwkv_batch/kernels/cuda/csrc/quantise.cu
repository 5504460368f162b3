// Quantises activation rows, and dequantises weights to fp16.
//
//   quantise_rows   q = fp8(x / scale), scale = max |x| / 448 of the row; optionally of max(x, 0)^2
//   two_part_rows   x as the sum of two e5m2 values (rows_two_part.cuh)
//   dequantise      W = q * scale, for cuBLAS; transposed: [k, n] -> [k, n]
//
// in     x        [rows, k]     fp16
//        qweight  [n, k]        fp8 or int4 (quant.cuh); int4 nibbles run along the row
//        scales   fp8 [n] fp32; int4 [k / 128, n] fp16 (scale, 1024 + zero); of the weights
//
// out    q        [rows, k]     e4m3, scales [rows] fp32
//        two-part [rows, 2, k]  e5m2
//        W        [n, k]        fp16
//
// Grid: quantise_rows: one CTA per row. two_part_rows: one thread per 8 elements. dequantise: one thread per 8
// elements, at most 16 CTAs per SM, which loop.
// Block: quantise_rows: up to 1,024 threads of 8 to 32 elements; the others 256.
// Shared memory: quantise_rows 128 bytes, the others none.
// Bound: memory; quantise_rows 3 k bytes per row, two_part_rows 4 k, dequantise 3 n k.
// Share of 4.8 TB/s (H200): quantise_rows 4,096 rows of 16,384 88 %, 320 rows 63 %; dequantise [16,384, 4,096] int4
// 71 %, transposed 24 %. two_part_rows takes at most 64 rows: the latency of a launch, 1.5 us.
// Made for: k <= 32,768, k % 8 == 0.
#include "quant.cuh"
#include "relu.cuh"
#include "rows_fp8.cuh"
#include "rows_two_part.cuh"

template <int VECTORS, bool RELU_SQUARE, int THREADS = 1024, int BLOCKS = 1>
__global__ void __launch_bounds__(THREADS, BLOCKS) quantise_rows_kernel(const __half* x, uint2* codes, float* scales, int k) {
    __shared__ float scratch[32];
    allow_next_kernel();
    wait_for_previous_kernel();
    const int64_t row = blockIdx.x;
    uint4 packed[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int at = (i * blockDim.x + threadIdx.x) * 8;
        packed[i] = at < k ? load16(x + row * k + at) : make_uint4(0, 0, 0, 0);
    }
    float v[8], largest = 0.0f;
    const auto unpack = [&](int i) {
        unpack8(packed[i], v);
        if (RELU_SQUARE) {
#pragma unroll
            for (int j = 0; j < 8; ++j) v[j] = relu_square(v[j]);
        }
    };
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        unpack(i);
        largest = fmaxf(largest, abs_max(v));
    }
    largest = warp_max(largest);
    if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = largest;
    __syncthreads();
    const int lane = threadIdx.x & 31, warps = (blockDim.x + 31) >> 5;
    const Fp8RowScale of_row = fp8_row_scale(warp_max(lane < warps ? scratch[lane] : 0.0f));
    if (threadIdx.x == 0) scales[row] = of_row.scale;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int at = (i * blockDim.x + threadIdx.x) * 8;
        unpack(i);
        if (at < k) codes[(row * k + at) / 8] = quantise_fp8(v, of_row.inverse);
    }
}

// 8 values per thread.
__global__ void __launch_bounds__(256) two_part_rows_kernel(const __half* x, uint8_t* two_part, int64_t num_vectors, int k) {
    allow_next_kernel();
    wait_for_previous_kernel();
    const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= num_vectors) return;
    const int64_t row = i / (k / 8);
    store_two_part(two_part + 8 * i + row * k, k, load16(x + 8 * i));
}

__device__ __forceinline__ float load_half(const void* p, int64_t i) { return __half2float(__ldg(static_cast<const __half*>(p) + i)); }

// 8 adjacent elements of a stored row per thread.
template <Format FORMAT, bool TRANSPOSED>
__global__ void dequantise_kernel(const void* codes, const void* scales, __half* out, int64_t rows, int columns) {
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x, groups = rows * columns / 8;
    const int outputs = static_cast<int>(TRANSPOSED ? columns : rows);
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < groups; i += step) {
        const int64_t row = i / (columns / 8);
        const int column = static_cast<int>(i % (columns / 8)) * 8;
        float w[8];
        uint32_t pairs[4];
        if constexpr (FORMAT == INT4) {
            const uint32_t word = __ldg(static_cast<const uint32_t*>(codes) + i);
#pragma unroll
            for (int j = 0; j < 4; ++j) pairs[j] = unpack_nibbles(word, j, 0x64006400u);
        } else {
            const uint2 words = __ldg(static_cast<const uint2*>(codes) + i);
            unpack_e4m3(words.x, pairs[0], pairs[1]);
            unpack_e4m3(words.y, pairs[2], pairs[3]);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float2 f = __half22float2(*reinterpret_cast<const __half2*>(&pairs[j]));
            w[2 * j] = f.x, w[2 * j + 1] = f.y;
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const int64_t output = TRANSPOSED ? column + j : row;
            const int64_t at = (TRANSPOSED ? row : column) / GROUP_INPUTS * outputs + output;
            if constexpr (FORMAT == FP8) {
                w[j] *= __ldg(static_cast<const float*>(scales) + output);
            } else {
                w[j] = (w[j] - (load_half(scales, 2 * at + 1) - 1024.0f)) * load_half(scales, 2 * at);
            }
            w[j] *= code_scale<FORMAT>();
        }
        store16(out + row * columns + column, pack8(w));
    }
}

RWKV_API int rwkv_quantise_rows(const void* x, void* codes, void* scales, int rows, int k, int relu_square, void* stream) {
    const auto run = [&](auto kernel, int each) {
        const int threads = (k / 8 + each * 32 - 1) / (each * 32) * 32;
        launch(kernel, dim3(rows), threads, stream, static_cast<const __half*>(x), static_cast<uint2*>(codes),
               static_cast<float*>(scales), k);
    };
    if (k % 8 != 0 || k > 4 * 8192) return static_cast<int>(cudaErrorInvalidValue);
    if (k > 8192 && k <= 16384 && rows > device_info().num_sms) {  // three CTAs per SM
        relu_square ? run(quantise_rows_kernel<4, true, 512, 3>, 4) : run(quantise_rows_kernel<4, false, 512, 3>, 4);
    } else if (k <= 8192) {
        relu_square ? run(quantise_rows_kernel<1, true>, 1) : run(quantise_rows_kernel<1, false>, 1);
    } else if (k <= 16384) {
        relu_square ? run(quantise_rows_kernel<2, true>, 2) : run(quantise_rows_kernel<2, false>, 2);
    } else {
        relu_square ? run(quantise_rows_kernel<4, true>, 4) : run(quantise_rows_kernel<4, false>, 4);
    }
    return launch_result();
}

RWKV_API int rwkv_two_part_rows(const void* x, void* two_part, int rows, int k, void* stream) {
    if (k % 8 != 0) return static_cast<int>(cudaErrorInvalidValue);
    const int64_t num_vectors = static_cast<int64_t>(rows) * (k / 8);
    launch(two_part_rows_kernel, dim3(static_cast<unsigned>((num_vectors + 255) / 256)), 256, stream, static_cast<const __half*>(x),
           static_cast<uint8_t*>(two_part), num_vectors, k);
    return launch_result();
}

// rows, columns: the matrix as stored.
RWKV_API int rwkv_dequantise(
    const void* codes, const void* scales, void* out, int format, int transposed, int64_t rows, int columns, void* stream) {
    const dim3 grid(static_cast<unsigned>(min(static_cast<int64_t>(16 * device_info().num_sms), (rows * columns / 8 + 255) / 256)));
    const auto run = [&](auto plain, auto transposed_kernel) {
        launch<LaunchOrder::SERIAL>(transposed ? transposed_kernel : plain, grid, 256, stream, codes, scales, static_cast<__half*>(out), rows, columns);
        return launch_result();
    };
    switch (format) {
        case FP8: return run(dequantise_kernel<FP8, false>, dequantise_kernel<FP8, true>);
        case INT4: return run(dequantise_kernel<INT4, false>, dequantise_kernel<INT4, true>);
    }
    return static_cast<int>(cudaErrorInvalidValue);
}
