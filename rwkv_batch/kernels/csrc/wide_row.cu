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
// from before the launch's inputs are there. Before these have been asked for it asks for EARLY_TILES only: what is asked
// for later by any block, ffn.value's or the WKV's beside this one too, waits behind that.
//
// A block's units are of one map, so that it makes its row once. Maps get blocks by their bytes.
//
// A map: codes [n, k] (n a multiple of 32, k of 128, of 4 bits 256, at most 4,096), or halves (n of 32, k of 64).
// Bytes: W and its scales once; x, 2k, and where there is one the norm's and a mix's weights, in every block.
#include "quant.cuh"
#include "quant_maps.cuh"
#include "wide_maps.cuh"

constexpr int UNIT = 32, PIECES = 4, WARPGROUPS = 4, CONSUMERS = 128 * WARPGROUPS;
constexpr int STAGES = 2 * WARPGROUPS;  // of the ring; a multiple, so that a place always is the same warpgroup's
constexpr int EARLY_TILES = 4;  // of a block, asked for before its inputs are
constexpr int TILE_ROOM = UNIT * PIECES * TILE_BYTES, INPUT_ROOM = MOST_HELD * 4 + 256;  // 256: read past, not used

struct RowLaunch {
    CUtensorMap weights[MAX_MAPS], scales[MAX_MAPS];
    QuantArgs args;
    int units[MAX_MAPS];
};

// A block's units, which are of one map.
struct RowShare {
    int map, first, last;
};

__device__ __forceinline__ RowShare share_of(const RowLaunch& p, int block) {
    int map = 0;
    while (map + 1 < p.args.count && block >= p.args.maps[map + 1].first_block) ++map;
    const QuantMap& m = p.args.maps[map];
    const int64_t units = p.units[map], mine = block - m.first_block;
    return {map, static_cast<int>(mine * units / m.blocks), static_cast<int>((mine + 1) * units / m.blocks)};
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
    uint64_t asked[2];  // whether the warps have asked for the constants that their inputs are made of, and for the rest
    float scales[MOST_HELD / GROUP_INPUTS];         // of x
    float input_sums[MOST_HELD / GROUP_INPUTS][2];  // of its upper two parts and of its third, where codes have a zero
    float sums[2][2 * WARPGROUPS][UNIT];            // of a unit, of each warpgroup two; taken in turn
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
            room.input_sums[group][0] = static_cast<float>(sums[0] * 256 + sums[1]) * 256.0f;
            room.input_sums[group][1] = sums[2];
        }
    }
}

