// y [B, C] = h [B, F] @ Wt [F, C] for B <= 8 and Wt in small codes, skipping the rows of Wt whose h is zero in every row of the batch.
// One row has a kernel of its own (sparse_row.cu).
//
// h = relu(k)^2 is 88 % zero in trained models, so one row of the batch needs 12 % of ffn.value, eight 64 %.
// A block owns 32 columns and all of F, so that no two blocks share a sum. Each of its 16 warps has a share of F: it lists
// the active rows in rising order and takes 16 of them at a time on the tensor cores (m16n8k16, fp32 sums): a lane has
// four columns of four rows, a few steps' loads on their way at once; two rows' codes side by side are an operand's
// register. The warps' sums are added up in order.
//
// Wt holds codes of 8 or 4 bits [F, C] with scales (quant.cuh): fp8 [C] fp32, int8 [F / 128][C] fp16, int4
// [F / 128][C] pairs of fp16; its nibbles are columns. With scales of groups, 16 rows at a time are of one group.
//
// Bytes: C (C / 2) per active row of Wt, in pieces of 32 (16); 2BF for h in every block.
#include "fragments.cuh"
#include "quant.cuh"

constexpr int WARPS = 16, COLUMNS = 32, STEP = 16, MAX_ROWS = 8;
constexpr int LISTED = 256;  // rows of Wt that a warp looks at at once, 8 a lane
constexpr int MOST_SHARE = 1024;  // rows of Wt of a warp
constexpr uint16_t NOTHING = 0xffff;

// Rows of Wt as a warp reads them: a lane's four columns of a row (Raw), two of which become pairs of halves.
struct Fp8Rows {
    using Raw = uint32_t;
    static constexpr bool GROUPED = false;
    static constexpr int FLIGHT = 8;
    const uint8_t* weight;
    const float* scales;
    struct Scales {};

    __device__ static __forceinline__ int column(int g, int i) { return 4 * g + i; }
    __device__ __forceinline__ Raw load(int64_t row, int width, int first, int g) const {
        return __ldcs(reinterpret_cast<const uint32_t*>(weight + row * width + first + 4 * g));
    }
    __device__ __forceinline__ void load_scales(Scales&, int, int, int, int) const {}
    __device__ __forceinline__ void pair(const Raw& a, const Raw& b, const Scales&, uint32_t (&out)[4]) const {
        unpack_bytes<FP8>(__byte_perm(a, b, 0x5140), out[0], out[1]);
        unpack_bytes<FP8>(__byte_perm(a, b, 0x7362), out[2], out[3]);
    }
    __device__ __forceinline__ float scale(const Scales&, int) const { return 1.0f; }
    __device__ __forceinline__ float last_scale(int column) const { return code_scale<FP8>() * __ldg(scales + column); }
};

struct Int8Rows {
    using Raw = uint32_t;
    static constexpr bool GROUPED = true;
    static constexpr int FLIGHT = 6;
    const uint8_t* weight;
    const __half* scales;
    using Scales = uint2;

    __device__ static __forceinline__ int column(int g, int i) { return 4 * g + i; }
    __device__ __forceinline__ Raw load(int64_t row, int width, int first, int g) const {
        return __ldcs(reinterpret_cast<const uint32_t*>(weight + row * width + first + 4 * g));
    }
    __device__ __forceinline__ void load_scales(Scales& to, int row, int width, int first, int g) const {
        to = __ldg(reinterpret_cast<const uint2*>(scales + static_cast<int64_t>(row / GROUP_INPUTS) * width + first + 4 * g));
    }
    __device__ __forceinline__ void pair(const Raw& a, const Raw& b, const Scales&, uint32_t (&out)[4]) const {
        unpack_bytes<INT8>(__byte_perm(a, b, 0x5140), out[0], out[1]);
        unpack_bytes<INT8>(__byte_perm(a, b, 0x7362), out[2], out[3]);
    }
    __device__ __forceinline__ float scale(const Scales& of, int i) const {
        const uint32_t pair = i < 2 ? of.x : of.y;
        return __half2float(__ushort_as_half(static_cast<unsigned short>(i & 1 ? pair >> 16 : pair & 0xffffu)));
    }
    __device__ __forceinline__ float last_scale(int) const { return code_scale<INT8>(); }
};

