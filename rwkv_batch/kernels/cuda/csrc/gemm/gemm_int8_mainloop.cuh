// Main loop and two-byte epilogue of gemm_int8.cuh: integers from the tensor cores, scaled and summed in fp32.
#pragma once

#include "stage_release.cuh"
#include "../rows_two_byte.cuh"
#include "../weight_only/weight_only_operand.cuh"
#include "gemm_split_k.cuh"
#include "gemm_ring.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
namespace hopper {

// sums [64, N] s32 (+)= a [64, 32] u8 @ b [N, 32]^T s8, both K-major.
template <int N>
__device__ __forceinline__ void wgmma_u8s8(int (&sums)[N / 2], uint32_t a, uint32_t b, int add);

#define HOPPER_R8(i)                                                                                    \
    "+r"(s[i]), "+r"(s[i + 1]), "+r"(s[i + 2]), "+r"(s[i + 3]), "+r"(s[i + 4]), "+r"(s[i + 5]), "+r"(s[i + 6]), \
        "+r"(s[i + 7])
#define HOPPER_R16(i) HOPPER_R8(i), HOPPER_R8(i + 8)
#define HOPPER_R32(i) HOPPER_R16(i), HOPPER_R16(i + 16)
#define HOPPER_WGMMA_INT8(N, REGISTERS, A, B, ADD, ...)                                                        \
    template <>                                                                                                  \
    __device__ __forceinline__ void wgmma_u8s8<N>(int (&s)[N / 2], uint32_t a, uint32_t b, int add) {        \
        asm volatile("{\n.reg .pred add;\n.reg .b64 a, b;\nsetp.ne.b32 add, %" #ADD ", 0;\n"                       \
                     "mov.b64 a, {%" #A ", 0x40000040};\nmov.b64 b, {%" #B ", 0x40000040};\n"                    \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k32.s32.u8.s8 {" REGISTERS "}, a, b, add;\n}"          \
                     : __VA_ARGS__                                                                               \
                     : "r"(a), "r"(b), "r"(add));                                                                \
    }

HOPPER_WGMMA_INT8(32, HOPPER_P1, 16, 17, 18, HOPPER_R16(0))
HOPPER_WGMMA_INT8(64, HOPPER_P2, 32, 33, 34, HOPPER_R32(0))
HOPPER_WGMMA_INT8(128, HOPPER_P4, 64, 65, 66, HOPPER_R32(0), HOPPER_R32(32))

// Same, with a from registers in the layout of mma.m16n8k32 per warp.
template <int N>
__device__ __forceinline__ void wgmma_u8s8(int (&sums)[N / 2], const uint32_t (&a)[4], uint32_t b, int add);

#define HOPPER_WGMMA_INT8_RS(N, REGISTERS, A0, A1, A2, A3, B, ADD, ...)                                          \
    template <>                                                                                                          \
    __device__ __forceinline__ void wgmma_u8s8<N>(int (&s)[N / 2], const uint32_t (&a)[4], uint32_t b, int add) {    \
        asm volatile("{\n.reg .pred add;\n.reg .b64 b;\nsetp.ne.b32 add, %" #ADD ", 0;\nmov.b64 b, {%" #B ", 0x40000040};\n" \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k32.s32.u8.s8 {" REGISTERS "}, {%" #A0 ",%" #A1 ",%" #A2 ",%" #A3 \
                     "}, b, add;\n}"                                                                                     \
                     : __VA_ARGS__                                                                                       \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(add));                                    \
    }

HOPPER_WGMMA_INT8_RS(32, HOPPER_P1, 16, 17, 18, 19, 20, 21, HOPPER_R16(0))
HOPPER_WGMMA_INT8_RS(64, HOPPER_P2, 32, 33, 34, 35, 36, 37, HOPPER_R32(0))
HOPPER_WGMMA_INT8_RS(128, HOPPER_P4, 64, 65, 66, 67, 68, 69, HOPPER_R32(0), HOPPER_R32(32))

}  // namespace hopper

__device__ __forceinline__ float4 ld_shared_float4(uint32_t at) {
    const uint4 v = ld_shared_u128(at);
    return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
}

