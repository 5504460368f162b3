// ffn.value of W8A8 for one row: y = codes(max(h, 0)^2) @ Wt over the rows of Wt whose code is not zero.
//
//   codes, S and y as in w8a8_rows.cuh and w8a8.cuh. A code of zero adds nothing to S, so the bits are the same.
//
// in     as in w8a8_sparse.cu, T = 1
//
// out    y    [C]  fp16
//
// CTA: 32 columns x all of F, so that no CTA waits for another. Every CTA rounds all of h. A warp has a range of F. It
// lists its active rows, loads them by cp.async as far as it has slots, and multiplies 32 at a time. The first 128
// positions are segment 1, all of the first warp; they take whole steps.
// At most 56 registers: CTAs of this kernel and of hopper_row.cu fit on one SM, and the next GEMV's weights are loaded
// meanwhile. Each quarter of an SM has 16,384 registers; one quarter holds 4 warps of this kernel and 5 of 17 of the
// other, which has 56, too.
//
// Grid: C / 32.
// Block: 512 threads; mma.m16n8k32.
// Shared memory: 70 KB, a ring of weight rows per warp, sums.
// Bound: memory; C bytes per active row in pieces of 32, 6 F for h and factors in every CTA.
// Made for: T = 1, F <= 16,384, F % 128 == 0, C % 32 == 0.
#include <cuda_pipeline.h>

#include "../mma.cuh"
#include "w8a8_rows.cuh"

constexpr int WARPS = 16, COLUMNS = 32, STEP = 32, SLOTS = 128, STEPS_IN_FLIGHT = SLOTS / STEP;
constexpr int LISTED = 256, LISTINGS = 4;  // positions of a warp at once, 8 per lane; times
constexpr int MAX_FFN = WARPS * LISTED * LISTINGS;

struct SparseRowSmem {
    uint8_t weights[WARPS][SLOTS][COLUMNS];
    uint8_t codes[WARPS][SLOTS];  // at `code_slot`
    int sums[WARPS][COLUMNS];
    float weight_scales[COLUMNS];
    int weight_ratios[COLUMNS];
    uint32_t rest[WARPS], large;  // bits of the largest inputs
};

// Where a slot's code is stored: a lane multiplies every fourth of 16 slots, so that its weights are in other banks than
// its neighbours'.
__device__ __forceinline__ int code_slot(int slot) { return (slot & ~15) | (slot & 3) << 2 | (slot >> 2 & 3); }

// Bytes i of four words in word i.
__device__ __forceinline__ void transpose_bytes(const uint32_t (&v)[4], uint32_t (&out)[4]) {
    const uint32_t ab = __byte_perm(v[0], v[1], 0x5140), cd = __byte_perm(v[2], v[3], 0x5140);
    const uint32_t ab_high = __byte_perm(v[0], v[1], 0x7362), cd_high = __byte_perm(v[2], v[3], 0x7362);
    out[0] = __byte_perm(ab, cd, 0x5410), out[1] = __byte_perm(ab, cd, 0x7632);
    out[2] = __byte_perm(ab_high, cd_high, 0x5410), out[3] = __byte_perm(ab_high, cd_high, 0x7632);
}

