// What the kernels for few rows have in common, whatever W is stored as (skinny.cu, skinny_quant.cu): y = act(x @ W^T),
// several maps in one launch, W streamed once.
//
// A warp takes a group of 16 * HEIGHT rows of W and a share of k: `warps_k` of a block's 8 warps share one group, so a
// block makes 8 / warps_k groups of outputs per row of x. Products on the tensor cores (m16n8k16, fp32 sums): 16 rows of W
// against 8 rows of x. Both operands go from memory to registers 16 bytes at a time: the k index inside a piece is permuted
// alike for W and x, which a sum over k does not notice.
//
// A block stays for several groups of one map; the next chunk of W is always on its way while one is multiplied, also across groups
// and, before the first, while the kernel before still runs.
#pragma once

#include <type_traits>

#include "activation.h"
#include "fragments.cuh"
#include "quant_maps.cuh"
#include "relu.cuh"

constexpr int WARPS = 8;
constexpr int RED_PAD = 4;  // floats between columns of the partial sums: no bank conflicts
constexpr int MOST_INPUTS = 32768;
constexpr int SUM_INPUTS = 128;  // of a group whose inputs a Chunk wants to know the sum of

__device__ __forceinline__ uint4 load_stream(const void* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

__device__ __forceinline__ float activate(float v, int activation) {
    if (activation == TANH) return tanh_exp(v);
    if (activation == SIGNED_SQUARE) return v * fabsf(v);
    if (activation == SIGMOID) return sigmoidf(v);
    if (activation == RELU_SQUARED) return relu_square(v);
    return v;
}

// Where a lane reads rows of x, from its first input of a chunk on: from memory, or one row from shared memory.
struct RowsInMemory {
    const __half* x;
    int k, rows;
    const float2* sums;  // of lane t

    // The 16 bytes at the `at`-th half of a row, or zeros.
    __device__ __forceinline__ uint4 read(int row, int at) const {
        if (row >= rows) return make_uint4(0, 0, 0, 0);
        return __ldg(reinterpret_cast<const uint4*>(x + static_cast<int64_t>(row) * k + at));
    }
    // Of a group of the inputs, counted from x on: the sums of rows 2t and 2t + 1.
    __device__ __forceinline__ float2 group_sums(int group) const { return sums[4 * group]; }
};

struct RowInShared {
    const __half* x;
    const float* sums;

    __device__ __forceinline__ uint4 read(int row, int at) const {
        return row > 0 ? make_uint4(0, 0, 0, 0) : *reinterpret_cast<const uint4*>(x + at);
    }
    // As above; of row 0 alone.
    __device__ __forceinline__ float2 group_sums(int group) const { return make_float2(sums[group], 0.0f); }
};

// TILES * 8 rows of x against a chunk of W in halves: PARTS pieces of 8 inputs a lane, of rows g and g + 8 of each tile.
template <int HEIGHT, int TILES, int PARTS, typename Rows>
__device__ __forceinline__ void multiply_halves(
    float (&sums)[HEIGHT][TILES][4], const uint4 (&w)[HEIGHT][2][PARTS], const Rows& x, int g) {
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
        uint4 b[PARTS];
#pragma unroll
        for (int part = 0; part < PARTS; ++part) b[part] = x.read(n * 8 + g, 32 * part);
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
#pragma unroll
            for (int tile = 0; tile < HEIGHT; ++tile) {
                const uint4 &lo = w[tile][0][part], &hi = w[tile][1][part];
                mma(sums[tile][n], Fragment{{lo.x, hi.x, lo.y, hi.y}}, b[part].x, b[part].y);
                mma(sums[tile][n], Fragment{{lo.z, hi.z, lo.w, hi.w}}, b[part].z, b[part].w);
            }
        }
    }
}

// Where a warp stands: a group of rows of its block's map, and a chunk of k in it. A block makes neighbouring groups of one map.
template <int GROUP, typename Chunk>
struct Place {
    int map, unit, last;  // of what all of a block's warps make at a time; one past the block's last
    int row0, k0;

