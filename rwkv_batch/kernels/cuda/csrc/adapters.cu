// LoRA with a different adapter per row (SGMV, as in punica): y += B (A x), up to 3 projections per launch.
//
//   shrink   h = A x, a partial sum per split of the inputs
//   expand   y = y + B h; with squared_relu, y holds v |v| of the projection and becomes max(v + B h, 0)^2
//
// in     x         [T, k] fp16
//        pairs     [adapters, layers, targets] of A [rank, k] fp16, B [n, rank] fp16, rank; a table on the device
//        tokens    [tiles, 16] int32: token of each tile row; -1: none
//        numbers   [tiles] int32: adapter of a tile; 0: no adapter; -1: no tile
//
// inout  y         [T, n] fp16
//        partials  [projections, splits, tiles, 16, 128] fp32: h
//
// The host sorts tokens by adapter into tiles of 16. CUDA graphs read the table, so adapters are loaded and unloaded
// without a new capture. Splits are added in order, so a row's bits do not depend on the schedule. Both kernels
// prefetch A or B before the previous kernel ends.
//
// Grid: shrink (splits, tiles, projections), expand (n / 256, tiles, projections). A graph is captured for one adapter
// per row, but few tiles exist: CTAs loop over tiles.
// Block: shrink 256 threads, expand 128; mma.m16n8k16.
// Shared memory: shrink 16.5 KB, expand 4.25 KB.
// Bound: memory; 2 rank (k + n) bytes per adapter and tile, 32 k for x, 64 n for y. Share of 4.8 TB/s (H200, k = 4,096,
// rank 16): 320 rows of one adapter, one projection: shrink 10 %, expand 24 % (n = 16,384: 42 %); three projections: 23
// and 32 %. With few rows the latency of a launch, 3 to 4 us.
// Made for: rank <= 128, rank % 16 == 0.
#include "activation.h"
#include "common.cuh"
#include "mma.cuh"
#include "relu.cuh"

constexpr int TILE = 16;
constexpr int WARPS = 8;
constexpr int MAX_GEMMS = 3;
constexpr int MAX_RANK = 128;
constexpr int RANKS = 32;  // ranks of A that a warp sums at a time
constexpr int STEP = 32 * 4;  // inputs per warp and step
constexpr int TILE_N = 256;  // outputs per CTA of the expand
constexpr int EXPAND_WARPS = 4;

struct Pair {
    const __half* a;  // [rank, k]
    const __half* b;  // [n, rank], scaled
    int64_t rank;  // a multiple of 16; 0: none
};

struct AdapterGemmArgs {
    const __half* x;  // [tokens, k]
    __half* y;        // [tokens, n]
    int k, n, target, unused;
};

struct AdapterArgs {
    AdapterGemmArgs gemms[MAX_GEMMS];
    const Pair* pairs;     // [numbers, layers, targets]
    const int* tokens;     // [tiles, 16]
    const int* numbers;    // [tiles]
    float* partials;  // [projections, splits, tiles, 16, MAX_RANK]
    int count, tiles, layers, layer, targets, splits, squared_relu, tiles_in_grid;
};

__device__ __forceinline__ const Pair* pair_of(const AdapterArgs& p, int number, int target) {
    return p.pairs + (static_cast<int64_t>(number) * p.layers + p.layer) * p.targets + target;
}

__device__ __forceinline__ float* partials_of(const AdapterArgs& p, int gemm, int split, int tile) {
    return p.partials + ((static_cast<int64_t>(gemm) * p.splits + split) * p.tiles + tile) * TILE * MAX_RANK;
}