__global__ void __launch_bounds__(576, 2) w8a8_sparse_row_kernel(const __grid_constant__ W8A8SparseArgs a, int rows_per_warp) {
    extern __shared__ __align__(16) unsigned char dynamic[];
    SparseRowSmem& smem = *reinterpret_cast<SparseRowSmem*>(dynamic);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int first_column = blockIdx.x * COLUMNS, first = warp * rows_per_warp + 8 * lane;  // the lane's first position
    const int rows = max(0, min(rows_per_warp, a.ffn - warp * rows_per_warp));
    const bool has_large = warp == 0;  // segment 1: the first listing's lower lanes
    const auto is_large = [&](int i) { return has_large && i == 0 && lane < SEGMENT / 8; };
    W8A8Octet octets[LISTINGS] = {};
#pragma unroll
    for (int i = 0; i < LISTINGS; ++i) {
        if (i * LISTED + 8 * lane < rows) octets[i].load(a.factors, first + i * LISTED);
    }
    if (threadIdx.x < COLUMNS) {
        smem.weight_scales[threadIdx.x] = __ldg(a.weight_scales + first_column + threadIdx.x);
        smem.weight_ratios[threadIdx.x] = __ldg(a.weight_ratios + first_column + threadIdx.x);
    }
    allow_next_kernel();
    wait_for_previous_kernel();
    uint4 h[LISTINGS];
#pragma unroll
    for (int i = 0; i < LISTINGS; ++i) {
        h[i] = make_uint4(0, 0, 0, 0);
        if (i * LISTED + 8 * lane < rows) h[i] = load16(a.h + first + i * LISTED);
    }
    float v[LISTINGS][8];
    uint32_t rest = 0, large = 0;
#pragma unroll
    for (int i = 0; i < LISTINGS; ++i) {
        octets[i].template scale<true>(h[i], v[i]);
        const uint32_t bits = largest_bits(v[i]);
        if (is_large(i)) {
            large = bits;
        } else {
            rest = max(rest, bits);
        }
    }
    rest = __reduce_max_sync(FULL_MASK, rest);
    if (lane == 0) smem.rest[warp] = rest;
    if (has_large) {
        large = __reduce_max_sync(FULL_MASK, large);
        if (lane == 0) smem.large = large;
    }
    __syncthreads();
    const W8A8Row<true> of_row(__reduce_max_sync(FULL_MASK, lane < WARPS ? smem.rest[lane] : 0), smem.large);

    uint2 codes[LISTINGS];
    uint32_t active[LISTINGS], counts[2] = {};  // bits of the lane's active positions; how many, 16 bits per listing
#pragma unroll
    for (int i = 0; i < LISTINGS; ++i) {
        const float inverse = is_large(i) ? of_row.inverse_large : of_row.inverse_rest;
#pragma unroll
        for (int j = 0; j < 8; ++j) v[i][j] = __fmul_rn(v[i][j], inverse);
        codes[i] = make_uint2(pack_u8(v[i][0], v[i][1], v[i][2], v[i][3]), pack_u8(v[i][4], v[i][5], v[i][6], v[i][7]));
        active[i] = 0;
#pragma unroll
        for (int j = 0; j < 8; ++j) active[i] |= ((j < 4 ? codes[i].x : codes[i].y) >> 8 * (j % 4) & 0xffu) != 0 ? 1u << j : 0u;
        counts[i / 2] += __popc(active[i]) << 16 * (i % 2);
    }
    uint32_t before[2] = {counts[0], counts[1]};  // prefix sums over the lanes
#pragma unroll
    for (int offset = 1; offset < 32; offset <<= 1) {
#pragma unroll
        for (int w = 0; w < 2; ++w) {
            const uint32_t other = __shfl_up_sync(FULL_MASK, before[w], offset);
            if (lane >= offset) before[w] += other;
        }
    }
    const int of_large = has_large ? __shfl_sync(FULL_MASK, before[0], SEGMENT / 8 - 1) & 0xffff : 0;
    const int large_end = (of_large + STEP - 1) / STEP * STEP;  // segment 1's entries, padded
    int at[LISTINGS], end = large_end - of_large;
#pragma unroll
    for (int i = 0; i < LISTINGS; ++i) {
        at[i] = end + static_cast<int>((before[i / 2] - counts[i / 2]) >> 16 * (i % 2) & 0xffffu);
        end += static_cast<int>(__shfl_sync(FULL_MASK, before[i / 2], 31) >> 16 * (i % 2) & 0xffffu);
    }
    if (has_large && lane < SEGMENT / 8) at[0] -= large_end - of_large;
    const int steps = (end + STEP - 1) / STEP;

    // Loads the entries before `limit` that have not been loaded.
    const auto issue = [&](int limit) {
#pragma unroll
        for (int i = 0; i < LISTINGS; ++i) {
            while (active[i] != 0 && at[i] < limit) {
                const int j = __popc((active[i] & -active[i]) - 1), slot = at[i] % SLOTS;
                const int8_t* const from = a.weights + static_cast<int64_t>(first + i * LISTED + j) * a.width + first_column;
                __pipeline_memcpy_async(&smem.weights[warp][slot][0], from, 16);
                __pipeline_memcpy_async(&smem.weights[warp][slot][16], from + 16, 16);
                smem.codes[warp][code_slot(slot)] = static_cast<uint8_t>((j < 4 ? codes[i].x : codes[i].y) >> 8 * (j % 4));
                active[i] &= active[i] - 1, ++at[i];
            }
        }
        const int begin = limit - STEP;  // entries without a row: code 0, any weight
        const auto is_padding = [&](int entry) { return (entry >= of_large && entry < large_end) || entry >= end; };
        if (is_padding(begin + lane)) smem.codes[warp][code_slot((begin + lane) % SLOTS)] = 0;
        __pipeline_commit();
    };
    // sums[m]: columns 4 g + 2 m and the next; only lanes with t = 0, every other sum.
    int sums[2][4] = {};
    const auto multiply = [&](int step) {
        const int slot = step * STEP % SLOTS;
        uint32_t x[2], low[4], high[4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32_t raw[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) raw[i] = *reinterpret_cast<const uint32_t*>(&smem.weights[warp][slot + 16 * half + 4 * i + t][4 * g]);
            transpose_bytes(raw, half == 0 ? low : high);
            x[half] = g == 0 ? *reinterpret_cast<const uint32_t*>(&smem.codes[warp][slot + 16 * half + 4 * t]) : 0u;
        }
#pragma unroll
        for (int m = 0; m < 2; ++m) mma_s8_u8(sums[m], make_uint4(low[2 * m], low[2 * m + 1], high[2 * m], high[2 * m + 1]), x[0], x[1]);
    };
    const auto end_segment = [&] {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                sums[m][i] = in_units_of_rest(sums[m][i], of_row.ratio * smem.weight_ratios[4 * g + 2 * m + i / 2]);
            }
        }
    };
