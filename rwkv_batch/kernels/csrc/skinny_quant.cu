// y = act(x @ W^T) for few rows (up to 16, of 4 bits 8) and W of 8 or 4 bits (quant.cuh), several maps in one launch: streams W once.
//
// As skinny.cu: a warp takes a group of 32 rows of W and a share of k, the next chunk of W is on its way while one is
// multiplied, products on the tensor cores (m16n8k16, fp16, fp32 sums). A lane's 16 bytes are 16 (8-bit) or 32 (4-bit)
// neighbouring inputs, made halves in registers; x is read in the same order. Sums of a group of 128 inputs are scaled
// as they are added up; fp8's scales come at the end.
//
// A map: codes [n, k] (n a multiple of 32, k of 128, or 256 for 4 bits), scales fp8 [n] fp32, int8 [k / 128][n] fp16,
// int4 [k / 128][n] pairs of fp16 (scale, 1024 + zero); x [rows, k] fp16, y [rows, ld_y] fp16 or fp32.
// Bytes: nk or nk / 2 per map, read past L1, and the scales.
#include "activation.h"
#include "fragments.cuh"
#include "quant.cuh"

constexpr int WARPS = 8;
constexpr int HEIGHT = 2;  // tiles of 16 rows of W
constexpr int GROUP = HEIGHT * 16;
constexpr int PARTS = 2;
constexpr int RED_PAD = 4;
constexpr int MAX_MAPS = 8;


struct QuantMap {
    const uint8_t* codes;
    const void* scales;
    const __half* x;
    void* y;
    int n, k, ld_y;
    int activation;
    int float_out;
    int warps_k;      // 1, 2, 4 or 8
    int first_block;  // of this map in the grid
};

struct QuantArgs {
    QuantMap maps[MAX_MAPS];
    int count;
    int rows;
    int format;
};

__device__ __forceinline__ uint4 load_stream(const uint8_t* p) {
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
    if (activation == RELU_SQUARED) {
        v = fmaxf(v, 0.0f);
        return v * v;
    }
    return v;
}

// Inputs of a lane's 16 bytes, of a piece (a quad's), of a chunk; groups of 128 in a chunk.
template <Format FORMAT>
struct Sizes {
    static constexpr int LANE = FORMAT == INT4 ? 32 : 16, PIECE = 4 * LANE, CHUNK = PARTS * PIECE;
    static constexpr int GROUPS = FORMAT == FP8 ? 0 : CHUNK / GROUP_INPUTS, ROW_BYTES_SHIFT = FORMAT == INT4 ? 1 : 0;
};

template <Format FORMAT>
struct CodeChunk {
    static constexpr int GROUPS = Sizes<FORMAT>::GROUPS;
    uint4 w[HEIGHT][2][PARTS];
    uint32_t scales[GROUPS == 0 ? 1 : GROUPS][HEIGHT][2];

    // Lane t of quad g: row row0 + g (and so on), inputs from k0 on.
    __device__ __forceinline__ void load(const QuantMap& m, int row0, int k0, int g, int t) {
        constexpr int SHIFT = Sizes<FORMAT>::ROW_BYTES_SHIFT;
        const int64_t pitch = m.k >> SHIFT;
        const uint8_t* at = m.codes + (row0 + g) * pitch + (k0 >> SHIFT) + 16 * t;
#pragma unroll
        for (int tile = 0; tile < HEIGHT; ++tile) {
#pragma unroll
            for (int up = 0; up < 2; ++up) {
#pragma unroll
                for (int part = 0; part < PARTS; ++part)
                    w[tile][up][part] = load_stream(at + (tile * 16 + up * 8) * pitch + 64 * part);
            }
        }
        if constexpr (GROUPS > 0) {
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
                for (int tile = 0; tile < HEIGHT; ++tile) {
#pragma unroll
                    for (int up = 0; up < 2; ++up) {
                        const int64_t i =
                            static_cast<int64_t>(k0 / GROUP_INPUTS + group) * m.n + row0 + tile * 16 + up * 8 + g;
                        if constexpr (FORMAT == INT4) {
                            scales[group][tile][up] = __ldg(static_cast<const uint32_t*>(m.scales) + i);
                        } else {
                            scales[group][tile][up] = __ldg(static_cast<const uint16_t*>(m.scales) + i);
                        }
                    }
                }
            }
        }
    }

    __device__ __forceinline__ float scale(int group, int tile, int up) const {
        return __half2float(__ushort_as_half(static_cast<unsigned short>(scales[group][tile][up] & 0xffffu)));
    }

    // Twice the half 1024 + zero.
    __device__ __forceinline__ uint32_t zeros(int group, int tile, int up) const {
        return __byte_perm(scales[group][tile][up], 0, 0x3232);
    }
};

