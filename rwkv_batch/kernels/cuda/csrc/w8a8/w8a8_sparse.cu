// ffn.value of W8A8 for 2 to 8 rows: y = codes(max(h, 0)^2) @ Wt over the rows of Wt whose code is not zero in all rows.
//
//   codes, S and y as in w8a8_rows.cuh and w8a8.cuh. A code of zero adds nothing to S, so the bits are the same.
//
// in     h               [T, F]  fp16   by position
//        weights         [F, C]  s8     W transposed, by position
//        factors         [F]     fp32   by position
//        weight_ratios   [C]     s32
//        largest         [T, 2]  u32    bits of the rows' largest inputs of the rest, of segment 1
//
// out    scales          [T]     fp32
//
// inout  sums            [T, C]  s32    S is added
//
// Four CTAs compute 128 columns, each a quarter of F. A warp rounds its inputs, lists the active rows of Wt with their
// codes, and multiplies 32 at a time: a lane has 16 columns of eight rows, and transposes them in registers. The first 128
// positions are segment 1, and all of one warp.
//
// Grid: 4 C / 128.
// Block: 512 threads; mma.m16n8k32.
// Shared memory: 66 KB, lists, then sums.
// Bound: memory; C bytes per active row in pieces of 128.
// Made for: T <= 8, F <= 16,384, F % 128 == 0, C % 128 == 0.
#include "../mma.cuh"
#include "w8a8_rows.cuh"

constexpr int WARPS = 16, COLUMNS = 128, SPLITS = 4, STEP = 32, MAX_ROWS = 8, LANE_COLUMNS = 16;
constexpr int RANGE = 256;                  // positions of a warp, 8 per lane
constexpr int ENTRIES = RANGE + 2 * STEP;  // both segments take whole steps
constexpr int STEPS_IN_FLIGHT = 2;
constexpr uint16_t PADDING = 0xffff;

struct ActiveList {
    uint2 codes[ENTRIES];  // of all rows of the batch
    uint16_t positions[ENTRIES];
};
struct SparseSmem {
    union {
        ActiveList lists[WARPS];
        int4 sums[WARPS][COLUMNS * MAX_ROWS / 4];  // after the main loop
    };
    __align__(16) int column_ratios[COLUMNS];  // of the warp that has segment 1
    int totals[COLUMNS * MAX_ROWS];
};

// Bytes i of four words in word i.
__device__ __forceinline__ void transpose_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t (&out)[4]) {
    const uint32_t ab = __byte_perm(a, b, 0x5140), cd = __byte_perm(c, d, 0x5140), ab_high = __byte_perm(a, b, 0x7362), cd_high = __byte_perm(c, d, 0x7362);
    out[0] = __byte_perm(ab, cd, 0x5410), out[1] = __byte_perm(ab, cd, 0x7632);
    out[2] = __byte_perm(ab_high, cd_high, 0x5410), out[3] = __byte_perm(ab_high, cd_high, 0x7632);
}
__device__ __forceinline__ uint32_t word_of(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// Positions of a warp: all of segment 1 in range 0.
struct Range {
    int number, first, count;
    __device__ __forceinline__ Range(int ffn, int split, int warp) : number(warp * SPLITS + split) {
        const int each = max((ffn / (SPLITS * WARPS) + 7) / 8 * 8, SEGMENT);
        first = number * each, count = max(min(each, ffn - first), 0);
    }
};

// Lists a warp's active positions. rows: codes of 8 positions from `at` on. has_large: the first 16 lanes have segment 1,
// which takes whole steps; they end at large_end. Returns the list's end.
__device__ __forceinline__ int list_active(ActiveList& list, const uint2 (&rows)[MAX_ROWS], int at, bool has_large, int lane, int& large_end) {
    uint32_t low[8], high[8];  // codes of rows 0 to 3 and 4 to 7 of each position
    const auto transpose = [&](uint32_t (&to)[8], int row) {
        auto& first = reinterpret_cast<uint32_t(&)[4]>(to[0]);
        auto& second = reinterpret_cast<uint32_t(&)[4]>(to[4]);
        transpose_bytes(rows[row].x, rows[row + 1].x, rows[row + 2].x, rows[row + 3].x, first);
        transpose_bytes(rows[row].y, rows[row + 1].y, rows[row + 2].y, rows[row + 3].y, second);
    };
    transpose(low, 0);
    transpose(high, 4);
    int own = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) own += (low[j] | high[j]) != 0;
    int before = own;  // prefix sum over the lanes
#pragma unroll
    for (int offset = 1; offset < 32; offset <<= 1) {
        const int other = __shfl_up_sync(FULL_MASK, before, offset);
        if (lane >= offset) before += other;
    }
    const int total = __shfl_sync(FULL_MASK, before, 31), of_large = __shfl_sync(FULL_MASK, before, SEGMENT / 8 - 1);
    int to = before - own, count = total;
    large_end = 0;
    if (has_large) {
        large_end = (of_large + STEP - 1) / STEP * STEP;
        if (lane >= SEGMENT / 8) to += large_end - of_large;
        if (lane < large_end - of_large) list.codes[of_large + lane] = make_uint2(0, 0), list.positions[of_large + lane] = PADDING;
        count += large_end - of_large;
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        if ((low[j] | high[j]) == 0) continue;
        list.codes[to] = make_uint2(low[j], high[j]);
        list.positions[to++] = static_cast<uint16_t>(at + j);
    }
    const int end = (count + STEP - 1) / STEP * STEP;
    if (lane < end - count) list.codes[count + lane] = make_uint2(0, 0), list.positions[count + lane] = PADDING;
    __syncwarp();
    return end;
}

