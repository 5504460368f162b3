// y = act(x @ W^T) for one row and W of 8 or 4 bits (quant.cuh), several maps in one launch, on Hopper's tensor cores. W is
// multiplied from where bulk copies have put it: no code of 8 bits is ever in a register.
//
// The codes are wgmma's first operand, the inputs its second: split into three parts, each of which holds what the ones
// before have left, so that nothing of an fp16 input is lost but last bits of those that are 4,000 times smaller than the
// largest of their 128, which have a scale. For fp8 the parts are e4m3 codes, each part's unit a 16th of the one's before, for
// int8 and int4 the bytes of 24 bits.
// The fp8 units add in some 14 bits: sums leave them after each 128 inputs.
//
// A unit of work is 32 outputs; a block's are neighbours. A tile is 32 outputs by four pieces of 128 bytes along k: two
// pieces side by side are the operand's 64 rows, each multiplied by the columns of its own inputs (0 .. 3 and 4 .. 7).
// Four warpgroups take turns with a unit's tiles, so that four are worked at; a warp more keeps the ring of tiles filled,
// from before the launch's inputs are there.
//
// A map: codes [n, k] (n a multiple of 32, k of 128, of 4 bits 256, at most 4,096), or halves (n of 32, k of 64).
// Bytes: W and its scales once; x, 2k, and where there is one the norm's and a mix's weights, in every block.
#include "quant.cuh"
#include "quant_maps.cuh"
#include "wide_maps.cuh"

constexpr int UNIT = 32, PIECES = 4, WARPGROUPS = 4, CONSUMERS = 128 * WARPGROUPS;
constexpr int STAGES = 2 * WARPGROUPS;  // of the ring; a multiple, so that a place always is the same warpgroup's
constexpr int TILE_ROOM = UNIT * PIECES * TILE_BYTES, INPUT_ROOM = MOST_HELD * 4 + 256;  // 256: read past, not used

struct RowLaunch {
    CUtensorMap weights[MAX_MAPS];
    QuantArgs args;
    int first_unit[MAX_MAPS + 1];
    int64_t first_byte[MAX_MAPS + 1];  // of W; units are dealt by these
    int working;  // blocks that have units
};

// The first unit that begins at this byte or behind.
__host__ __device__ __forceinline__ int unit_from(const RowLaunch& p, int64_t byte) {
    int map = 0;
    while (map + 1 < p.args.count && byte >= p.first_byte[map + 1]) ++map;
    const int units = p.first_unit[map + 1] - p.first_unit[map];
    if (units == 0) return p.first_unit[map];
    const int64_t each = (p.first_byte[map + 1] - p.first_byte[map]) / units, in_map = (byte - p.first_byte[map] + each - 1) / each;
    return p.first_unit[map] + static_cast<int>(in_map < units ? in_map : units);
}
__host__ __device__ __forceinline__ int first_unit_of(const RowLaunch& p, int block, int blocks) {
    return unit_from(p, (p.first_byte[p.args.count] * block + blocks - 1) / blocks);
}

template <Format FORMAT>
struct RowTile {
    static constexpr bool grouped = FORMAT != FP8;
    static constexpr int GROUPS = FORMAT == INT4 ? 2 * PIECES : PIECES;  // of 128 inputs
    static constexpr int SCALE_ITEM = FORMAT == INT4 ? 4 : 2;
    static constexpr int BYTES = TILE_ROOM + (grouped ? 1024 : 0);
};

