// y = act(x @ W^T) for few rows (up to 8 or 16), several maps in one launch: streams the weights once.
//
// A map: W [n, k] fp16 (n a multiple of 32, k of 64), x [rows, k] fp16, y [rows, ld_y] fp16 or fp32. A warp takes a group
// of 32 rows of W and a share of k: `warps_k` of a block's 8 warps share one group, so a block makes 32 * 8 / warps_k
// outputs per row of x. Groups are of 16 rows, and twice as much of k goes at a time, where a block per processor then
// still does it all. Products on the tensor cores (m16n8k16, fp32 sums): 16 rows of W against 8 rows of x. Both operands
// go from memory to registers 16 bytes at a time: the k index inside a piece of 32 is permuted alike for W and x (lane t
// of a quad holds k = 8t .. 8t+7), which a sum over k does not notice.
//
// Blocks stay for several groups; the next chunk of W is always on its way while one is multiplied, also across groups
// and, before the first, while the kernel before still runs.
//
// Bytes: 2nk per map, read past L1; x comes through L1 (2 * rows * k once per multiprocessor). A thread keeps
// 8 x 16 bytes in flight, a multiprocessor 64 KiB.
#include "activation.h"
#include "common.cuh"

constexpr int WARPS = 8;
constexpr int RED_PAD = 4;  // floats between columns of the partial sums: no bank conflicts
constexpr int MAX_MAPS = 8;


struct Map {
    const __half* weight;
    const __half* x;
    void* y;
    int n, k, ld_y;
    int activation;
    int float_out;
    int warps_k;      // 1, 2, 4 or 8
    int first_block;  // of this map in the grid
};

struct SkinnyArgs {
    Map maps[MAX_MAPS];
    int count;
    int rows;
};

__device__ __forceinline__ uint4 load_stream(const __half* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

__device__ __forceinline__ void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float activate(float v, int activation) {
    if (activation == TANH) return tanh_exp(v);
    if (activation == SIGNED_SQUARE) return v * fabsf(v);
    if (activation == SIGMOID) return sigmoidf(v);
    if (activation == RELU_SQUARED) {
        v = fmaxf(v, 0.0f);
        return v * v;
    }
    return v;
}

// Weights of one chunk: HEIGHT tiles of 16 rows x PARTS pieces of 32 k. [tile][row g, row g+8][piece of the chunk]
template <int HEIGHT>
struct WeightChunk {
    static constexpr int PARTS = 4 / HEIGHT;
    uint4 w[HEIGHT][2][PARTS];

    __device__ __forceinline__ void load(const __half* at, int k) {
#pragma unroll
        for (int tile = 0; tile < HEIGHT; ++tile) {
#pragma unroll
            for (int up = 0; up < 2; ++up) {
                const __half* row = at + static_cast<int64_t>(tile * 16 + up * 8) * k;
#pragma unroll
                for (int part = 0; part < PARTS; ++part) w[tile][up][part] = load_stream(row + 32 * part);
            }
        }
    }
};

// TILES * 8 rows of x against one chunk of weights.
template <int TILES, int HEIGHT>
__device__ __forceinline__ void multiply(
    float (&sums)[HEIGHT][TILES][4], const WeightChunk<HEIGHT>& chunk, const __half* x, int k, int g, int rows) {
    constexpr int PARTS = WeightChunk<HEIGHT>::PARTS;
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
        uint4 b[PARTS] = {};
        if (n * 8 + g < rows) {
            const uint4* at = reinterpret_cast<const uint4*>(x + static_cast<int64_t>(n * 8 + g) * k);
#pragma unroll
            for (int part = 0; part < PARTS; ++part) b[part] = __ldg(at + 4 * part);
        }
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
#pragma unroll
            for (int tile = 0; tile < HEIGHT; ++tile) {
                const uint4 &lo = chunk.w[tile][0][part], &hi = chunk.w[tile][1][part];
                mma(sums[tile][n], lo.x, hi.x, lo.y, hi.y, b[part].x, b[part].y);
                mma(sums[tile][n], lo.z, hi.z, lo.w, hi.w, b[part].z, b[part].w);
            }
        }
    }
}

// Where a warp stands: a group of 32 rows of a map and a chunk of k in it.
struct Place {
    int block, map, row0, k0;

