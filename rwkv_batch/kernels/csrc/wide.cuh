// y = act(x @ W^T) for up to 256 rows, or several times as many, several maps in one launch, on Hopper's tensor cores.
//
// A map: W [n, k] fp16, or [k, n] when it is stored transposed; x [rows, k] fp16; y [rows, n] fp16; n a multiple of 16 (64 if
// transposed), k of 64 times the splits. Or W [n, k] and x [rows, k] of e4m3 codes with a scale for each output and each
// row, k a multiple of 128 times the splits: the same bytes along k, multiplied by the fp8 units; then ROWS may be 320, two
// products of 160. A block makes 128 outputs of all rows, so that W is read once (of more rows than ROWS, several tiles):
// two warps keep a ring of tiles (128 of W, ROWS of x, 64 of k each) filled by bulk tensor copies, two warpgroups multiply
// 64 outputs each. W is the wgmma's first operand, so that ROWS, its second, may be any of 32, 64 .. 256.
//
// Blocks stay for several tiles. Where there are fewer tiles than processors, SPLITS blocks share a tile's k and add up
// through memory (not as a cluster: an H200 has room for 30 clusters of four, not for 33). The first tiles of W are on
// their way before the kernel that makes x has ended (programmatic dependent launch).
//
// Bytes: 2nk per map, once; x 2k * rows per tile of outputs, from the L2 cache; splits 4 * 128 * ROWS each way, likewise.
// Shared memory: ring [STAGES] of W [2][64][64] fp16 and x [ROWS][64] fp16, 128-byte swizzle; 2 x 16 rows of 16 outputs
// per warp on their way out; full and empty barriers.
#pragma once

#include <cuda.h>

#include "activation.h"
#include "common.cuh"

constexpr int MAX_WIDE_MAPS = 8;
constexpr int OUTPUTS = 128;  // of a tile
constexpr int TILE_BYTES = 128;  // of a tile along k
constexpr int STAGING_PITCH = 48;  // bytes; 32 would put every fourth row into the same banks

// What W holds: halves as [n, k] or as [k, n], or fp8 codes as [n, k].
enum WideKind { WIDE_PLAIN, WIDE_TURNED, WIDE_FP8 };

template <WideKind KIND>
constexpr int DEPTH = KIND == WIDE_FP8 ? 128 : 64;  // k of a tile


// What a launch needs on the device; the tensor maps say where W and x are.
struct WideLaunch {
    CUtensorMap weights[MAX_WIDE_MAPS];
    CUtensorMap inputs[MAX_WIDE_MAPS];
    __half* y[MAX_WIDE_MAPS];
    const float* weight_scales[MAX_WIDE_MAPS];  // fp8: of every output and every row
    const float* input_scales[MAX_WIDE_MAPS];
    int n[MAX_WIDE_MAPS];
    int k[MAX_WIDE_MAPS];
    int activation[MAX_WIDE_MAPS];
    int first_tile[MAX_WIDE_MAPS + 1];  // of each map
    int count;
    int rows;
    int row_blocks;   // how many times ROWS it takes to hold the rows; each tile of outputs is made for all of them
    float4* partial;  // where k is split: [tiles][SPLITS][ROWS / 8][256]
    int* counters;    // likewise [tiles][2], zero between launches
};

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define WIDE_ON_DEVICE 1
#include "hopper.cuh"
#endif

// Shared memory of a block whose ring has places of PLACE_BYTES.
template <int PLACE_BYTES>
struct WideRing {
    static constexpr int BYTES = PLACE_BYTES;
    static constexpr int STAGING_BYTES = 8 * 2 * 16 * STAGING_PITCH;
    static constexpr int ROOM = 227 * 1024 - 1024 - STAGING_BYTES - 512;
    static constexpr int STAGES = ROOM / BYTES < 12 ? ROOM / BYTES : 12;
    static constexpr int SHARED_BYTES = STAGES * BYTES + STAGING_BYTES + 512 + 1024;  // 1024: for the ring's alignment
    static_assert(STAGES >= 2);
};

template <int ROWS>
struct WideTile : WideRing<(OUTPUTS + ROWS) * TILE_BYTES> {
    static constexpr int WEIGHT_BYTES = OUTPUTS * TILE_BYTES, INPUT_BYTES = ROWS * TILE_BYTES;
    static constexpr int PARTS = ROWS > 256 ? 2 : 1, PART = ROWS / PARTS;  // rows of one wgmma and of one copy
};

#ifdef WIDE_ON_DEVICE
struct WidePlace {
    int map, output;  // which map; the tile's first output
};