struct RowRoom {
    uint64_t full[STAGES], empty[STAGES];
    float scales[MOST_HELD / GROUP_INPUTS];       // of x
    float4 input_sums[MOST_HELD / GROUP_INPUTS];  // of its parts, where codes have a zero
    float sums[2][2 * WARPGROUPS][UNIT];          // of a unit, of each warpgroup two; taken in turn
    MixRoom mix;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr int PARTS = 3;           // of an input
constexpr int PAIR_BYTES = 1024;  // inputs of two groups of 128: [16 inputs][group, part][16]

namespace hopper {
// Rows of 16 bytes, 8 of them neighbours, no swizzle. `along_k`: bytes to a row's next 16; `along_rows`: to the next 8 rows.
__device__ __forceinline__ uint64_t describe_rows_of_16(uint32_t address, uint32_t along_k, uint32_t along_rows) {
    return static_cast<uint64_t>((address & 0x3ffff) >> 4) | static_cast<uint64_t>(along_k >> 4) << 16 |
           static_cast<uint64_t>(along_rows >> 4) << 32;
}
__device__ __forceinline__ void publish_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// s [64 x 8] += a [64 x 32] * b [8 x 32]^T, or = without `add`.
__device__ __forceinline__ void multiply_e4m3(float (&s)[4], uint64_t a, uint64_t b, int add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %6, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0,%1,%2,%3}, %4, %5, add, 1, 1;\n}"
                 : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3]) : "l"(a), "l"(b), "r"(add));
}
__device__ __forceinline__ void multiply_bytes(int (&s)[4], uint64_t a, uint64_t b, int add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %6, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n8k32.s32.u8.s8 {%0,%1,%2,%3}, %4, %5, add;\n}"
                 : "+r"(s[0]), "+r"(s[1]), "+r"(s[2]), "+r"(s[3]) : "l"(a), "l"(b), "r"(add));
}
__device__ __forceinline__ void multiply_bytes(int (&s)[4], const uint32_t (&a)[4], uint64_t b, int add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %9, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n8k32.s32.u8.s8 {%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, add;\n}"
                 : "+r"(s[0]), "+r"(s[1]), "+r"(s[2]), "+r"(s[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
// s [64 x 16] += a [64 x 16] * b [16 x 16]^T of halves.
__device__ __forceinline__ void multiply_16_halves(float (&s)[8], uint64_t a, uint64_t b, int add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %10, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7}, %8, %9, add, 1, 1, 0, 0;\n}"
                 : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3]), "+f"(s[4]), "+f"(s[5]), "+f"(s[6]), "+f"(s[7])
                 : "l"(a), "l"(b), "r"(add));
}
}  // namespace hopper

__device__ __forceinline__ void sync_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }
__device__ __forceinline__ void put_words(uint32_t at, uint32_t a, uint32_t b) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(at), "r"(a), "r"(b) : "memory");
}
__device__ __forceinline__ void put_word(uint32_t at, uint32_t v) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory");
}