// Starts the wgmmas of one scale group (a stage or half of it), A from shared memory.
template <int ROWS, int STEPS>
__device__ __forceinline__ void begin_group(int (&numbers)[ROWS], uint32_t weight, uint32_t input) {
    using namespace hopper;
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < STEPS; ++j) wgmma_u8s8<2 * ROWS>(numbers, weight + j * 2, input + j * 2, j > 0);
    wgmma_commit();
}
// Same for W [k, n]: the second half of A is transposed in registers while the first is multiplied.
template <int ROWS>
__device__ __forceinline__ void begin_transposed_stage(int (&numbers)[ROWS], const TransposedOperand& operand, uint32_t tile, uint32_t input) {
    using namespace hopper;
    constexpr int STEPS = 4, BATCH = 2;
    uint32_t a[STEPS][4];
#pragma unroll
    for (int first = 0; first < STEPS; first += BATCH) {
#pragma unroll
        for (int j = first; j < first + BATCH; ++j) operand.read(a[j], tile, j);
        wgmma_fence();
#pragma unroll
        for (int j = first; j < first + BATCH; ++j) wgmma_u8s8<2 * ROWS>(numbers, a[j], input + j * 2, j > 0);
        wgmma_commit();
    }
}

// Loads the scales of a lane's two outputs, 8 apart or adjacent. Returns some of the loaded bits.
template <bool TRANSPOSED>
__device__ __forceinline__ uint32_t load_output_scales(float (&output_scale)[2], uint32_t at) {
    uint32_t loaded = 0;
    if constexpr (TRANSPOSED) {
        loaded = ld_shared_u32(at);
        const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&loaded));
        output_scale[0] = both.x, output_scale[1] = both.y;
    } else {
#pragma unroll
        for (int up = 0; up < 2; ++up) {
            const uint32_t bits = ld_shared_u16(at + 16 * up);
            loaded |= bits;
            output_scale[up] = __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
        }
    }
    return loaded;
}

// Addresses of a lane's data in stage 0; for tiles, the low words of their descriptors.
struct Int8Addresses {
    uint32_t weights, inputs;
    uint32_t row_scales_at, output_scales;  // scales of a lane's two rows, and of its two outputs
    uint32_t full;  // full mbarriers
};

// Multiplies 64 outputs by COUNT stages of 128 inputs. The wgmmas of one scale group run while the previous group is
// scaled.
// At most two groups: with more, or across calls, the extra instructions cost more than the wait. A stage is freed
// before it is scaled.
template <int ROWS, int GROUPS, int COUNT, bool TRANSPOSED, typename Tile>
__device__ __forceinline__ void add_stages(
    float (&sums)[ROWS / 2], const Int8Addresses& at, PipelineState<Tile::STAGES>& pipe, const TransposedOperand& operand, uint32_t ring, int pitch, int lane) {
    using namespace hopper;
    constexpr int NUM_PARTS = COUNT * GROUPS, STEPS = 4 / GROUPS;
    static_assert(NUM_PARTS <= 2 && (NUM_PARTS == 1 || !TRANSPOSED));
    int numbers[NUM_PARTS][ROWS];
    float output_scale[COUNT][2];
    uint32_t index[COUNT], loaded[COUNT];
#pragma unroll
    for (int part = 0; part < NUM_PARTS; ++part) {
        const int stage = part / GROUPS, group = part % GROUPS;
        if (group == 0) {
            index[stage] = pipe.stage;
            mbarrier_wait(at.full + 8 * pipe.stage, pipe.parity);
            loaded[stage] = load_output_scales<TRANSPOSED>(output_scale[stage], at.output_scales + pipe.stage * Tile::BYTES);
            pipe.advance();
        }
        const uint32_t input = at.inputs + index[stage] * (Tile::BYTES >> 4) + group * STEPS * 2;
        if constexpr (TRANSPOSED) {
            begin_transposed_stage<ROWS>(numbers[part], operand, ring + index[stage] * Tile::BYTES, input);
        } else {
            begin_group<ROWS, STEPS>(numbers[part], at.weights + index[stage] * (Tile::BYTES >> 4) + group * STEPS * 2, input);
        }
    }
#pragma unroll
    for (int part = 0; part < NUM_PARTS; ++part) {
        const int stage = part / GROUPS, group = part % GROUPS;
        int (&mine)[ROWS] = numbers[part];
        float4 row_scales[ROWS / 8];  // scale and offset of two rows
#pragma unroll
        for (int c = 0; c < ROWS / 8; ++c) {
            row_scales[c] = ld_shared_float4(at.row_scales_at + index[stage] * Tile::BYTES + (group * pitch + 8 * c) * 8);
            loaded[stage] |= __float_as_uint(row_scales[c].x);
        }
        if (part + 1 < NUM_PARTS) {
            wgmma_wait<1>();
        } else {
            wgmma_wait<0>();
        }
#pragma unroll
        for (int j = 0; j < ROWS; ++j) asm volatile("" : "+r"(mine[j])::"memory");
        if (group + 1 == GROUPS) release_stage_after_loads(at.full + 8 * (Tile::STAGES + index[stage]), lane, loaded[stage]);
#pragma unroll
        for (int c = 0; c < ROWS / 8; ++c) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float number = static_cast<float>(256 * mine[4 * c + j] + mine[ROWS / 2 + 4 * c + j]);
                const float value = j % 2 ? fmaf(number, row_scales[c].z, row_scales[c].w) : fmaf(number, row_scales[c].x, row_scales[c].y);
                sums[4 * c + j] = fmaf(value, output_scale[stage][j / 2], sums[4 * c + j]);
            }
        }
    }
}

