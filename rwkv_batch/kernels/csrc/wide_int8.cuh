// y = act(x @ W^T) for up to 64 rows in two bytes (row_bytes.cuh) and W of int8 (quant.cuh), several maps in one launch and maps of
// halves beside them, on Hopper's tensor cores.
//
// As wide.cuh has rows in two parts: a block makes 128 outputs of all rows; two warps keep a ring of tiles (128 of W, ROWS of x in
// both bytes, 128 of k each) filled by bulk copies; two warpgroups multiply 64 outputs each. Codes and bytes are multiplied as they
// are, into whole numbers, which are exact. 128 inputs have a scale of W and one of x, or two: after so many the sums of both bytes
// are taken out of the tensor cores, made one number, and added up in fp32.
//
// A map: W u8 [n, k] with 128 added, scales [k / 128][n] fp16; n a multiple of 16 (128 where y is in bytes), k of 128 times the
// splits; x [rows, 2, k] with its scales; y [rows, n] fp16, or likewise in bytes, or what each share of k comes to in fp32. Or W [k, n]
// of the only map (WIDE_PARTS_TURNED; turned_codes.cuh), x with a scale for 128 inputs, y not in bytes. Bytes: W
// and scales once; x 2k * rows per tile of outputs, from the L2 cache. Shared memory besides wide.cuh's: scales of a place of the
// ring; what the warps of a tile tell each other where its results are made bytes.
#pragma once

#include "ring_release.cuh"
#include "row_bytes.cuh"
#include "wide_codes_reader.cuh"
#include "wide_exchange.cuh"
#include "wide_maps.cuh"
#include "wide_ring.cuh"

struct Int8Launch {
    WideLaunch wide;  // parts: y of maps whose results are in bytes
    const __half* weight_scales[MAX_WIDE_MAPS];  // null: a map of halves
    const float2* input_scales[MAX_WIDE_MAPS];
    float2* y_scales[MAX_WIDE_MAPS];
    int pitch;   // of scales of rows
    int groups;  // of 128 inputs of a row, that have a scale: 1 or 2
    int to_shares;  // y is fp32 [SPLITS, rows, n], what each share of k comes to; the next kernel adds them up
};

// A place of the ring; scales of x [groups][pitch], then those of W [128].
template <int ROWS>
struct Int8Tile : WideRing<(OUTPUTS + 2 * ROWS) * TILE_BYTES + (ROWS <= 32 ? 1024 : 2048)> {
    using Ring = WideRing<(OUTPUTS + 2 * ROWS) * TILE_BYTES + (ROWS <= 32 ? 1024 : 2048)>;
    static constexpr int WEIGHT_BYTES = OUTPUTS * TILE_BYTES, INPUT_BYTES = 2 * ROWS * TILE_BYTES;
    static constexpr int SCALES_AT = WEIGHT_BYTES + INPUT_BYTES, WEIGHT_SCALES_AT = SCALES_AT + 2 * ROWS * 8;
    static constexpr int TOLD_BYTES = 8 * ROWS * 6;  // each warp's largest values, each warp's sums; two rooms, which take turns
    static constexpr int SHARED_BYTES = Ring::SHARED_BYTES + 2 * TOLD_BYTES;
    static_assert(WEIGHT_SCALES_AT + OUTPUTS * 2 <= Ring::BYTES && SHARED_BYTES <= 227 * 1024);
};