// Of the half-warp, which holds 128 inputs.
__device__ __forceinline__ float half_warp_max(float v) {
#pragma unroll
    for (int i = 8; i > 0; i >>= 1) v = fmaxf(v, __shfl_xor_sync(FULL, v, i));
    return v;
}
__device__ __forceinline__ int half_warp_sum(int v) {
#pragma unroll
    for (int i = 8; i > 0; i >>= 1) v += __shfl_xor_sync(FULL, v, i);
    return v;
}
__device__ __forceinline__ uint32_t pack_bytes(int a, int b, int c, int d) {
    return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

// Inputs c .. c + 7 (zeros where `inside` is false) as parts into the operand's place at x. All lanes of a warp.
template <Format FORMAT>
__device__ __forceinline__ void store_parts(uint32_t x, RowRoom& room, int c, const uint4& given, bool inside) {
    float f[8], largest = 0.0f;
    unpack8(given, f);
#pragma unroll
    for (int j = 0; j < 8; ++j) largest = fmaxf(largest, fabsf(f[j]));
    largest = half_warp_max(largest);
    const int group = c / GROUP_INPUTS;
    const uint32_t to = x + group / 2 * PAIR_BYTES + group % 2 * 64;
    if constexpr (FORMAT == FP8) {
        // The largest becomes 128 to 256.
        const uint32_t exponent = largest > 0.0f ? __float_as_uint(largest) >> 23 : 127u;
        const float inverse = __uint_as_float((261u - exponent) << 23);
        uint32_t codes[PARTS][4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float lo = f[2 * j] * inverse, hi = f[2 * j + 1] * inverse;
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                uint16_t code;
                asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(code) : "f"(hi), "f"(lo));
                codes[part][j] = code;
                const uint32_t pair = halves_of_two_e4m3(code);
                const float2 meant = __half22float2(*reinterpret_cast<const __half2*>(&pair));
                lo = (lo - meant.x) * 16.0f, hi = (hi - meant.y) * 16.0f;
            }
        }
        if (!inside) return;
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
            put_words(to + c % 128 / 16 * 128 + part * 16 + (c & 8), codes[part][0] | codes[part][1] << 16, codes[part][2] | codes[part][3] << 16);
        if ((threadIdx.x & 15) == 0) room.scales[group] = __uint_as_float((exponent - 7u) << 23);
    } else {
        constexpr float MOST = 127.0f * 65536.0f;
        const float inverse = largest > 0.0f ? MOST / largest : 0.0f;
        int parts[PARTS][8], sums[PARTS] = {};
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const int v = __float2int_rn(f[j] * inverse), high = (v + 32896) >> 16, rest = v - (high << 16), middle = (rest + 128) >> 8;
            parts[0][j] = high, parts[1][j] = middle, parts[2][j] = rest - (middle << 8);
        }
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
#pragma unroll
            for (int j = 0; j < 8; ++j) sums[part] += parts[part][j];
            sums[part] = half_warp_sum(sums[part]);
        }
        if (!inside) return;
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            const auto& v = parts[part];
            if constexpr (FORMAT == INT8) {
                put_words(to + c % 128 / 16 * 128 + part * 16 + (c & 8), pack_bytes(v[0], v[1], v[2], v[3]), pack_bytes(v[4], v[5], v[6], v[7]));
            } else {
                // As a lane has the codes of a word: of lane t's 16 bytes word s in step s, the lower nibbles of its bytes first.
                const int word = c % 128 / 8, t = word / 4, step = word % 4;
                const uint32_t at = to + step * 256 + part * 16 + 4 * t;
                put_word(at, pack_bytes(v[0], v[4], v[1], v[5]));
                put_word(at + 128, pack_bytes(v[2], v[6], v[3], v[7]));
            }
        }
        if ((threadIdx.x & 15) == 0) {
            room.scales[group] = largest / MOST;
            room.input_sums[group] = make_float4(sums[0], sums[1], sums[2], 0.0f);
        }
    }
}