#pragma unroll
    for (int s = 0; s < STEPS_IN_FLIGHT; ++s) issue((s + 1) * STEP);
    for (int step = 0; step < steps; ++step) {
        __pipeline_wait_prior(STEPS_IN_FLIGHT - 1);
        __syncwarp();
        multiply(step);
        if ((step + 1) * STEP == large_end) end_segment();
        __syncwarp();
        issue((step + 1 + STEPS_IN_FLIGHT) * STEP);
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            if (t == 0) smem.sums[warp][4 * g + 2 * m + i / 2] = sums[m][i];
        }
    }
    __syncthreads();
    if (threadIdx.x >= COLUMNS) return;
    int total = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) total += smem.sums[w][threadIdx.x];
    a.y[first_column + threadIdx.x] = __float2half_rn(scaled_sum(total, of_row.scale, smem.weight_scales[threadIdx.x]));
}

RWKV_API int rwkv_w8a8_sparse_row(const W8A8SparseArgs* a, void* stream) {
    const int rows_per_warp = (a->ffn + WARPS * SEGMENT - 1) / (WARPS * SEGMENT) * SEGMENT;
    if (a->rows != 1 || a->ffn > MAX_FFN || a->ffn % SEGMENT || a->width % COLUMNS) return static_cast<int>(cudaErrorInvalidValue);
    static bool raised[MAX_DEVICES] = {};
    if (!raised[current_device()]) {
        const cudaError_t error = cudaFuncSetAttribute(w8a8_sparse_row_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(SparseRowSmem));
        if (error != cudaSuccess) return static_cast<int>(error);
        raised[current_device()] = true;
    }
    launch_with_carveout(w8a8_sparse_row_kernel, dim3(a->width / COLUMNS), WARPS * 32, sizeof(SparseRowSmem), 100, stream, *a, rows_per_warp);
    return launch_result();
}
