// Rows of several adapters beside a map, y += B (A x), each row its own pair: a shrink and an expand, in the manner of
// punica's SGMV.
//
// The host sorts the step's tokens by adapter into tiles of 16 (`tokens`: which, -1 for none; `numbers`: whose, 0 for rows
// without, -1 for a tile that is not there), so that a tile's products are the tensor cores' (m16n8k16). Pairs are found in
// a table by adapter, layer and map: adapters come and go under the graphs that read it. Up to 3 maps in a launch.
//
//   shrink: h[split][token of a tile][rank] fp32 = A x over a split of the inputs; a block for each tile, map and split
//   expand: y[token] += B h, or, behind a map whose outputs were left as v |v| (SIGNED_SQUARE): max(v + B h, 0)^2, for rows
//           without an adapter max(v, 0)^2 as that map would have left it; a block for each tile, map and 256 outputs
//
// Blocks take tiles in turn (`tiles_at_once`): a graph has room for every row with an adapter of its own, and mostly few
// tiles are there. Sums over splits are taken in their order: a row's bits do not depend on when blocks run. Both kernels read their pairs
// while the kernel before still runs. Bytes: 2 rank (k + n) for each pair of a tile, 2 * 16 k for x, 4 * 16 n for y.
#include "activation.h"
#include "common.cuh"
#include "fragments.cuh"
#include "relu.cuh"

constexpr int TILE = 16;
constexpr int WARPS = 8;
constexpr int MAX_MAPS = 3;
constexpr int MAX_RANK = 128;
constexpr int RANKS = 32;       // of A that a warp sums at a time
constexpr int STEP = 32 * 4;    // inputs of a warp at a time
constexpr int OUTPUTS = 256;    // of a block of the expand
constexpr int EXPAND_WARPS = 4;

struct Pair {
    const __half* a;  // [rank, k]
    const __half* b;  // [n, rank], its scale in it
    int64_t rank;     // a multiple of 16; 0: none
};

struct AdapterMap {
    const __half* x;  // [tokens, k]
    __half* y;        // [tokens, n]
    int k, n, target, unused;
};

struct AdapterArgs {
    AdapterMap maps[MAX_MAPS];
    const Pair* pairs;     // [numbers, layers, targets]
    const int* tokens;     // [tiles, 16]
    const int* numbers;    // [tiles]
    float* partial;        // [maps, splits, tiles, 16, MAX_RANK]
    int count, tiles, layers, layer, targets, splits, squares, tiles_at_once;
};

__device__ __forceinline__ const Pair* pair_of(const AdapterArgs& p, int number, int target) {
    return p.pairs + (static_cast<int64_t>(number) * p.layers + p.layer) * p.targets + target;
}

__device__ __forceinline__ float* partial_of(const AdapterArgs& p, int map, int split, int tile) {
    return p.partial + ((static_cast<int64_t>(map) * p.splits + split) * p.tiles + tile) * TILE * MAX_RANK;
}

