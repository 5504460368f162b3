// Skinny GEMM with 8- or 4-bit weights (skinny.cuh): y = act(x @ W^T), several weights per launch.
//
// in   qweight  [n, k] fp8 or int4 (quant.cuh); or fp16 without scales
//      scales   fp8 [n] fp32; int4 [k / 128, n] fp16 (scale, 1024 + zero)
//      x        [rows, k] fp16
//
// out  y        [rows, ld_y] fp16 or fp32
//
// One row of up to 4,096 inputs is cached in shared memory. A lane's 16 bytes are 16 (8 bits) or 32 (4 bits) adjacent
// inputs, converted to fp16 in registers. Sums are scaled per group of 128 inputs, fp8 at the end.
//
// Grid, block: as in skinny.cuh, at most two CTAs per SM of 256 threads.
// Shared memory: 10 to 26 KB, partial sums; one row: also the row; int4: sums of x per group.
// Bound: memory; n k (int4 n k / 2) bytes and the scales. Share of 4.8 TB/s (H200): head [65,536, 4,096] fp8 1 row
// 76 %, 8 rows 73 %; ffn.key [16,384, 4,096] int4 4 rows 37 %, 8 rows 31 %.
// Made for: rows <= 16 (int4 or with fp16 GEMMs: 8), n % 32 == 0, k % 128 == 0 (int4: 256).
#include "../quant.cuh"
#include "skinny.cuh"

__device__ __forceinline__ uint32_t word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// A chunk of W. LANE: inputs of a lane's 16 bytes; PIECE: of a quad; DEPTH: of the chunk; GROUPS: scale groups per
// chunk.
// MIXED: some GEMMs are fp16, with 64 inputs per chunk (128 with one tile).
template <Format FORMAT, bool MIXED, int TILES_HIGH>
struct QuantChunk {
    static constexpr int HEIGHT = TILES_HIGH, PARTS = 4 / HEIGHT, LANE = FORMAT == INT4 ? 32 : 16, PIECE = 4 * LANE, DEPTH = PARTS * PIECE;
    static constexpr int GROUPS = FORMAT == FP8 ? 0 : DEPTH / GROUP_INPUTS, ROW_BYTES_SHIFT = FORMAT == INT4 ? 1 : 0;
    uint4 w[HEIGHT][2][PARTS];
    uint32_t scales[GROUPS == 0 ? 1 : GROUPS][HEIGHT][2];

    __device__ static __forceinline__ bool is_fp16(const QuantGemmArgs& m) { return MIXED && m.scales == nullptr; }
    __device__ static __forceinline__ int depth(const QuantGemmArgs& m) { return is_fp16(m) ? PARTS * 32 : DEPTH; }
    __device__ static __forceinline__ int lane(const QuantGemmArgs& m) { return is_fp16(m) ? 8 : LANE; }

