// y = act(x @ W^T) for few rows (up to 8 or 16), several maps in one launch: streams the weights once.
//
// A map: W [n, k] fp16 (n a multiple of 32, k of 64), x [rows, k] fp16, y [rows, ld_y] fp16 or fp32. A warp takes 32
// rows of W and a share of k: `warps_k` of a block's 8 warps share one group of 32 rows, so a block makes
// 32 * 8 / warps_k outputs per row of x. Products on the tensor cores (m16n8k16, fp32 sums): 16 rows of W against 8
// rows of x. Both operands go from memory to registers 16 bytes at a time: the k index inside a piece of 32 is
// permuted alike for W and x (lane t of a quad holds k = 8t .. 8t+7), which a sum over k does not notice.
//
// Bytes: 2nk per map, read past L1; x comes through L1 (2 * rows * k once per multiprocessor). A thread keeps
// 16 x 16 bytes in flight, a multiprocessor 128 KiB.
#include "common.cuh"

constexpr int WARPS = 8;
constexpr int GROUP = 32;   // rows of W per warp
constexpr int CHUNK = 64;   // k per iteration
constexpr int RED_LD = 36;  // floats between columns of the partial sums: no bank conflicts
constexpr int MAX_MAPS = 8;

enum Activation { NONE, TANH, SIGMOID, RELU_SQUARE };

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
    if (activation == SIGMOID) return sigmoidf(v);
    if (activation == RELU_SQUARE) {
        v = fmaxf(v, 0.0f);
        return v * v;
    }
    return v;
}

// One chunk of 64 k: 32 rows of W (two tiles of 16) against TILES * 8 rows of x.
template <int TILES>
struct Chunk {
    uint4 w[2][2][2];  // [tile of 16][row g, row g+8][half of the chunk]
    uint4 x[TILES][2];

    __device__ __forceinline__ void load(const __half* weight, const Map& m, int k0, int g, int rows) {
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
            for (int up = 0; up < 2; ++up) {
                const __half* row = weight + static_cast<int64_t>(tile * 16 + up * 8) * m.k + k0;
                w[tile][up][0] = load_stream(row);
                w[tile][up][1] = load_stream(row + 32);
            }
        }
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            const int row = tile * 8 + g;
            x[tile][0] = x[tile][1] = make_uint4(0, 0, 0, 0);
            if (row < rows) {
                const uint4* at = reinterpret_cast<const uint4*>(m.x + static_cast<int64_t>(row) * m.k + k0);
                x[tile][0] = __ldg(at);
                x[tile][1] = __ldg(at + 4);
            }
        }
    }

    __device__ __forceinline__ void multiply(float (&sums)[2][TILES][4]) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
                const uint4 &lo = w[tile][0][half], &hi = w[tile][1][half];
#pragma unroll
                for (int n = 0; n < TILES; ++n) {
                    const uint4& b = x[n][half];
                    mma(sums[tile][n], lo.x, hi.x, lo.y, hi.y, b.x, b.y);
                    mma(sums[tile][n], lo.z, hi.z, lo.w, hi.w, b.z, b.w);
                }
            }
        }
    }
};

template <int TILES>
__global__ void __launch_bounds__(WARPS * 32, 2) skinny_kernel(const __grid_constant__ SkinnyArgs args) {
    __shared__ float partial[WARPS][TILES * 8][RED_LD];
    int which = 0;
    while (which + 1 < args.count && static_cast<int>(blockIdx.x) >= args.maps[which + 1].first_block) ++which;
    const Map& m = args.maps[which];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int warp_k = warp % m.warps_k, groups = WARPS / m.warps_k;
    const int first_row = (static_cast<int>(blockIdx.x) - m.first_block) * groups * GROUP;
    const int row0 = first_row + warp / m.warps_k * GROUP;
    float sums[2][TILES][4] = {};
    if (row0 < m.n) {
        const __half* weight = m.weight + static_cast<int64_t>(row0 + g) * m.k;
        const int step = m.warps_k * CHUNK;
        int k0 = warp_k * CHUNK;
        for (; k0 + step < m.k; k0 += 2 * step) {
            Chunk<TILES> first, second;
            first.load(weight, m, k0 + 8 * t, g, args.rows);
            second.load(weight, m, k0 + step + 8 * t, g, args.rows);
            first.multiply(sums);
            second.multiply(sums);
        }
        if (k0 < m.k) {
            Chunk<TILES> rest;
            rest.load(weight, m, k0 + 8 * t, g, args.rows);
            rest.multiply(sums);
        }
    }
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) partial[warp][n * 8 + 2 * t + (i & 1)][tile * 16 + g + (i >> 1) * 8] = sums[tile][n][i];
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < groups * GROUP * args.rows; i += WARPS * 32) {
        const int row = i / (groups * GROUP), out = i % (groups * GROUP);
        const int group = out / GROUP;
        if (first_row + out >= m.n) continue;
        float sum = 0.0f;
        for (int j = 0; j < m.warps_k; ++j) sum += partial[group * m.warps_k + j][row][out % GROUP];
        sum = activate(sum, m.activation);
        const int64_t at = static_cast<int64_t>(row) * m.ld_y + first_row + out;
        if (m.float_out) {
            static_cast<float*>(m.y)[at] = sum;
        } else {
            static_cast<__half*>(m.y)[at] = __float2half_rn(sum);
        }
    }
}

// Fills in first_block; rows <= 16.
RWKV_API int rwkv_skinny(SkinnyArgs* args, void* stream) {
    int blocks = 0;
    for (int i = 0; i < args->count; ++i) {
        const int outputs = GROUP * WARPS / args->maps[i].warps_k;
        args->maps[i].first_block = blocks;
        blocks += (args->maps[i].n + outputs - 1) / outputs;
    }
    const cudaStream_t s = static_cast<cudaStream_t>(stream);
    if (args->rows <= 8) {
        skinny_kernel<1><<<blocks, WARPS * 32, 0, s>>>(*args);
    } else {
        skinny_kernel<2><<<blocks, WARPS * 32, 0, s>>>(*args);
    }
    return launch_result();
}