// Few enough registers of up to 32 rows that blocks of shift_mix come up beside it: 96 a thread, as many as 640 threads can have, which is
// how that is said; 120 of those that multiply.
template <int ROWS>
constexpr bool IS_LEAN_INT8 = ROWS <= 32;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
namespace hopper {

// Of whole numbers: sums [64 x N] += a [64 x 32] of u8 * b [N x 32]^T of s8, both with k inner.
template <int N>
__device__ __forceinline__ void multiply_bytes(int (&sums)[N / 2], uint32_t a, uint32_t b, int add);

#define HOPPER_R8(i)                                                                                    \
    "+r"(s[i]), "+r"(s[i + 1]), "+r"(s[i + 2]), "+r"(s[i + 3]), "+r"(s[i + 4]), "+r"(s[i + 5]), "+r"(s[i + 6]), \
        "+r"(s[i + 7])
#define HOPPER_R16(i) HOPPER_R8(i), HOPPER_R8(i + 8)
#define HOPPER_R32(i) HOPPER_R16(i), HOPPER_R16(i + 16)
#define HOPPER_INTEGER_PRODUCT(N, PLACES, A, B, ADD, ...)                                                        \
    template <>                                                                                                  \
    __device__ __forceinline__ void multiply_bytes<N>(int (&s)[N / 2], uint32_t a, uint32_t b, int add) {        \
        asm volatile("{\n.reg .pred add;\n.reg .b64 a, b;\nsetp.ne.b32 add, %" #ADD ", 0;\n"                       \
                     "mov.b64 a, {%" #A ", 0x40000040};\nmov.b64 b, {%" #B ", 0x40000040};\n"                    \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k32.s32.u8.s8 {" PLACES "}, a, b, add;\n}"          \
                     : __VA_ARGS__                                                                               \
                     : "r"(a), "r"(b), "r"(add));                                                                \
    }

HOPPER_INTEGER_PRODUCT(32, HOPPER_P1, 16, 17, 18, HOPPER_R16(0))
HOPPER_INTEGER_PRODUCT(64, HOPPER_P2, 32, 33, 34, HOPPER_R32(0))
HOPPER_INTEGER_PRODUCT(128, HOPPER_P4, 64, 65, 66, HOPPER_R32(0), HOPPER_R32(32))

// The same with a in registers: as a warp's operand of mma.m16n8k32, 16 rows each.
template <int N>
__device__ __forceinline__ void multiply_bytes(int (&sums)[N / 2], const uint32_t (&a)[4], uint32_t b, int add);

#define HOPPER_INTEGER_REGISTER_PRODUCT(N, PLACES, A0, A1, A2, A3, B, ADD, ...)                                          \
    template <>                                                                                                          \
    __device__ __forceinline__ void multiply_bytes<N>(int (&s)[N / 2], const uint32_t (&a)[4], uint32_t b, int add) {    \
        asm volatile("{\n.reg .pred add;\n.reg .b64 b;\nsetp.ne.b32 add, %" #ADD ", 0;\nmov.b64 b, {%" #B ", 0x40000040};\n" \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k32.s32.u8.s8 {" PLACES "}, {%" #A0 ",%" #A1 ",%" #A2 ",%" #A3 \
                     "}, b, add;\n}"                                                                                     \
                     : __VA_ARGS__                                                                                       \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(add));                                    \
    }

HOPPER_INTEGER_REGISTER_PRODUCT(32, HOPPER_P1, 16, 17, 18, 19, 20, 21, HOPPER_R16(0))
HOPPER_INTEGER_REGISTER_PRODUCT(64, HOPPER_P2, 32, 33, 34, 35, 36, 37, HOPPER_R32(0))
HOPPER_INTEGER_REGISTER_PRODUCT(128, HOPPER_P4, 64, 65, 66, 67, 68, 69, HOPPER_R32(0), HOPPER_R32(32))

}  // namespace hopper

__device__ __forceinline__ float4 shared_float4(uint32_t at) {
    const uint4 v = shared_u128(at);
    return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
}

template <int ROWS>
constexpr uint32_t INT8_TILE_CYCLES = ROWS <= 16 ? TILE_CYCLES : 2000;  // as measured (docs/notebook.md)

