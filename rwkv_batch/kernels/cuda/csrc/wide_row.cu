// y = act(x @ W^T) for one row and W of 8 or 4 bits (quant.cuh), several maps in one launch, on Hopper's tensor cores. W is
// multiplied from where bulk copies have put it: no code of 8 bits is ever in a register.
//
// The codes are wgmma's first operand, the inputs its second: split into three parts, each of which holds what the ones
// before have left, so that nothing of an fp16 input is lost but last bits of those that are 4,000 times smaller than the
// largest of their 128, which have a scale. For fp8 the parts are e4m3 codes, each part's unit a 16th of the one's before, for
// int8 the bytes of 24 bits.
// The fp8 units add in some 14 bits: sums leave them after each 128 inputs.
//
// Codes of 4 bits become bytes by two masks, 16 times as large, and are multiplied by warps (m16n8k32), their inputs being the
// two bytes of 16 bits with a scale for 128. A lane's codes are all of one group of inputs, of four side by side, and so are the
// two of eight columns that are not zero for it: four groups are added up at once and come out in a lane each.
//
// A unit of work is 32 outputs; a block's are neighbours. A tile is 32 outputs by four pieces of 128 bytes along k: two
// pieces side by side are the operand's 64 rows, each multiplied by the columns of its own inputs (0 .. 3 and 4 .. 7).
// Four warpgroups take turns with a unit's tiles, so that four are worked at; a warp more keeps the ring of tiles filled,
// from before the launch's inputs are there. Until these have been asked for it asks for some tiles only at once (EARLY_TILES), for the
// others one after the other: what is asked for later by any block, ffn.value's or the WKV's beside this one too, waits behind that.
//
// A block's units are of one map, so that it makes its row once. Maps get blocks by their bytes.
//
// A map: codes [n, k] (n a multiple of 32, k of 128, of 4 bits 256, at most 4,096), or halves (n of 32, k of 64).
// A value (RowValue): the map is ffn.key, squared, of a multiple of 32 outputs for each block; behind its last unit a block
// multiplies the rows of ffn.value whose inputs it has made, and are not zero, and adds them to the row's sums (row_sums.cuh).
// These rows, at most a group, come by bulk copies as soon as a unit is done, as many as there is room for.
//
// Bytes: W and its scales once; x, 2k, and where there is one the norm's and a mix's weights, in every block. Of a value its
// active rows and a group's scales in each block, and 8C of sums.
#include "ring_release.cuh"
#include "row_sums.cuh"
#include "wide_ring.cuh"
#include "wide_row_parts.cuh"
#include "wide_row_value.cuh"

constexpr int EARLY_TILES = 2;  // with TILE_CYCLES as measured (docs/notebook.md)

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

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
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
            if (count >= EARLY_TILES && count < STAGES) wait_for_turn(asked + 8, TILE_CYCLES);
            ++count;
            const bool scaled = Tile::grouped && !half;
            expect_bytes(barrier, TILE_ROOM + (scaled ? Tile::GROUPS * UNIT * Tile::SCALE_ITEM : 0));
            copy_box(to, &p.weights[share.map], 0, output, step * PIECES, barrier, EVICT_FIRST);
            if (scaled) copy_box(to + TILE_ROOM, &p.scales[share.map], output, step * Tile::GROUPS, 0, barrier, EVICT_FIRST);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
    }
}
#endif