    template <typename Args>
    __device__ __forceinline__ Place(const Args& args, int warp) : map(0) {
        const int block = blockIdx.x;
        while (map + 1 < args.count && block >= args.maps[map + 1].first_block) ++map;
        const auto& m = args.maps[map];
        const int outputs = outputs_of(m), units = (m.n + outputs - 1) / outputs, mine = block - m.first_block;
        unit = static_cast<int>(static_cast<int64_t>(mine) * units / m.blocks);
        last = static_cast<int>(static_cast<int64_t>(mine + 1) * units / m.blocks);
        begin(m, warp);
    }
    template <typename Map>
    __device__ static __forceinline__ int outputs_of(const Map& m) { return WARPS / m.warps_k * GROUP; }
    template <typename Map>
    __device__ __forceinline__ void begin(const Map& m, int warp) {
        row0 = unit * outputs_of(m) + warp / m.warps_k * GROUP;
        k0 = warp % m.warps_k * Chunk::depth(m);
    }
    template <typename Map>
    __device__ __forceinline__ void advance(const Map& m, int warp) {
        k0 += m.warps_k * Chunk::depth(m);
        if (k0 < m.k) return;
        ++unit;
        begin(m, warp);
    }
};

// All of a kernel, for up to 8 * TILES rows of x. A Chunk is what a warp has of W at a time: HEIGHT tiles of 16 rows, DEPTH
// inputs, of whose pieces a lane holds LANE neighbouring ones. It is loaded, multiplied, and knows what the sums of an
// output are to be multiplied by at last.
// HELD: there is one row, of at most MOST_HELD inputs, which the block brings into shared memory at once. NORMED: so there
// is, and the block makes it: args.norm says of what, a map's x is its mix.
enum Source { IN_MEMORY, HELD, NORMED };
template <typename Chunk, int TILES, Source SOURCE, typename Args>
__device__ __forceinline__ void stream_maps(const Args& args) {
    constexpr int HEIGHT = Chunk::HEIGHT, GROUP = HEIGHT * 16;
    __shared__ float partial[WARPS][TILES * 8][GROUP + RED_PAD];
    __shared__ uint4 held[SOURCE == IN_MEMORY ? 1 : MOST_HELD / 8];
    constexpr int SUMMED_GROUPS = !Chunk::SUMMED ? 0 : (SOURCE == IN_MEMORY ? MOST_INPUTS : MOST_HELD) / SUM_INPUTS;
    constexpr int SUMMED_ROWS = SOURCE == IN_MEMORY ? 8 : 1;
    __shared__ __align__(8) float group_sums[SUMMED_GROUPS * SUMMED_ROWS + 2];
    __shared__ std::conditional_t<SOURCE == NORMED, MixRoom, int> room;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    Place<GROUP, Chunk> place(args, warp);
    const auto& m = args.maps[place.map];
    Chunk ahead;
    const auto fetch = [&] {
        if (place.unit < place.last && place.row0 < m.n && place.k0 < m.k) ahead.load(m, place.row0, place.k0, g, t);
    };
    fetch();
    int arrived = 0;
    if constexpr (SOURCE == NORMED) {
        RowMix<WARPS * 32> row(args.norm, m.x);
        let_next_start();
        wait_for_inputs();
        row.make(args.norm, held, room);
        __syncthreads();
        if (threadIdx.x == 0) arrived = atomicAdd(args.norm.counter, 1);
    } else {
        let_next_start();
        wait_for_inputs();
    }
    if constexpr (SOURCE == HELD) {
        for (int i = threadIdx.x; i < m.k / 8; i += WARPS * 32) held[i] = __ldg(reinterpret_cast<const uint4*>(m.x) + i);
        __syncthreads();
    }
    if constexpr (Chunk::SUMMED) {
        const int at = Chunk::lane(m) * t;
        const auto sum_groups = [&](const auto& rows, const auto& put) {
            constexpr int TOGETHER = 3;  // groups whose inputs are on their way at once
            for (int first = warp; first < m.k / SUM_INPUTS && !Chunk::is_half(m); first += WARPS * TOGETHER) {
                uint4 inputs[TOGETHER][4];
#pragma unroll
                for (int i = 0; i < TOGETHER; ++i) {
                    const int group = min(first + WARPS * i, m.k / SUM_INPUTS - 1);
#pragma unroll
                    for (int q = 0; q < 4; ++q) inputs[i][q] = rows.read(g, group * SUM_INPUTS + 8 * q);
                }
#pragma unroll
                for (int i = 0; i < TOGETHER; ++i) {
                    float sums[4] = {};
                    Chunk::sum_inputs(sums, inputs[i]);
                    if (first + WARPS * i < m.k / SUM_INPUTS) put(first + WARPS * i, make_float2(sums[0], sums[1]));
                }
            }
        };
        if constexpr (SOURCE == IN_MEMORY) {
            sum_groups(RowsInMemory{m.x + at, m.k, args.rows, nullptr}, [&](int group, const float2& sums) {
                if (g == 0) reinterpret_cast<float2*>(group_sums)[4 * group + t] = sums;
            });
        } else {
            sum_groups(RowInShared{reinterpret_cast<const __half*>(held) + at, nullptr}, [&](int group, const float2& sums) {
                if (lane == 0) group_sums[group] = sums.x;
            });
        }
        __syncthreads();
    }
    while (place.unit < place.last) {
        const int unit = place.unit;
        float sums[HEIGHT][TILES][4] = {};
        while (place.unit == unit) {
            const Chunk chunk = ahead;
            const int row0 = place.row0, k0 = place.k0, at = k0 + Chunk::lane(m) * t;
            place.advance(m, warp);
            fetch();
            if (row0 < m.n && k0 < m.k) {
                if constexpr (SOURCE != IN_MEMORY) {
                    chunk.multiply(sums, m, RowInShared{reinterpret_cast<const __half*>(held) + at, group_sums + k0 / SUM_INPUTS}, g);
                } else {
                    chunk.multiply(sums, m, RowsInMemory{m.x + at, m.k, args.rows, reinterpret_cast<const float2*>(group_sums) + 4 * (k0 / SUM_INPUTS) + t}, g);
                }
            }
        }
#pragma unroll
        for (int tile = 0; tile < HEIGHT; ++tile) {
#pragma unroll
            for (int n = 0; n < TILES; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    partial[warp][n * 8 + 2 * t + (i & 1)][tile * 16 + g + (i >> 1) * 8] = sums[tile][n][i];
                }
            }
        }
        __syncthreads();
        const int outputs = place.outputs_of(m), first_row = unit * outputs;
        for (int i = threadIdx.x; i < outputs * args.rows; i += WARPS * 32) {
            const int row = i / outputs, out = i % outputs;
            if (first_row + out >= m.n) continue;
            float sum = 0.0f;
            for (int j = 0; j < m.warps_k; ++j) sum += partial[out / GROUP * m.warps_k + j][row][out % GROUP];
            sum = activate(Chunk::scaled(sum, m, first_row + out), m.activation);
            const int64_t at = static_cast<int64_t>(row) * m.ld_y + first_row + out;
            if (m.float_out) {
                static_cast<float*>(m.y)[at] = sum;
            } else {
                static_cast<__half*>(m.y)[at] = __float2half_rn(sum);
            }
        }
        __syncthreads();
    }
    if constexpr (SOURCE == NORMED) keep_token<WARPS * 32>(args.norm, room, arrived, gridDim.x, [] { __syncthreads(); });
}

