// y = act(x @ W^T) for few rows (up to 16, of 4 bits 8) and W of 8 or 4 bits (quant.cuh), several maps in one launch
// (skinny.cuh).
//
// One row of up to 4,096 inputs is brought into shared memory at once, instead of piece by piece as it is multiplied. A
// lane's 16 bytes are 16 (8-bit) or 32 (4-bit) neighbouring inputs, made halves in registers; x is read in the same
// order. Sums of a group of 128 inputs are scaled as they are added up; fp8's scales come at the end.
//
// A map: codes [n, k] (n a multiple of 32, k of 128, or 256 for 4 bits), scales fp8 [n] fp32, int8 [k / 128][n] fp16,
// int4 [k / 128][n] pairs of fp16 (scale, 1024 + zero); x [rows, k] fp16, y [rows, ld_y] fp16 or fp32.
// Bytes: nk or nk / 2 per map, read past L1, and the scales.
#include "quant.cuh"
#include "skinny.cuh"

struct QuantMap {
    const uint8_t* codes;
    const void* scales;  // null: the map is one of halves (MIXED)
    const __half* x;
    void* y;
    int n, k, ld_y;
    int activation;
    int float_out;
    int warps_k;      // 1, 2, 4 or 8
    int first_block, blocks;  // of this map in the grid
};

struct QuantArgs {
    QuantMap maps[MAX_MAPS];
    int count;
    int rows;
    int format;
};

__device__ __forceinline__ uint32_t word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// Inputs of a lane's 16 bytes (LANE), of a piece (a quad's), of a chunk (DEPTH); groups of 128 in a chunk. MIXED: some maps
// are of halves, whose chunks are 64 inputs (128 of one tile).
template <Format FORMAT, bool MIXED, int TILES_HIGH>
struct CodeChunk {
    static constexpr int HEIGHT = TILES_HIGH, PARTS = 4 / HEIGHT, LANE = FORMAT == INT4 ? 32 : 16, PIECE = 4 * LANE, DEPTH = PARTS * PIECE;
    static constexpr int GROUPS = FORMAT == FP8 ? 0 : DEPTH / GROUP_INPUTS, ROW_BYTES_SHIFT = FORMAT == INT4 ? 1 : 0;
    uint4 w[HEIGHT][2][PARTS];
    uint32_t scales[GROUPS == 0 ? 1 : GROUPS][HEIGHT][2];

    __device__ static __forceinline__ bool is_half(const QuantMap& m) { return MIXED && m.scales == nullptr; }
    __device__ static __forceinline__ int depth(const QuantMap& m) { return is_half(m) ? PARTS * 32 : DEPTH; }
    __device__ static __forceinline__ int lane(const QuantMap& m) { return is_half(m) ? 8 : LANE; }