// At most 64 registers a thread of 4 bits, 48 of 8: so many blocks of ffn.value and the WKV stand beside (with 72 of 4 bits, of
// which a quarter of a processor has five warps, the WKV's do not). No block does beside one with a value.
template <Format FORMAT, bool NORMED, bool VALUED>
__global__ void __launch_bounds__(VALUED ? CONSUMERS + 32 : FORMAT == INT4 ? 1024 : 640, VALUED || FORMAT == INT4 ? 1 : 2) wide_row_kernel(const __grid_constant__ RowLaunch p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using namespace hopper;
    using Tile = RowTile<FORMAT>;
    using Sum = std::conditional_t<FORMAT == FP8, float, int>;
    using Mix = RowMix<CONSUMERS>;
    extern __shared__ unsigned char dynamic[];
    const uint32_t ring = (shared_address(dynamic) + 1023) & ~1023u, x = ring + STAGES * Tile::BYTES;
    RowRoom& room = *reinterpret_cast<RowRoom*>(dynamic + (x + INPUT_ROOM - shared_address(dynamic)));
    ValueRoom& valued = *reinterpret_cast<ValueRoom*>(&room + 1);  // VALUED
    const unsigned char* const value_rows = reinterpret_cast<const unsigned char*>(&valued + 1);
    const int value_bytes = FORMAT == INT4 ? p.args.value.width / 2 : p.args.value.width;  // of a row
    const int value_places = VALUED ? VALUE_ROOM / value_bytes : 0;
    const RowShare share = share_of(p, blockIdx.x);
    const int warp = __shfl_sync(FULL, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, t = lane & 3;
    const uint32_t full = shared_address(room.full), empty = shared_address(room.empty);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            init_barrier(full + 8 * i, 1);
            init_barrier(empty + 8 * i, 4);
        }
        for (int i = 0; i < 2; ++i) init_barrier(shared_address(&room.asked[i]), CONSUMERS / 32);
        if (VALUED) init_barrier(shared_address(&valued.full), share.last - share.first);
        publish_barriers();
    }
    __syncthreads();
    let_next_start();
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
    // Of 4 bits: its output of the unit, and the one 8 behind; of a warp's lines those of two that load together are 4 apart.
    const int line = warp % 2 * 16 + (g >> 1 | (g & 1) << 2);
    constexpr bool KEEPS = FORMAT == INT4 && VALUED;  // the parts that its tiles are multiplied by, in registers
    uint4 parts[KEEPS ? 4 : 1][2];
    int parts_of = -1;  // the step
    int stage = group, parity = 0;  // of the warpgroup's next tile
    // Its tiles are those whose number leaves it when divided by WARPGROUPS: who waits for a place to be filled again must have
    // seen it filled before, as a parity tells no more than that.
    const auto go_on = [&] {
        stage += WARPGROUPS;
        if (stage >= STAGES) stage -= STAGES, parity ^= 1;
    };
    int before = 0;  // tiles of the units before
    int listed = 0;  // of the first warp: rows of the value that are active
    for (int unit = share.first; unit < share.last; ++unit) {
        const int out = unit * UNIT + threadIdx.x;  // of a thread of the first warp
        float scale = half ? 1.0f : code_scale<FORMAT>();
        if (FORMAT == FP8 && !half && warp == 0) scale *= __ldg(static_cast<const float*>(m.scales) + out);
        const int depth = half ? PIECES * 64 : Tile::GROUPS * GROUP_INPUTS, steps = (m.k + depth - 1) / depth;
        float sums[2] = {};
        const int turn = (group - before) & (WARPGROUPS - 1);  // its first tile of the unit
        before += steps;
        int step = turn;
        if (FORMAT == INT4 && !half) {
            const int groups = m.k / GROUP_INPUTS;
            for (; step < steps; step += WARPGROUPS) {
                // A lane's codes are of one group, and so are its sums: those of others are multiplied by zeros.
                const int in_tile = 2 * t + second, of_inputs = step * Tile::GROUPS + in_tile;
                const bool has_part = g >> 1 == t;
                const auto load_parts = [&](uint4 (&to)[2], int quarter) {
                    const uint32_t at = place_of_parts(x, of_inputs, quarter) ^ ((g & 1) * OTHER_PART);
                    to[0] = shared_u128_if(has_part, at), to[1] = shared_u128_if(has_part, at + 16);
                };
                if (KEEPS && parts_of != step) {
#pragma unroll
                    for (int r = 0; r < 4; ++r) load_parts(parts[KEEPS ? r : 0], (r + t) & 3);
                    parts_of = step;
                }
                wait_barrier(full + 8 * stage, parity);
                const uint32_t tile = ring + stage * Tile::BYTES, codes_at = tile + t * (UNIT * TILE_BYTES) + line * TILE_BYTES;
                uint32_t items[2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(items[i]) : "r"(tile + TILE_ROOM + (in_tile * UNIT + line + 8 * i) * Tile::SCALE_ITEM) : "memory");
                }
                int products[2][4] = {};
#pragma unroll
                for (int r = 0; r < 4; ++r) {
                    const int quarter = (r + t) & 3;
                    const uint32_t at = codes_at + (((second * 4 + quarter) ^ (line & 7)) << 4);
                    const uint4 low = shared_u128(at), high = shared_u128(at + 8 * TILE_BYTES);
                    if (!KEEPS) load_parts(parts[0], quarter);
                    const auto& b = parts[KEEPS ? r : 0];
                    const auto multiply_word = [&](int j, uint32_t of_line, uint32_t of_other, uint32_t b_low, uint32_t b_high) {
                        const uint32_t a[4] = {of_line << 4 & 0xf0f0f0f0u, of_other << 4 & 0xf0f0f0f0u, of_line & 0xf0f0f0f0u, of_other & 0xf0f0f0f0u};
                        multiply_bytes_of_warp(products[j], a, b_low, b_high);
                    };
                    multiply_word(0, low.x, high.x, b[0].x, b[0].y);
                    multiply_word(1, low.y, high.y, b[0].z, b[0].w);
                    multiply_word(0, low.z, high.z, b[1].x, b[1].y);
                    multiply_word(1, low.w, high.w, b[1].z, b[1].w);
                }
                const int known = min(of_inputs, groups - 1);
                const float unit_of_x = of_inputs < groups ? room.scales[known] : 0.0f, of_parts = room.input_sums[known][0];
                release_loaded_place(empty + 8 * stage, lane, items[0] | items[1] | products[0][0] | products[1][0]);
                go_on();
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float2 item = __half22float2(*reinterpret_cast<const __half2*>(&items[i]));
                    const int whole = (products[0][2 * i] + products[1][2 * i]) * 256 + products[0][2 * i + 1] + products[1][2 * i + 1];
                    sums[i] = fmaf(fmaf(1024.0f - item.y, of_parts, static_cast<float>(whole)), unit_of_x * item.x, sums[i]);
                }
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                sums[i] += __shfl_xor_sync(FULL, sums[i], 1);
                sums[i] += __shfl_xor_sync(FULL, sums[i], 2);
            }
        } else if (half) {
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
                release_place(empty + 8 * stage, lane);
                go_on();
            }
