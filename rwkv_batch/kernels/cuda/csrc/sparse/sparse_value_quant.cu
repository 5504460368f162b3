// Sparse ffn.value, 8 or 4 bits: y = h @ Wt over the active rows of Wt. One row: sparse_row_quant.cu.
//
// in   h        [B, F] fp16; relu(k)^2, 88 % zero: one row needs 12 % of Wt, eight rows 64 %
//      qweight  [F, C] fp8 or int4 (quant.cuh); int4 nibbles run along C
//      scales   fp8 [C] fp32; int4 [F / 128, C] fp16 (scale, 1024 + zero)
//
// out  y        [B, C] fp16
//
// CTA: 32 columns x all of F, so that no two CTAs share a sum. Each of its 16 warps has a range of F. It lists the
// active rows in order and multiplies 16 at a time (fp32 sums). A lane has four columns of four rows; two rows' weights
// make an operand register. With group scales, 16 rows are of one group. The warps' sums are added in order.
//
// Grid: C / 32.
// Block: 512 threads; mma.m16n8k16.
// Shared memory: 36 KB, lists of active rows, then sums.
// Bound: memory; C (int4: C / 2) bytes per active row in pieces of 32 (16), 2 B F for h in every CTA.
// Share of 4.8 TB/s (H200, C = 4,096): int4, 12 % at 4 and 8 rows. Every CTA lists the active rows of all of h, which
// takes longer than loading them.
// Made for: B <= 8, F <= 16,384.
#include "../mma.cuh"
#include "../quant.cuh"

constexpr int WARPS = 16, COLUMNS = 32, STEP = 16, MAX_ROWS = 8;
constexpr int ROWS_PER_LISTING = 256;  // rows per pass, 8 per lane
constexpr int MAX_ROWS_PER_WARP = 1024;
constexpr uint16_t PADDING = 0xffff;

// Weight formats: a lane's four columns of a row (Raw), and two rows' conversion to fp16 pairs.
struct Fp8Rows {
    using Raw = uint32_t;
    static constexpr bool GROUPED = false;
    static constexpr int LOADS_IN_FLIGHT = 8;
    const uint8_t* weight;
    const float* scales;
    struct Scales {};

    __device__ static __forceinline__ int column(int g, int i) { return 4 * g + i; }
    __device__ __forceinline__ Raw load(int64_t row, int width, int first, int g) const {
        return __ldcs(reinterpret_cast<const uint32_t*>(weight + row * width + first + 4 * g));
    }
    __device__ __forceinline__ void load_scales(Scales&, int, int, int, int) const {}
    __device__ __forceinline__ void pair(const Raw& a, const Raw& b, const Scales&, uint32_t (&out)[4]) const {
        unpack_e4m3(__byte_perm(a, b, 0x5140), out[0], out[1]);
        unpack_e4m3(__byte_perm(a, b, 0x7362), out[2], out[3]);
    }
    __device__ __forceinline__ float scale(const Scales&, int) const { return 1.0f; }
    __device__ __forceinline__ float final_scale(int column) const { return code_scale<FP8>() * __ldg(scales + column); }
};

// Four nibbles of half a word: every other column.
struct Int4Rows {
    using Raw = uint16_t;
    static constexpr bool GROUPED = true;
    static constexpr int LOADS_IN_FLIGHT = 4;
    const uint16_t* weight;
    const uint32_t* scales;  // (scale, 1024 + zero)
    struct Scales {
        uint32_t of[4];
    };

    __device__ static __forceinline__ int column(int g, int i) { return 8 * (g >> 1) + 2 * i + (g & 1); }
    __device__ __forceinline__ Raw load(int64_t row, int width, int first, int g) const {
        return __ldcs(weight + (row * width + first) / 4 + g);
    }
    __device__ __forceinline__ void load_scales(Scales& to, int row, int width, int first, int g) const {
        const uint32_t* at = scales + static_cast<int64_t>(row / GROUP_INPUTS) * width + first;
#pragma unroll
        for (int i = 0; i < 4; ++i) to.of[i] = __ldg(at + column(g, i));
    }
    __device__ __forceinline__ void pair(const Raw& a, const Raw& b, const Scales& of, uint32_t (&out)[4]) const {
        const uint32_t both = a | static_cast<uint32_t>(b) << 16;
#pragma unroll
        for (int i = 0; i < 4; ++i) out[i] = unpack_nibbles(both, i, __byte_perm(of.of[i], 0, 0x3232));
    }
    __device__ __forceinline__ float scale(const Scales& of, int i) const {
        return __half2float(__ushort_as_half(static_cast<unsigned short>(of.of[i] & 0xffffu)));
    }
    __device__ __forceinline__ float final_scale(int) const { return code_scale<INT4>(); }
};