// One lane: W's tiles and scales of all of this block's work into the ring.
template <int ROWS, int SPLITS, WideKind KIND, typename Block>
__device__ __forceinline__ void fetch_int8(const Int8Launch& p, const Block& block) {
    using namespace hopper;
    using Tile = Int8Tile<ROWS>;
    RingSlot<Tile::STAGES> slot(1);
    int in_turn = IS_BEHIND_SHIFT_MIX<SPLITS, KIND> ? Tile::STAGES - 1 : 0;
    for (WideTurn<KIND, SPLITS> turn(p.wide, block); turn.has_work(); turn.advance()) {
        const WideWork work = wide_work<KIND, SPLITS>(p.wide, turn.number, block.my_split);
        const CUtensorMap* map = &p.wide.weights[work.map];
        const int steps = wide_steps<KIND, SPLITS>(p.wide, work), n = p.wide.n[work.map];
        const uint32_t scale_bytes = min(OUTPUTS, n - work.output) * sizeof(__half);
        const uint32_t bytes = work.half ? Tile::WEIGHT_BYTES + ROWS * TILE_BYTES
                                         : Tile::WEIGHT_BYTES + Tile::INPUT_BYTES + scale_bytes + p.groups * p.pitch * sizeof(float2);
        for (int step = work.split * steps; step < (work.split + 1) * steps; ++step) {
            wait_barrier(block.empty + 8 * slot.stage, slot.parity);
            const uint32_t barrier = block.full + 8 * slot.stage, to = block.ring + slot.stage * Tile::BYTES;
            expect_bytes(barrier, bytes);
            const int input = step * (work.half ? 64 : 128);
            copy_box(to, map, TURNS_CODES<KIND> ? work.output : input, TURNS_CODES<KIND> ? input : work.output, 0, barrier, EVICT_FIRST);
            if (!work.half) {
                const __half* const scales = p.weight_scales[work.map] + static_cast<int64_t>(step) * n + work.output;
                copy_line(to + Tile::WEIGHT_SCALES_AT, scales, scale_bytes, barrier);
            }
            slot.advance();
            if (in_turn > 0) wait_for_turn(block.inputs_there, INT8_TILE_CYCLES<ROWS>), --in_turn;
        }
    }
}

// One lane of another warp: x's likewise, once the kernel that makes x has ended.
template <int ROWS, int SPLITS, WideKind KIND, typename Block>
__device__ __forceinline__ void fetch_row_bytes(const Int8Launch& p, const Block& block) {
    using namespace hopper;
    using Tile = Int8Tile<ROWS>;
    RingSlot<Tile::STAGES> slot(1);
    int waiting = 0;  // blocks that wait for maps of halves, once this one has
    wait_for_inputs();
    arrive(block.inputs_there);
    for (WideTurn<KIND, SPLITS> turn(p.wide, block); turn.has_work(); turn.advance()) {
        const WideWork work = wide_work<KIND, SPLITS>(p.wide, turn.number, block.my_split);
        if (IS_MIXED<KIND> && work.late && waiting == 0) {
            waiting = turn.waiting;
            wait_for_early<SPLITS>(p.wide);
        }
        const CUtensorMap* map = &p.wide.inputs[work.map];
        const int steps = wide_steps<KIND, SPLITS>(p.wide, work);
        for (int step = work.split * steps; step < (work.split + 1) * steps; ++step) {
            wait_barrier(block.empty + 8 * slot.stage, slot.parity);
            const uint32_t barrier = block.full + 8 * slot.stage, to = block.ring + slot.stage * Tile::BYTES;
            copy_box(to + Tile::WEIGHT_BYTES, map, step * (work.half ? 64 : 128), 0, 0, barrier, EVICT_LAST);
            if (!work.half) {
                const float2* const scales = p.input_scales[work.map] + step * p.groups * p.pitch;
                copy_line(to + Tile::SCALES_AT, scales, p.groups * p.pitch * sizeof(float2), barrier);
            }
            slot.advance();
        }
    }
    if (waiting > 0) put_back(late_counters(p.wide), waiting);
}