// Stores 8 * CHUNKS rows of a tile's 128 outputs as two-byte rows; a warp has 16 outputs. exchange: buffer of Int8Tile.
template <int CHUNKS, int SUMS>
__device__ __forceinline__ void store_two_byte_tile(
    const float (&sums)[SUMS], const WarpOutput& out, float2* scale_items, uint32_t buffers, uint32_t exchange) {
    constexpr int PITCH = STAGING_PITCH;
    const int tid = threadIdx.x - 128, warp = tid / 32, lane = tid % 32, t = lane & 3;
    const uint32_t exchange_sums = exchange + 8 * CHUNKS * 4 * 4;
    uint32_t pairs[CHUNKS][2], largest[CHUNKS];  // two rows per word
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const float* v = sums + 4 * c;
        pairs[c][0] = pack_half2(v[0], v[1]), pairs[c][1] = pack_half2(v[2], v[3]);
        largest[c] = __vmaxu2(pairs[c][0] & 0x7fff7fffu, pairs[c][1] & 0x7fff7fffu);
    }
#pragma unroll
    for (int offset = 4; offset < 32; offset <<= 1) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) largest[c] = __vmaxu2(largest[c], __shfl_xor_sync(FULL_MASK, largest[c], offset));
    }
    if (lane < 4) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) st_shared(exchange + ((c * 4 + t) * 8 + warp) * 4, largest[c]);
    }
    sync_warpgroups();
    const auto tile_abs_max = [&](int index) {
        const uint4 a = ld_shared_u128(exchange + index * 32), b = ld_shared_u128(exchange + index * 32 + 16);
        return __vmaxu2(__vmaxu2(__vmaxu2(a.x, a.y), __vmaxu2(a.z, a.w)), __vmaxu2(__vmaxu2(b.x, b.y), __vmaxu2(b.z, b.w)));
    };
    const uint32_t to = buffers + (lane & 7) * PITCH + (lane >> 3 & 1) * 16, from = buffers + (lane / 2) * PITCH + (lane & 1) * 16;
#pragma unroll
    for (int c = 0; c < CHUNKS; c += 2) {
        const uint32_t buffer = (c / 2 & 1) * 16 * PITCH;
#pragma unroll
        for (int d = 0; d < 2; ++d) {
            if (c + d < CHUNKS) {
                const uint32_t found = tile_abs_max((c + d) * 4 + t);
                const float row_scales[2] = {TwoByteScale(found & 0xffffu).inverse, TwoByteScale(found >> 16).inverse};
                uint32_t numbers[2];
#pragma unroll
                for (int up = 0; up < 2; ++up) {
                    const float2 v = __half22float2(*reinterpret_cast<const __half2*>(&pairs[c + d][up]));
                    numbers[up] = __byte_perm(two_byte_bits(v.x, row_scales[0]), two_byte_bits(v.y, row_scales[1]), 0x5410);
                }
                stmatrix_transposed(to + buffer + d * 8 * PITCH, numbers[0], numbers[1]);
            }
        }
        __syncwarp();
        const int row = 8 * c + lane / 2;
        const TwoByteRow bytes(ld_shared_u128(from + buffer));
        int sum = bytes.sum();
        sum += __shfl_xor_sync(FULL_MASK, sum, 1);
        if (c + 2 <= CHUNKS || lane < 16) {
            if ((lane & 1) == 0) st_shared(exchange_sums + (row * 8 + warp) * 4, static_cast<uint32_t>(sum));
            uint8_t* const at = out.two_part + static_cast<int64_t>(out.first_row + row) * 2 * out.pitch + (lane & 1) * 8;
            if (out.first_row + row < out.rows) bytes.store(at, out.pitch);
        }
        __syncwarp();
    }
    sync_warpgroups();
    if (tid < 8 * CHUNKS && out.first_row + tid < out.rows) {
        const uint4 a = ld_shared_u128(exchange_sums + tid * 32), b = ld_shared_u128(exchange_sums + tid * 32 + 16);
        const int sum = static_cast<int>(a.x + a.y + a.z + a.w + b.x + b.y + b.z + b.w);
        const uint32_t found = tile_abs_max(tid / 2);
        scale_items[out.first_row + tid] = two_byte_scale_item(TwoByteScale(tid & 1 ? found >> 16 : found & 0xffffu).scale, sum);
    }
}
#endif