// A warp's active rows.
struct ActiveList {
    uint16_t rows[MAX_ROWS_PER_WARP + MAX_ROWS_PER_WARP / GROUP_INPUTS * (STEP - 1) + STEP];
};

union Smem {
    ActiveList lists[WARPS];
    float sums[WARPS][MAX_ROWS][COLUMNS];  // after the main loop
};

// Lists the active rows among first .. first + rows_per_warp - 1. PADDED: each group of 128 starts at a multiple of
// STEP.
// Free entries hold PADDING. Returns the number of entries, a multiple of STEP.
template <bool PADDED>
__device__ __forceinline__ int list_active_rows(const __half* h, int rows, int ffn, int first, int rows_per_warp, uint16_t* to, int lane) {
    constexpr int BATCH = 2;
    int count = 0;
    for (int begin = 0; begin < rows_per_warp; begin += BATCH * ROWS_PER_LISTING) {
        uint4 loaded[BATCH][MAX_ROWS];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int at = begin + i * ROWS_PER_LISTING + 8 * lane;
#pragma unroll
            for (int b = 0; b < MAX_ROWS; ++b) {
                loaded[i][b] = make_uint4(0, 0, 0, 0);
                if (b < rows && at < rows_per_warp) loaded[i][b] = __ldg(reinterpret_cast<const uint4*>(h + static_cast<int64_t>(b) * ffn + first + at));
            }
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            if (begin + i * ROWS_PER_LISTING >= rows_per_warp) break;
            uint4 any = loaded[i][0];
#pragma unroll
            for (int b = 1; b < MAX_ROWS; ++b)
                any.x |= loaded[i][b].x, any.y |= loaded[i][b].y, any.z |= loaded[i][b].z, any.w |= loaded[i][b].w;
            const uint32_t words[4] = {any.x, any.y, any.z, any.w};
            uint32_t active = 0;  // one bit per row of the lane; -0 counts as zero
#pragma unroll
            for (int w = 0; w < 4; ++w)
                active |= ((words[w] & 0x7fffu) != 0 ? 1u : 0u) << (2 * w) | ((words[w] & 0x7fff0000u) != 0 ? 2u : 0u) << (2 * w);
            const int own = __popc(active);
            int before = own;  // prefix sum over the 16 lanes of a group
#pragma unroll
            for (int offset = 1; offset < 16; offset <<= 1) {
                const int other = __shfl_up_sync(FULL_MASK, before, offset);
                if ((lane & 15) >= offset) before += other;
            }
            const int low = __shfl_sync(FULL_MASK, before, 15), high = __shfl_sync(FULL_MASK, before, 31);
            const int low_padded = PADDED ? (low + STEP - 1) / STEP * STEP : low;
            int at = count + before - own + (lane < 16 ? 0 : low_padded);
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                if (active >> j & 1) to[at++] = static_cast<uint16_t>(first + begin + i * ROWS_PER_LISTING + 8 * lane + j);
            }
            const int end = count + low_padded + high;
            if (PADDED && lane < low_padded - low) to[count + low + lane] = PADDING;
            count = PADDED ? (end + STEP - 1) / STEP * STEP : end;
            if (PADDED && lane < count - end) to[end + lane] = PADDING;
        }
    }
    const int padded = (count + STEP - 1) / STEP * STEP;
    if (lane < padded - count) to[count + lane] = PADDING;
    __syncwarp();
    return padded;
}

