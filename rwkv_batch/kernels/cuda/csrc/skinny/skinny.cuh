// Skinny GEMM for few rows, any weight format (skinny.cu, skinny_quant.cu): y = act(x @ W^T), several weights per
// launch.
//
// Warp tile: 16 * HEIGHT outputs x 8 * TILES rows, by mma.m16n8k16 (fp16 in, fp32 sums). warps_k of a CTA's 8 warps
// split k.
// Both operands go from global memory to registers, 16 bytes per load. The order of k within a 16-byte piece is
// permuted alike for W and x, which the sum does not notice.
// Grid: at most two CTAs per SM; a CTA computes adjacent tiles of one GEMM. The next chunk of W is always in flight,
// across tiles too; the first one before the previous kernel ends.
// Shared memory: partial sums of 8 warps, and the row if there is only one. Bound: HBM; W is read once, past L1.
#pragma once

#include <type_traits>

#include "activation.h"
#include "../mma.cuh"
#include "quant_args.cuh"
#include "../relu.cuh"

constexpr int WARPS = 8;
constexpr int RED_PAD = 4;  // padding in floats: no bank conflicts
constexpr int MAX_K = 32768;
constexpr int SUM_INPUTS = 128;  // inputs of a group in Chunk::sum_inputs

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

// A lane's view of x from its first input of a chunk on: in global memory, or one row in shared memory.
struct GlobalRows {
    const __half* x;
    int k, rows;
    const float2* sums;  // group sums of lane t's rows

    // Returns 16 bytes from element `at` of a row, or zeros.
    __device__ __forceinline__ uint4 read(int row, int at) const {
        if (row >= rows) return make_uint4(0, 0, 0, 0);
        return __ldg(reinterpret_cast<const uint4*>(x + static_cast<int64_t>(row) * k + at));
    }
    // Returns the sums of rows 2t and 2t + 1 over input group `group`.
    __device__ __forceinline__ float2 group_sums(int group) const { return sums[4 * group]; }
};

struct SharedRow {
    const __half* x;
    const float* sums;

    __device__ __forceinline__ uint4 read(int row, int at) const {
        return row > 0 ? make_uint4(0, 0, 0, 0) : *reinterpret_cast<const uint4*>(x + at);
    }
    // Same; only row 0 exists.
    __device__ __forceinline__ float2 group_sums(int group) const { return make_float2(sums[group], 0.0f); }
};