// One lane: the tiles of a block's units into the ring.
template <Format FORMAT>
__device__ __forceinline__ void fetch_units(const RowLaunch& p, RowRoom& room, uint32_t ring, int first, int last) {
    using namespace hopper;
    using Tile = RowTile<FORMAT>;
    const uint32_t full = shared_address(room.full), empty = shared_address(room.empty);
    uint32_t stage = 0, parity = 1;
    int map = 0;
    for (int unit = first; unit < last; ++unit) {
        while (unit >= p.first_unit[map + 1]) ++map;
        const QuantMap& m = p.args.maps[map];
        const bool half = m.scales == nullptr;
        const int output = (unit - p.first_unit[map]) * UNIT, row_bytes = half ? 2 * m.k : FORMAT == INT4 ? m.k / 2 : m.k;
        for (int step = 0; step * PIECES * TILE_BYTES < row_bytes; ++step) {
            wait_barrier(empty + 8 * stage, parity);
            const uint32_t barrier = full + 8 * stage, to = ring + stage * Tile::BYTES;
            const int groups = half || !Tile::grouped ? 0 : min(Tile::GROUPS, m.k / GROUP_INPUTS - step * Tile::GROUPS);
            expect_bytes(barrier, TILE_ROOM + groups * UNIT * Tile::SCALE_ITEM);
            copy_box(to, &p.weights[map], 0, output, step * PIECES, barrier, EVICT_FIRST);
            for (int i = 0; i < groups; ++i) {
                const auto* from = static_cast<const uint8_t*>(m.scales) + (static_cast<int64_t>(step * Tile::GROUPS + i) * m.n + output) * Tile::SCALE_ITEM;
                copy_line(to + TILE_ROOM + i * UNIT * Tile::SCALE_ITEM, from, UNIT * Tile::SCALE_ITEM, barrier);
            }
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
    }
}
#endif

template <Format FORMAT, bool NORMED>
__global__ void __launch_bounds__(CONSUMERS + 32, 1) wide_row_kernel(const __grid_constant__ RowLaunch p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using namespace hopper;
    using Tile = RowTile<FORMAT>;
    using Sum = std::conditional_t<FORMAT == FP8, float, int>;
    using Mix = RowMix<CONSUMERS>;
    extern __shared__ unsigned char dynamic[];
    const uint32_t ring = (shared_address(dynamic) + 1023) & ~1023u, x = ring + STAGES * Tile::BYTES;
    RowRoom& room = *reinterpret_cast<RowRoom*>(dynamic + (x + INPUT_ROOM - shared_address(dynamic)));
    const int warp = __shfl_sync(FULL, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, t = lane & 3;
    const uint32_t full = shared_address(room.full), empty = shared_address(room.empty);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            init_barrier(full + 8 * i, 1);
            init_barrier(empty + 8 * i, 4);
        }
        publish_barriers();
    }
    __syncthreads();
    let_next_start();
    const int first = first_unit_of(p, blockIdx.x, gridDim.x), last = first_unit_of(p, blockIdx.x + 1, gridDim.x);
    if (warp == CONSUMERS / 32) {
        if (elect_lane()) fetch_units<FORMAT>(p, room, ring, first, last);
        return;
    }
    if (first >= last) {
        wait_for_inputs();  // until then it keeps its place, so that blocks of later launches are spread evenly
        return;
    }
    int map = 0;
    while (first >= p.first_unit[map + 1]) ++map;
    std::conditional_t<NORMED, Mix, int> row = [&] {
        if constexpr (NORMED) return Mix(p.args.norm, p.args.maps[map].x);
        else return 0;
    }();
    wait_for_inputs();
    if constexpr (NORMED) row.enter(p.args.norm, room.mix, sync_consumers);

    // The row as a map wants it.
    const auto make_inputs = [&](const QuantMap& m, bool is_first) {
        if (!is_first) sync_consumers();  // the ones before have been multiplied
        const bool half = m.scales == nullptr;
        uint4 values[Mix::TIMES];
#pragma unroll
        for (int i = 0; i < Mix::TIMES; ++i) {
            const int c = Mix::channel(i);
            values[i] = make_uint4(0, 0, 0, 0);
            if (c >= m.k) continue;
            if constexpr (NORMED) {
                if (!is_first) row.mix[i] = load16(m.x + c);
            } else {
                values[i] = load16(m.x + c);
            }
        }
#pragma unroll
        for (int i = 0; i < Mix::TIMES; ++i) {
            const int c = Mix::channel(i);
            if constexpr (NORMED) {
                if (c < m.k) values[i] = row.mixed(p.args.norm, room.mix, i, is_first);
            }
            if (half) {
                asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(x + 2 * c), "r"(values[i].x), "r"(values[i].y),
                             "r"(values[i].z), "r"(values[i].w) : "memory");
            } else {
                store_parts<FORMAT>(x, room, c, values[i], c < m.k);
            }
        }
        publish_shared();
        sync_consumers();
    };

    const int group = warp / 4, second = warp % 4 / 2;   // the warpgroup; which of two pieces side by side the warp's rows are
    const int output = warp % 2 * 16 + g;                // of the unit, and the one 8 behind
    const bool low_part = t & 1;                         // its column is the third part
    int stage = group, parity = 0;  // of the warpgroup's next tile
    int made = -1, arrived = 0;
    // Its tiles are those whose number leaves it when divided by WARPGROUPS: who waits for a place to be filled again must have
    // seen it filled before, as a parity tells no more than that.
    const auto release = [&] {
        __syncwarp();
        if (lane == 0) arrive(empty + 8 * stage);
        stage += WARPGROUPS;
        if (stage >= STAGES) stage -= STAGES, parity ^= 1;
    };
    int before = 0;  // tiles of the units before
    for (int unit = first; unit < last; ++unit) {
        while (unit >= p.first_unit[map + 1]) ++map;
        const QuantMap& m = p.args.maps[map];
        if (map != made) {
            make_inputs(m, made < 0);
            if (NORMED && made < 0 && threadIdx.x == 0) arrived = atomicAdd(p.args.norm.counter, 1);
            made = map;
        }
        const bool half = m.scales == nullptr;
        const int out = (unit - p.first_unit[map]) * UNIT + threadIdx.x;  // of a thread of the first warp
        float scale = half ? 1.0f : code_scale<FORMAT>();
        if (FORMAT == FP8 && !half && warp == 0) scale *= __ldg(static_cast<const float*>(m.scales) + out);
        const int depth = half ? PIECES * 64 : Tile::GROUPS * GROUP_INPUTS, steps = (m.k + depth - 1) / depth;
        float sums[2] = {};
        const int turn = (group - before) & (WARPGROUPS - 1);  // its first tile of the unit
        before += steps;
        int step = turn;
        if (half) {
            float products[8] = {};
            for (; step < steps; step += WARPGROUPS) {
                wait_barrier(full + 8 * stage, parity);
                const uint64_t a = describe_tile(ring + stage * Tile::BYTES);
                const uint64_t b = describe_rows_of_16(x + step * PIECES * 128, 16, 128);
                begin_products();
#pragma unroll
                for (int pair = 0; pair < 2; ++pair) {
#pragma unroll
                    for (int j = 0; j < 4; ++j)
                        multiply_16_halves(products, a + pair * (TILE_ROOM / 2 / 16) + 2 * j, b + pair * 16 + 2 * j, 1);
                }
                commit_products();
                wait_products<0>();
                release();
            }
#pragma unroll
            for (int i = 0; i < 8; ++i) asm volatile("" : "+f"(products[i])::"memory");
#pragma unroll
            for (int i = 0; i < 2; ++i) sums[i] = second ? products[4 + 2 * i] : products[2 * i];  // of lanes with t == 0
        } else {
            constexpr int PAIRS = Tile::GROUPS / 2;  // of groups of inputs
            const int groups = m.k / GROUP_INPUTS;
            for (; step < steps; step += WARPGROUPS) {
                wait_barrier(full + 8 * stage, parity);
                const uint32_t tile = ring + stage * Tile::BYTES;
                Sum products[PAIRS][4];
                const int first_pair = step * PAIRS;
                if constexpr (FORMAT != INT4) {
                    begin_products();
#pragma unroll
                    for (int pair = 0; pair < PAIRS; ++pair) {
                        const uint64_t a = describe_tile(tile + pair * (TILE_ROOM / PAIRS));
                        const uint64_t b = describe_rows_of_16(x + (first_pair + pair) * PAIR_BYTES, 128, 128);
#pragma unroll
                        for (int j = 0; j < 4; ++j) {
                            if constexpr (FORMAT == FP8) multiply_e4m3(products[pair], a + 2 * j, b + 16 * j, j);
                            else multiply_bytes(products[pair], a + 2 * j, b + 16 * j, j);
                        }
                    }
                    commit_products();
                } else {
                    constexpr int TOGETHER = 2;  // pieces of 256 inputs whose codes are in registers until they are multiplied
#pragma unroll
                    for (int piece = 0; piece < PAIRS; piece += TOGETHER) {
                        uint32_t codes[TOGETHER][4][4];  // of each step the operand's registers
#pragma unroll
                        for (int pair = 0; pair < TOGETHER; ++pair) {
#pragma unroll
                            for (int up = 0; up < 2; ++up) {
                                const int line = output + 8 * up;
                                const uint4 v = shared_u128(tile + (piece + pair) * UNIT * TILE_BYTES + line * TILE_BYTES + (((second * 4 + t) ^ (line & 7)) << 4));
#pragma unroll
                                for (int j = 0; j < 4; ++j) {
                                    const uint32_t word = j == 0 ? v.x : j == 1 ? v.y : j == 2 ? v.z : v.w;
                                    codes[pair][j][up] = word & 0x0f0f0f0fu, codes[pair][j][2 + up] = word >> 4 & 0x0f0f0f0fu;
                                }
                            }
                        }
                        begin_products();
#pragma unroll
                        for (int pair = 0; pair < TOGETHER; ++pair) {
                            const uint64_t b = describe_rows_of_16(x + (first_pair + piece + pair) * PAIR_BYTES, 128, 128);
#pragma unroll
                            for (int j = 0; j < 4; ++j) multiply_bytes(products[piece + pair], codes[pair][j], b + 16 * j, j);
                        }
                        commit_products();
                        if (piece + TOGETHER < PAIRS) wait_products<0>();
                    }
                }
                // While they run: what the sums are multiplied by.
                float unit_of_x[PAIRS], of_codes[PAIRS][2], zeros[PAIRS][2];
                float4 of_parts[PAIRS];
#pragma unroll
                for (int pair = 0; pair < PAIRS; ++pair) {
                    const int of_inputs = min(2 * (first_pair + pair) + second, groups - 1);
                    unit_of_x[pair] = room.scales[of_inputs];
                    if constexpr (Tile::grouped) {
                        of_parts[pair] = room.input_sums[of_inputs];
#pragma unroll
                        for (int i = 0; i < 2; ++i) {
                            const uint32_t at = tile + TILE_ROOM + ((of_inputs - step * Tile::GROUPS) * UNIT + output + 8 * i) * Tile::SCALE_ITEM;
                            zeros[pair][i] = 128.0f;
                            if constexpr (FORMAT == INT4) {
                                uint32_t item;
                                asm volatile("ld.shared.u32 %0, [%1];" : "=r"(item) : "r"(at) : "memory");
                                const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&item));
                                of_codes[pair][i] = both.x, zeros[pair][i] = both.y - 1024.0f;
                            } else {
                                uint16_t item;
                                asm volatile("ld.shared.u16 %0, [%1];" : "=h"(item) : "r"(at) : "memory");
                                of_codes[pair][i] = __half2float(__ushort_as_half(item));
                            }
                        }
                    }
                }
                wait_products<0>();
                release();
#pragma unroll
                for (int pair = 0; pair < PAIRS; ++pair) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        if constexpr (FORMAT == FP8) asm volatile("" : "+f"(products[pair][i])::"memory");
                        else asm volatile("" : "+r"(products[pair][i])::"memory");
                    }
                    if (2 * (first_pair + pair) + second >= groups) continue;
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const Sum one = products[pair][2 * i], other = products[pair][2 * i + 1];
                        if constexpr (FORMAT == FP8) {
                            sums[i] = fmaf(low_part ? one * 0x1p-8f : fmaf(other, 0x1p-4f, one), unit_of_x[pair], sums[i]);
                        } else {
                            const float zero = -zeros[pair][i];
                            const float sum = low_part ? fmaf(zero, of_parts[pair].z, static_cast<float>(one))
                                                       : fmaf(fmaf(zero, of_parts[pair].x, static_cast<float>(one)), 65536.0f,
                                                              fmaf(zero, of_parts[pair].y, static_cast<float>(other)) * 256.0f);
                            sums[i] = fmaf(sum, unit_of_x[pair] * of_codes[pair][i], sums[i]);
                        }
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) sums[i] += __shfl_xor_sync(FULL, sums[i], 1);
        }
        auto& of_unit = room.sums[unit & 1];
        if (t == (half ? 0 : 2 * second)) of_unit[2 * turn + second][output] = sums[0], of_unit[2 * turn + second][output + 8] = sums[1];
        sync_consumers();
        if (warp == 0 && out < m.n) {
            float y[1] = {};
#pragma unroll
            for (int i = 0; i < 2 * WARPGROUPS; ++i) y[0] += of_unit[i][lane];
            y[0] *= scale;
            activate_sums<1>(y, m.activation);
            if (m.float_out) {
                static_cast<float*>(m.y)[out] = y[0];
            } else {
                static_cast<__half*>(m.y)[out] = __float2half_rn(y[0]);
            }
        }
    }
    if constexpr (NORMED) keep_token<CONSUMERS>(p.args.norm, room.mix, arrived, p.working, sync_consumers);