// One lane: the tiles of a block's units into the ring.
template <Format FORMAT>
__device__ __forceinline__ void fetch_units(const RowLaunch& p, RowRoom& room, uint32_t ring, const RowShare& share) {
    using namespace hopper;
    using Tile = RowTile<FORMAT>;
    const uint32_t full = shared_address(room.full), empty = shared_address(room.empty);
    const QuantMap& m = p.args.maps[share.map];
    const bool half = m.scales == nullptr;
    const int row_bytes = half ? 2 * m.k : FORMAT == INT4 ? m.k / 2 : m.k;
    const uint32_t asked = shared_address(room.asked);
    uint32_t stage = 0, parity = 1;
    int count = 0;
    wait_barrier(asked, 0);
    for (int unit = share.first; unit < share.last; ++unit) {
        const int output = unit * UNIT;
        for (int step = 0; step * PIECES * TILE_BYTES < row_bytes; ++step) {
            wait_barrier(empty + 8 * stage, parity);
            const uint32_t barrier = full + 8 * stage, to = ring + stage * Tile::BYTES;
            if (count++ == EARLY_TILES) wait_barrier(asked + 8, 0);
            const bool scaled = Tile::grouped && !half;
            expect_bytes(barrier, TILE_ROOM + (scaled ? Tile::GROUPS * UNIT * Tile::SCALE_ITEM : 0));
            copy_box(to, &p.weights[share.map], 0, output, step * PIECES, barrier, EVICT_FIRST);
            if (scaled) copy_box(to + TILE_ROOM, &p.scales[share.map], output, step * Tile::GROUPS, 0, barrier, EVICT_FIRST);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
    }
}
#endif

// At most 64 registers a thread of 4 bits, 48 of 8: so many blocks of ffn.value and the WKV stand beside.
template <Format FORMAT, bool NORMED>
__global__ void __launch_bounds__(FORMAT == INT4 ? 1024 : 640, FORMAT == INT4 ? 1 : 2) wide_row_kernel(const __grid_constant__ RowLaunch p) {
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
        for (int i = 0; i < 2; ++i) init_barrier(shared_address(&room.asked[i]), CONSUMERS / 32);
        publish_barriers();
    }
    __syncthreads();
    let_next_start();
    const RowShare share = share_of(p, blockIdx.x);
    if (warp == CONSUMERS / 32) {
        if (elect_lane()) fetch_units<FORMAT>(p, room, ring, share);
        return;
    }
    const QuantMap& m = p.args.maps[share.map];
    const bool half = m.scales == nullptr;
    int arrived = 0;
    const auto have_asked = [&](int which) {
        if (lane == 0) arrive(shared_address(&room.asked[which]));
    };

    // The row as the map wants it.
    const auto put_inputs = [&](int c, const uint4& values) {
        if (half) {
            asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(x + 2 * c), "r"(values.x), "r"(values.y), "r"(values.z), "r"(values.w) : "memory");
        } else {
            store_parts<FORMAT>(x, room, c, values, c < m.k);
        }
    };
    const auto inputs_are_there = [&] {
        publish_shared();
        sync_consumers();
    };
    if constexpr (NORMED) {
        Mix row(p.args.norm, m.x);
        have_asked(0);
        wait_for_inputs();
        row.enter(p.args.norm, room.mix, sync_consumers, [&] { have_asked(1); });
#pragma unroll
        for (int i = 0; i < Mix::TIMES; ++i) {
            const int c = Mix::channel(i);
            put_inputs(c, c < m.k ? row.mixed(p.args.norm, room.mix, i) : make_uint4(0, 0, 0, 0));
        }
        inputs_are_there();
        if (threadIdx.x == 0) arrived = atomicAdd(p.args.norm.counter, 1);
    } else {
        have_asked(0);
        wait_for_inputs();
        uint4 values[Mix::TIMES];
#pragma unroll
        for (int i = 0; i < Mix::TIMES; ++i) {
            const int c = Mix::channel(i);
            values[i] = c < m.k ? load16(m.x + c) : make_uint4(0, 0, 0, 0);
        }
        have_asked(1);
#pragma unroll
        for (int i = 0; i < Mix::TIMES; ++i) put_inputs(Mix::channel(i), values[i]);
        inputs_are_there();
    }

    const int group = warp / 4, second = warp % 4 / 2;   // the warpgroup; which of two pieces side by side the warp's rows are
    const int output = warp % 2 * 16 + g;                // of the unit, and the one 8 behind
    const bool low_part = t & 1;                         // its column is the third part
    int stage = group, parity = 0;  // of the warpgroup's next tile
    // Its tiles are those whose number leaves it when divided by WARPGROUPS: who waits for a place to be filled again must have
    // seen it filled before, as a parity tells no more than that.
    const auto release = [&] {
        __syncwarp();
        if (lane == 0) arrive(empty + 8 * stage);
        stage += WARPGROUPS;
        if (stage >= STAGES) stage -= STAGES, parity ^= 1;
    };
    int before = 0;  // tiles of the units before
    for (int unit = share.first; unit < share.last; ++unit) {
        const int out = unit * UNIT + threadIdx.x;  // of a thread of the first warp
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
#pragma unroll
                    for (int pair = 0; pair < PAIRS; ++pair) {
                        uint32_t codes[4][4];  // of each step the operand's registers
#pragma unroll
                        for (int up = 0; up < 2; ++up) {
                            const int line = output + 8 * up;
                            const uint4 v = shared_u128(tile + pair * UNIT * TILE_BYTES + line * TILE_BYTES + (((second * 4 + t) ^ (line & 7)) << 4));
#pragma unroll
                            for (int j = 0; j < 4; ++j) {
                                const uint32_t word = j == 0 ? v.x : j == 1 ? v.y : j == 2 ? v.z : v.w;
                                codes[j][up] = word & 0x0f0f0f0fu, codes[j][2 + up] = word >> 4 & 0x0f0f0f0fu;
                            }
                        }
                        begin_products();
                        const uint64_t b = describe_rows_of_16(x + (first_pair + pair) * PAIR_BYTES, 128, 128);
#pragma unroll
                        for (int j = 0; j < 4; ++j) multiply_bytes(products[pair], codes[j], b + 16 * j, j);
                        commit_products();
                        if (pair + 1 < PAIRS) wait_products<0>();
                    }
                }
                // What the sums are multiplied by, and what their codes' zeros come to.
                float unit_of_x[PAIRS], of_parts[PAIRS];
                uint32_t items[PAIRS][2];
                const auto load_scales = [&] {
#pragma unroll
                    for (int pair = 0; pair < PAIRS; ++pair) {
                        const int of_inputs = min(2 * (first_pair + pair) + second, groups - 1);
                        unit_of_x[pair] = room.scales[of_inputs];
                        if constexpr (Tile::grouped) {
                            of_parts[pair] = room.input_sums[of_inputs][low_part];
#pragma unroll
                            for (int i = 0; i < 2; ++i) {
                                const uint32_t at = tile + TILE_ROOM + ((of_inputs - step * Tile::GROUPS) * UNIT + output + 8 * i) * Tile::SCALE_ITEM;
                                if constexpr (FORMAT == INT4) {
                                    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(items[pair][i]) : "r"(at) : "memory");
                                } else {
                                    uint16_t item;
                                    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(item) : "r"(at) : "memory");
                                    items[pair][i] = item;
                                }
                            }
                        }
                    }
                };
                if constexpr (FORMAT != INT4) load_scales();
                wait_products<0>();
                if constexpr (FORMAT == INT4) load_scales();  // their registers held codes until then
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
                            const float2 item = __half22float2(*reinterpret_cast<const __half2*>(&items[pair][i]));
                            const float zero = FORMAT == INT4 ? 1024.0f - item.y : -128.0f;
                            const float whole = low_part ? static_cast<float>(one) : fmaf(static_cast<float>(one), 65536.0f, static_cast<float>(other) * 256.0f);
                            sums[i] = fmaf(fmaf(zero, of_parts[pair], whole), unit_of_x[pair] * item.x, sums[i]);
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
    if constexpr (NORMED) keep_token<CONSUMERS>(p.args.norm, room.mix, arrived, gridDim.x, sync_consumers);