// Multiplies entries begin .. end - 1 of a list, whole steps. sums[m]: columns 2m and 2m + 1 of the lane, rows 2t, 2t + 1.
__device__ __forceinline__ void multiply_list(int (&sums)[8][4], const ActiveList& list, const int8_t* weights, int width, int begin, int end, int lane) {
    const int g = lane >> 2, t = lane & 3;
    const uint32_t byte_of_row = (g & 3) | ((g & 3) + 4) << 4;
    for (; begin < end; begin += STEPS_IN_FLIGHT * STEP) {
        uint4 raw[STEPS_IN_FLIGHT][8];
        uint32_t x[STEPS_IN_FLIGHT][2];
#pragma unroll
        for (int f = 0; f < STEPS_IN_FLIGHT; ++f) {
            const int at = begin + f * STEP + 4 * t;
            if (begin + f * STEP >= end) break;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint2 four = *reinterpret_cast<const uint2*>(list.positions + at + 16 * half);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int position = (i < 2 ? four.x : four.y) >> (16 * (i & 1)) & 0xffffu;
                    raw[f][4 * half + i] = make_uint4(0, 0, 0, 0);
                    if (position != PADDING) raw[f][4 * half + i] = __ldcs(reinterpret_cast<const uint4*>(weights + static_cast<int64_t>(position) * width));
                }
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint32_t* const codes = reinterpret_cast<const uint32_t*>(list.codes + at + 16 * half) + (g >> 2);
                x[f][half] = __byte_perm(__byte_perm(codes[0], codes[2], byte_of_row), __byte_perm(codes[4], codes[6], byte_of_row), 0x5410);
            }
        }
#pragma unroll
        for (int f = 0; f < STEPS_IN_FLIGHT; ++f) {
            if (begin + f * STEP >= end) break;
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                uint32_t low[4], high[4];
                transpose_bytes(word_of(raw[f][0], w), word_of(raw[f][1], w), word_of(raw[f][2], w), word_of(raw[f][3], w), low);
                transpose_bytes(word_of(raw[f][4], w), word_of(raw[f][5], w), word_of(raw[f][6], w), word_of(raw[f][7], w), high);
#pragma unroll
                for (int m = 0; m < 2; ++m)
                    mma_s8_u8(sums[2 * w + m], make_uint4(low[2 * m], low[2 * m + 1], high[2 * m], high[2 * m + 1]), x[f][0], x[f][1]);
            }
        }
    }
}