// Products of a stage of 128 inputs, or of the half of them that has a scale, put on their way: of codes in shared memory,
template <int ROWS, int STEPS>
__device__ __forceinline__ void begin_group(int (&numbers)[ROWS], uint32_t weight, uint32_t input) {
    using namespace hopper;
    begin_products();
#pragma unroll
    for (int j = 0; j < STEPS; ++j) multiply_bytes<2 * ROWS>(numbers, weight + j * 2, input + j * 2, j > 0);
    commit_products();
}
// or of codes [k, n] there, which are turned in registers: the second half of them while the first is multiplied.
template <int ROWS>
__device__ __forceinline__ void begin_turned_stage(int (&numbers)[ROWS], const TurnedCodes& codes, uint32_t tile, uint32_t input) {
    using namespace hopper;
    constexpr int STEPS = 4, TOGETHER = 2;
    uint32_t a[STEPS][4];
#pragma unroll
    for (int first = 0; first < STEPS; first += TOGETHER) {
#pragma unroll
        for (int j = first; j < first + TOGETHER; ++j) codes.read(a[j], tile, j);
        begin_products();
#pragma unroll
        for (int j = first; j < first + TOGETHER; ++j) multiply_bytes<2 * ROWS>(numbers, a[j], input + j * 2, j > 0);
        commit_products();
    }
}

// Scales of a lane's two outputs, 8 apart or neighbours; some bits of what was loaded.
template <bool TURNED>
__device__ __forceinline__ uint32_t load_output_scales(float (&of_output)[2], uint32_t at) {
    uint32_t loaded = 0;
    if constexpr (TURNED) {
        loaded = shared_u32(at);
        const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&loaded));
        of_output[0] = both.x, of_output[1] = both.y;
    } else {
#pragma unroll
        for (int up = 0; up < 2; ++up) {
            const uint32_t bits = shared_u16(at + 16 * up);
            loaded |= bits;
            of_output[up] = __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
        }
    }
    return loaded;
}

// Where a lane finds what it reads of the ring's first place; of tiles the low words of their descriptors.
struct Int8Places {
    uint32_t weights, inputs;
    uint32_t of_rows, of_outputs;  // scales of a lane's two rows and two outputs
    uint32_t full;                 // barriers
};

// 64 outputs of ROWS rows more, by COUNT stages of 128 inputs: what has a scale, a stage or one of its two GROUPS, is multiplied while the
// one before is scaled. Two at most: with more, or under way from one call to the next, what the compiler adds costs more than waiting.
// A place of the ring is given back before its stage is scaled.
template <int ROWS, int GROUPS, int COUNT, bool TURNED, typename Tile>
__device__ __forceinline__ void add_stages(
    float (&sums)[ROWS / 2], const Int8Places& at, RingSlot<Tile::STAGES>& slot, const TurnedCodes& codes, uint32_t ring, int pitch, int lane) {
    using namespace hopper;
    constexpr int PARTS = COUNT * GROUPS, STEPS = 4 / GROUPS;
    static_assert(PARTS <= 2 && (PARTS == 1 || !TURNED));
    int numbers[PARTS][ROWS];
    float of_output[COUNT][2];
    uint32_t place[COUNT], loaded[COUNT];
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        const int stage = part / GROUPS, group = part % GROUPS;
        if (group == 0) {
            place[stage] = slot.stage;
            wait_barrier(at.full + 8 * slot.stage, slot.parity);
            loaded[stage] = load_output_scales<TURNED>(of_output[stage], at.of_outputs + slot.stage * Tile::BYTES);
            slot.advance();
        }
        const uint32_t input = at.inputs + place[stage] * (Tile::BYTES >> 4) + group * STEPS * 2;
        if constexpr (TURNED) {
            begin_turned_stage<ROWS>(numbers[part], codes, ring + place[stage] * Tile::BYTES, input);
        } else {
            begin_group<ROWS, STEPS>(numbers[part], at.weights + place[stage] * (Tile::BYTES >> 4) + group * STEPS * 2, input);
        }
    }
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        const int stage = part / GROUPS, group = part % GROUPS;
        int (&mine)[ROWS] = numbers[part];
        float4 of_row[ROWS / 8];  // scale and what 128 adds, of two rows