__device__ __forceinline__ uint32_t word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// One piece of a chunk against TILES * 8 rows of x.
template <Format FORMAT, int TILES>
__device__ __forceinline__ void multiply_piece(
    float (&sums)[HEIGHT][TILES][4], const CodeChunk<FORMAT>& chunk, int part, int group, const __half* x, int k, int g,
    int rows) {
    constexpr int QUADS = Sizes<FORMAT>::LANE / 8;  // 16-byte loads of x
    constexpr int WORDS = 4 / QUADS;                // of codes, for each of these
    constexpr bool AT_ONCE = TILES == 1;            // or there are too few registers
    uint4 b[TILES][QUADS];
    const auto load_x = [&](int q) {
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
            b[n][q] = make_uint4(0, 0, 0, 0);
            if (n * 8 + g < rows) b[n][q] = __ldg(reinterpret_cast<const uint4*>(x + static_cast<int64_t>(n * 8 + g) * k) + q);
        }
    };
    if constexpr (AT_ONCE) {
#pragma unroll
        for (int q = 0; q < QUADS; ++q) load_x(q);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // words of codes
        if (!AT_ONCE && i % WORDS == 0) load_x(i / WORDS);
        if constexpr (FORMAT == INT4) {
#pragma unroll
            for (int pair = 0; pair < 4; pair += 2) {
                Fragment a[HEIGHT];
#pragma unroll
                for (int tile = 0; tile < HEIGHT; ++tile) {
#pragma unroll
                    for (int up = 0; up < 2; ++up) {
                        const uint32_t codes = word(chunk.w[tile][up][part], i), zeros = chunk.zeros(group, tile, up);
                        a[tile].x[up] = unpack_nibbles(codes, pair, zeros);
                        a[tile].x[up + 2] = unpack_nibbles(codes, pair + 1, zeros);
                    }
                }
#pragma unroll
                for (int n = 0; n < TILES; ++n) {
#pragma unroll
                    for (int tile = 0; tile < HEIGHT; ++tile)
                        mma(sums[tile][n], a[tile], word(b[n][i], pair), word(b[n][i], pair + 1));
                }
            }
        } else {
            Fragment a[HEIGHT];
#pragma unroll
            for (int tile = 0; tile < HEIGHT; ++tile) {
#pragma unroll
                for (int up = 0; up < 2; ++up)
                    unpack_bytes<FORMAT>(word(chunk.w[tile][up][part], i), a[tile].x[up], a[tile].x[up + 2]);
            }
#pragma unroll
            for (int n = 0; n < TILES; ++n) {
                const uint32_t b0 = word(b[n][i / 2], i % 2 * 2), b1 = word(b[n][i / 2], i % 2 * 2 + 1);
#pragma unroll
                for (int tile = 0; tile < HEIGHT; ++tile) mma(sums[tile][n], a[tile], b0, b1);
            }
        }
    }
}

template <Format FORMAT, int TILES>
__device__ __forceinline__ void multiply(
    float (&sums)[HEIGHT][TILES][4], const CodeChunk<FORMAT>& chunk, const __half* x, int k, int g, int rows) {
    constexpr int PIECE = Sizes<FORMAT>::PIECE, GROUPS = Sizes<FORMAT>::GROUPS;
    if constexpr (GROUPS == 0) {
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
            multiply_piece<FORMAT, TILES>(sums, chunk, part, 0, x + part * PIECE, k, g, rows);
    } else {
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            float own[HEIGHT][TILES][4] = {};
#pragma unroll
            for (int part = group * (PARTS / GROUPS); part < (group + 1) * (PARTS / GROUPS); ++part)
                multiply_piece<FORMAT, TILES>(own, chunk, part, group, x + part * PIECE, k, g, rows);
#pragma unroll
            for (int tile = 0; tile < HEIGHT; ++tile) {
                const float low = chunk.scale(group, tile, 0), high = chunk.scale(group, tile, 1);
#pragma unroll
                for (int n = 0; n < TILES; ++n) {
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        sums[tile][n][i] = fmaf(own[tile][n][i], i < 2 ? low : high, sums[tile][n][i]);
                }
            }
        }
    }
}

// Where a warp stands: a group of 32 rows of a map and a chunk of k in it.
struct Place {
    int block, map, row0, k0;