// Multiplies TILES * 8 rows of x by a chunk of fp16 W: PARTS pieces of 8 inputs per lane, outputs g and g + 8 of each
// tile.
template <int HEIGHT, int TILES, int PARTS, typename Rows>
__device__ __forceinline__ void multiply_fp16(
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

// A warp's position: a tile of outputs of its CTA's GEMM, and a chunk of k.
template <int GROUP, typename Chunk>
struct WarpPosition {
    int gemm, unit, last;  // in units of the CTA's outputs per pass; one past the CTA's last
    int row0, k0;

    template <typename Args>
    __device__ __forceinline__ WarpPosition(const Args& args, int warp) : gemm(0) {
        const int block = blockIdx.x;
        while (gemm + 1 < args.count && block >= args.gemms[gemm + 1].first_block) ++gemm;
        const auto& m = args.gemms[gemm];
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

// The kernel, for up to 8 * TILES rows.
// A Chunk is a warp's piece of W: HEIGHT tiles of 16 outputs x DEPTH inputs, LANE adjacent inputs per lane and piece.
// It loads, multiplies and scales.
// FROM_SHARED: one row of at most MAX_CACHED_K inputs, loaded into shared memory first.
// FROM_NORM: one row that each CTA computes from args.norm; x of a GEMM is its mix weight.
enum Source { FROM_GLOBAL, FROM_SHARED, FROM_NORM };
template <typename Chunk, int TILES, Source SOURCE, typename Args>
__device__ __forceinline__ void stream_gemms(const Args& args) {
    constexpr int HEIGHT = Chunk::HEIGHT, GROUP = HEIGHT * 16;
    __shared__ float partials[WARPS][TILES * 8][GROUP + RED_PAD];
    __shared__ uint4 cached_row[SOURCE == FROM_GLOBAL ? 1 : MAX_CACHED_K / 8];
    constexpr int SUMMED_GROUPS = !Chunk::SUMMED ? 0 : (SOURCE == FROM_GLOBAL ? MAX_K : MAX_CACHED_K) / SUM_INPUTS;
    constexpr int SUMMED_ROWS = SOURCE == FROM_GLOBAL ? 8 : 1;
    __shared__ __align__(8) float group_sums[SUMMED_GROUPS * SUMMED_ROWS + 2];
    __shared__ std::conditional_t<SOURCE == FROM_NORM, MixSmem, int> smem;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    WarpPosition<GROUP, Chunk> position(args, warp);
    const auto& m = args.gemms[position.gemm];
    Chunk next_chunk;
    const auto prefetch = [&] {
        if (position.unit < position.last && position.row0 < m.n && position.k0 < m.k) next_chunk.load(m, position.row0, position.k0, g, t);
    };
    prefetch();
    int arrived = 0;
    if constexpr (SOURCE == FROM_NORM) {
        RowMix<WARPS * 32> row(args.norm, m.x);
        allow_next_kernel();
        wait_for_previous_kernel();
        row.make_row(args.norm, cached_row, smem);
        __syncthreads();
        if (threadIdx.x == 0) arrived = atomicAdd(args.norm.counter, 1);
    } else {
        allow_next_kernel();
        wait_for_previous_kernel();
    }
    if constexpr (SOURCE == FROM_SHARED) {
        for (int i = threadIdx.x; i < m.k / 8; i += WARPS * 32) cached_row[i] = __ldg(reinterpret_cast<const uint4*>(m.x) + i);
        __syncthreads();
    }
    if constexpr (Chunk::SUMMED) {
        const int at = Chunk::lane(m) * t;
        const auto sum_groups = [&](const auto& rows, const auto& store) {
            constexpr int BATCH = 3;  // groups in flight
            for (int first = warp; first < m.k / SUM_INPUTS && !Chunk::is_fp16(m); first += WARPS * BATCH) {
                uint4 inputs[BATCH][4];
#pragma unroll
                for (int i = 0; i < BATCH; ++i) {
                    const int group = min(first + WARPS * i, m.k / SUM_INPUTS - 1);
#pragma unroll
                    for (int q = 0; q < 4; ++q) inputs[i][q] = rows.read(g, group * SUM_INPUTS + 8 * q);
                }
#pragma unroll
                for (int i = 0; i < BATCH; ++i) {
                    float sums[4] = {};
                    Chunk::sum_inputs(sums, inputs[i]);
                    if (first + WARPS * i < m.k / SUM_INPUTS) store(first + WARPS * i, make_float2(sums[0], sums[1]));
                }
            }
        };
        if constexpr (SOURCE == FROM_GLOBAL) {
            sum_groups(GlobalRows{m.x + at, m.k, args.rows, nullptr}, [&](int group, const float2& sums) {
                if (g == 0) reinterpret_cast<float2*>(group_sums)[4 * group + t] = sums;
            });
        } else {
            sum_groups(SharedRow{reinterpret_cast<const __half*>(cached_row) + at, nullptr}, [&](int group, const float2& sums) {
                if (lane == 0) group_sums[group] = sums.x;
            });
        }
        __syncthreads();
    }
    while (position.unit < position.last) {
        const int unit = position.unit;
        float sums[HEIGHT][TILES][4] = {};
        while (position.unit == unit) {
            const Chunk chunk = next_chunk;
            const int row0 = position.row0, k0 = position.k0, at = k0 + Chunk::lane(m) * t;
            position.advance(m, warp);
            prefetch();
            if (row0 < m.n && k0 < m.k) {
                if constexpr (SOURCE != FROM_GLOBAL) {
                    chunk.multiply(sums, m, SharedRow{reinterpret_cast<const __half*>(cached_row) + at, group_sums + k0 / SUM_INPUTS}, g);
                } else {
                    chunk.multiply(sums, m, GlobalRows{m.x + at, m.k, args.rows, reinterpret_cast<const float2*>(group_sums) + 4 * (k0 / SUM_INPUTS) + t}, g);
                }
            }
        }
#pragma unroll
        for (int tile = 0; tile < HEIGHT; ++tile) {
#pragma unroll
            for (int n = 0; n < TILES; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    partials[warp][n * 8 + 2 * t + (i & 1)][tile * 16 + g + (i >> 1) * 8] = sums[tile][n][i];
                }
            }
        }
        __syncthreads();
        const int outputs = position.outputs_of(m), first_row = unit * outputs;
        for (int i = threadIdx.x; i < outputs * args.rows; i += WARPS * 32) {
            const int row = i / outputs, out = i % outputs;
            if (first_row + out >= m.n) continue;
            float sum = 0.0f;
            for (int j = 0; j < m.warps_k; ++j) sum += partials[out / GROUP * m.warps_k + j][row][out % GROUP];
            sum = activate(Chunk::scaled(sum, m, first_row + out), m.activation);
            const int64_t at = static_cast<int64_t>(row) * m.ld_y + first_row + out;
            if (m.out_fp32) {
                static_cast<float*>(m.y)[at] = sum;
            } else {
                static_cast<__half*>(m.y)[at] = __float2half_rn(sum);
            }
        }
        __syncthreads();
    }
    if constexpr (SOURCE == FROM_NORM) store_shift_state<WARPS * 32>(args.norm, smem, arrived, gridDim.x, [] { __syncthreads(); });
}

// Whether the launch has one row that fits shared memory.
template <typename Args>
static bool fits_shared(const Args& args) {
    bool fits = args.rows == 1;
    for (int i = 0; i < args.count; ++i) fits = fits && args.gemms[i].k <= MAX_CACHED_K;
    return fits;
}

// CTAs of a launch.
struct CtaAssignment {
    int blocks;
    int64_t max_bytes;  // bytes of W of the most loaded CTA
};

// Assigns CTAs to GEMMs so that the most loaded CTA reads as little as possible. Fills first_block and blocks.
// group: outputs of a warp tile; bytes_of(gemm): bytes per output.
template <typename Args, typename BytesOf>
static CtaAssignment assign_ctas(Args& args, int group, const BytesOf& bytes_of) {
    int units[MAX_GEMMS];
    int64_t bytes[MAX_GEMMS], most = 0, least = INT64_MAX;
    for (int i = 0; i < args.count; ++i) {
        const int outputs = group * WARPS / args.gemms[i].warps_k;
        units[i] = (args.gemms[i].n + outputs - 1) / outputs;
        bytes[i] = bytes_of(args.gemms[i]) * outputs;
        most = most > bytes[i] ? most : bytes[i], least = least < bytes[i] ? least : bytes[i];
    }
    for (int64_t max_bytes = most;; max_bytes += least) {
        CtaAssignment plan = {0, 0};
        for (int i = 0; i < args.count; ++i) {
            const int64_t each = max_bytes / bytes[i];
            args.gemms[i].first_block = plan.blocks;
            args.gemms[i].blocks = static_cast<int>((units[i] + each - 1) / each);
            plan.blocks += args.gemms[i].blocks;
            const int64_t heaviest = (units[i] + args.gemms[i].blocks - 1) / args.gemms[i].blocks * bytes[i];
            plan.max_bytes = plan.max_bytes > heaviest ? plan.max_bytes : heaviest;
        }
        if (plan.blocks <= 2 * device_info().num_sms) return plan;
    }
}

template <typename Args>
static int launch_gemms(void (*kernel)(Args), const Args& args, int blocks, void* stream) {
    launch_streaming(kernel, dim3(blocks), WARPS * 32, stream, args);
    return launch_result();
}