    // Lane t of quad g: row row0 + g (and so on), inputs from k0 on.
    __device__ __forceinline__ void load(const QuantMap& m, int row0, int k0, int g, int t) {
        if (is_half(m)) {
            const uint8_t* half = m.codes + 2 * (static_cast<int64_t>(row0 + g) * m.k + k0 + 8 * t);
#pragma unroll
            for (int tile = 0; tile < HEIGHT; ++tile) {
#pragma unroll
                for (int up = 0; up < 2; ++up) {
#pragma unroll
                    for (int part = 0; part < PARTS; ++part)
                        w[tile][up][part] = load_stream(half + 2 * static_cast<int64_t>(tile * 16 + up * 8) * m.k + 64 * part);
                }
            }
            return;
        }
        const int64_t pitch = m.k >> ROW_BYTES_SHIFT;
        const uint8_t* at = m.codes + (row0 + g) * pitch + (k0 >> ROW_BYTES_SHIFT) + 16 * t;
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

    // One piece of it.
    template <int TILES, typename Rows>
    __device__ __forceinline__ void multiply_piece(
        float (&sums)[HEIGHT][TILES][4], int part, int group, const Rows& x, int g) const {
        constexpr int QUADS = LANE / 8;  // 16-byte loads of x
        constexpr int WORDS = 4 / QUADS;  // of codes, for each of these
        constexpr bool AT_ONCE = TILES == 1;  // or there are too few registers
        uint4 b[TILES][QUADS];
        const auto load_x = [&](int q) {
#pragma unroll
            for (int n = 0; n < TILES; ++n) b[n][q] = x.read(n * 8 + g, part * PIECE + 8 * q);
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
                            const uint32_t codes = word(w[tile][up][part], i), zero = zeros(group, tile, up);
                            a[tile].x[up] = unpack_nibbles(codes, pair, zero);
                            a[tile].x[up + 2] = unpack_nibbles(codes, pair + 1, zero);
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
                        unpack_bytes<FORMAT>(word(w[tile][up][part], i), a[tile].x[up], a[tile].x[up + 2]);
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

    // TILES * 8 rows of x against the chunk.
    template <int TILES, typename Rows>
    __device__ __forceinline__ void multiply(float (&sums)[HEIGHT][TILES][4], const QuantMap& m, const Rows& x, int g) const {
        if (is_half(m)) return multiply_halves(sums, w, x, g);
        if constexpr (GROUPS == 0) {
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
                multiply_piece(sums, part, 0, x, g);
        } else {
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
                float own[HEIGHT][TILES][4] = {};
#pragma unroll
                for (int part = group * (PARTS / GROUPS); part < (group + 1) * (PARTS / GROUPS); ++part)
                    multiply_piece(own, part, group, x, g);
#pragma unroll
                for (int tile = 0; tile < HEIGHT; ++tile) {
                    const float low = scale(group, tile, 0), high = scale(group, tile, 1);
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

    __device__ static __forceinline__ float scaled(float sum, const QuantMap& m, int output) {
        if (is_half(m)) return sum;
        sum *= code_scale<FORMAT>();
        if constexpr (FORMAT == FP8) sum *= __ldg(static_cast<const float*>(m.scales) + output);
        return sum;
    }
};

template <Format FORMAT, int TILES, bool MIXED, int HEIGHT, bool HELD>
__global__ void __launch_bounds__(WARPS * 32, 2) skinny_quant_kernel(const __grid_constant__ QuantArgs args) {
    stream_maps<CodeChunk<FORMAT, MIXED, HEIGHT>, TILES, HELD>(args);
}

// Of up to 8 rows.
template <Format FORMAT, bool MIXED, bool HELD>
static int launch_few(QuantArgs& args, void* stream) {
    const auto bytes_of = [](const QuantMap& m) {
        return static_cast<int64_t>(m.k) * (m.scales == nullptr ? 4 : FORMAT == INT4 ? 1 : 2);  // twice the bytes
    };
    bool deep = true;
    for (int i = 0; i < args.count; ++i) {
        const bool half = args.maps[i].scales == nullptr;
        deep = deep && args.maps[i].k % (half ? 128 : CodeChunk<FORMAT, false, 1>::DEPTH) == 0;
    }
    const Deal narrow = deal_blocks(args, 16, bytes_of);
    const int64_t wide = deal_blocks(args, 32, bytes_of).share;
    if (deep && narrow.share < wide) {
        deal_blocks(args, 16, bytes_of);
        return launch_maps(skinny_quant_kernel<FORMAT, 1, MIXED, 1, HELD>, args, narrow.blocks, stream);
    }
    return launch_maps(skinny_quant_kernel<FORMAT, 1, MIXED, 2, HELD>, args, deal_blocks(args, 32, bytes_of).blocks, stream);
}

template <Format FORMAT>
static int launch_format(QuantArgs& args, void* stream) {
    bool mixed = false;
    for (int i = 0; i < args.count; ++i) mixed = mixed || args.maps[i].scales == nullptr;
    if (holds_row(args)) return (mixed ? launch_few<FORMAT, true, true> : launch_few<FORMAT, false, true>)(args, stream);
    if (args.rows <= 8) return (mixed ? launch_few<FORMAT, true, false> : launch_few<FORMAT, false, false>)(args, stream);
    if (mixed || FORMAT == INT4) return static_cast<int>(cudaErrorInvalidValue);  // the registers hold 8 rows
    if constexpr (FORMAT != INT4) {
        const auto bytes_of = [](const QuantMap& m) { return static_cast<int64_t>(m.k); };
        const int blocks = deal_blocks(args, 32, bytes_of).blocks;
        return launch_maps(skinny_quant_kernel<FORMAT, 2, false, 2, false>, args, blocks, stream);
    }
    return 0;
}

// Fills in first_block and blocks; rows <= 16, of 4 bits 8.
RWKV_API int rwkv_skinny_quant(QuantArgs* args, void* stream) {
    switch (args->format) {
        case FP8: return launch_format<FP8>(*args, stream);
        case INT8: return launch_format<INT8>(*args, stream);
        case INT4: return launch_format<INT4>(*args, stream);
    }
    return static_cast<int>(cudaErrorInvalidValue);
}
