// Rows in 8 bits for up to 3 W8A8 GEMMs, each with its own inputs (w8a8_rows.cuh has the formula).
//
// in     x        [M, T, K]   fp16
//        factors  [K] fp32    of each GEMM, in the order of x
//        stored_factors [K]   the same by position
//        order    [K] u16     of each GEMM: the channel at a position; null: x is in the order of positions
//
// out    codes    [M, T, K]   s8; u8 with relu_squared
//        scales   [M, pitch]  fp32
//        ratios   [M, pitch]  s32
//        In two bytes (is_two_byte) a row of x is two rows of all three: high bytes, then low bytes.
//
// A CTA takes one row. With at most one CTA per SM it loads the factors before the previous kernel ends. Of more than
// three rows per SM it takes some at a time, and keeps the factors in registers. In two bytes: one row each.
//
// Grid: (rows, GEMMs); many rows: as many CTAs as are resident, in all.
// Block: K / 8 threads up to K = 4,096; then K / 16, or K / 32 for at most three rows per SM.
// Shared memory: below 1 KB; by order K bytes more. Many rows: 8 K bytes up to K = 4,096, then 4 K.
// Bound: memory, 3 K bytes per row; with few rows the latency of one load and a barrier, 2 to 3 us. Share of 4.8 TB/s
// (H200, 16,384 rows): K = 4,096 by order 75 %, K = 16,384 in order 72 %.
// Made for: K % 128 == 0, K <= 16,384.
#include <cuda_pipeline.h>

#include "w8a8_rows.cuh"

struct W8A8QuantiseArgs {
    const float *factors[MAX_W8A8_GEMMS], *stored_factors[MAX_W8A8_GEMMS];
    const uint16_t* order[MAX_W8A8_GEMMS];
    const __half* x;
    uint2* codes;
    float* scales;
    int* ratios;
    int count, rows, k, pitch, relu_squared, is_two_byte;  // rows: of x
};

template <int OCTETS, int THREADS, int CTAS, int BYTES, bool RELU_SQUARED, bool IN_ORDER>
__global__ void __launch_bounds__(THREADS, CTAS) w8a8_quantise_kernel(const __grid_constant__ W8A8QuantiseArgs a) {
    constexpr bool PRELOADED = CTAS == 1;
    __shared__ W8A8Maxima maxima;
    __shared__ __align__(8) uint8_t codes_of_row[IN_ORDER ? 8 : BYTES * OCTETS * THREADS * 8];
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
    if (threadIdx.x < BYTES) {
        a.scales[gemm * a.pitch + BYTES * blockIdx.x + threadIdx.x] = of_row.scale;
        a.ratios[gemm * a.pitch + BYTES * blockIdx.x + threadIdx.x] = of_row.ratio;
    }
    uint2* const codes = a.codes + BYTES * at_row * (a.k / 8);
#pragma unroll
    for (int i = 0; i < OCTETS; ++i) {
        if (channel(i) >= a.k) continue;
        const W8A8Octet octet = octet_of(i);
        octet.template scale<RELU_SQUARED>(x[i], v);
        uint2 eight[BYTES];
        octet.template codes<RELU_SQUARED>(v, of_row.inverses(), eight);
#pragma unroll
        for (int byte = 0; byte < BYTES; ++byte) {
            if (IN_ORDER) {
                codes[(byte * a.k + channel(i)) / 8] = eight[byte];
            } else {
                *reinterpret_cast<uint2*>(codes_of_row + byte * a.k + channel(i)) = eight[byte];
            }
        }
    }
    if constexpr (!IN_ORDER) {
        __syncthreads();
        for (int p = threadIdx.x; p < SEGMENT; p += blockDim.x) {
#pragma unroll
            for (int byte = 0; byte < BYTES; ++byte) swap_codes(codes_of_row + byte * a.k, p, __ldg(a.order[gemm] + p));
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < OCTETS; ++i) {
            if (channel(i) >= a.k) continue;
#pragma unroll
            for (int byte = 0; byte < BYTES; ++byte) codes[(byte * a.k + channel(i)) / 8] = *reinterpret_cast<const uint2*>(codes_of_row + byte * a.k + channel(i));
        }
    }
}