// Four nibbles of one half of a word: every other column.
struct Int4Rows {
    using Raw = uint16_t;
    static constexpr bool GROUPED = true;
    static constexpr int FLIGHT = 4;
    const uint16_t* weight;
    const uint32_t* scales;  // pairs of scale and 1024 + zero
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
    __device__ __forceinline__ float last_scale(int) const { return code_scale<INT4>(); }
};

// A warp's active rows, 16 at a time.
struct Listed {
    uint16_t rows[MOST_SHARE + MOST_SHARE / GROUP_INPUTS * (STEP - 1) + STEP];
};

union Shared {
    Listed lists[WARPS];
    float sums[WARPS][MAX_ROWS][COLUMNS];  // when the active rows have been read
};

// Lists rows first .. first + share - 1 whose h is not zero, from `to` on; PADDED: what a group of 128 leaves of a step
// holds NOTHING. Returns how many entries there are, a multiple of STEP.
template <bool PADDED>
__device__ __forceinline__ int list_active(const __half* h, int rows, int ffn, int first, int share, uint16_t* to, int lane) {
    constexpr int TOGETHER = 2;
    int count = 0;
    for (int begin = 0; begin < share; begin += TOGETHER * LISTED) {
        uint4 given[TOGETHER][MAX_ROWS];
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            const int at = begin + i * LISTED + 8 * lane;
#pragma unroll
            for (int b = 0; b < MAX_ROWS; ++b) {
                given[i][b] = make_uint4(0, 0, 0, 0);
                if (b < rows && at < share) given[i][b] = __ldg(reinterpret_cast<const uint4*>(h + static_cast<int64_t>(b) * ffn + first + at));
            }
        }
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            if (begin + i * LISTED >= share) break;
            uint4 any = given[i][0];
#pragma unroll
            for (int b = 1; b < MAX_ROWS; ++b)
                any.x |= given[i][b].x, any.y |= given[i][b].y, any.z |= given[i][b].z, any.w |= given[i][b].w;
            const uint32_t words[4] = {any.x, any.y, any.z, any.w};
            uint32_t active = 0;  // a bit for each of the lane's rows; a sign alone is a zero
#pragma unroll
            for (int w = 0; w < 4; ++w)
                active |= ((words[w] & 0x7fffu) != 0 ? 1u : 0u) << (2 * w) | ((words[w] & 0x7fff0000u) != 0 ? 2u : 0u) << (2 * w);
            const int own = __popc(active);
            int before = own;  // of the 16 lanes that share a group
#pragma unroll
            for (int offset = 1; offset < 16; offset <<= 1) {
                const int other = __shfl_up_sync(FULL, before, offset);
                if ((lane & 15) >= offset) before += other;
            }
            const int low = __shfl_sync(FULL, before, 15), high = __shfl_sync(FULL, before, 31);
            const int low_room = PADDED ? (low + STEP - 1) / STEP * STEP : low;
            int at = count + before - own + (lane < 16 ? 0 : low_room);
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                if (active >> j & 1) to[at++] = static_cast<uint16_t>(first + begin + i * LISTED + 8 * lane + j);
            }
            const int end = count + low_room + high;
            if (PADDED && lane < low_room - low) to[count + low + lane] = NOTHING;
            count = PADDED ? (end + STEP - 1) / STEP * STEP : end;
            if (PADDED && lane < count - end) to[end + lane] = NOTHING;
        }
    }
    const int whole = (count + STEP - 1) / STEP * STEP;
    if (lane < whole - count) to[count + lane] = NOTHING;
    __syncwarp();
    return whole;
}