__device__ __forceinline__ WidePlace wide_place(const WideLaunch& p, int tile) {
    int map = 0;
    while (map + 1 < p.count && tile >= p.first_tile[map + 1]) ++map;
    return {map, (tile - p.first_tile[map]) * OUTPUTS};
}

template <Activation ACTIVATION>
__device__ __forceinline__ float wide_activate(float v) {
    if constexpr (ACTIVATION == RELU_SQUARED) return fmaxf(v, 0.0f) * fmaxf(v, 0.0f);
    if constexpr (ACTIVATION == SIGNED_SQUARE) return v * fabsf(v);
    if constexpr (ACTIVATION == TANH) return tanh_exp(v);
    if constexpr (ACTIVATION == SIGMOID) return sigmoidf(v);
    return v;
}

// The first COUNT sums in place: one choice for all of them.
template <int COUNT, int SUMS>
__device__ __forceinline__ void activate_sums(float (&sums)[SUMS], int activation) {
    const auto all = [&](auto of_one) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) sums[i] = of_one(sums[i]);
    };
    switch (activation) {
        case TANH: all([](float v) { return wide_activate<TANH>(v); }); break;
        case SIGMOID: all([](float v) { return wide_activate<SIGMOID>(v); }); break;
        case RELU_SQUARED: all([](float v) { return wide_activate<RELU_SQUARED>(v); }); break;
        case SIGNED_SQUARE: all([](float v) { return wide_activate<SIGNED_SQUARE>(v); }); break;
        default: break;
    }
}

// Two 8x8 matrices (outputs x rows, as wgmma leaves them) turned into rows of 16 outputs.
__device__ __forceinline__ void store_turned(uint32_t to, uint32_t low, uint32_t high) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(to), "r"(low), "r"(high) : "memory");
}

__device__ __forceinline__ uint32_t pack_half2(float lo, float hi) {
    const __half2 pair = __floats2half2_rn(lo, hi);
    return *reinterpret_cast<const uint32_t*>(&pair);
}

// Where a warp's 16 outputs of a tile's rows go.
struct WideOut {
    __half* y;  // of row 0
    int pitch, first_row, rows;
    const float* weight_scales;  // of its 16 outputs
    const float* input_scales;   // of row 0
};

// fp8: the sums of 8 * CHUNKS rows times the scales of their outputs and rows. The rows' come from the kernel before.
template <int CHUNKS, int SUMS>
__device__ __forceinline__ void scale_sums(float (&sums)[SUMS], const WideOut& out, int lane) {
    constexpr bool AT_ONCE = CHUNKS <= 32;  // all are asked for at once; of more there are too few registers for that
    constexpr int TOGETHER = AT_ONCE ? CHUNKS : 2;
    const auto scale_of = [&](int row) {
        float scale = 0.0f;
        if (row < out.rows) asm volatile("ld.global.ca.f32 %0, [%1];" : "=f"(scale) : "l"(out.input_scales + row) : "memory");
        return scale;
    };
    wait_for_inputs();
    if constexpr (!AT_ONCE) {
#pragma unroll
        for (int i = 0; i < CHUNKS * 8; i += 32) scale_of(out.first_row + i + lane);  // into L1
    }
    const float of_output[2] = {__ldg(out.weight_scales + lane / 4), __ldg(out.weight_scales + lane / 4 + 8)};
#pragma unroll
    for (int first = 0; first < CHUNKS; first += TOGETHER) {
        float of_row[TOGETHER][2];
#pragma unroll
        for (int c = 0; c < TOGETHER; ++c) {
#pragma unroll
            for (int i = 0; i < 2; ++i) of_row[c][i] = scale_of(out.first_row + 8 * (first + c) + lane % 4 * 2 + i);
        }
#pragma unroll
        for (int c = 0; c < TOGETHER; ++c) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[4 * (first + c) + i] *= of_output[i / 2] * of_row[c][i % 2];
        }
    }
}

