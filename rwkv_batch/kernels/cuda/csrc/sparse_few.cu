// h [B, F] @ Wt [F, C] for 2 to 8 rows and Wt of 8 bits, skipping the rows of Wt whose h is zero in every row of
// the batch: as sparse_codes.cu, which reads all of h in each block of 32 columns; of eight rows that is as much as the codes.
//
// Here a block has 128 columns and a quarter of F. Each of its 16 warps lists the active rows of a share of these, with their h
// of all rows of the batch beside them, and takes 16 of them at a time on the tensor cores (m16n8k16, fp32 sums): a lane has 16
// columns of four rows. The warps' sums are added up in order; those of the four blocks by the next kernel (shift_mix.cu).
//
// Bytes: C per active row of Wt, in pieces of 128; 2BF / 4 for h in every block; sums 4 KB a block.
#include "fragments.cuh"
#include "quant.cuh"

constexpr int WARPS = 16, COLUMNS = 128, SPLITS = 4, STEP = 16, MAX_ROWS = 8, LANE_COLUMNS = 16;
constexpr int SHARE = 256;  // rows of Wt of a warp, 8 a lane
constexpr int ENTRIES = SHARE + SHARE / GROUP_INPUTS * STEP;  // each group of 128 is listed in whole steps
constexpr int SUMS = MAX_ROWS * COLUMNS;
constexpr uint16_t NOTHING = 0xffff;

struct Listed {
    uint4 inputs[ENTRIES];  // h of the rows of the batch
    uint16_t rows[ENTRIES];
};
union FewShared {
    Listed lists[WARPS];
    float4 sums[WARPS][SUMS / 4];  // when the active rows have been read
};

struct FewArgs {
    const __half* h;
    const uint8_t* codes;
    const void* scales;
    float* shares;  // [SPLITS, rows, C]
    int rows, width, ffn;
};

// Lists a warp's active rows from `first` on, each group of 128 from a whole step on. Returns the entries of the first group
// and of both.
__device__ __forceinline__ int2 list_rows(const FewArgs& a, Listed& list, int first, int lane) {
    uint4 given[MAX_ROWS];
    const int at = first + 8 * lane;
#pragma unroll
    for (int b = 0; b < MAX_ROWS; ++b) {
        given[b] = make_uint4(0, 0, 0, 0);
        if (b < a.rows && at < a.ffn) given[b] = __ldg(reinterpret_cast<const uint4*>(a.h + static_cast<int64_t>(b) * a.ffn + at));
    }
    uint32_t words[MAX_ROWS][4], any[4] = {};
#pragma unroll
    for (int b = 0; b < MAX_ROWS; ++b) {
        words[b][0] = given[b].x, words[b][1] = given[b].y, words[b][2] = given[b].z, words[b][3] = given[b].w;
#pragma unroll
        for (int w = 0; w < 4; ++w) any[w] |= words[b][w];
    }
    uint32_t active = 0;  // a bit for each of the lane's rows; a sign alone is a zero
#pragma unroll
    for (int w = 0; w < 4; ++w)
        active |= ((any[w] & 0x7fffu) != 0 ? 1u : 0u) << (2 * w) | ((any[w] & 0x7fff0000u) != 0 ? 2u : 0u) << (2 * w);
    const int own = __popc(active);
    int before = own;  // of the 16 lanes that share a group
#pragma unroll
    for (int offset = 1; offset < 16; offset <<= 1) {
        const int other = __shfl_up_sync(FULL, before, offset);
        if ((lane & 15) >= offset) before += other;
    }
    const int low = __shfl_sync(FULL, before, 15), high = __shfl_sync(FULL, before, 31);
    const int low_room = (low + STEP - 1) / STEP * STEP, end = low_room + high, room = (end + STEP - 1) / STEP * STEP;
    int to = before - own + (lane < 16 ? 0 : low_room);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        if ((active >> j & 1) == 0) continue;
        uint32_t pairs[4];
#pragma unroll
        for (int b = 0; b < 4; ++b) pairs[b] = __byte_perm(words[2 * b][j / 2], words[2 * b + 1][j / 2], j & 1 ? 0x7632 : 0x5410);
        list.inputs[to] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        list.rows[to++] = static_cast<uint16_t>(at + j);
    }
    const auto pad = [&](int from, int behind) {
        if (lane < behind - from) list.inputs[from + lane] = make_uint4(0, 0, 0, 0), list.rows[from + lane] = NOTHING;
    };
    pad(low, low_room);
    pad(end, room);
    __syncwarp();
    return make_int2(low_room, room);
}