__global__ void __launch_bounds__(WARPS * 32, 1) w8a8_sparse_kernel(const __grid_constant__ W8A8SparseArgs a) {
    extern __shared__ __align__(16) unsigned char dynamic[];
    SparseSmem& smem = *reinterpret_cast<SparseSmem*>(dynamic);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int tile = blockIdx.x / SPLITS, rank = blockIdx.x % SPLITS;
    const Range range(a.ffn, rank, warp);
    const bool inside = 8 * lane < range.count, is_large = range.number == 0 && lane < SEGMENT / 8;
    W8A8Octet octet = {};
    if (inside) octet.load(a.factors, range.first + 8 * lane);
    if (range.number == 0) reinterpret_cast<int4*>(smem.column_ratios)[lane] = __ldg(reinterpret_cast<const int4*>(a.weight_ratios + tile * COLUMNS) + lane);
    allow_next_kernel();
    wait_for_previous_kernel();
    uint4 h[MAX_ROWS];
#pragma unroll
    for (int row = 0; row < MAX_ROWS; ++row) {
        h[row] = make_uint4(0, 0, 0, 0);
        if (row < a.rows && inside) h[row] = load16(a.h + static_cast<int64_t>(row) * a.ffn + range.first + 8 * lane);
    }
    const uint2 largest = (lane & 7) < a.rows ? __ldcg(a.largest + (lane & 7)) : make_uint2(0, 0);
    const W8A8Row<true> of_row(largest.x, largest.y);  // of row lane % 8
    if (blockIdx.x == 0 && threadIdx.x < a.rows) a.scales[threadIdx.x] = of_row.scale;

    ActiveList& list = smem.lists[warp];
    uint2 codes[MAX_ROWS];
#pragma unroll
    for (int row = 0; row < MAX_ROWS; ++row) {
        const float of_rest = __shfl_sync(FULL_MASK, of_row.inverse_rest, row), of_large = __shfl_sync(FULL_MASK, of_row.inverse_large, row);
        const float inverse = is_large ? of_large : of_rest;
        codes[row] = make_uint2(0, 0);
        if (row >= a.rows || !inside) continue;
        float v[8];
        octet.template scale<true>(h[row], v);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = __fmul_rn(v[j], inverse);
        codes[row] = make_uint2(pack_u8(v[0], v[1], v[2], v[3]), pack_u8(v[4], v[5], v[6], v[7]));
    }
    int large_end;
    const int end = list_active(list, codes, range.first + 8 * lane, range.number == 0, lane, large_end);

    const int8_t* const weights = a.weights + tile * COLUMNS + LANE_COLUMNS * g;
    int sums[8][4] = {};
    if (large_end > 0) {
        multiply_list(sums, list, weights, a.width, 0, large_end, lane);
        const int ratios[2] = {__shfl_sync(FULL_MASK, of_row.ratio, 2 * t), __shfl_sync(FULL_MASK, of_row.ratio, 2 * t + 1)};
#pragma unroll
        for (int m = 0; m < 8; ++m) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                sums[m][i] = in_units_of_rest(sums[m][i], ratios[i & 1] * smem.column_ratios[LANE_COLUMNS * g + 2 * m + i / 2]);
        }
    }
    multiply_list(sums, list, weights, a.width, large_end, end, lane);
    __syncthreads();  // the lists have been read
#pragma unroll
    for (int m = 0; m < 8; ++m) smem.sums[warp][m * 32 + lane] = make_int4(sums[m][0], sums[m][1], sums[m][2], sums[m][3]);
    __syncthreads();
    // Item i = 32 m + lane has columns 16 g + 2 m and the next, rows 2 t and 2 t + 1.
    constexpr int ITEMS = COLUMNS * MAX_ROWS / 4;
    if (const int item = threadIdx.x; item < ITEMS) {
        int4 total = make_int4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < WARPS; ++i) {
            const int4 v = smem.sums[i][item];
            total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
        }
        int* const of_rows = smem.totals + item % 4 * 2 * COLUMNS + item % 32 / 4 * LANE_COLUMNS + item / 32 * 2;
        *reinterpret_cast<int2*>(of_rows) = make_int2(total.x, total.z);
        *reinterpret_cast<int2*>(of_rows + COLUMNS) = make_int2(total.y, total.w);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < a.rows * COLUMNS; i += WARPS * 32)
        atomicAdd(a.sums + static_cast<int64_t>(i / COLUMNS) * a.width + tile * COLUMNS + i % COLUMNS, smem.totals[i]);
}

RWKV_API int rwkv_w8a8_sparse(const W8A8SparseArgs* a, void* stream) {
    if (a->rows == 0) return 0;
    const int ctas = a->width / COLUMNS * SPLITS;
    if (a->rows > MAX_ROWS || a->ffn > SPLITS * WARPS * RANGE || a->ffn % SEGMENT || a->width % COLUMNS)
        return static_cast<int>(cudaErrorInvalidValue);
    static bool raised[MAX_DEVICES] = {};
    if (!raised[current_device()]) {
        const cudaError_t error = cudaFuncSetAttribute(w8a8_sparse_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(SparseSmem));
        if (error != cudaSuccess) return static_cast<int>(error);
        raised[current_device()] = true;
    }
    launch_with_smem(w8a8_sparse_kernel, dim3(ctas), WARPS * 32, sizeof(SparseSmem), stream, *a);
    return launch_result();
}