template <typename Rows>
__global__ void __launch_bounds__(WARPS * 32, 1) sparse_value_quant_kernel(
    const __half* h, const Rows weight, __half* y, int rows, int width, int ffn, int rows_per_warp) {
    __shared__ __align__(16) Smem smem;
    constexpr int LOADS_IN_FLIGHT = Rows::LOADS_IN_FLIGHT;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int first_column = blockIdx.x * COLUMNS, first = warp * rows_per_warp;
    allow_next_kernel();
    wait_for_previous_kernel();
    uint16_t* const list = smem.lists[warp].rows;
    const int count = list_active_rows<Rows::GROUPED>(h, rows, ffn, first, min(rows_per_warp, ffn - first), list, lane);
    const __half* const mine = h + static_cast<int64_t>(g) * ffn;  // h of the lane's row of the batch
    const auto value = [&](int row) -> uint32_t {
        return g < rows && row != PADDING ? __half_as_ushort(__ldg(mine + row)) : 0u;
    };

    float sums[2][4] = {};  // columns 0, 1 (operand rows g, g + 8), and 2, 3 of the lane
    for (int begin = 0; begin < count; begin += LOADS_IN_FLIGHT * STEP) {
        typename Rows::Raw raw[LOADS_IN_FLIGHT][4];
        typename Rows::Scales scales[LOADS_IN_FLIGHT];
        uint32_t x[LOADS_IN_FLIGHT][2];
#pragma unroll
        for (int f = 0; f < LOADS_IN_FLIGHT; ++f) {
            const int at = begin + f * STEP;
            if (at >= count) break;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint32_t two = *reinterpret_cast<const uint32_t*>(list + at + 8 * half + 2 * t);
                const int row[2] = {static_cast<int>(two & 0xffffu), static_cast<int>(two >> 16)};
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    raw[f][2 * half + i] = {};
                    if (row[i] != PADDING) raw[f][2 * half + i] = weight.load(row[i], width, first_column, g);
                }
                x[f][half] = value(row[0]) | value(row[1]) << 16;
            }
            if constexpr (Rows::GROUPED) weight.load_scales(scales[f], list[at], width, first_column, g);
        }
#pragma unroll
        for (int f = 0; f < LOADS_IN_FLIGHT; ++f) {
            if (begin + f * STEP >= count) break;
            uint32_t low[4], high[4];
            weight.pair(raw[f][0], raw[f][1], scales[f], low);
            weight.pair(raw[f][2], raw[f][3], scales[f], high);
            if constexpr (Rows::GROUPED) {
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    float own[4] = {};
                    mma(own, Fragment{{low[2 * m], low[2 * m + 1], high[2 * m], high[2 * m + 1]}}, x[f][0], x[f][1]);
#pragma unroll
                    for (int i = 0; i < 4; ++i) sums[m][i] = fmaf(own[i], weight.scale(scales[f], 2 * m + i / 2), sums[m][i]);
                }
            } else {
#pragma unroll
                for (int m = 0; m < 2; ++m)
                    mma(sums[m], Fragment{{low[2 * m], low[2 * m + 1], high[2 * m], high[2 * m + 1]}}, x[f][0], x[f][1]);
            }
        }
    }
    __syncthreads();  // the lists have been read
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = 2 * t + (i & 1);
            if (row < MAX_ROWS) smem.sums[warp][row][Rows::column(g, 2 * m + (i >> 1))] = sums[m][i];
        }
    }
    __syncthreads();
    const int row = threadIdx.x / COLUMNS, column = threadIdx.x % COLUMNS;
    if (row >= min(rows, MAX_ROWS)) return;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += smem.sums[w][row][column];
    const int out = first_column + column;
    y[static_cast<int64_t>(row) * width + out] = __float2half_rn(sum * weight.final_scale(out));
}

struct SparseArgs {
    const __half* h;
    __half* y;
    int rows, width, ffn;
};

template <typename Rows>
static int launch_rows(const SparseArgs& a, const Rows& weight, void* stream) {
    const int rows_per_warp = (a.ffn + WARPS * GROUP_INPUTS - 1) / (WARPS * GROUP_INPUTS) * GROUP_INPUTS;
    if (a.rows > MAX_ROWS || rows_per_warp > MAX_ROWS_PER_WARP || a.width % COLUMNS != 0 || a.ffn % 8 != 0) {
        return static_cast<int>(cudaErrorInvalidValue);
    }
    launch_streaming(sparse_value_quant_kernel<Rows>, dim3(a.width / COLUMNS), WARPS * 32, stream, a.h, weight, a.y, a.rows, a.width, a.ffn, rows_per_warp);
    return launch_result();
}

RWKV_API int rwkv_sparse_value_quant(
    const void* h, const void* qweight, const void* scales, void* y, int format, int rows, int width, int ffn, void* stream) {
    const SparseArgs args = {static_cast<const __half*>(h), static_cast<__half*>(y), rows, width, ffn};
    switch (format) {
        case FP8: return launch_rows(args, Fp8Rows{static_cast<const uint8_t*>(qweight), static_cast<const float*>(scales)}, stream);
        case INT4: return launch_rows(args, Int4Rows{static_cast<const uint16_t*>(qweight), static_cast<const uint32_t*>(scales)}, stream);
    }
    return static_cast<int>(cudaErrorInvalidValue);
}