// 8 * CHUNKS rows of 16 outputs, from a warp's sums through its buffers, 16 rows at a time, to memory.
template <int CHUNKS, int SUMS>
__device__ __forceinline__ void write_out(const float (&sums)[SUMS], const WideOut& out, uint32_t buffers, int lane) {
    constexpr int PITCH = STAGING_PITCH;
    const uint32_t to = buffers + (lane & 7) * PITCH + (lane >> 3 & 1) * 16, from = buffers + (lane / 2) * PITCH + (lane & 1) * 16;
    int row = out.first_row + lane / 2;
    __half* y = out.y + static_cast<int64_t>(row) * out.pitch + (lane & 1) * 8;
#pragma unroll
    for (int c = 0; c < CHUNKS; c += 2) {
        const uint32_t buffer = (c / 2 & 1) * 16 * PITCH;
#pragma unroll
        for (int d = 0; d < 2; ++d) {
            if (c + d < CHUNKS) {
                const float* v = sums + 4 * (c + d);
                store_turned(to + buffer + d * 8 * PITCH, pack_half2(v[0], v[1]), pack_half2(v[2], v[3]));
            }
        }
        __syncwarp();
        if (row < out.rows && (c + 2 <= CHUNKS || lane < 16)) {
            uint4 v;
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                         : "r"(from + buffer)
                         : "memory");
            asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(y), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
        }
        __syncwarp();
        row += 16, y += static_cast<int64_t>(out.pitch) * 16;
    }
}
#endif

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// A place in the ring and the parity of the barrier phase to wait for there.
template <int STAGES>
struct RingSlot {
    uint32_t stage, parity;

    __device__ __forceinline__ explicit RingSlot(uint32_t first_parity) : stage(0), parity(first_parity) {}
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// Where a block's ring, staging and barriers lie in shared memory, and its share of the tiles.
template <typename Tile, int SPLITS>
struct WideBlock {
    uint32_t ring, staging, full, empty;
    int my_split, first, blocks;

    // It takes `readers` arrivals to free a place of the ring. All threads; the next kernel may start after it.
    __device__ __forceinline__ WideBlock(const unsigned char* dynamic, int readers)
        : ring((hopper::shared_address(dynamic) + 1023) & ~1023u),
          staging(ring + Tile::STAGES * Tile::BYTES),
          full(staging + Tile::STAGING_BYTES),
          empty(full + 8 * Tile::STAGES),
          my_split(blockIdx.x % SPLITS),
          first(blockIdx.x / SPLITS),
          blocks(gridDim.x / SPLITS) {
        if (threadIdx.x == 0) {
            for (int i = 0; i < Tile::STAGES; ++i) {
                hopper::init_barrier(full + 8 * i, 1);
                hopper::init_barrier(empty + 8 * i, readers);
            }
            hopper::publish_barriers();
        }
        __syncthreads();
        let_next_start();
    }
};

// Steps of DEPTH in a split's share of k, which the number of splits divides.
template <int SPLITS, WideKind KIND>
__device__ __forceinline__ int wide_steps(const WideLaunch& p, int map) { return p.k[map] / (DEPTH<KIND> * SPLITS); }

// The sums of a tile's splits, exchanged through memory: each block ends with an equal share of the chunks of 8 rows, in
// sums[0 ..], the splits added in their order. All blocks of the launch run at once (the caller sees to it), so waiting is safe.
template <int ROWS, int SPLITS>
__device__ __forceinline__ void add_splits(float (&sums)[ROWS / 2], const WideLaunch& p, int tile, int my_split) {
    constexpr int CHUNKS = ROWS / 8, MINE = CHUNKS / SPLITS;
    constexpr int BATCH = MINE % 4 == 0 ? 4 : MINE % 3 == 0 ? 3 : MINE % 2 == 0 ? 2 : 1;
    const int thread = threadIdx.x - 128;
    float4* const partial = p.partial + static_cast<int64_t>(tile) * SPLITS * CHUNKS * 256 + thread;
#pragma unroll
    for (int j = 0; j < CHUNKS; ++j) {
        if (j / MINE == my_split) continue;
        __stcg(partial + (my_split * CHUNKS + j) * 256,
               make_float4(sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]));
    }
    __threadfence();
    asm volatile("bar.sync 1, 256;" ::: "memory");
    if (thread == 0) {
        int* const arrived = p.counters + 2 * tile;
        atomicAdd(arrived, 1);
        while (*static_cast<volatile int*>(arrived) < SPLITS) {}
        __threadfence();
        if (atomicAdd(arrived + 1, 1) == SPLITS - 1) arrived[0] = arrived[1] = 0;  // the last to see them all
    }
    asm volatile("bar.sync 1, 256;" ::: "memory");
#pragma unroll
    for (int first = 0; first < MINE; first += BATCH) {
        float4 parts[SPLITS][BATCH];
#pragma unroll
        for (int s = 0; s < SPLITS; ++s) {
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                const int j = 4 * (s * MINE + first + b);
                if (s == my_split) {
                    parts[s][b] = make_float4(sums[j], sums[j + 1], sums[j + 2], sums[j + 3]);
                } else {
                    parts[s][b] = __ldcg(partial + (s * CHUNKS + my_split * MINE + first + b) * 256);
                }
            }
        }
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            float4 total = parts[0][b];
#pragma unroll
            for (int s = 1; s < SPLITS; ++s) {
                total.x += parts[s][b].x, total.y += parts[s][b].y, total.z += parts[s][b].z, total.w += parts[s][b].w;
            }
            const int j = 4 * (first + b);  // of split 0: its own, or written out above
            sums[j] = total.x, sums[j + 1] = total.y, sums[j + 2] = total.z, sums[j + 3] = total.w;
        }
    }
}

