// Rows of activations as fp8 (e4m3) for products of many rows, and codes of weights back as halves.
//
//   quantise_rows  x [rows, k] fp16 -> codes [rows, k] e4m3, scales [rows] fp32: x = codes * scale, the largest of a row
//                  becomes 448; optionally of max(x, 0)^2. A block owns a row. Bytes 3k per row.
//   row_parts      x [rows, k] fp16 -> two e5m2 parts [rows, 2, k] (row_parts.cuh). Bytes 4k per row.
//   row_bytes      likewise -> two bytes [rows, 2, k] with [k / group, pitch] pairs of fp32 (row_bytes.cuh), k a multiple of the
//                  group, which is 64 or 128.
//   dequantise     codes [n, k] (quant.cuh; the 4-bit ones' nibbles run along k, or along n if transposed) -> [n, k] fp16,
//                  for products by cuBLAS. Bytes 3nk (2.5nk).
//
// Scales of int8 and int4 lie [k / 128][n], of fp8 [n]. Transposed: codes [k, n] -> [k, n] fp16.
#include "quant.cuh"
#include "relu.cuh"
#include "row_bytes.cuh"
#include "row_codes.cuh"
#include "row_parts.cuh"

template <int EACH, bool RELU_SQUARE, int THREADS = 1024, int BLOCKS = 1>
__global__ void __launch_bounds__(THREADS, BLOCKS) quantise_rows_kernel(const __half* x, uint2* codes, float* scales, int k) {
    __shared__ float scratch[32];
    let_next_start();
    wait_for_inputs();
    const int64_t row = blockIdx.x;
    uint4 packed[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
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
    for (int i = 0; i < EACH; ++i) {
        unpack(i);
        largest = fmaxf(largest, largest_of(v));
    }
    largest = warp_max(largest);
    if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = largest;
    __syncthreads();
    const int lane = threadIdx.x & 31, warps = (blockDim.x + 31) >> 5;
    const RowScale of_row = scale_of_row(warp_max(lane < warps ? scratch[lane] : 0.0f));
    if (threadIdx.x == 0) scales[row] = of_row.scale;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int at = (i * blockDim.x + threadIdx.x) * 8;
        unpack(i);
        if (at < k) codes[(row * k + at) / 8] = codes_of(v, of_row.inverse);
    }
}

// x, 8 halves a thread, as [rows, 2, k].
__global__ void __launch_bounds__(256) row_parts_kernel(const __half* x, uint8_t* parts, int64_t eighths, int k) {
    let_next_start();
    wait_for_inputs();
    const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= eighths) return;
    const int64_t row = i / (k / 8);
    store_parts(parts + 8 * i + row * k, k, load16(x + 8 * i));
}

// x, 8 halves a thread, as [rows, 2, k] and [k / GROUP, pitch].
template <int GROUP>
__global__ void __launch_bounds__(256) row_bytes_kernel(const __half* x, uint8_t* bytes, float2* scales, int64_t eighths, int k, int pitch) {
    let_next_start();
    wait_for_inputs();
    const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    const bool active = i < eighths;
    const int64_t row = i / (k / 8), group = i % (k / 8) * 8 / GROUP;
    const uint4 halves = active ? load16(x + 8 * i) : make_uint4(0, 0, 0, 0);
    uint8_t* const at[1] = {bytes + 8 * i + row * k};
    float2* const items[1] = {scales + group * pitch + row};
    store_bytes<GROUP, 1>(at, k, items, &halves, active);
}

__device__ __forceinline__ float half_at(const void* p, int64_t i) { return __half2float(__ldg(static_cast<const __half*>(p) + i)); }

// Eight neighbouring elements of a row of the matrix as it is stored.
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
            unpack_bytes<FORMAT>(words.x, pairs[0], pairs[1]);
            unpack_bytes<FORMAT>(words.y, pairs[2], pairs[3]);
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
            } else if constexpr (FORMAT == INT8) {
                w[j] *= half_at(scales, at);
            } else {
                w[j] = (w[j] - (half_at(scales, 2 * at + 1) - 1024.0f)) * half_at(scales, 2 * at);
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
    if (k > 8192 && k <= 16384 && rows > this_machine().processors) {  // three rows on a processor at a time
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

RWKV_API int rwkv_row_parts(const void* x, void* parts, int rows, int k, void* stream) {
    if (k % 8 != 0) return static_cast<int>(cudaErrorInvalidValue);
    const int64_t eighths = static_cast<int64_t>(rows) * (k / 8);
    launch(row_parts_kernel, dim3(static_cast<unsigned>((eighths + 255) / 256)), 256, stream, static_cast<const __half*>(x),
           static_cast<uint8_t*>(parts), eighths, k);
    return launch_result();
}

RWKV_API int rwkv_row_bytes(const void* x, void* bytes, void* scales, int rows, int k, int pitch, int group, void* stream) {
    if (k % group != 0 || pitch < rows || (group != HEAD && group != BYTES_GROUP)) return static_cast<int>(cudaErrorInvalidValue);
    const int64_t eighths = static_cast<int64_t>(rows) * (k / 8);
    launch(group == HEAD ? row_bytes_kernel<HEAD> : row_bytes_kernel<BYTES_GROUP>, dim3(static_cast<unsigned>((eighths + 255) / 256)), 256, stream, static_cast<const __half*>(x),
           static_cast<uint8_t*>(bytes), static_cast<float2*>(scales), eighths, k, pitch);
    return launch_result();
}

// rows, columns: of the matrix as it is stored.
RWKV_API int rwkv_dequantise(
    const void* codes, const void* scales, void* out, int format, int transposed, int64_t rows, int columns, void* stream) {
    const dim3 grid(static_cast<unsigned>(min(static_cast<int64_t>(16 * this_machine().processors), (rows * columns / 8 + 255) / 256)));
    const auto run = [&](auto plain, auto turned) {
        launch<Start::SPREAD>(transposed ? turned : plain, grid, 256, stream, codes, scales, static_cast<__half*>(out), rows, columns);
        return launch_result();
    };
    switch (format) {
        case FP8: return run(dequantise_kernel<FP8, false>, dequantise_kernel<FP8, true>);
        case INT8: return run(dequantise_kernel<INT8, false>, dequantise_kernel<INT8, true>);
        case INT4: return run(dequantise_kernel<INT4, false>, dequantise_kernel<INT4, true>);
    }
    return static_cast<int>(cudaErrorInvalidValue);
}