#pragma unroll
        for (int c = 0; c < ROWS / 8; ++c) {
            of_row[c] = shared_float4(at.of_rows + place[stage] * Tile::BYTES + (group * pitch + 8 * c) * 8);
            loaded[stage] |= __float_as_uint(of_row[c].x);
        }
        if (part + 1 < PARTS) {
            wait_products<1>();
        } else {
            wait_products<0>();
        }
#pragma unroll
        for (int j = 0; j < ROWS; ++j) asm volatile("" : "+r"(mine[j])::"memory");
        if (group + 1 == GROUPS) release_loaded_place(at.full + 8 * (Tile::STAGES + place[stage]), lane, loaded[stage]);
#pragma unroll
        for (int c = 0; c < ROWS / 8; ++c) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float number = static_cast<float>(256 * mine[4 * c + j] + mine[ROWS / 2 + 4 * c + j]);
                const float value = j % 2 ? fmaf(number, of_row[c].z, of_row[c].w) : fmaf(number, of_row[c].x, of_row[c].y);
                sums[4 * c + j] = fmaf(value, of_output[stage][j / 2], sums[4 * c + j]);
            }
        }
    }
}

// 8 * CHUNKS rows of a tile's 128 outputs as bytes, a warp's 16 of them; `told`: the room of Int8Tile.
template <int CHUNKS, int SUMS>
__device__ __forceinline__ void write_bytes(
    const float (&sums)[SUMS], const WideOut& out, float2* items, uint32_t buffers, uint32_t told) {
    constexpr int PITCH = STAGING_PITCH;
    const int tid = threadIdx.x - 128, warp = tid / 32, lane = tid % 32, t = lane & 3;
    const uint32_t told_sums = told + 8 * CHUNKS * 4 * 4;
    uint32_t pairs[CHUNKS][2], largest[CHUNKS];  // of two rows each
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const float* v = sums + 4 * c;
        pairs[c][0] = pack_half2(v[0], v[1]), pairs[c][1] = pack_half2(v[2], v[3]);
        largest[c] = __vmaxu2(pairs[c][0] & 0x7fff7fffu, pairs[c][1] & 0x7fff7fffu);
    }
#pragma unroll
    for (int offset = 4; offset < 32; offset <<= 1) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) largest[c] = __vmaxu2(largest[c], __shfl_xor_sync(FULL, largest[c], offset));
    }
    if (lane < 4) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) put_shared(told + ((c * 4 + t) * 8 + warp) * 4, largest[c]);
    }
    meet_warpgroups();
    const auto largest_of_all = [&](int place) {
        const uint4 a = shared_u128(told + place * 32), b = shared_u128(told + place * 32 + 16);
        return __vmaxu2(__vmaxu2(__vmaxu2(a.x, a.y), __vmaxu2(a.z, a.w)), __vmaxu2(__vmaxu2(b.x, b.y), __vmaxu2(b.z, b.w)));
    };
    const uint32_t to = buffers + (lane & 7) * PITCH + (lane >> 3 & 1) * 16, from = buffers + (lane / 2) * PITCH + (lane & 1) * 16;