// Shrink of one tile over a split of the inputs, RANKS ranks at a time, summed over the CTA's warps.
// The k index within 32 inputs is permuted alike for A and x: lane t of a quad holds 8t .. 8t + 7.
__device__ __forceinline__ void shrink_tile(
    const AdapterArgs& p, const AdapterGemmArgs& m, const Pair& pair, int tile, float (&sums)[WARPS][TILE][RANKS + 1], bool& waited) {
    const int gemm = blockIdx.z, split = blockIdx.x, rank = static_cast<int>(pair.rank);
    const int per = ((m.k + p.splits - 1) / p.splits + 31) / 32 * 32;
    const int first = split * per, last = min(m.k, first + per);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int low = p.tokens[tile * TILE + g], high = p.tokens[tile * TILE + g + 8];
    const uint4 zeros = {0, 0, 0, 0};
    for (int rank0 = 0; rank0 < rank; rank0 += RANKS) {
        float c[RANKS / 8][4] = {};
        for (int at = first + warp * STEP; at < last; at += WARPS * STEP) {
            uint4 a[4][RANKS / 8];
#pragma unroll
            for (int piece = 0; piece < 4; ++piece) {
#pragma unroll
                for (int j = 0; j < RANKS / 8; ++j) {
                    const int row = rank0 + j * 8 + g, k = at + piece * 32 + t * 8;
                    a[piece][j] = row < rank && k < last ? load16(pair.a + static_cast<int64_t>(row) * m.k + k) : zeros;
                }
            }
            if (!waited) wait_for_previous_kernel();
            waited = true;
#pragma unroll
            for (int piece = 0; piece < 4; ++piece) {
                const int k = at + piece * 32 + t * 8;
                const uint4 lo = low >= 0 && k < last ? load16(m.x + static_cast<int64_t>(low) * m.k + k) : zeros;
                const uint4 hi = high >= 0 && k < last ? load16(m.x + static_cast<int64_t>(high) * m.k + k) : zeros;
#pragma unroll
                for (int j = 0; j < RANKS / 8; ++j) {
                    if (rank0 + j * 8 >= rank) break;
                    mma(c[j], Fragment{{lo.x, hi.x, lo.y, hi.y}}, a[piece][j].x, a[piece][j].y);
                    mma(c[j], Fragment{{lo.z, hi.z, lo.w, hi.w}}, a[piece][j].z, a[piece][j].w);
                }
            }
        }
        if (!waited) wait_for_previous_kernel();  // a warp without inputs: the previous kernel may still read what it overwrites
        waited = true;
#pragma unroll
        for (int j = 0; j < RANKS / 8; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[warp][g + (i >> 1) * 8][j * 8 + t * 2 + (i & 1)] = c[j][i];
        }
        __syncthreads();
        float* to = partials_of(p, gemm, split, tile);
        for (int i = threadIdx.x; i < TILE * RANKS; i += WARPS * 32) {
            const int row = i / RANKS, column = i % RANKS;
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) sum += sums[w][row][column];
            if (rank0 + column < rank) to[row * MAX_RANK + rank0 + column] = sum;
        }
        __syncthreads();
    }
}

__global__ void __launch_bounds__(WARPS * 32) shrink_kernel(const AdapterArgs p) {
    __shared__ float sums[WARPS][TILE][RANKS + 1];
    allow_next_kernel();
    const AdapterGemmArgs m = p.gemms[blockIdx.z];
    bool waited = false;
    for (int tile = blockIdx.y; tile < p.tiles; tile += gridDim.y) {
        const int number = p.numbers[tile];
        if (number <= 0) break;  // tiles without an adapter come last
        const Pair pair = *pair_of(p, number, m.target);
        if (pair.rank > 0) shrink_tile(p, m, pair, tile, sums, waited);
    }
    if (!waited) wait_for_previous_kernel();  // otherwise this kernel could end, and the next one start, before the previous one has ended
}

// v from v |v|.
__device__ __forceinline__ float inverse_signed_square(float z) { return copysignf(sqrtf(fabsf(z)), z); }

// Adds B h to eight outputs of a token.
template <bool SQUARED_RELU>
__device__ __forceinline__ void finish(__half* y, const float (&added)[8]) {
    float v[8];
    unpack8(load16(y), v);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = SQUARED_RELU ? relu_square(inverse_signed_square(v[i]) + added[i]) : v[i] + added[i];
    store16(y, pack8(v));
}

// Rows without an adapter: max(v, 0)^2 from v |v|.
__device__ __forceinline__ void finish_squares(const AdapterGemmArgs& m, const int* tokens, int first) {
    for (int i = threadIdx.x; i < TILE * TILE_N / 8; i += EXPAND_WARPS * 32) {
        const int token = tokens[i / (TILE_N / 8)], column = first + i % (TILE_N / 8) * 8;
        if (token < 0 || column >= m.n) continue;
        __half* y = m.y + static_cast<int64_t>(token) * m.n + column;
        float v[8];
        unpack8(load16(y), v);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = relu(v[j]);
        store16(y, pack8(v));
    }
}