    // Lane t of quad g: output row0 + g (+ 8, + 16 ..), inputs from k0 on.
    __device__ __forceinline__ void load(const QuantGemmArgs& m, int row0, int k0, int g, int t) {
        if (is_fp16(m)) {
            const uint8_t* fp16 = m.qweight + 2 * (static_cast<int64_t>(row0 + g) * m.k + k0 + 8 * t);
#pragma unroll
            for (int tile = 0; tile < HEIGHT; ++tile) {
#pragma unroll
                for (int up = 0; up < 2; ++up) {
#pragma unroll
                    for (int part = 0; part < PARTS; ++part)
                        w[tile][up][part] = load_stream(fp16 + 2 * static_cast<int64_t>(tile * 16 + up * 8) * m.k + 64 * part);
                }
            }
            return;
        }
        const int64_t pitch = m.k >> ROW_BYTES_SHIFT;
        const uint8_t* at = m.qweight + (row0 + g) * pitch + (k0 >> ROW_BYTES_SHIFT) + 16 * t;
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
                        scales[group][tile][up] = __ldg(static_cast<const uint32_t*>(m.scales) + i);
                    }
                }
            }
        }
    }

    __device__ __forceinline__ float scale(int group, int tile, int up) const {
        return __half2float(__ushort_as_half(static_cast<unsigned short>(scales[group][tile][up] & 0xffffu)));
    }

    // The zero point.
    __device__ __forceinline__ float zero(int group, int tile, int up) const {
        return __half2float(__ushort_as_half(static_cast<unsigned short>(scales[group][tile][up] >> 16))) - 1024.0f;
    }

    // int4 values are multiplied as subnormal fp16, 2^-24 times as large, odd nibbles 2^-20 times. Their zero point is
    // subtracted once per group: zero * sum of the group's inputs.
    static constexpr bool SUMMED = FORMAT == INT4;
    static constexpr int QUADS = LANE / 8;  // 16-byte loads of x per piece

    // Sums 8 rows' inputs over a group; a lane gets those of rows 2t and 2t + 1.
    __device__ static __forceinline__ void sum_inputs(float (&sums)[4], const uint4 (&inputs)[4]) {
        static_assert(!SUMMED || PIECE == GROUP_INPUTS);
        constexpr Fragment ONES = {{0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u}};
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            mma(sums, ONES, inputs[q].x, inputs[q].y);
            mma(sums, ONES, inputs[q].z, inputs[q].w);
        }
    }

    // Multiplies one piece.
    template <int TILES, typename Rows>
    __device__ __forceinline__ void multiply_piece(float (&sums)[HEIGHT][TILES][4], int part, const Rows& x, int g) const {
        constexpr int WORDS = 4 / QUADS;  // weight words per load of x
        constexpr bool AT_ONCE = TILES == 1 && !SUMMED;  // otherwise there are too few registers
        uint4 b[TILES][QUADS];
        const auto load_x = [&](int q) {
#pragma unroll
            for (int n = 0; n < TILES; ++n) b[n][q] = x.read(n * 8 + g, part * PIECE + 8 * q);
        };
        if constexpr (AT_ONCE) {
#pragma unroll
            for (int q = 0; q < QUADS; ++q) load_x(q);
        }
        if constexpr (SUMMED) {
            float high[HEIGHT][TILES][4] = {};  // of nibbles 1, 3, 5, 7: 16 times as large
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                load_x(i);
#pragma unroll
                for (int odd = 0; odd < 2; ++odd) {
                    const uint32_t mask = odd ? 0x00f000f0u : 0x000f000fu;
#pragma unroll
                    for (int tile = 0; tile < HEIGHT; ++tile) {
                        const uint32_t low_row = word(w[tile][0][part], i), high_row = word(w[tile][1][part], i);
                        const Fragment a = {{low_row & mask, high_row & mask, low_row >> 8 & mask, high_row >> 8 & mask}};
#pragma unroll
                        for (int n = 0; n < TILES; ++n)
                            mma(odd ? high[tile][n] : sums[tile][n], a, word(b[n][i], odd), word(b[n][i], odd + 2));
                    }
                }
            }
#pragma unroll
            for (int tile = 0; tile < HEIGHT; ++tile) {
#pragma unroll
                for (int n = 0; n < TILES; ++n) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) sums[tile][n][i] = fmaf(high[tile][n][i], 0.0625f, sums[tile][n][i]);
                }
            }
        }
#pragma unroll
        for (int i = SUMMED ? 4 : 0; i < 4; ++i) {  // weight words
            if (!AT_ONCE && i % WORDS == 0) load_x(i / WORDS);
            Fragment a[HEIGHT];
#pragma unroll
            for (int tile = 0; tile < HEIGHT; ++tile) {
#pragma unroll
                for (int up = 0; up < 2; ++up) {
                    const uint32_t codes = word(w[tile][up][part], i);
                    unpack_e4m3(codes, a[tile].x[up], a[tile].x[up + 2]);
                }
            }
#pragma unroll
            for (int n = 0; n < TILES; ++n) {
                const uint32_t b0 = word(b[n][i / WORDS], i % WORDS * 2), b1 = word(b[n][i / WORDS], i % WORDS * 2 + 1);
#pragma unroll
                for (int tile = 0; tile < HEIGHT; ++tile) mma(sums[tile][n], a[tile], b0, b1);
            }
        }
    }

    // Multiplies TILES * 8 rows of x.
    template <int TILES, typename Rows>
    __device__ __forceinline__ void multiply(float (&sums)[HEIGHT][TILES][4], const QuantGemmArgs& m, const Rows& x, int g) const {
        if (is_fp16(m)) return multiply_fp16(sums, w, x, g);
        if constexpr (GROUPS == 0) {
#pragma unroll
            for (int part = 0; part < PARTS; ++part) multiply_piece(sums, part, x, g);
        } else {
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
                float own[HEIGHT][TILES][4] = {};
#pragma unroll
                for (int part = group * (PARTS / GROUPS); part < (group + 1) * (PARTS / GROUPS); ++part)
                    multiply_piece(own, part, x, g);
                const float2 of_x = x.group_sums(group);
#pragma unroll
                for (int tile = 0; tile < HEIGHT; ++tile) {
                    const float low = scale(group, tile, 0), high = scale(group, tile, 1);
                    const float low_zero = zero(group, tile, 0) * -0x1p-24f, high_zero = zero(group, tile, 1) * -0x1p-24f;
#pragma unroll
                    for (int n = 0; n < TILES; ++n) {
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            const float sum = fmaf(i < 2 ? low_zero : high_zero, i % 2 ? of_x.y : of_x.x, own[tile][n][i]);
                            sums[tile][n][i] = fmaf(sum, i < 2 ? low : high, sums[tile][n][i]);
                        }
                    }
                }
            }
        }
    }

    __device__ static __forceinline__ float scaled(float sum, const QuantGemmArgs& m, int output) {
        if (is_fp16(m)) return sum;
        sum *= code_scale<FORMAT>() * (SUMMED ? 0x1p24f : 1.0f);
        if constexpr (FORMAT == FP8) sum *= __ldg(static_cast<const float*>(m.scales) + output);
        return sum;
    }
};