// Many rows: a CTA takes up to ROWS rows at a time, with the factors in registers; the next ones are on their way to
// shared memory meanwhile. There, pairs of channels change their place, so that threads hold positions. in_order: they
// are in place already. factors: in the order of positions.
template <int OCTETS, int ROWS, int CTAS, bool RELU_SQUARED>
__global__ void __launch_bounds__(1024 / CTAS, CTAS) w8a8_quantise_many_kernel(const __grid_constant__ W8A8QuantiseArgs a, int rows_at_once) {
    extern __shared__ __align__(16) unsigned char dynamic[];
    __half* const x_rows = reinterpret_cast<__half*>(dynamic);  // [ROWS][k]
    __shared__ uint32_t largest[2][ROWS][32], large[2][ROWS];
    const int gemm = blockIdx.y, thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, warps = blockDim.x >> 5;
    const uint16_t* const order = a.order[gemm];
    const auto position = [&](int i) { return (i * static_cast<int>(blockDim.x) + thread) * 8; };
    const auto is_large = [&](int i) { return i == 0 && thread < SEGMENT / 8; };
    float factors[OCTETS][8] = {};
#pragma unroll
    for (int i = 0; i < OCTETS; ++i) {
        if (position(i) < a.k) load_fp32x8(a.stored_factors[gemm] + position(i), factors[i]);
    }
    const int partner = order == nullptr ? 0 : __ldg(order + thread % SEGMENT);
    const auto fetch = [&](int first) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (r >= rows_at_once || first + r >= a.rows) continue;
#pragma unroll
            for (int i = 0; i < OCTETS; ++i) {
                if (position(i) < a.k) __pipeline_memcpy_async(x_rows + r * a.k + position(i), a.x + (static_cast<int64_t>(gemm) * a.rows + first + r) * a.k + position(i), 16);
            }
        }
        __pipeline_commit();
    };
    const auto scale = [&](const uint4& x, int i, float (&v)[8]) {
        unpack8(x, v);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = __fmul_rn(RELU_SQUARED ? relu_square(v[j]) : v[j], fabsf(factors[i][j]));
    };
    allow_next_kernel();
    wait_for_previous_kernel();
    const int step = gridDim.x * rows_at_once;
    int turn = 0;
    fetch(blockIdx.x * rows_at_once);
    for (int first = blockIdx.x * rows_at_once; first < a.rows; first += step, turn ^= 1) {
        const int count = min(rows_at_once, a.rows - first);
        __pipeline_wait_prior(0);
        if (order != nullptr) {
            __syncthreads();
            for (int i = thread; i < ROWS * SEGMENT; i += blockDim.x) {
                __half* const row = x_rows + i / SEGMENT * a.k;
                const int p = i % SEGMENT, other = i == thread ? partner : __ldg(order + p);
                const __half here = row[p], there = row[other];
                row[p] = there, row[other] = here;
            }
            __syncthreads();
        }
        uint4 x[ROWS][OCTETS];
        float v[8];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
#pragma unroll
            for (int i = 0; i < OCTETS; ++i) x[r][i] = r < count && position(i) < a.k ? load16(x_rows + r * a.k + position(i)) : make_uint4(0, 0, 0, 0);
        }
        fetch(first + step);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            uint32_t of_rest = 0, of_large = 0;
#pragma unroll
            for (int i = 0; i < OCTETS; ++i) {
                scale(x[r][i], i, v);
                const uint32_t bits = largest_bits(v);
                of_rest = max(of_rest, is_large(i) ? 0 : bits), of_large = is_large(i) ? bits : of_large;
            }
            of_rest = __reduce_max_sync(FULL_MASK, of_rest);
            if (lane == 0) largest[turn][r][warp] = of_rest;
            if (warp != 0) continue;
            of_large = __reduce_max_sync(FULL_MASK, of_large);
            if (lane == 0) large[turn][r] = of_large;
        }
        __syncthreads();
        uint32_t rest = 0;  // of the lane's row
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const uint32_t of_rest = __reduce_max_sync(FULL_MASK, lane < warps ? largest[turn][r][lane] : 0);
            if (lane == r) rest = of_rest;
        }
        const W8A8Row<RELU_SQUARED> of_lane(rest, large[turn][lane % ROWS]);
        if (thread < count) {
            a.scales[gemm * a.pitch + first + lane] = of_lane.scale;
            a.ratios[gemm * a.pitch + first + lane] = of_lane.ratio;
        }
        uint2* codes = a.codes + (static_cast<int64_t>(gemm) * a.rows + first) * (a.k / 8);