// Whether a launch's one row fits into shared memory.
template <typename Args>
static bool holds_row(const Args& args) {
    bool fits = args.rows == 1;
    for (int i = 0; i < args.count; ++i) fits = fits && args.maps[i].k <= MOST_HELD;
    return fits;
}

// How a launch's blocks are dealt to its maps.
struct Deal {
    int blocks;
    int64_t share;  // bytes of W of the block that has most
};

// Deals as many blocks as run at once to the maps, so that the one with most to read has as little as can be: fills in
// every map's first_block and blocks. For groups of `group` rows of W; bytes_of(map): of an output.
template <typename Args, typename BytesOf>
static Deal deal_blocks(Args& args, int group, const BytesOf& bytes_of) {
    int units[MAX_MAPS];
    int64_t bytes[MAX_MAPS], most = 0, least = INT64_MAX;
    for (int i = 0; i < args.count; ++i) {
        const int outputs = group * WARPS / args.maps[i].warps_k;
        units[i] = (args.maps[i].n + outputs - 1) / outputs;
        bytes[i] = bytes_of(args.maps[i]) * outputs;
        most = most > bytes[i] ? most : bytes[i], least = least < bytes[i] ? least : bytes[i];
    }
    for (int64_t share = most;; share += least) {
        Deal deal = {0, 0};
        for (int i = 0; i < args.count; ++i) {
            const int64_t each = share / bytes[i];
            args.maps[i].first_block = deal.blocks;
            args.maps[i].blocks = static_cast<int>((units[i] + each - 1) / each);
            deal.blocks += args.maps[i].blocks;
            const int64_t heaviest = (units[i] + args.maps[i].blocks - 1) / args.maps[i].blocks * bytes[i];
            deal.share = deal.share > heaviest ? deal.share : heaviest;
        }
        if (deal.blocks <= 2 * this_machine().processors) return deal;
    }
}

template <typename Args>
static int launch_maps(void (*kernel)(Args), const Args& args, int blocks, void* stream) {
    launch_streaming(kernel, dim3(blocks), WARPS * 32, stream, args);
    return launch_result();
}
