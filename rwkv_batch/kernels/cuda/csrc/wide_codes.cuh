// y = act(x @ W^T) for up to 256 rows and W of 8 or 4 bits (quant.cuh), several maps in one launch, on Hopper's tensor cores.
//
// As wide.cuh, with x as it is: a block makes 128 outputs of all rows; two warps keep a ring of tiles (128 of W and its
// scales, ROWS of x, 128 of k each); two warpgroups multiply 64 outputs each. Their warps take codes out of shared memory,
// make them halves in registers (with the scale of their group of 128 inputs) in the order in which wgmma wants its first
// operand, and multiply by x in shared memory.
//
// A map: codes [n, k], or [k, n] when stored transposed (its 4-bit codes' nibbles then run along n); n a multiple of 32,
// k of 128 times the splits. Of a transposed tile a lane's two rows of the operand are neighbouring outputs: they lie in
// one piece. Bytes: W and scales once; x 2k * rows per tile of outputs, from the L2 cache.
#pragma once

#include "wide_codes_reader.cuh"
#include "wide_exchange.cuh"
#include "wide_maps.cuh"
#include "wide_ring.cuh"

// A stage: W's codes, x as two tiles [ROWS][64] with the 128-byte swizzle, scales of 128 outputs.
template <typename Kind, int ROWS>
struct CodesTile : WideRing<Kind::WEIGHT_ROOM + ROWS * Kind::DEPTH * 2 + Kind::SCALE_ROOM> {
    static constexpr int INPUT_BYTES = ROWS * Kind::DEPTH * 2;
};

template <typename Kind, int SPLITS>
__device__ __forceinline__ int codes_steps(int k, bool half) { return k / ((half ? 64 : Kind::DEPTH) * SPLITS); }

struct CodesLaunch {
    WideLaunch wide;
    const void* scales[MAX_WIDE_MAPS];  // null: the map is one of halves [n, k], multiplied as in wide.cuh
    float* floats[MAX_WIDE_MAPS];  // y in fp32 instead of fp16, or null
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// The sums of a warp's 16 outputs of 8 * CHUNKS rows to memory. A lane's: sums[4c + i], row 8c + 2t + i % 2, output i / 2.
template <typename Kind, int CHUNKS, int SUMS>
__device__ __forceinline__ void write_codes(
    float (&sums)[SUMS], const CodesLaunch& p, int map, int output, int first_row, uint32_t buffers, int lane) {
    const WideLaunch& wide = p.wide;
    const int g = lane / 4, t = lane & 3, n = wide.n[map];
    const bool half = p.scales[map] == nullptr, transposed = Kind::transposed && !half;
    float of_output[2];
    int out[2];
#pragma unroll
    for (int up = 0; up < 2; ++up) {
        out[up] = transposed ? 2 * g + up : g + 8 * up;
        of_output[up] = half ? 1.0f : code_scale<Kind::format>();
        if (Kind::format == FP8 && !half) of_output[up] *= __ldg(static_cast<const float*>(p.scales[map]) + output + out[up]);
    }
#pragma unroll
    for (int i = 0; i < 4 * CHUNKS; ++i) sums[i] *= of_output[i % 4 / 2];
    activate_sums<4 * CHUNKS>(sums, wide.activation[map]);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const float* v = sums + 4 * c;
        if (p.floats[map] != nullptr) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = first_row + 8 * c + 2 * t + i % 2;
                if (row < wide.rows) p.floats[map][static_cast<int64_t>(row) * n + output + out[i / 2]] = v[i];
            }
            continue;
        }
        // 8 rows of 16 outputs through the warp's buffer, 16 bytes a lane out of it.
        const uint32_t buffer = buffers + (c & 1) * 16 * STAGING_PITCH;
        if (transposed) {
#pragma unroll
            for (int i = 0; i < 2; ++i) put_shared(buffer + (2 * t + i) * STAGING_PITCH + 4 * g, pack_half2(v[i], v[i + 2]));
        } else {
            store_turned(buffer + (lane & 7) * STAGING_PITCH + (lane >> 3 & 1) * 16, pack_half2(v[0], v[1]), pack_half2(v[2], v[3]));
        }
        __syncwarp();
        const int row = first_row + 8 * c + lane / 2;
        if (lane < 16 && row < wide.rows) {
            __half* const y = wide.y[map] + static_cast<int64_t>(row) * n + output + (lane & 1) * 8;
            put_global(y, shared_u128(buffer + lane / 2 * STAGING_PITCH + (lane & 1) * 16));
        }
        __syncwarp();
    }
}

