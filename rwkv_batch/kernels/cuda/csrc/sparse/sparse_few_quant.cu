// Sparse ffn.value for 2 to 8 rows, fp8: partials of h @ Wt over the active rows of Wt.
//
// in   h         [B, F] fp16
//      qweight   [F, C] fp8
//      scales    [C] fp32
//
// out  partials  [4, B, C] fp32: split-K partials, reduced by the next kernel (shift_mix.cu)
//
// sparse_value_quant.cu reads all of h per 32 columns; for eight rows that is as much as the weights.
// CTA: 128 columns x a quarter of F. Each of its 16 warps lists the active rows of its range together with their h, and
// multiplies 16 at a time. A lane has 16 columns of four rows. The warps' sums are added in order.
//
// Grid: 4 C / 128.
// Block: 512 threads; mma.m16n8k16.
// Shared memory: 81 KB, lists, then sums.
// Bound: memory; C bytes per active row in pieces of 128, B F / 2 for h and 4 KB of sums per CTA. Share of 4.8 TB/s
// (H200, C = 4,096): 4 rows 50 %, 8 rows 61 %.
// Made for: B <= 8, F <= 16,384, F % 128 == 0, C % 128 == 0.
#include "../mma.cuh"
#include "../quant.cuh"

constexpr int WARPS = 16, COLUMNS = 128, SPLITS = 4, STEP = 16, MAX_ROWS = 8, LANE_COLUMNS = 16;
constexpr int ROWS_PER_WARP = 256;  // rows of Wt per warp, 8 per lane
constexpr int ENTRIES = ROWS_PER_WARP + ROWS_PER_WARP / GROUP_INPUTS * STEP;  // each group of 128 takes whole steps
constexpr int SUMS = MAX_ROWS * COLUMNS;
constexpr uint16_t PADDING = 0xffff;

struct ActiveList {
    uint4 inputs[ENTRIES];  // h of all rows of the batch
    uint16_t rows[ENTRIES];
};
union SparseFewSmem {
    ActiveList lists[WARPS];
    float4 sums[WARPS][SUMS / 4];  // after the main loop
};

struct SparseFewArgs {
    const __half* h;
    const uint8_t* qweight;
    const float* scales;
    float* partials;  // [SPLITS, rows, C]
    int rows, width, ffn;
};

// Lists a warp's active rows from `first` on; each group of 128 starts at a whole step. Returns the end.
__device__ __forceinline__ int list_active_rows(const SparseFewArgs& a, ActiveList& list, int first, int lane) {
    uint4 loaded[MAX_ROWS];
    const int at = first + 8 * lane;
#pragma unroll
    for (int b = 0; b < MAX_ROWS; ++b) {
        loaded[b] = make_uint4(0, 0, 0, 0);
        if (b < a.rows && at < a.ffn) loaded[b] = __ldg(reinterpret_cast<const uint4*>(a.h + static_cast<int64_t>(b) * a.ffn + at));
    }
    uint32_t words[MAX_ROWS][4], any[4] = {};
#pragma unroll
    for (int b = 0; b < MAX_ROWS; ++b) {
        words[b][0] = loaded[b].x, words[b][1] = loaded[b].y, words[b][2] = loaded[b].z, words[b][3] = loaded[b].w;
#pragma unroll
        for (int w = 0; w < 4; ++w) any[w] |= words[b][w];
    }
    uint32_t active = 0;  // one bit per row of the lane; -0 counts as zero
#pragma unroll
    for (int w = 0; w < 4; ++w)
        active |= ((any[w] & 0x7fffu) != 0 ? 1u : 0u) << (2 * w) | ((any[w] & 0x7fff0000u) != 0 ? 2u : 0u) << (2 * w);
    const int own = __popc(active);
    int before = own;  // prefix sum over the 16 lanes of a group
#pragma unroll
    for (int offset = 1; offset < 16; offset <<= 1) {
        const int other = __shfl_up_sync(FULL_MASK, before, offset);
        if ((lane & 15) >= offset) before += other;
    }
    const int low = __shfl_sync(FULL_MASK, before, 15), high = __shfl_sync(FULL_MASK, before, 31);
    const int low_padded = (low + STEP - 1) / STEP * STEP, end = low_padded + high, end_padded = (end + STEP - 1) / STEP * STEP;
    int to = before - own + (lane < 16 ? 0 : low_padded);
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
        if (lane < behind - from) list.inputs[from + lane] = make_uint4(0, 0, 0, 0), list.rows[from + lane] = PADDING;
    };
    pad(low, low_padded);
    pad(end, end_padded);
    __syncwarp();
    return end_padded;
}