// A split of the inputs of one tile times A, RANKS rows of it at a time, summed over the block's warps.
// The k index inside a piece of 32 is permuted alike for A and x: lane t of a quad holds 8t .. 8t + 7.
__device__ __forceinline__ void shrink_tile(
    const AdapterArgs& p, const AdapterMap& m, const Pair& pair, int tile, float (&sums)[WARPS][TILE][RANKS + 1], bool& waited) {
    const int map = blockIdx.z, split = blockIdx.x, rank = static_cast<int>(pair.rank);
    const int per = ((m.k + p.splits - 1) / p.splits + 31) / 32 * 32;
    const int first = split * per, last = min(m.k, first + per);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int low = p.tokens[tile * TILE + g], high = p.tokens[tile * TILE + g + 8];
    const uint4 nothing = {0, 0, 0, 0};
    for (int rank0 = 0; rank0 < rank; rank0 += RANKS) {
        float c[RANKS / 8][4] = {};
        for (int at = first + warp * STEP; at < last; at += WARPS * STEP) {
            uint4 a[4][RANKS / 8];
#pragma unroll
            for (int piece = 0; piece < 4; ++piece) {
#pragma unroll
                for (int j = 0; j < RANKS / 8; ++j) {
                    const int row = rank0 + j * 8 + g, k = at + piece * 32 + t * 8;
                    a[piece][j] = row < rank && k < last ? load16(pair.a + static_cast<int64_t>(row) * m.k + k) : nothing;
                }
            }
            if (!waited) wait_for_inputs();
            waited = true;
#pragma unroll
            for (int piece = 0; piece < 4; ++piece) {
                const int k = at + piece * 32 + t * 8;
                const uint4 lo = low >= 0 && k < last ? load16(m.x + static_cast<int64_t>(low) * m.k + k) : nothing;
                const uint4 hi = high >= 0 && k < last ? load16(m.x + static_cast<int64_t>(high) * m.k + k) : nothing;
#pragma unroll
                for (int j = 0; j < RANKS / 8; ++j) {
                    if (rank0 + j * 8 >= rank) break;
                    mma(c[j], Fragment{{lo.x, hi.x, lo.y, hi.y}}, a[piece][j].x, a[piece][j].y);
                    mma(c[j], Fragment{{lo.z, hi.z, lo.w, hi.w}}, a[piece][j].z, a[piece][j].w);
                }
            }
        }
        if (!waited) wait_for_inputs();  // a warp without inputs: what is written below may still be read before
        waited = true;
#pragma unroll
        for (int j = 0; j < RANKS / 8; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[warp][g + (i >> 1) * 8][j * 8 + t * 2 + (i & 1)] = c[j][i];
        }
        __syncthreads();
        float* to = partial_of(p, map, split, tile);
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
    let_next_start();
    const AdapterMap m = p.maps[blockIdx.z];
    bool waited = false;
    for (int tile = blockIdx.y; tile < p.tiles; tile += gridDim.y) {
        const int number = p.numbers[tile];
        if (number <= 0) break;  // rows without an adapter come last
        const Pair pair = *pair_of(p, number, m.target);
        if (pair.rank > 0) shrink_tile(p, m, pair, tile, sums, waited);
    }
    if (!waited) wait_for_inputs();  // or this kernel might end, and the next one start, before the one before has ended
}

// v from what SIGNED_SQUARE left of it.
__device__ __forceinline__ float unsquared(float z) { return copysignf(sqrtf(fabsf(z)), z); }

// Eight outputs of a token: what B h adds to them, and what the map left.
template <bool SQUARES>
__device__ __forceinline__ void finish(__half* y, const float (&added)[8]) {
    float v[8];
    unpack8(load16(y), v);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = SQUARES ? relu_square(unsquared(v[i]) + added[i]) : v[i] + added[i];
    store16(y, pack8(v));
}

// Rows without an adapter: what the map would have left.
__device__ __forceinline__ void leave_squares(const AdapterMap& m, const int* tokens, int first) {
    for (int i = threadIdx.x; i < TILE * OUTPUTS / 8; i += EXPAND_WARPS * 32) {
        const int token = tokens[i / (OUTPUTS / 8)], column = first + i % (OUTPUTS / 8) * 8;
        if (token < 0 || column >= m.n) continue;
        __half* y = m.y + static_cast<int64_t>(token) * m.n + column;
        float v[8];
        unpack8(load16(y), v);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = relu(v[j]);
        store16(y, pack8(v));
    }
}

// Outputs of a group of 32 are dealt to the columns of four products so that each lane has 8 neighbours of a row: lane t
// of a quad has 8t .. 8t + 7. The rank inside a step of 16 is permuted alike for h and B: lane t has 4t .. 4t + 3.
template <bool SQUARES>
__device__ __forceinline__ void expand_tile(
    const AdapterArgs& p, const AdapterMap& m, const Pair& pair, int tile, __half (&h)[TILE][MAX_RANK + 8], bool& waited) {
    const int map = blockIdx.z, rank = static_cast<int>(pair.rank);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    constexpr int GROUPS = OUTPUTS / EXPAND_WARPS / 32;
    const int first = blockIdx.x * OUTPUTS + warp * GROUPS * 32;
    const int row = (g >> 1) * 8 + (g & 1);  // of B, plus twice the product's number
    const uint2 nothing = {0, 0};
    uint2 b[GROUPS][4];
    auto load_b = [&](int rank0) {
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int n = first + group * 32 + row + j * 2;
                b[group][j] = n < m.n ? *reinterpret_cast<const uint2*>(pair.b + static_cast<int64_t>(n) * rank + rank0 + t * 4) : nothing;
            }
        }
    };
    load_b(0);
    const int tokens[2] = {p.tokens[tile * TILE + g], p.tokens[tile * TILE + g + 8]};
    if (waited) __syncthreads();  // all have read the tile's before
    else wait_for_inputs();
    waited = true;
    for (int i = threadIdx.x; i < TILE * rank; i += EXPAND_WARPS * 32) {
        const int r = i / rank, column = i % rank;
        float sum = 0.0f;
        for (int split = 0; split < p.splits; ++split) sum += __ldcg(partial_of(p, map, split, tile) + r * MAX_RANK + column);
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
            finish<SQUARES>(m.y + static_cast<int64_t>(tokens[half]) * m.n + column, added);
        }
    }
}

template <bool SQUARES>
__global__ void __launch_bounds__(EXPAND_WARPS * 32) expand_kernel(const AdapterArgs p) {
    __shared__ __half h[TILE][MAX_RANK + 8];
    let_next_start();
    const AdapterMap m = p.maps[blockIdx.z];
    bool waited = false;
    if (static_cast<int>(blockIdx.x) * OUTPUTS < m.n) {
        for (int tile = blockIdx.y; tile < p.tiles; tile += gridDim.y) {
            const int number = p.numbers[tile];
            if (number < 0 || (number == 0 && !SQUARES)) break;
            const Pair pair = number > 0 ? *pair_of(p, number, m.target) : Pair{nullptr, nullptr, 0};
            if (pair.rank > 0) {
                expand_tile<SQUARES>(p, m, pair, tile, h, waited);
            } else if (SQUARES) {
                if (!waited) wait_for_inputs();
                waited = true;
                leave_squares(m, p.tokens + tile * TILE, blockIdx.x * OUTPUTS);
            }
        }
    }
    if (!waited) wait_for_inputs();  // as above
}

RWKV_API int rwkv_adapters(const AdapterArgs* args, void* stream) {
    const AdapterArgs& p = *args;
    int widest = 0;
    for (int i = 0; i < p.count; ++i) widest = max(widest, p.maps[i].n);
    launch(shrink_kernel, dim3(p.splits, p.tiles_at_once, p.count), WARPS * 32, stream, p);
    const dim3 grid((widest + OUTPUTS - 1) / OUTPUTS, p.tiles_at_once, p.count);
    if (p.squares) launch(expand_kernel<true>, grid, EXPAND_WARPS * 32, stream, p);
    else launch(expand_kernel<false>, grid, EXPAND_WARPS * 32, stream, p);
    return launch_result();
}