// Expand of one tile. The outputs of a group of 32 are spread over four mma so that a lane has 8 adjacent ones: lane t
// of a quad has 8t .. 8t + 7. The rank within a step of 16 is permuted alike for h and B: lane t has 4t .. 4t + 3.
template <bool SQUARED_RELU>
__device__ __forceinline__ void expand_tile(
    const AdapterArgs& p, const AdapterGemmArgs& m, const Pair& pair, int tile, __half (&h)[TILE][MAX_RANK + 8], bool& waited) {
    const int gemm = blockIdx.z, rank = static_cast<int>(pair.rank);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    constexpr int GROUPS = TILE_N / EXPAND_WARPS / 32;
    const int first = blockIdx.x * TILE_N + warp * GROUPS * 32;
    const int row = (g >> 1) * 8 + (g & 1);  // row of B, plus twice the mma's index
    const uint2 zeros = {0, 0};
    uint2 b[GROUPS][4];
    auto load_b = [&](int rank0) {
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int n = first + group * 32 + row + j * 2;
                b[group][j] = n < m.n ? *reinterpret_cast<const uint2*>(pair.b + static_cast<int64_t>(n) * rank + rank0 + t * 4) : zeros;
            }
        }
    };
    load_b(0);
    const int tokens[2] = {p.tokens[tile * TILE + g], p.tokens[tile * TILE + g + 8]};
    if (waited) __syncthreads();  // all warps have read the previous tile's h
    else wait_for_previous_kernel();
    waited = true;
    for (int i = threadIdx.x; i < TILE * rank; i += EXPAND_WARPS * 32) {
        const int r = i / rank, column = i % rank;
        float sum = 0.0f;
        for (int split = 0; split < p.splits; ++split) sum += __ldcg(partials_of(p, gemm, split, tile) + r * MAX_RANK + column);
        h[r][column] = __float2half_rn(fminf(fmaxf(sum, -65504.0f), 65504.0f));
    }
    __syncthreads();
    float c[GROUPS][4][4] = {};
    for (int rank0 = 0; rank0 < rank; rank0 += 16) {
        const uint2 lo = *reinterpret_cast<const uint2*>(&h[g][rank0 + t * 4]);
        const uint2 hi = *reinterpret_cast<const uint2*>(&h[g + 8][rank0 + t * 4]);
        const Fragment a = {{lo.x, hi.x, lo.y, hi.y}};
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
            for (int j = 0; j < 4; ++j) mma(c[group][j], a, b[group][j].x, b[group][j].y);
        }
        if (rank0 + 16 < rank) load_b(rank0 + 16);
    }
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        const int column = first + group * 32 + t * 8;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (tokens[half] < 0 || column >= m.n) continue;
            float added[8];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                added[2 * j] = c[group][j][2 * half];
                added[2 * j + 1] = c[group][j][2 * half + 1];
            }
            finish<SQUARED_RELU>(m.y + static_cast<int64_t>(tokens[half]) * m.n + column, added);
        }
    }
}

template <bool SQUARED_RELU>
__global__ void __launch_bounds__(EXPAND_WARPS * 32) expand_kernel(const AdapterArgs p) {
    __shared__ __half h[TILE][MAX_RANK + 8];
    allow_next_kernel();
    const AdapterGemmArgs m = p.gemms[blockIdx.z];
    bool waited = false;
    if (static_cast<int>(blockIdx.x) * TILE_N < m.n) {
        for (int tile = blockIdx.y; tile < p.tiles; tile += gridDim.y) {
            const int number = p.numbers[tile];
            if (number < 0 || (number == 0 && !SQUARED_RELU)) break;
            const Pair pair = number > 0 ? *pair_of(p, number, m.target) : Pair{nullptr, nullptr, 0};
            if (pair.rank > 0) {
                expand_tile<SQUARED_RELU>(p, m, pair, tile, h, waited);
            } else if (SQUARED_RELU) {
                if (!waited) wait_for_previous_kernel();
                waited = true;
                finish_squares(m, p.tokens + tile * TILE, blockIdx.x * TILE_N);
            }
        }
    }
    if (!waited) wait_for_previous_kernel();  // as in shrink_kernel
}

RWKV_API int rwkv_adapters(const AdapterArgs* args, void* stream) {
    const AdapterArgs& p = *args;
    int widest = 0;
    for (int i = 0; i < p.count; ++i) widest = max(widest, p.gemms[i].n);
    launch(shrink_kernel, dim3(p.splits, p.tiles_in_grid, p.count), WARPS * 32, stream, p);
    const dim3 grid((widest + TILE_N - 1) / TILE_N, p.tiles_in_grid, p.count);
    if (p.squared_relu) launch(expand_kernel<true>, grid, EXPAND_WARPS * 32, stream, p);
    else launch(expand_kernel<false>, grid, EXPAND_WARPS * 32, stream, p);
    return launch_result();
}