// One lane: W's tiles of all of this block's work into the ring.
template <int ROWS, int SPLITS, WideKind KIND>
__device__ __forceinline__ void fetch_weights(const WideLaunch& p, const WideBlock<WideTile<ROWS>, SPLITS>& block) {
    using namespace hopper;
    using Tile = WideTile<ROWS>;
    RingSlot<Tile::STAGES> slot(1);
    const int row_blocks = p.row_blocks;
    for (int tile = block.first; tile < p.first_tile[p.count] * row_blocks; tile += block.blocks) {
        const WidePlace at = wide_place(p, tile / row_blocks);
        const CUtensorMap* map = &p.weights[at.map];
        const int steps = wide_steps<SPLITS, KIND>(p, at.map), begin = block.my_split * steps;
        for (int k = begin * DEPTH<KIND>; k < (begin + steps) * DEPTH<KIND>; k += DEPTH<KIND>) {
            wait_barrier(block.empty + 8 * slot.stage, slot.parity);
            const uint32_t barrier = block.full + 8 * slot.stage, to = block.ring + slot.stage * Tile::BYTES;
            expect_bytes(barrier, Tile::BYTES);
            if (KIND == WIDE_TURNED) {
                copy_box(to, map, 0, k, at.output / 64, barrier, EVICT_FIRST);
            } else {
                copy_box(to, map, k, at.output, 0, barrier, EVICT_FIRST);
            }
            slot.advance();
        }
    }
}

// One lane of another warp: x's tiles likewise, once the kernel that makes x has ended.
template <int ROWS, int SPLITS, WideKind KIND>
__device__ __forceinline__ void fetch_inputs(const WideLaunch& p, const WideBlock<WideTile<ROWS>, SPLITS>& block) {
    using namespace hopper;
    using Tile = WideTile<ROWS>;
    const uint32_t to = block.ring + Tile::WEIGHT_BYTES;
    RingSlot<Tile::STAGES> slot(1);
    const int row_blocks = p.row_blocks;
    wait_for_inputs();
    for (int tile = block.first; tile < p.first_tile[p.count] * row_blocks; tile += block.blocks) {
        const WidePlace at = wide_place(p, tile / row_blocks);
        const CUtensorMap* map = &p.inputs[at.map];
        const int steps = wide_steps<SPLITS, KIND>(p, at.map), begin = block.my_split * steps;
        for (int k = begin * DEPTH<KIND>; k < (begin + steps) * DEPTH<KIND>; k += DEPTH<KIND>) {
            wait_barrier(block.empty + 8 * slot.stage, slot.parity);
#pragma unroll
            for (int part = 0; part < Tile::PARTS; ++part)
                copy_box(to + slot.stage * Tile::BYTES + part * Tile::PART * TILE_BYTES, map, k,
                         tile % row_blocks * ROWS + part * Tile::PART, 0, block.full + 8 * slot.stage, EVICT_LAST);
            slot.advance();
        }
    }
}
#endif