template <typename Rows>
__global__ void __launch_bounds__(WARPS * 32, 1) sparse_value_kernel(
    const __half* h, const Rows weight, __half* y, int rows, int width, int ffn, int share) {
    __shared__ __align__(16) Shared sh;
    constexpr int FLIGHT = Rows::FLIGHT;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int first_column = blockIdx.x * COLUMNS, first = warp * share;
    let_next_start();
    wait_for_inputs();
    uint16_t* const list = sh.lists[warp].rows;
    const int count = list_active<Rows::GROUPED>(h, rows, ffn, first, min(share, ffn - first), list, lane);
    const __half* const mine = h + static_cast<int64_t>(g) * ffn;  // of the row of the batch that a lane's operand is of
    const auto value = [&](int row) -> uint32_t {
        return g < rows && row != NOTHING ? __half_as_ushort(__ldg(mine + row)) : 0u;
    };

    float sums[2][4] = {};  // columns 0 and 1 (mma's rows g and g + 8), 2 and 3 of the lane
    for (int begin = 0; begin < count; begin += FLIGHT * STEP) {
        typename Rows::Raw raw[FLIGHT][4];
        typename Rows::Scales scales[FLIGHT];
        uint32_t x[FLIGHT][2];
#pragma unroll
        for (int f = 0; f < FLIGHT; ++f) {
            const int at = begin + f * STEP;
            if (at >= count) break;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint32_t two = *reinterpret_cast<const uint32_t*>(list + at + 8 * half + 2 * t);
                const int row[2] = {static_cast<int>(two & 0xffffu), static_cast<int>(two >> 16)};
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    raw[f][2 * half + i] = {};
                    if (row[i] != NOTHING) raw[f][2 * half + i] = weight.load(row[i], width, first_column, g);
                }
                x[f][half] = value(row[0]) | value(row[1]) << 16;
            }
            if constexpr (Rows::GROUPED) weight.load_scales(scales[f], list[at], width, first_column, g);
        }
#pragma unroll
        for (int f = 0; f < FLIGHT; ++f) {
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
            if (row < MAX_ROWS) sh.sums[warp][row][Rows::column(g, 2 * m + (i >> 1))] = sums[m][i];
        }
    }
    __syncthreads();
    const int row = threadIdx.x / COLUMNS, column = threadIdx.x % COLUMNS;
    if (row >= min(rows, MAX_ROWS)) return;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += sh.sums[w][row][column];
    const int out = first_column + column;
    y[static_cast<int64_t>(row) * width + out] = __float2half_rn(sum * weight.last_scale(out));
}

struct SparseArgs {
    const __half* h;
    __half* y;
    int rows, width, ffn;
};

template <typename Rows>
static int launch_rows(const SparseArgs& a, const Rows& weight, void* stream) {
    const int share = (a.ffn + WARPS * GROUP_INPUTS - 1) / (WARPS * GROUP_INPUTS) * GROUP_INPUTS;
    if (a.rows > MAX_ROWS || share > MOST_SHARE || a.width % COLUMNS != 0 || a.ffn % 8 != 0) {
        return static_cast<int>(cudaErrorInvalidValue);
    }
    launch_streaming(sparse_value_kernel<Rows>, dim3(a.width / COLUMNS), WARPS * 32, stream, a.h, weight, a.y, a.rows, a.width, a.ffn, share);
    return launch_result();
}

RWKV_API int rwkv_sparse_value_quant(
    const void* h, const void* codes, const void* scales, void* y, int format, int rows, int width, int ffn, void* stream) {
    const SparseArgs args = {static_cast<const __half*>(h), static_cast<__half*>(y), rows, width, ffn};
    switch (format) {
        case FP8: return launch_rows(args, Fp8Rows{static_cast<const uint8_t*>(codes), static_cast<const float*>(scales)}, stream);
        case INT8: return launch_rows(args, Int8Rows{static_cast<const uint8_t*>(codes), static_cast<const __half*>(scales)}, stream);
        case INT4: return launch_rows(args, Int4Rows{static_cast<const uint16_t*>(codes), static_cast<const uint32_t*>(scales)}, stream);
    }
    return static_cast<int>(cudaErrorInvalidValue);
}