__device__ __forceinline__ uint2 load_turned(const void* row) {
    uint2 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(shared_address(row)) : "memory");
    return v;
}
__device__ __forceinline__ uint32_t word_of(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

template <Format FORMAT>
__global__ void __launch_bounds__(WARPS * 32, 1) sparse_few_kernel(const FewArgs a) {
    extern __shared__ __align__(16) unsigned char dynamic[];
    FewShared& shared = *reinterpret_cast<FewShared*>(dynamic);
    constexpr int FLIGHT = FORMAT == FP8 ? 3 : 2;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int tile = blockIdx.x / SPLITS, split = blockIdx.x % SPLITS, column = tile * COLUMNS + LANE_COLUMNS * g;
    const int first = (split * WARPS + warp) * SHARE;
    // Of m = thread / 64, its lane thread / 2 % 32, the first or second column: rows 2t and 2t + 1 of the batch.
    const int m = threadIdx.x / 64, from = threadIdx.x / 2 % 32, of_tile = from / 4 * LANE_COLUMNS + 2 * m + threadIdx.x % 2, row = from % 4 * 2;
    float scale = code_scale<FORMAT>();
    if (FORMAT == FP8) scale *= __ldg(static_cast<const float*>(a.scales) + tile * COLUMNS + of_tile);
    let_next_start();
    wait_for_inputs();
    Listed& list = shared.lists[warp];
    const int2 listed = list_rows(a, list, first, lane);
    const uint8_t* const codes = a.codes + column;
    float sums[8][4] = {};  // columns 4w + 2 (m & 1) of the lane and the next one (mma's rows g and g + 8), for m = 2w, 2w + 1
    const auto add_rows = [&](float (&to)[8][4], int begin, int end) {
        for (; begin < end; begin += FLIGHT * STEP) {
            uint4 raw[FLIGHT][4];
            uint2 x[FLIGHT];
#pragma unroll
            for (int f = 0; f < FLIGHT; ++f) {
                const int at = begin + f * STEP;
                if (at >= end) break;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const uint32_t two = *reinterpret_cast<const uint32_t*>(list.rows + at + 8 * half + 2 * t);
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const int row = i ? two >> 16 : two & 0xffffu;
                        raw[f][2 * half + i] = make_uint4(0, 0, 0, 0);
                        if (row != NOTHING) raw[f][2 * half + i] = __ldcs(reinterpret_cast<const uint4*>(codes + static_cast<int64_t>(row) * a.width));
                    }
                }
                x[f] = load_turned(list.inputs + at + (lane & 15));
            }
#pragma unroll
            for (int f = 0; f < FLIGHT; ++f) {
                if (begin + f * STEP >= end) break;
#pragma unroll
                for (int w = 0; w < 4; ++w) {
                    uint32_t low[4], high[4];
                    const uint32_t r0 = word_of(raw[f][0], w), r1 = word_of(raw[f][1], w), r8 = word_of(raw[f][2], w), r9 = word_of(raw[f][3], w);
                    unpack_bytes<FORMAT>(__byte_perm(r0, r1, 0x5140), low[0], low[1]);
                    unpack_bytes<FORMAT>(__byte_perm(r0, r1, 0x7362), low[2], low[3]);
                    unpack_bytes<FORMAT>(__byte_perm(r8, r9, 0x5140), high[0], high[1]);
                    unpack_bytes<FORMAT>(__byte_perm(r8, r9, 0x7362), high[2], high[3]);
#pragma unroll
                    for (int m = 0; m < 2; ++m)
                        mma(to[2 * w + m], Fragment{{low[2 * m], low[2 * m + 1], high[2 * m], high[2 * m + 1]}}, x[f].x, x[f].y);
                }
            }
        }
    };
    if constexpr (FORMAT == FP8) {
        add_rows(sums, 0, listed.y);
    } else {
#pragma unroll 1
        for (int group = 0; group < SHARE / GROUP_INPUTS; ++group) {
            const int begin = group ? listed.x : 0, end = group ? listed.y : listed.x;
            if (begin == end) continue;
            const auto* of_group = static_cast<const __half*>(a.scales) + static_cast<int64_t>(first / GROUP_INPUTS + group) * a.width + column;
            const uint4 scales[2] = {__ldg(reinterpret_cast<const uint4*>(of_group)), __ldg(reinterpret_cast<const uint4*>(of_group) + 1)};
            float own[8][4] = {};
            add_rows(own, begin, end);
#pragma unroll
            for (int m = 0; m < 8; ++m) {  // columns 2m, 2m + 1 of the lane
                const uint32_t pair = word_of(scales[m / 4], m % 4);
                const float2 scale = __half22float2(*reinterpret_cast<const __half2*>(&pair));
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[m][i] = fmaf(own[m][i], i < 2 ? scale.x : scale.y, sums[m][i]);
            }
        }
    }
    __syncthreads();  // the lists have been read