template <Format FORMAT, int TILES, bool MIXED, int HEIGHT, Source SOURCE>
__global__ void __launch_bounds__(WARPS * 32, 2) skinny_quant_kernel(const __grid_constant__ QuantLaunchArgs args) {
    stream_gemms<QuantChunk<FORMAT, MIXED, HEIGHT>, TILES, SOURCE>(args);
}

// Up to 8 rows.
template <Format FORMAT, bool MIXED, Source SOURCE>
static int launch_few_rows(QuantLaunchArgs& args, void* stream) {
    const auto bytes_of = [](const QuantGemmArgs& m) {
        return static_cast<int64_t>(m.k) * (m.scales == nullptr ? 4 : FORMAT == INT4 ? 1 : 2);  // twice the bytes per output
    };
    bool deep = true;
    for (int i = 0; i < args.count; ++i) {
        const bool is_fp16 = args.gemms[i].scales == nullptr;
        deep = deep && args.gemms[i].k % (is_fp16 ? 128 : QuantChunk<FORMAT, false, 1>::DEPTH) == 0;
    }
    const CtaAssignment narrow = assign_ctas(args, 16, bytes_of);
    const int64_t wide = assign_ctas(args, 32, bytes_of).max_bytes;
    if (deep && narrow.max_bytes < wide) {
        assign_ctas(args, 16, bytes_of);
        return launch_gemms(skinny_quant_kernel<FORMAT, 1, MIXED, 1, SOURCE>, args, narrow.blocks, stream);
    }
    return launch_gemms(skinny_quant_kernel<FORMAT, 1, MIXED, 2, SOURCE>, args, assign_ctas(args, 32, bytes_of).blocks, stream);
}

template <Format FORMAT>
static int launch_format(QuantLaunchArgs& args, void* stream) {
    bool mixed = false;
    for (int i = 0; i < args.count; ++i) mixed = mixed || args.gemms[i].scales == nullptr;
    if (args.norm.x != nullptr) {
        if constexpr (FORMAT != INT4) {  // int4 is slower this way
            if (fits_shared(args)) return (mixed ? launch_few_rows<FORMAT, true, FROM_NORM> : launch_few_rows<FORMAT, false, FROM_NORM>)(args, stream);
        }
        return static_cast<int>(cudaErrorInvalidValue);
    }
    if (fits_shared(args)) return (mixed ? launch_few_rows<FORMAT, true, FROM_SHARED> : launch_few_rows<FORMAT, false, FROM_SHARED>)(args, stream);
    if (args.rows <= 8) return (mixed ? launch_few_rows<FORMAT, true, FROM_GLOBAL> : launch_few_rows<FORMAT, false, FROM_GLOBAL>)(args, stream);
    if (mixed || FORMAT == INT4) return static_cast<int>(cudaErrorInvalidValue);  // registers hold 8 rows
    if constexpr (FORMAT != INT4) {
        const auto bytes_of = [](const QuantGemmArgs& m) { return static_cast<int64_t>(m.k); };
        const int blocks = assign_ctas(args, 32, bytes_of).blocks;
        return launch_gemms(skinny_quant_kernel<FORMAT, 2, false, 2, FROM_GLOBAL>, args, blocks, stream);
    }
    return 0;
}

// Fills first_block and blocks; rows <= 16, int4: 8.
RWKV_API int rwkv_skinny_quant(QuantLaunchArgs* args, void* stream) {
    switch (args->format) {
        case FP8: return launch_format<FP8>(*args, stream);
        case INT4: return launch_format<INT4>(*args, stream);
    }
    return static_cast<int>(cudaErrorInvalidValue);
}