#pragma unroll
            for (int i = 0; i < 8; ++i) asm volatile("" : "+f"(products[i])::"memory");
#pragma unroll
            for (int i = 0; i < 2; ++i) sums[i] = second ? products[4 + 2 * i] : products[2 * i];  // of lanes with t == 0
        } else if constexpr (FORMAT != INT4) {
            constexpr int PAIRS = Tile::GROUPS / 2;  // of groups of inputs
            const int groups = m.k / GROUP_INPUTS;
            for (; step < steps; step += WARPGROUPS) {
                wait_barrier(full + 8 * stage, parity);
                const uint32_t tile = ring + stage * Tile::BYTES;
                Sum products[PAIRS][4];
                const int first_pair = step * PAIRS;
                const auto of_inputs = [&](int pair) { return min(2 * (first_pair + pair) + second, groups - 1); };
                uint16_t items[PAIRS][2];  // loaded before the products: behind them they come late, and the place is released late
                uint32_t loaded = 0;
#pragma unroll
                for (int pair = 0; pair < (Tile::grouped ? PAIRS : 0); ++pair) {
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const uint32_t at = tile + TILE_ROOM + ((of_inputs(pair) - step * Tile::GROUPS) * UNIT + output + 8 * i) * Tile::SCALE_ITEM;
                        asm volatile("ld.shared.u16 %0, [%1];" : "=h"(items[pair][i]) : "r"(at) : "memory");
                        loaded |= items[pair][i];
                    }
                }
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
                // What the sums are multiplied by, and what their codes' zeros come to.
                float unit_of_x[PAIRS], of_parts[PAIRS];
#pragma unroll
                for (int pair = 0; pair < PAIRS; ++pair) {
                    unit_of_x[pair] = room.scales[of_inputs(pair)];
                    if constexpr (Tile::grouped) of_parts[pair] = room.input_sums[of_inputs(pair)][low_part];
                }
                wait_products<0>();
                release_loaded_place(empty + 8 * stage, lane, loaded);
                go_on();
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
                            const float whole = low_part ? static_cast<float>(one) : fmaf(static_cast<float>(one), 65536.0f, static_cast<float>(other) * 256.0f);
                            sums[i] = fmaf(fmaf(-128.0f, of_parts[pair], whole), unit_of_x[pair] * __half2float(__ushort_as_half(items[pair][i])), sums[i]);
                        }
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) sums[i] += __shfl_xor_sync(FULL, sums[i], 1);
        }
        auto& of_unit = room.sums[unit & 1];
        const int of_lane = FORMAT == INT4 && !half ? line : output;
        if (t == (half || FORMAT == INT4 ? 0 : 2 * second)) of_unit[2 * turn + second][of_lane] = sums[0], of_unit[2 * turn + second][of_lane + 8] = sums[1];
        sync_consumers();
        if (warp == 0 && out < m.n) {
            float y[1] = {};
#pragma unroll
            for (int i = 0; i < 2 * WARPGROUPS; ++i) y[0] += of_unit[i][lane];
            y[0] *= scale;
            activate_sums<1>(y, m.activation);
            if constexpr (VALUED) {
                const __half input = __float2half_rn(y[0]);
                const bool active = (__half_as_ushort(input) & 0x7fffu) != 0;
                const unsigned all = __ballot_sync(FULL, active);
                const int at = listed + __popc(all & ((1u << lane) - 1u)), end = listed + __popc(all);
                const uint32_t barrier = shared_address(&valued.full);
                if (lane == 0) expect_bytes(barrier, max(0, min(end, value_places) - listed) * value_bytes);
                __syncwarp();
                if (active) {
                    valued.active[at] = ActiveRow{__half2float(input), out};
                    if (at < value_places) {
                        copy_line(shared_address(value_rows) + at * value_bytes, p.args.value.codes + static_cast<int64_t>(out) * value_bytes, value_bytes, barrier);
                    }
                }
                listed = end;
                if (lane == 0) valued.count = listed;
            } else if (m.float_out) {
                static_cast<float*>(m.y)[out] = y[0];
            } else {
                static_cast<__half*>(m.y)[out] = __float2half_rn(y[0]);
            }
        }
    }
    if constexpr (VALUED) {
        sync_consumers();
        using Value = ValueSums<FORMAT>;
        using Raw = typename Value::Raw;
        const RowValue& of = p.args.value;
        const int c = 8 * threadIdx.x, count = valued.count, held = min(count, value_places);
        if (c < of.width) {
            Value value;
            wait_barrier(shared_address(&valued.full), 0);
            const auto* const mine = reinterpret_cast<const Raw*>(value_rows) + threadIdx.x;
            const auto* const all = reinterpret_cast<const Raw*>(of.codes) + threadIdx.x;
            const int pitch = value_bytes / sizeof(Raw);
#pragma unroll 4
            for (int i = 0; i < held; ++i) value.add(valued.active[i].x, mine[i * pitch]);
#pragma unroll 4
            for (int i = held; i < count; ++i) value.add(valued.active[i].x, __ldg(all + static_cast<int64_t>(valued.active[i].row) * pitch));
            float sums[8];
            value.finish(of.scales, share.first * UNIT / GROUP_INPUTS, of.width, c, sums);
            if (count != 0) add_to_sums(of.sums, of.width, c, sums);
        }
    }
    if constexpr (NORMED) keep_token<CONSUMERS>(p.args.norm, room.mix, arrived, gridDim.x, sync_consumers);