#pragma unroll
        for (int r = 0; r < ROWS; ++r, codes += a.k / 8) {
            const float of_rest = __shfl_sync(FULL_MASK, of_lane.inverse_rest, r), of_large = __shfl_sync(FULL_MASK, of_lane.inverse_large, r);
#pragma unroll
            for (int i = 0; i < OCTETS; ++i) {
                asm volatile("" : "+r"(x[r][i].x), "+r"(x[r][i].y), "+r"(x[r][i].z), "+r"(x[r][i].w));  // otherwise nvcc holds all products since above
                scale(x[r][i], i, v);
                const float inverse = is_large(i) ? of_large : of_rest;
#pragma unroll
                for (int j = 0; j < 8; ++j) v[j] = __fmul_rn(v[j], inverse);
                const uint2 packed = RELU_SQUARED ? make_uint2(pack_u8(v[0], v[1], v[2], v[3]), pack_u8(v[4], v[5], v[6], v[7])) : make_uint2(pack_s8(v[0], v[1], v[2], v[3]), pack_s8(v[4], v[5], v[6], v[7]));
                if (r < count && position(i) < a.k) codes[position(i) / 8] = packed;
            }
        }
    }
}

template <int OCTETS, int ROWS, int CTAS>
void launch_w8a8_quantise_many(const W8A8QuantiseArgs& a, void* stream) {
    const auto run = [&](auto kernel, bool (&raised)[MAX_DEVICES]) {
        const int smem_bytes = ROWS * a.k * 2, threads = (a.k / 8 + OCTETS * 32 - 1) / (OCTETS * 32) * 32;
        if (!raised[current_device()]) {
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, ROWS * OCTETS * (1024 / CTAS) * 16);
            raised[current_device()] = true;
        }
        const int resident = max(1, CTAS * device_info().num_sms / a.count), rows_at_once = min(ROWS, (a.rows + resident - 1) / resident);
        launch_with_smem(kernel, dim3(min(resident, (a.rows + rows_at_once - 1) / rows_at_once), a.count), threads, smem_bytes, stream, a, rows_at_once);
    };
    static bool raised[2][MAX_DEVICES] = {};
    a.relu_squared ? run(w8a8_quantise_many_kernel<OCTETS, ROWS, CTAS, true>, raised[1]) : run(w8a8_quantise_many_kernel<OCTETS, ROWS, CTAS, false>, raised[0]);
}

template <int OCTETS, int THREADS, int CTAS, int BYTES = 1>
void launch_w8a8_quantise(const W8A8QuantiseArgs& a, void* stream) {
    const int threads = (a.k / 8 + OCTETS * 32 - 1) / (OCTETS * 32) * 32;
    const bool in_order = a.order[0] == nullptr;
    const auto run = [&](auto kernel) { launch(kernel, dim3(a.rows, a.count), threads, stream, a); };
    if (a.relu_squared) {
        in_order ? run(w8a8_quantise_kernel<OCTETS, THREADS, CTAS, BYTES, true, true>) : run(w8a8_quantise_kernel<OCTETS, THREADS, CTAS, BYTES, true, false>);
    } else {
        in_order ? run(w8a8_quantise_kernel<OCTETS, THREADS, CTAS, BYTES, false, true>) : run(w8a8_quantise_kernel<OCTETS, THREADS, CTAS, BYTES, false, false>);
    }
}

RWKV_API int rwkv_w8a8_quantise(const W8A8QuantiseArgs* a, void* stream) {
    if (a->rows == 0) return 0;
    if (a->k % SEGMENT != 0 || a->k > 16384 || a->count > MAX_W8A8_GEMMS) return static_cast<int>(cudaErrorInvalidValue);
    if (a->is_two_byte) {
        a->k <= 4096 ? launch_w8a8_quantise<1, 512, 3, 2>(*a, stream) : launch_w8a8_quantise<4, 512, 2, 2>(*a, stream);
        return launch_result();
    }
    const bool few = a->rows * a->count <= device_info().num_sms;
    if (a->rows * a->count > 3 * device_info().num_sms) {
        a->k <= 4096 ? launch_w8a8_quantise_many<1, 4, 2>(*a, stream) : launch_w8a8_quantise_many<2, 2, 1>(*a, stream);
    } else if (a->k <= 4096) {
        few ? launch_w8a8_quantise<1, 512, 1>(*a, stream) : launch_w8a8_quantise<1, 512, 3>(*a, stream);
    } else {
        few ? launch_w8a8_quantise<2, 1024, 1>(*a, stream) : launch_w8a8_quantise<4, 512, 3>(*a, stream);
    }
    return launch_result();
}