#endif
}

template <Format FORMAT, bool NORMED>
static int launch_row(const RowLaunch& p, void* stream) {
    static bool raised[MAX_DEVICES] = {};
    const auto kernel = wide_row_kernel<FORMAT, NORMED>;
    const int bytes = 1024 + STAGES * RowTile<FORMAT>::BYTES + INPUT_ROOM + static_cast<int>(sizeof(RowRoom));
    if (!raised[this_device()]) {
        const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, this_machine().shared_bytes);
        if (error != cudaSuccess) return static_cast<int>(error);
        raised[this_device()] = true;
    }
    launch_with_split(kernel, dim3(this_machine().processors), CONSUMERS + 32, bytes, 100, stream, p);
    return launch_result();
}

template <Format FORMAT>
static int launch_format(const QuantArgs& args, void* stream) {
    if (encode_tiled() == nullptr) return static_cast<int>(cudaErrorNotSupported);
    RowLaunch p = {};
    p.args = args;
    for (int i = 0; i < args.count; ++i) {
        const QuantMap& m = args.maps[i];
        const bool half = m.scales == nullptr;
        if (m.k > MOST_HELD || m.k % 64 || (args.norm.x != nullptr && m.k != args.norm.width)) return static_cast<int>(cudaErrorInvalidValue);
        const int row_bytes = half ? 2 * m.k : FORMAT == INT4 ? m.k / 2 : m.k, units = (m.n + UNIT - 1) / UNIT;
        p.first_unit[i + 1] = p.first_unit[i] + units;
        p.first_byte[i + 1] = p.first_byte[i] + static_cast<int64_t>(units) * UNIT * row_bytes;
        const ElementType element = half ? HALVES : BYTES;
        if (!describe(&p.weights[i], m.codes, element, m.n, TILE_BYTES / element.bytes, row_bytes / element.bytes, row_bytes / TILE_BYTES, UNIT, PIECES)) {
            return static_cast<int>(cudaErrorInvalidValue);
        }
    }
    const int blocks = this_machine().processors;
    for (int i = 0; i < blocks; ++i) p.working += first_unit_of(p, i, blocks) < first_unit_of(p, i + 1, blocks);
    if constexpr (FORMAT == FP8) {  // of the others that is slower
        if (args.norm.x != nullptr) return launch_row<FORMAT, true>(p, stream);
    }
    return args.norm.x == nullptr ? launch_row<FORMAT, false>(p, stream) : static_cast<int>(cudaErrorInvalidValue);
}

// One row of maps of up to 4,096 inputs each.
RWKV_API int rwkv_wide_row(const QuantArgs* args, void* stream) {
    if (args->rows != 1) return static_cast<int>(cudaErrorInvalidValue);
    switch (args->format) {
        case FP8: return launch_format<FP8>(*args, stream);
        case INT8: return launch_format<INT8>(*args, stream);
        case INT4: return launch_format<INT4>(*args, stream);
    }
    return static_cast<int>(cudaErrorInvalidValue);
}