#endif
}

template <Format FORMAT, bool NORMED, bool VALUED>
static int launch_row(const RowLaunch& p, void* stream) {
    static bool raised[MAX_DEVICES] = {};
    const auto kernel = wide_row_kernel<FORMAT, NORMED, VALUED>;
    const QuantMap& last = p.args.maps[p.args.count - 1];
    const int bytes = 1024 + STAGES * RowTile<FORMAT>::BYTES + INPUT_ROOM + static_cast<int>(sizeof(RowRoom)) +
                      (VALUED ? static_cast<int>(sizeof(ValueRoom)) + VALUE_ROOM : 0);
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

// Deals the units of a map with a value to blocks that all run at once, each with the rows of a group of the value's inputs, or of
// a half or a quarter of one. Whether that can be.
static bool deal_value(RowLaunch& p) {
    QuantMap& m = p.args.maps[0];
    int share = UNIT;
    while (share < MOST_VALUED && m.n > share * this_machine().processors) share *= 2;
    m.first_block = 0, m.blocks = m.n / share;
    const bool is_alone = p.args.count == 1 && p.args.norm.x == nullptr && m.scales != nullptr;
    return is_alone && m.n % share == 0 && m.blocks <= this_machine().processors && p.args.value.width % 8 == 0 && p.args.value.width <= 8 * CONSUMERS;
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
    if constexpr (FORMAT != FP8) {
        if (args.value.codes != nullptr) return deal_value(p) ? launch_row<FORMAT, false, true>(p, stream) : static_cast<int>(cudaErrorInvalidValue);
    }
    if (args.value.codes != nullptr) return static_cast<int>(cudaErrorInvalidValue);
    deal_blocks(p, this_machine().processors, [&](int i) { return static_cast<int64_t>(row_bytes(i)) * p.units[i]; });
    return args.norm.x != nullptr ? launch_row<FORMAT, true, false>(p, stream) : launch_row<FORMAT, false, false>(p, stream);
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

// x + sums -> x_out, in halves.
__global__ void add_sums_kernel(const __half* x, const unsigned long long* sums, __half* x_out, int width) {
    let_next_start();
    wait_for_inputs();
    const int c = 8 * threadIdx.x;
    if (c >= width) return;
    store16(x_out + c, add_packed(load16(x + c), halves_of_sums(sums, width, c)));
}

RWKV_API int rwkv_add_sums(const void* x, const void* sums, void* x_out, int width, void* stream) {
    launch(add_sums_kernel, dim3(1), (width / 8 + 31) / 32 * 32, stream, static_cast<const __half*>(x), static_cast<const unsigned long long*>(sums), static_cast<__half*>(x_out), width);
    return launch_result();
}
