// What the warps of wide_int8.cuh that multiply do with a stage of the ring, and with a tile's sums that become bytes: whole numbers out of the
// tensor cores, scaled and added up in fp32.
#pragma once

#include "ring_release.cuh"
#include "row_bytes.cuh"
#include "wide_codes_reader.cuh"
#include "wide_exchange.cuh"
#include "wide_ring.cuh"

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