#pragma unroll
    for (int c = 0; c < CHUNKS; c += 2) {
        const uint32_t buffer = (c / 2 & 1) * 16 * PITCH;
#pragma unroll
        for (int d = 0; d < 2; ++d) {
            if (c + d < CHUNKS) {
                const uint32_t found = largest_of_all((c + d) * 4 + t);
                const float of_row[2] = {NumberScale(found & 0xffffu).inverse, NumberScale(found >> 16).inverse};
                uint32_t numbers[2];
#pragma unroll
                for (int up = 0; up < 2; ++up) {
                    const float2 v = __half22float2(*reinterpret_cast<const __half2*>(&pairs[c + d][up]));
                    numbers[up] = __byte_perm(number_bits(v.x, of_row[0]), number_bits(v.y, of_row[1]), 0x5410);
                }
                store_turned(to + buffer + d * 8 * PITCH, numbers[0], numbers[1]);
            }
        }
        __syncwarp();
        const int row = 8 * c + lane / 2;
        const RowBytes bytes(shared_u128(from + buffer));
        int sum = bytes.sum();
        sum += __shfl_xor_sync(FULL, sum, 1);
        if (c + 2 <= CHUNKS || lane < 16) {
            if ((lane & 1) == 0) put_shared(told_sums + (row * 8 + warp) * 4, static_cast<uint32_t>(sum));
            uint8_t* const at = out.parts + static_cast<int64_t>(out.first_row + row) * 2 * out.pitch + (lane & 1) * 8;
            if (out.first_row + row < out.rows) bytes.store(at, out.pitch);
        }
        __syncwarp();
    }
    meet_warpgroups();
    if (tid < 8 * CHUNKS && out.first_row + tid < out.rows) {
        const uint4 a = shared_u128(told_sums + tid * 32), b = shared_u128(told_sums + tid * 32 + 16);
        const int sum = static_cast<int>(a.x + a.y + a.z + a.w + b.x + b.y + b.z + b.w);
        const uint32_t found = largest_of_all(tid / 2);
        items[out.first_row + tid] = group_item(NumberScale(tid & 1 ? found >> 16 : found & 0xffffu).scale, sum);
    }
}
#endif