// One lane: W's tiles and scales of all of this block's work into the ring.
template <typename Kind, int ROWS, int SPLITS>
__device__ __forceinline__ void fetch_codes(const CodesLaunch& p, const WideBlock<CodesTile<Kind, ROWS>, SPLITS>& block) {
    using namespace hopper;
    using Tile = CodesTile<Kind, ROWS>;
    RingSlot<Tile::STAGES> slot(1);
    for (int tile = block.first; tile < p.wide.first_tile[p.wide.count]; tile += block.blocks) {
        const WidePlace at = wide_place(p.wide, tile);
        const CUtensorMap* map = &p.wide.weights[at.map];
        const bool half = p.scales[at.map] == nullptr;
        const int n = p.wide.n[at.map], steps = codes_steps<Kind, SPLITS>(p.wide.k[at.map], half);
        const uint32_t scale_bytes = Kind::grouped ? min(OUTPUTS, n - at.output) * Kind::SCALE_ITEM : 0;
        for (int step = block.my_split * steps; step < (block.my_split + 1) * steps; ++step) {
            wait_barrier(block.empty + 8 * slot.stage, slot.parity);
            const uint32_t barrier = block.full + 8 * slot.stage, to = block.ring + slot.stage * Tile::BYTES;
            if (half) {
                expect_bytes(barrier, OUTPUTS * 128 + ROWS * 128);
                copy_box(to, map, step * 64, at.output, 0, barrier, EVICT_FIRST);
                slot.advance();
                continue;
            }
            expect_bytes(barrier, Kind::WEIGHT_BYTES + Tile::INPUT_BYTES + scale_bytes);
            if constexpr (Kind::transposed) {
                copy_box(to, map, at.output * Kind::BITS / 8, step * Kind::DEPTH, 0, barrier, EVICT_FIRST);
            } else {
                copy_box(to, map, step * Kind::DEPTH * Kind::BITS / 8, at.output, 0, barrier, EVICT_FIRST);
            }
            if constexpr (Kind::grouped) {
                const auto* from = static_cast<const uint8_t*>(p.scales[at.map]) +
                                   (static_cast<int64_t>(step) * n + at.output) * Kind::SCALE_ITEM;
                copy_line(to + Kind::WEIGHT_ROOM + Tile::INPUT_BYTES, from, scale_bytes, barrier);
            }
            slot.advance();
        }
    }
}

// One lane of another warp: x's tiles likewise, once the kernel that makes x has ended.
template <typename Kind, int ROWS, int SPLITS>
__device__ __forceinline__ void fetch_rows(const CodesLaunch& p, const WideBlock<CodesTile<Kind, ROWS>, SPLITS>& block) {
    using namespace hopper;
    using Tile = CodesTile<Kind, ROWS>;
    RingSlot<Tile::STAGES> slot(1);
    wait_for_inputs();
    for (int tile = block.first; tile < p.wide.first_tile[p.wide.count]; tile += block.blocks) {
        const WidePlace at = wide_place(p.wide, tile);
        const bool half = p.scales[at.map] == nullptr;
        const int steps = codes_steps<Kind, SPLITS>(p.wide.k[at.map], half), planes = half ? 1 : Kind::DEPTH / 64;
        for (int step = block.my_split * steps; step < (block.my_split + 1) * steps; ++step) {
            wait_barrier(block.empty + 8 * slot.stage, slot.parity);
            copy_box(block.ring + slot.stage * Tile::BYTES + Kind::WEIGHT_ROOM, &p.wide.inputs[at.map], 0, 0, step * planes,
                     block.full + 8 * slot.stage, EVICT_LAST);
            slot.advance();
        }
    }
}
#endif