#pragma unroll
    for (int m = 0; m < 8; ++m) shared.sums[warp][m * 32 + lane] = make_float4(sums[m][0], sums[m][1], sums[m][2], sums[m][3]);
    __syncthreads();
    float2 total = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        const float2 one = reinterpret_cast<const float2*>(shared.sums[w])[threadIdx.x];
        total.x += one.x, total.y += one.y;
    }
    total.x *= scale, total.y *= scale;
    __syncthreads();  // the warps' sums have been read
    float* const out = reinterpret_cast<float*>(dynamic);  // [MAX_ROWS][COLUMNS]
    out[row * COLUMNS + of_tile] = total.x, out[(row + 1) * COLUMNS + of_tile] = total.y;
    __syncthreads();
    const int written = threadIdx.x / (COLUMNS / 4), c = threadIdx.x % (COLUMNS / 4) * 4;
    if (written >= a.rows) return;
    float* const to = a.shares + (static_cast<int64_t>(split) * a.rows + written) * a.width + tile * COLUMNS + c;
    *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(out + written * COLUMNS + c);
}

template <Format FORMAT>
static int launch_sparse(const FewArgs& a, void* stream) {
    static bool raised[MAX_DEVICES] = {};
    const auto kernel = sparse_few_kernel<FORMAT>;
    const int bytes = static_cast<int>(sizeof(FewShared));
    if (!raised[this_device()]) {
        const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
        if (error != cudaSuccess) return static_cast<int>(error);
        raised[this_device()] = true;
    }
    launch_with_shared(kernel, dim3(a.width / COLUMNS * SPLITS), WARPS * 32, bytes, stream, a);
    return launch_result();
}

// 2 to 8 rows of fp8 or int8, F up to 16,384 and a multiple of 128, C of 128. shares [4, rows, C] fp32.
RWKV_API int rwkv_sparse_few(
    const void* h, const void* codes, const void* scales, void* shares, int format, int rows, int width, int ffn, void* stream) {
    if (rows > MAX_ROWS || ffn > SPLITS * WARPS * SHARE || ffn % GROUP_INPUTS || width % COLUMNS) return static_cast<int>(cudaErrorInvalidValue);
    const FewArgs args = {static_cast<const __half*>(h), static_cast<const uint8_t*>(codes), scales, static_cast<float*>(shares),
                          rows, width, ffn};
    switch (format) {
        case FP8: return launch_sparse<FP8>(args, stream);
        case INT8: return launch_sparse<INT8>(args, stream);
    }
    return static_cast<int>(cudaErrorInvalidValue);
}