#endif
}

template <Format FORMAT, bool NORMED>
static int launch_row(const RowLaunch& p, void* stream) {
    static bool raised[MAX_DEVICES] = {};
    const auto kernel = wide_row_kernel<FORMAT, NORMED>;
    const QuantMap& last = p.args.maps[p.args.count - 1];
    const int bytes = 1024 + STAGES * RowTile<FORMAT>::BYTES + INPUT_ROOM + static_cast<int>(sizeof(RowRoom));
    if (!raised[this_device()]) {
        const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, this_machine().shared_bytes);
        if (error != cudaSuccess) return static_cast<int>(error);
        raised[this_device()] = true;
    }
    launch_with_split(kernel, dim3(last.first_block + last.blocks), CONSUMERS + 32, bytes, 100, stream, p);
    return launch_result();
}

// Deals blocks to the maps by what they read.
template <typename BytesOf>
static void deal_blocks(RowLaunch& p, int blocks, const BytesOf& bytes_of) {
    QuantMap* const maps = p.args.maps;
    for (int i = 0; i < p.args.count; ++i) maps[i].blocks = 1;
    for (int given = p.args.count; given < blocks; ++given) {
        int most = 0;
        for (int i = 1; i < p.args.count; ++i) {
            if (bytes_of(i) * maps[most].blocks > bytes_of(most) * maps[i].blocks) most = i;
        }
        ++maps[most].blocks;
    }
    for (int i = 0, first = 0; i < p.args.count; ++i) {
        maps[i].blocks = min(maps[i].blocks, p.units[i]);
        maps[i].first_block = first, first += maps[i].blocks;
    }
}

// Scales [k / 128][n] in boxes of a tile's.
template <Format FORMAT>
static bool describe_scales(CUtensorMap* map, const QuantMap& m) {
    using Tile = RowTile<FORMAT>;
    const cuuint64_t rows = m.k / GROUP_INPUTS, pitch = static_cast<cuuint64_t>(m.n) * Tile::SCALE_ITEM;
    const cuuint64_t size[3] = {static_cast<cuuint64_t>(m.n), rows, 1}, strides[2] = {pitch, pitch * rows};
    const cuuint32_t box[3] = {UNIT, Tile::GROUPS, 1}, step[3] = {1, 1, 1};
    const auto type = Tile::SCALE_ITEM == 4 ? CU_TENSOR_MAP_DATA_TYPE_UINT32 : CU_TENSOR_MAP_DATA_TYPE_UINT16;
    return encode_tiled()(map, type, 3, const_cast<void*>(m.scales), size, strides, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                          CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <Format FORMAT>
static int launch_format(const QuantArgs& args, void* stream) {
    if (encode_tiled() == nullptr) return static_cast<int>(cudaErrorNotSupported);
    RowLaunch p = {};
    p.args = args;
    const auto row_bytes = [&](int i) {
        const QuantMap& m = args.maps[i];
        return m.scales == nullptr ? 2 * m.k : FORMAT == INT4 ? m.k / 2 : m.k;
    };
    for (int i = 0; i < args.count; ++i) {
        const QuantMap& m = args.maps[i];
        if (m.k > MOST_HELD || m.k % 64 || (args.norm.x != nullptr && m.k != args.norm.width)) return static_cast<int>(cudaErrorInvalidValue);
        p.units[i] = (m.n + UNIT - 1) / UNIT;
        const ElementType element = m.scales == nullptr ? HALVES : BYTES;
        if (!describe(&p.weights[i], m.codes, element, m.n, TILE_BYTES / element.bytes, row_bytes(i) / element.bytes, row_bytes(i) / TILE_BYTES, UNIT, PIECES)) {
            return static_cast<int>(cudaErrorInvalidValue);
        }
        if (RowTile<FORMAT>::grouped && m.scales != nullptr && !describe_scales<FORMAT>(&p.scales[i], m)) return static_cast<int>(cudaErrorInvalidValue);
    }
    deal_blocks(p, this_machine().processors, [&](int i) { return static_cast<int64_t>(row_bytes(i)) * p.units[i]; });
    return args.norm.x != nullptr ? launch_row<FORMAT, true>(p, stream) : launch_row<FORMAT, false>(p, stream);
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