template <typename Kind, int ROWS, int SPLITS>
__global__ void __launch_bounds__(384, 1) wide_codes_kernel(const __grid_constant__ CodesLaunch p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using namespace hopper;
    using Tile = CodesTile<Kind, ROWS>;
    constexpr int STAGES = Tile::STAGES, STEPS = Kind::DEPTH / 16, TOGETHER = 4;
    extern __shared__ unsigned char dynamic[];
    const int group = threadIdx.x / 128, tid = threadIdx.x % 128;
    const WideBlock<Tile, SPLITS> block(dynamic, 8);  // the warps that read codes
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        const int warp = __shfl_sync(FULL, tid / 32, 0);
        if (warp == 0 && elect_lane()) {
            fetch_codes(p, block);
        } else if (warp == 1 && elect_lane()) {
            fetch_rows(p, block);
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        const int warp = threadIdx.x / 32 - 4, lane = tid % 32;
        float sums[ROWS / 2];
        const uint32_t mine = block.staging + warp * 2 * 16 * STAGING_PITCH;
        RingSlot<STAGES> slot(0);
        const auto release = [&](uint32_t barrier) {
            __syncwarp();
            if (lane == 0) arrive(barrier);
        };
        for (int tile = block.first; tile < p.wide.first_tile[p.wide.count]; tile += block.blocks) {
            const WidePlace at = wide_place(p.wide, tile);
            int add = 0;
            uint32_t before = 0;  // the slot whose products may still run
            const bool half = p.scales[at.map] == nullptr;
            for (int i = codes_steps<Kind, SPLITS>(p.wide.k[at.map], half); i > 0; --i) {
                wait_barrier(block.full + 8 * slot.stage, slot.parity);
                const uint32_t stage = block.ring + slot.stage * Tile::BYTES, inputs = stage + Kind::WEIGHT_ROOM;
                const uint64_t input = describe_tile(inputs);
                if (half) {
                    const uint64_t weight = describe_tile(stage + warp / 4 * (64 * TILE_BYTES));
                    begin_products();
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        multiply<ROWS, false>(sums, weight + j * 32 / 16, input + j * 32 / 16, add);
                        add = 1;
                    }
                    commit_products();
                    wait_products<1>();
                    if (before != 0) release(before);
                    before = block.empty + 8 * slot.stage;
                    slot.advance();
                    continue;
                }
                const CodesReader<Kind> reader(stage, inputs + Tile::INPUT_BYTES, warp, lane);
#pragma unroll
                for (int part = 0; part < STEPS; part += TOGETHER) {
                    uint32_t a[TOGETHER][4];
#pragma unroll
                    for (int j = 0; j < TOGETHER; ++j) reader.read(a[j], part + j);
                    begin_products();
#pragma unroll
                    for (int j = 0; j < TOGETHER; ++j) {
                        const int step = part + j;
                        multiply_registers<ROWS>(sums, a[j], input + (step / 4 * ROWS * 128 + step % 4 * 32) / 16, add);
                        add = 1;
                    }
                    commit_products();
                    wait_products<1>();
                    if (part == 0 && before != 0) release(before);
                }
                before = block.empty + 8 * slot.stage;
                slot.advance();
            }
            wait_products<0>();
            if (before != 0) release(before);
#pragma unroll
            for (int i = 0; i < ROWS / 2; ++i) asm volatile("" : "+f"(sums[i])::"memory");

            constexpr int CHUNKS = ROWS / 8 / SPLITS;  // of 8 rows, that this block finishes
            if constexpr (SPLITS > 1) add_splits<ROWS, SPLITS>(sums, p.wide, tile, block.my_split);
            const int output = at.output + warp * 16;
            if (output < p.wide.n[at.map]) write_codes<Kind, CHUNKS>(sums, p, at.map, output, block.my_split * CHUNKS * 8, mine, lane);
            if constexpr (SPLITS > 1) put_back_splits<SPLITS>(p.wide, tile);
        }
    }
#endif
}

// What the caller hands over; mirrored in Python.
struct WideCodesMap {
    const void* codes;   // [n, k], or [k, n] if transposed; or halves [n, k]
    const void* scales;  // see quant.cuh; null: of halves
    const void* x;       // [rows, k] fp16
    void* y;             // [rows, n] fp16, or fp32
    int n, k;
    int activation;
    int float_out;
};

struct WideCodesArgs {
    WideCodesMap maps[MAX_WIDE_MAPS];
    int count;
    int rows;
    int transposed;  // of all maps alike
    int tile_rows, splits;
    void* partial;  // see WideLaunch
    void* counters;
};

template <typename Kind>
int launch_codes(const WideCodesArgs& args, void* stream) {
    if (encode_tiled() == nullptr) return static_cast<int>(cudaErrorNotSupported);
    CodesLaunch p = {};
    describe_maps(p.wide, args);
    for (int i = 0; i < args.count; ++i) {
        const WideCodesMap& m = args.maps[i];
        const int rows = Kind::transposed ? m.k : m.n, columns = (Kind::transposed ? m.n : m.k) * Kind::BITS / 8;
        const bool half = m.scales == nullptr;
        const bool done = half ? describe_rows(&p.wide.weights[i], m.codes, HALVES, m.n, m.k, OUTPUTS)
                               : describe(&p.wide.weights[i], m.codes, BYTES, rows, columns, columns, 1, 128, 1, Kind::ROW_BYTES);
        if (!done || !describe(&p.wide.inputs[i], m.x, HALVES, args.rows, 64, m.k, m.k / 64, args.tile_rows, half ? 1 : 2)) {
            return static_cast<int>(cudaErrorInvalidValue);
        }
        p.scales[i] = m.scales, p.floats[i] = m.float_out ? static_cast<float*>(m.y) : nullptr;
    }
    return launch_planned<32, 64, 128, 256>(args.tile_rows, args.splits, [&](auto rows, auto splits) {
        using Tile = CodesTile<Kind, rows.value>;
        static bool raised[MAX_DEVICES] = {};
        const auto kernel = wide_codes_kernel<Kind, rows.value, splits.value>;
        return launch_tiles(kernel, raised, Tile::SHARED_BYTES, p.wide.first_tile[args.count], splits.value, p, stream);
    });
}

template <Format FORMAT>
int launch_wide_codes(const WideCodesArgs& args, void* stream) {
    return args.transposed ? launch_codes<Codes<FORMAT, true>>(args, stream) : launch_codes<Codes<FORMAT, false>>(args, stream);
}