    template <int CHUNK>
    __device__ __forceinline__ void enter(const QuantArgs& args, int number, int blocks, int warp) {
        block = number;
        if (block >= blocks) return;
        while (map + 1 < args.count && block >= args.maps[map + 1].first_block) ++map;
        const QuantMap& m = args.maps[map];
        row0 = ((block - m.first_block) * (WARPS / m.warps_k) + warp / m.warps_k) * GROUP;
        k0 = warp % m.warps_k * CHUNK;
    }
};

template <Format FORMAT, int TILES>
__global__ void __launch_bounds__(WARPS * 32, 2) skinny_quant_kernel(const __grid_constant__ QuantArgs args, int blocks) {
    constexpr int CHUNK = Sizes<FORMAT>::CHUNK, LANE = Sizes<FORMAT>::LANE;
    __shared__ float partial[WARPS][TILES * 8][GROUP + RED_PAD];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    CodeChunk<FORMAT> ahead;
    const auto fetch = [&](const Place& p) {
        const QuantMap& m = args.maps[p.map];
        if (p.block < blocks && p.row0 < m.n && p.k0 < m.k) ahead.load(m, p.row0, p.k0, g, t);
    };
    Place place = {0, 0, 0, 0};
    place.template enter<CHUNK>(args, blockIdx.x, blocks, warp);
    fetch(place);
    let_next_start();
    wait_for_inputs();
    while (place.block < blocks) {
        const QuantMap& m = args.maps[place.map];
        const Place group = place;
        float sums[HEIGHT][TILES][4] = {};
        while (place.block == group.block) {
            const CodeChunk<FORMAT> chunk = ahead;
            const int k0 = place.k0;
            place.k0 += m.warps_k * CHUNK;
            if (place.k0 >= m.k) place.template enter<CHUNK>(args, group.block + gridDim.x, blocks, warp);
            fetch(place);
            if (group.row0 < m.n && k0 < m.k) multiply<FORMAT, TILES>(sums, chunk, m.x + k0 + LANE * t, m.k, g, args.rows);
        }
#pragma unroll
        for (int tile = 0; tile < HEIGHT; ++tile) {
#pragma unroll
            for (int n = 0; n < TILES; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    partial[warp][n * 8 + 2 * t + (i & 1)][tile * 16 + g + (i >> 1) * 8] = sums[tile][n][i];
            }
        }
        __syncthreads();
        const int outputs = WARPS / m.warps_k * GROUP, first_row = (group.block - m.first_block) * outputs;
        for (int i = threadIdx.x; i < outputs * args.rows; i += WARPS * 32) {
            const int row = i / outputs, out = i % outputs;
            if (first_row + out >= m.n) continue;
            float sum = 0.0f;
            for (int j = 0; j < m.warps_k; ++j) sum += partial[out / GROUP * m.warps_k + j][row][out % GROUP];
            sum *= code_scale<FORMAT>();
            if constexpr (FORMAT == FP8) sum *= __ldg(static_cast<const float*>(m.scales) + first_row + out);
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

template <Format FORMAT>
static int launch_format(const QuantArgs& args, int blocks, void* stream) {
    const dim3 grid(min(blocks, 2 * this_machine().processors));
    if (args.rows <= 8) {
        launch_streaming(skinny_quant_kernel<FORMAT, 1>, grid, WARPS * 32, stream, args, blocks);
        return launch_result();
    }
    if constexpr (FORMAT == INT4) {
        return static_cast<int>(cudaErrorInvalidValue);  // the registers hold 8 rows
    } else {
        launch_streaming(skinny_quant_kernel<FORMAT, 2>, grid, WARPS * 32, stream, args, blocks);
        return launch_result();
    }
}

// Fills in first_block; rows <= 16, of 4 bits 8.
RWKV_API int rwkv_skinny_quant(QuantArgs* args, void* stream) {
    int blocks = 0;
    for (int i = 0; i < args->count; ++i) {
        const int outputs = GROUP * WARPS / args->maps[i].warps_k;
        args->maps[i].first_block = blocks;
        blocks += (args->maps[i].n + outputs - 1) / outputs;
    }
    switch (args->format) {
        case FP8: return launch_format<FP8>(*args, blocks, stream);
        case INT8: return launch_format<INT8>(*args, blocks, stream);
        case INT4: return launch_format<INT4>(*args, blocks, stream);
    }
    return static_cast<int>(cudaErrorInvalidValue);
}