template <int ROWS, int SPLITS, WideKind KIND>
__global__ void __launch_bounds__(384, 1) wide_kernel(const __grid_constant__ WideLaunch p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using namespace hopper;
    using Tile = WideTile<ROWS>;
    constexpr int STAGES = Tile::STAGES;
    extern __shared__ unsigned char dynamic[];
    const int group = threadIdx.x / 128, tid = threadIdx.x % 128;
    const WideBlock<Tile, SPLITS> block(dynamic, 2);
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        const int warp = __shfl_sync(FULL, tid / 32, 0);
        if (warp == 0 && elect_lane()) {
            fetch_weights<ROWS, SPLITS, KIND>(p, block);
        } else if (warp == 1 && elect_lane()) {
            fetch_inputs<ROWS, SPLITS, KIND>(p, block);
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        const int half = group - 1, warp = tid / 32, lane = tid % 32;
        float sums[ROWS / 2];
        const uint32_t mine = block.staging + (half * 4 + warp) * 2 * 16 * STAGING_PITCH;
        const uint64_t weights_at = describe_tile(block.ring + half * (64 * TILE_BYTES));
        const uint64_t inputs_at = describe_tile(block.ring + Tile::WEIGHT_BYTES);
        RingSlot<STAGES> slot(0);
        int add = 0;
        const auto release = [&](uint32_t barrier) {
            if (tid == 0) arrive(barrier);
        };
        const int row_blocks = p.row_blocks;
        for (int tile = block.first; tile < p.first_tile[p.count] * row_blocks; tile += block.blocks) {
            const WidePlace at = wide_place(p, tile / row_blocks);
            uint32_t before = 0;  // the slot whose products may still run
            for (int i = wide_steps<SPLITS, KIND>(p, at.map); i > 0; --i) {
                wait_barrier(block.full + 8 * slot.stage, slot.parity);
                const uint64_t weight = weights_at + slot.stage * (Tile::BYTES >> 4);
                const uint64_t input = inputs_at + slot.stage * (Tile::BYTES >> 4);
                begin_products();
#pragma unroll
                for (int j = 0; j < TILE_BYTES / 32; ++j) {
                    if constexpr (KIND == WIDE_FP8) {
#pragma unroll
                        for (int part = 0; part < Tile::PARTS; ++part)
                            multiply_fp8<Tile::PART>(reinterpret_cast<float(&)[Tile::PART / 2]>(sums[part * Tile::PART / 2]),
                                                     weight + j * 32 / 16, input + (part * Tile::PART * TILE_BYTES + j * 32) / 16, add);
                    } else {
                        constexpr bool TURNED = KIND == WIDE_TURNED;
                        multiply<ROWS, TURNED>(sums, weight + j * (TURNED ? 16 * 128 : 32) / 16, input + j * 32 / 16, add);
                    }
                    add = 1;
                }
                commit_products();
                wait_products<1>();
                if (before != 0) release(before);
                before = block.empty + 8 * slot.stage;
                slot.advance();
            }
            wait_products<0>();
            release(before);
            add = 0;
#pragma unroll
            for (int i = 0; i < ROWS / 2; ++i) asm volatile("" : "+f"(sums[i])::"memory");

            constexpr int CHUNKS = ROWS / 8 / SPLITS;  // of 8 rows, that this block finishes
            if constexpr (SPLITS > 1) add_splits<ROWS, SPLITS>(sums, p, tile, block.my_split);
            const int first_output = at.output + half * 64 + warp * 16;
            if (first_output >= p.n[at.map]) continue;  // the map's last tile may be narrower
            const int first_row = tile % row_blocks * ROWS + block.my_split * CHUNKS * 8;
            WideOut out = {p.y[at.map] + first_output, p.n[at.map], first_row, p.rows, nullptr, nullptr};
            if constexpr (KIND == WIDE_FP8) {
                out.weight_scales = p.weight_scales[at.map] + first_output, out.input_scales = p.input_scales[at.map];
                scale_sums<CHUNKS>(sums, out, lane);
            }
            activate_sums<4 * CHUNKS>(sums, p.activation[at.map]);
            write_out<CHUNKS>(sums, out, mine, lane);
        }
    }
#endif
}

// As many blocks as run at once and have work; all of them at once when k is split. `raised`: on which devices the kernel
// may have its shared memory.
template <typename Params>
int launch_tiles(
    void (*kernel)(Params), bool (&raised)[MAX_DEVICES], int shared_bytes, int tiles, int splits, const Params& p, void* stream) {
    if (!raised[this_device()]) {
        const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
        if (error != cudaSuccess) return static_cast<int>(error);
        raised[this_device()] = true;
    }
    const int units = tiles * splits, room = this_machine().processors;
    if (splits > 1 && units > room) return static_cast<int>(cudaErrorInvalidValue);
    launch_with_shared(kernel, dim3(min(units, room)), 384, shared_bytes, stream, p);
    return launch_result();
}

template <int ROWS, int SPLITS, WideKind KIND>
int launch_wide(const WideLaunch& p, void* stream) {
    static bool raised[MAX_DEVICES] = {};
    const int tiles = p.first_tile[p.count] * p.row_blocks;
    return launch_tiles(wide_kernel<ROWS, SPLITS, KIND>, raised, WideTile<ROWS>::SHARED_BYTES, tiles, SPLITS, p, stream);
}