template <int ROWS, int SPLITS, WideKind KIND>
__global__ void __launch_bounds__(IS_LEAN_INT8<ROWS> ? 640 : 384, 1) wide_int8_kernel(const __grid_constant__ Int8Launch p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using namespace hopper;
    using Tile = Int8Tile<ROWS>;
    constexpr int STAGES = Tile::STAGES;
    extern __shared__ unsigned char dynamic[];
    const int group = threadIdx.x / 128, tid = threadIdx.x % 128;
    const WideBlock<Tile, BLOCK_SPLITS<SPLITS, KIND>> block(dynamic, 8);  // the warps that read scales
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        const int warp = __shfl_sync(FULL, tid / 32, 0);
        if (warp == 0 && elect_lane()) {
            fetch_int8<ROWS, SPLITS, KIND>(p, block);
        } else if (warp == 1 && elect_lane()) {
            fetch_row_bytes<ROWS, SPLITS, KIND>(p, block);
        }
    } else {
        if constexpr (IS_LEAN_INT8<ROWS>) {
            asm volatile("setmaxnreg.inc.sync.aligned.u32 120;");
        } else {
            asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        }
        constexpr bool TURNED = TURNS_CODES<KIND>;
        const int half = group - 1, warp = tid / 32, lane = tid % 32, t = lane & 3;
        float sums[ROWS / 2];
        uint32_t told_room = 0;
        const uint32_t mine = block.staging + (half * 4 + warp) * 2 * 16 * STAGING_PITCH;
        const uint32_t told = block.full + 512;
        // Kept in registers: nvcc makes them anew in every stage otherwise.
        Int8Places at = {static_cast<uint32_t>(describe_tile(block.ring + half * (64 * TILE_BYTES))),
                         static_cast<uint32_t>(describe_tile(block.ring + Tile::WEIGHT_BYTES)), block.ring + Tile::SCALES_AT + 16 * t,
                         block.ring + Tile::WEIGHT_SCALES_AT + (half * 64 + warp * 16 + output_of_lane<TURNED>(lane, 0)) * 2, block.full};
        TurnedCodes codes(half * 4 + warp, lane);
        if (TURNED) codes.keep();
        asm volatile("" : "+r"(at.weights), "+r"(at.inputs), "+r"(at.of_rows), "+r"(at.of_outputs), "+r"(at.full));
        RingSlot<STAGES> slot(0);
        const auto settle = [&] {
#pragma unroll
            for (int i = 0; i < ROWS / 2; ++i) asm volatile("" : "+f"(sums[i])::"memory");
        };
        for (WideTurn<KIND, SPLITS> turn(p.wide, block); turn.has_work(); turn.advance()) {
            const WideWork work = wide_work<KIND, SPLITS>(p.wide, turn.number, block.my_split);
#pragma unroll
            for (int i = 0; i < ROWS / 2; ++i) sums[i] = 0.0f;
            int i = wide_steps<KIND, SPLITS>(p.wide, work);
            if (IS_MIXED<KIND> && work.half) {
                uint32_t before = 0;  // of the place whose products may still run
                settle();
                for (; i > 0; --i) {
                    wait_barrier(at.full + 8 * slot.stage, slot.parity);
                    const uint32_t weight = at.weights + slot.stage * (Tile::BYTES >> 4), input = at.inputs + slot.stage * (Tile::BYTES >> 4);
                    begin_products();
#pragma unroll
                    for (int j = 0; j < 4; ++j) multiply<ROWS, false>(sums, describe_tile(0) | (weight + j * 2), describe_tile(0) | (input + j * 2), 1);
                    commit_products();
                    wait_products<1>();
                    if (before != 0) release_place(before, lane);
                    before = at.full + 8 * (STAGES + slot.stage);
                    slot.advance();
                }
                wait_products<0>();
                settle();
                release_place(before, lane);
            }
            const auto add = [&](auto groups, auto count) {
#pragma unroll 1
                for (; i >= count.value; i -= count.value) {
                    add_stages<ROWS, groups.value, count.value, TURNED, Tile>(sums, at, slot, codes, block.ring, p.pitch, lane);
                }
            };
            constexpr std::integral_constant<int, 1> ONE;
            constexpr std::integral_constant<int, 2> TWO;
            if constexpr (TURNED) {
                add(ONE, ONE);
            } else if (p.groups == 1) {
                add(ONE, TWO);
                add(ONE, ONE);
            } else {
                add(TWO, ONE);
            }
            // A share's sums added to the others', scaled, activated and written.
            const auto finish = [&](auto splits) {
                constexpr int CHUNKS = SHARE_CHUNKS<ROWS, splits.value>;  // of 8 rows, that this block finishes
                const int first_output = work.output + half * 64 + warp * 16, n = p.wide.n[work.map];
                if (!work.half) {
#pragma unroll
                    for (int i = 0; i < ROWS / 2; ++i) sums[i] *= code_scale<INT8>();
                }
                if constexpr (ALL_CODES<KIND>) {
                    if (p.to_shares) {
                        const WideOut out = {nullptr, nullptr, n, 0, p.wide.rows, nullptr, nullptr};
                        float* const share = reinterpret_cast<float*>(p.wide.y[work.map]) + static_cast<int64_t>(work.split) * p.wide.rows * n;
                        if (first_output < n) write_floats<ROWS / 8, TURNED>(sums, share + first_output, out, lane);
                        return;
                    }
                }
                if constexpr (splits.value > 1) add_splits<ROWS, splits.value>(sums, p.wide, work.exchange, work.split);
                if (first_output >= n) return;  // the map's last tile may be narrower, but for results in bytes
                WideOut out = {p.wide.y[work.map] + first_output, nullptr, n, work.split * CHUNKS * 8, p.wide.rows, nullptr, nullptr};
                activate_sums<4 * CHUNKS>(sums, p.wide.activation[work.map]);
                if (TURNED || p.wide.parts[work.map] == nullptr) {
                    write_out<CHUNKS, false, TURNED>(sums, out, mine, lane);
                    return;
                }
                if constexpr (!TURNED) {
                    out.parts = p.wide.parts[work.map] + first_output;
                    float2* const items = p.y_scales[work.map] + static_cast<int64_t>(work.output / BYTES_GROUP) * p.pitch;
                    write_bytes<CHUNKS>(sums, out, items, mine, told + told_room), told_room ^= Tile::TOLD_BYTES;
                }
            };
            if (work.shared) {
                finish(std::integral_constant<int, SPLITS>());
                if (IS_MIXED<KIND> && p.wide.early < p.wide.count) tell_early_is_done(p.wide);
                if constexpr (SPLITS > 1) {
                    if (!p.to_shares) put_back_splits<SPLITS>(p.wide, work.exchange);
                }
            } else {
                finish(std::integral_constant<int, 1>());
            }
        }
    }