__device__ __forceinline__ uint2 ldmatrix_x2_transposed(const void* row) {
    uint2 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(smem_address(row)) : "memory");
    return v;
}
__device__ __forceinline__ uint32_t word_of(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

__global__ void __launch_bounds__(WARPS * 32, 1) sparse_few_quant_kernel(const SparseFewArgs a) {
    extern __shared__ __align__(16) unsigned char dynamic[];
    SparseFewSmem& smem = *reinterpret_cast<SparseFewSmem*>(dynamic);
    constexpr int LOADS_IN_FLIGHT = 3;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int tile = blockIdx.x / SPLITS, split = blockIdx.x % SPLITS, column = tile * COLUMNS + LANE_COLUMNS * g;
    const int first = (split * WARPS + warp) * ROWS_PER_WARP;
    // Sum m = thread / 64 of lane thread / 2 % 32: its first or second column, rows 2t and 2t + 1 of the batch.
    const int m = threadIdx.x / 64, from = threadIdx.x / 2 % 32, of_tile = from / 4 * LANE_COLUMNS + 2 * m + threadIdx.x % 2, row = from % 4 * 2;
    const float scale = code_scale<FP8>() * __ldg(a.scales + tile * COLUMNS + of_tile);
    allow_next_kernel();
    wait_for_previous_kernel();
    ActiveList& list = smem.lists[warp];
    const int listed = list_active_rows(a, list, first, lane);
    const uint8_t* const weights = a.qweight + column;
    float sums[8][4] = {};  // for m = 2w, 2w + 1: columns 4w + 2 (m & 1) of the lane and the next (operand rows g, g + 8)
    const auto add_rows = [&](int begin, int end) {
        for (; begin < end; begin += LOADS_IN_FLIGHT * STEP) {
            uint4 raw[LOADS_IN_FLIGHT][4];
            uint2 x[LOADS_IN_FLIGHT];
#pragma unroll
            for (int f = 0; f < LOADS_IN_FLIGHT; ++f) {
                const int at = begin + f * STEP;
                if (at >= end) break;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const uint32_t two = *reinterpret_cast<const uint32_t*>(list.rows + at + 8 * half + 2 * t);
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const int row = i ? two >> 16 : two & 0xffffu;
                        raw[f][2 * half + i] = make_uint4(0, 0, 0, 0);
                        if (row != PADDING) raw[f][2 * half + i] = __ldcs(reinterpret_cast<const uint4*>(weights + static_cast<int64_t>(row) * a.width));
                    }
                }
                x[f] = ldmatrix_x2_transposed(list.inputs + at + (lane & 15));
            }
#pragma unroll
            for (int f = 0; f < LOADS_IN_FLIGHT; ++f) {
                if (begin + f * STEP >= end) break;
#pragma unroll
                for (int w = 0; w < 4; ++w) {
                    uint32_t low[4], high[4];
                    const uint32_t r0 = word_of(raw[f][0], w), r1 = word_of(raw[f][1], w), r8 = word_of(raw[f][2], w), r9 = word_of(raw[f][3], w);
                    unpack_e4m3(__byte_perm(r0, r1, 0x5140), low[0], low[1]);
                    unpack_e4m3(__byte_perm(r0, r1, 0x7362), low[2], low[3]);
                    unpack_e4m3(__byte_perm(r8, r9, 0x5140), high[0], high[1]);
                    unpack_e4m3(__byte_perm(r8, r9, 0x7362), high[2], high[3]);
#pragma unroll
                    for (int m = 0; m < 2; ++m)
                        mma(sums[2 * w + m], Fragment{{low[2 * m], low[2 * m + 1], high[2 * m], high[2 * m + 1]}}, x[f].x, x[f].y);
                }
            }
        }
    };
    add_rows(0, listed);
    __syncthreads();  // the lists have been read
#pragma unroll
    for (int m = 0; m < 8; ++m) smem.sums[warp][m * 32 + lane] = make_float4(sums[m][0], sums[m][1], sums[m][2], sums[m][3]);
    __syncthreads();
    float2 total = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        const float2 one = reinterpret_cast<const float2*>(smem.sums[w])[threadIdx.x];
        total.x += one.x, total.y += one.y;
    }
    total.x *= scale, total.y *= scale;
    __syncthreads();  // the warps' sums have been read
    float* const out = reinterpret_cast<float*>(dynamic);  // [MAX_ROWS][COLUMNS]
    out[row * COLUMNS + of_tile] = total.x, out[(row + 1) * COLUMNS + of_tile] = total.y;
    __syncthreads();
    const int out_row = threadIdx.x / (COLUMNS / 4), c = threadIdx.x % (COLUMNS / 4) * 4;
    if (out_row >= a.rows) return;
    float* const to = a.partials + (static_cast<int64_t>(split) * a.rows + out_row) * a.width + tile * COLUMNS + c;
    *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(out + out_row * COLUMNS + c);
}

static int launch_sparse(const SparseFewArgs& a, void* stream) {
    static bool raised[MAX_DEVICES] = {};
    const auto kernel = sparse_few_quant_kernel;
    const int bytes = static_cast<int>(sizeof(SparseFewSmem));
    if (!raised[current_device()]) {
        const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
        if (error != cudaSuccess) return static_cast<int>(error);
        raised[current_device()] = true;
    }
    launch_with_smem(kernel, dim3(a.width / COLUMNS * SPLITS), WARPS * 32, bytes, stream, a);
    return launch_result();
}

// 2 to 8 rows, fp8.
RWKV_API int rwkv_sparse_few_quant(
    const void* h, const void* qweight, const void* scales, void* partials, int format, int rows, int width, int ffn, void* stream) {
    if (format != FP8 || rows > MAX_ROWS || ffn > SPLITS * WARPS * ROWS_PER_WARP || ffn % GROUP_INPUTS || width % COLUMNS) return static_cast<int>(cudaErrorInvalidValue);
    const SparseFewArgs args = {static_cast<const __half*>(h), static_cast<const uint8_t*>(qweight), static_cast<const float*>(scales),
                                static_cast<float*>(partials), rows, width, ffn};
    return launch_sparse(args, stream);
}