    // The first place of block number `block`, or one past the end. `map` only grows.
    template <int GROUP, int CHUNK>
    __device__ __forceinline__ void enter(const SkinnyArgs& args, int number, int blocks, int warp) {
        block = number;
        if (block >= blocks) return;
        while (map + 1 < args.count && block >= args.maps[map + 1].first_block) ++map;
        const Map& m = args.maps[map];
        row0 = ((block - m.first_block) * (WARPS / m.warps_k) + warp / m.warps_k) * GROUP;
        k0 = warp % m.warps_k * CHUNK;
    }
};

template <int TILES, int HEIGHT>
__global__ void __launch_bounds__(WARPS * 32, 2) skinny_kernel(const __grid_constant__ SkinnyArgs args, int blocks) {
    constexpr int GROUP = HEIGHT * 16, CHUNK = WeightChunk<HEIGHT>::PARTS * 32;
    __shared__ float partial[WARPS][TILES * 8][GROUP + RED_PAD];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    WeightChunk<HEIGHT> ahead;
    const auto fetch = [&](const Place& p) {
        const Map& m = args.maps[p.map];
        if (p.block < blocks && p.row0 < m.n && p.k0 < m.k) {
            ahead.load(m.weight + static_cast<int64_t>(p.row0 + g) * m.k + p.k0 + 8 * t, m.k);
        }
    };
    Place place = {0, 0, 0, 0};
    place.template enter<GROUP, CHUNK>(args, blockIdx.x, blocks, warp);
    fetch(place);
    let_next_start();
    wait_for_inputs();
    while (place.block < blocks) {
        const Map& m = args.maps[place.map];
        const Place group = place;
        float sums[HEIGHT][TILES][4] = {};
        while (place.block == group.block) {
            const WeightChunk<HEIGHT> chunk = ahead;
            const int k0 = place.k0;
            place.k0 += m.warps_k * CHUNK;
            if (place.k0 >= m.k) place.template enter<GROUP, CHUNK>(args, group.block + gridDim.x, blocks, warp);
            fetch(place);
            if (group.row0 < m.n && k0 < m.k) multiply<TILES, HEIGHT>(sums, chunk, m.x + k0 + 8 * t, m.k, g, args.rows);
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
        const int outputs = WARPS / m.warps_k * GROUP, first_row = (group.block - m.first_block) * outputs;
        for (int i = threadIdx.x; i < outputs * args.rows; i += WARPS * 32) {
            const int row = i / outputs, out = i % outputs;
            if (first_row + out >= m.n) continue;
            float sum = 0.0f;
            for (int j = 0; j < m.warps_k; ++j) sum += partial[out / GROUP * m.warps_k + j][row][out % GROUP];
            sum = activate(sum, m.activation);
            const int64_t at = static_cast<int64_t>(row) * m.ld_y + first_row + out;
            if (m.float_out) {
                static_cast<float*>(m.y)[at] = sum;
            } else {
                static_cast<__half*>(m.y)[at] = __float2half_rn(sum);
            }
        }
        __syncthreads();
    }
}

// Fills in first_block; rows <= 16.
RWKV_API int rwkv_skinny(SkinnyArgs* args, void* stream) {
    const auto number = [&](int group) {
        int blocks = 0;
        for (int i = 0; i < args->count; ++i) {
            const int outputs = group * WARPS / args->maps[i].warps_k;
            args->maps[i].first_block = blocks;
            blocks += (args->maps[i].n + outputs - 1) / outputs;
        }
        return blocks;
    };
    const auto run = [&](auto few, auto many, int blocks) {
        const dim3 grid(min(blocks, 2 * this_machine().processors));
        launch_streaming(args->rows <= 8 ? few : many, grid, WARPS * 32, stream, *args, blocks);
        return launch_result();
    };
    bool deep = true;
    for (int i = 0; i < args->count; ++i) deep = deep && args->maps[i].k % (args->maps[i].warps_k * 128) == 0;
    if (deep && number(16) <= this_machine().processors) {
        return run(skinny_kernel<1, 1>, skinny_kernel<2, 1>, number(16));
    }
    return run(skinny_kernel<1, 2>, skinny_kernel<2, 2>, number(32));
}