#endif
}

// What the caller hands over; mirrored in Python.
struct WideInt8Map {
    const void* weight;         // [n, k] u8, or [k, n], or [n, k] fp16
    const void* x;              // [rows, 2, k] s8, or [rows, k] fp16
    const void* weight_scales;  // [k / 128][n] fp16; null: halves
    const void* input_scales;   // [k / 128 * groups][pitch] pairs of fp32; null likewise
    void* y;                    // [rows, n] fp16, or [rows, 2, n] s8, or fp32 [splits, rows, n]
    void* y_scales;             // of these bytes [n / 128][pitch] pairs of fp32
    int n, k;
    int activation;
    int unused;
};

struct WideInt8Args {
    WideInt8Map maps[MAX_WIDE_MAPS];  // those in codes first, then those of halves
    int count;
    int late;  // of the last ones the inputs are results of the halves before them
    int rows;
    int tile_rows;
    int splits;  // where there are maps of halves: of these alone, of none that is late
    int pitch;   // of scales of rows
    int groups;  // of 128 inputs: 1 or 2
    int to_shares;  // y of the only map is fp32, whose sum over the splits is meant
    int turned;     // the only map's weight is [k, n]
    void* partial;  // see WideLaunch
    void* counters;
};

// The launch with its tensor maps; false: there can be none.
inline bool describe_int8(Int8Launch& p, const WideInt8Args& args) {
    if (encode_tiled() == nullptr || args.pitch % 2 != 0 || args.pitch < args.rows || args.pitch > args.tile_rows) return false;
    describe_maps(p.wide, args);
    p.wide.coded = 0, p.wide.early = args.count - args.late;
    p.pitch = args.pitch, p.groups = args.groups, p.to_shares = args.to_shares;
    for (int i = 0; i < args.count; ++i) {
        const WideInt8Map& m = args.maps[i];
        const bool half = m.weight_scales == nullptr;
        p.wide.coded += !half;
        p.wide.parts[i] = m.y_scales == nullptr ? nullptr : static_cast<uint8_t*>(m.y);
        const bool described = half ? describe_rows(&p.wide.inputs[i], m.x, HALVES, args.rows, m.k, args.tile_rows)
                                    : describe(&p.wide.inputs[i], m.x, BYTES, args.rows, m.k, 2 * m.k, 2, args.tile_rows, 2, TILE_BYTES, m.k);
        const bool weights = args.turned ? describe_turned(&p.wide.weights[i], m.weight, m.n, m.k)
                                         : describe_weights(&p.wide.weights[i], m.weight, half ? HALVES : BYTES, m.n, m.k);
        if (!described || !weights) return false;
        p.weight_scales[i] = static_cast<const __half*>(m.weight_scales);
        p.input_scales[i] = static_cast<const float2*>(m.input_scales);
        p.y_scales[i] = static_cast<float2*>(m.y_scales);
    }
    return true;
}

template <int ROWS, int SPLITS, WideKind KIND>
int launch_int8(const Int8Launch& p, void* stream) {
    static bool raised[MAX_DEVICES] = {};
    const WideLaunch& wide = p.wide;
    const int works = wide_works<KIND, SPLITS>(wide), at_once = works - wide_late_tiles(wide);
    if (IS_MIXED<KIND> && SPLITS > 1 && at_once > this_machine().processors) return static_cast<int>(cudaErrorInvalidValue);
    constexpr int TOGETHER = IS_MIXED<KIND> ? 1 : SPLITS;
    return launch_tiles(wide_int8_kernel<ROWS, SPLITS, KIND>, raised, Int8Tile<ROWS>::SHARED_BYTES, works, TOGETHER, p, stream);
}
