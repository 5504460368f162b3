// y = act(x @ W^T) for 2 to 8 rows and W in fp8, or halves beside it, several maps in one launch, on Hopper's tensor cores: as
// wide_row.cu has it for one row, with the columns of 8 rows.
//
// Each input is two e4m3 codes: itself, and 16 times what that rounding left, with a power of two for 128 inputs of a row (an
// error of 2^-9 at most; the codes of W have 2^-4). The fp8 units add in some 14 bits: sums leave them after 128 inputs.
//
// A unit of work is 32 outputs; a block's are neighbours. A tile is 32 outputs by four pieces of 128 bytes along k: two
// pieces side by side are the operand's 64 rows, each multiplied by the columns of its own inputs (in codes 0 .. 15 and 16 ..
// 31: a part's 8 rows side by side). Four warpgroups take turns with a unit's tiles; a warp more keeps the ring of tiles
// filled, from before the launch's inputs are there.
//
// A map: codes [n, k] (n a multiple of 32, k of 128), or halves (n of 32, k of 64). More than 4,096 inputs are made one
// part after the other, while the ring fills.
// Bytes: W and its scales once; x, 16k, in every block.
#include "quant.cuh"
#include "quant_maps.cuh"
#include "wide_maps.cuh"

constexpr int UNIT = 32, PIECES = 4, WARPGROUPS = 4, CONSUMERS = 128 * WARPGROUPS, MOST_ROWS = 8;
constexpr int STAGES = 2 * WARPGROUPS;  // of the ring; a multiple, so that a place always is the same warpgroup's
constexpr int TILE_ROOM = UNIT * PIECES * TILE_BYTES;
// Of two pieces' inputs, [16 bytes of k][columns][16], a step of k 16 bytes further than it is long: stores then find other banks.
constexpr int CODE_COLUMNS = 4 * MOST_ROWS, HALF_COLUMNS = 2 * MOST_ROWS, STEPS = TILE_BYTES / 16;
constexpr int CODE_STEP = 16 * CODE_COLUMNS + 16, HALF_STEP = 16 * HALF_COLUMNS + 16;
constexpr int CODE_PAIR = STEPS * CODE_STEP, HALF_PAIR = STEPS * HALF_STEP;
constexpr int INPUT_ROOM = MOST_HELD / (2 * TILE_BYTES) * CODE_PAIR > MOST_HELD / TILE_BYTES * HALF_PAIR
                               ? MOST_HELD / (2 * TILE_BYTES) * CODE_PAIR : MOST_HELD / TILE_BYTES * HALF_PAIR;

struct FewLaunch {
    CUtensorMap weights[MAX_MAPS];
    QuantArgs args;
    int first_unit[MAX_MAPS + 1];
    int64_t first_byte[MAX_MAPS + 1];  // of W; units are dealt by these
};

// The first unit that begins at this byte or behind.
__host__ __device__ __forceinline__ int unit_from(const FewLaunch& p, int64_t byte) {
    int map = 0;
    while (map + 1 < p.args.count && byte >= p.first_byte[map + 1]) ++map;
    const int units = p.first_unit[map + 1] - p.first_unit[map];
    if (units == 0) return p.first_unit[map];
    const int64_t each = (p.first_byte[map + 1] - p.first_byte[map]) / units, in_map = (byte - p.first_byte[map] + each - 1) / each;
    return p.first_unit[map] + static_cast<int>(in_map < units ? in_map : units);
}
__host__ __device__ __forceinline__ int first_unit_of(const FewLaunch& p, int block, int blocks) {
    return unit_from(p, (p.first_byte[p.args.count] * block + blocks - 1) / blocks);
}

struct FewRoom {
    uint64_t full[STAGES], empty[STAGES];
    float scales[MOST_HELD / GROUP_INPUTS][MOST_ROWS];      // of x
    float sums[2][2 * WARPGROUPS][MOST_ROWS][UNIT];  // of a unit, of each warpgroup two; taken in turn
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
namespace hopper {
// Columns of 16 bytes, 8 neighbours: without a swizzle. `along_k`, `along_columns`: bytes to the next 16 bytes, to the next 8 columns.
__device__ __forceinline__ uint64_t describe_columns(uint32_t address, uint32_t along_k, uint32_t along_columns) {
    return static_cast<uint64_t>((address & 0x3ffff) >> 4) | static_cast<uint64_t>(along_k >> 4) << 16 |
           static_cast<uint64_t>(along_columns >> 4) << 32;
}
// s [64 x 16] += a [64 x 16] * b [16 x 16]^T of halves.
__device__ __forceinline__ void multiply_16_halves(float (&s)[8], uint64_t a, uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7}, %8, %9, 1, 1, 1, 0, 0;"
                 : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3]), "+f"(s[4]), "+f"(s[5]), "+f"(s[6]), "+f"(s[7])
                 : "l"(a), "l"(b));
}
}  // namespace hopper

__device__ __forceinline__ void sync_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }

// Inputs c .. c + 7 of a row as parts into the operand's place at x. All lanes of a warp; half of one holds 128 inputs.
__device__ __forceinline__ void store_parts(uint32_t x, FewRoom& room, int c, int row, const uint4& given, bool inside) {
    float f[8], largest = 0.0f;
    unpack8(given, f);
#pragma unroll
    for (int j = 0; j < 8; ++j) largest = fmaxf(largest, fabsf(f[j]));
#pragma unroll
    for (int i = 8; i > 0; i >>= 1) largest = fmaxf(largest, __shfl_xor_sync(FULL, largest, i));
    // The largest becomes 128 to 256.
    const uint32_t exponent = largest > 0.0f ? __float_as_uint(largest) >> 23 : 127u;
    const float inverse = __uint_as_float((261u - exponent) << 23);
    uint32_t codes[2][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const float lo = f[2 * j] * inverse, hi = f[2 * j + 1] * inverse;
        uint16_t code, rest;
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(code) : "f"(hi), "f"(lo));
        const uint32_t pair = halves_of_two_e4m3(code);
        const float2 meant = __half22float2(*reinterpret_cast<const __half2*>(&pair));
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(rest) : "f"((hi - meant.y) * 16.0f), "f"((lo - meant.x) * 16.0f));
        codes[0][j] = code, codes[1][j] = rest;
    }
    if (!inside) return;
    const int group = c / GROUP_INPUTS;
    const uint32_t to = x + group / 2 * CODE_PAIR + c % GROUP_INPUTS / 16 * CODE_STEP + (group % 2 * 2 * MOST_ROWS + row) * 16 + (c & 8);
#pragma unroll
    for (int part = 0; part < 2; ++part) {
        asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to + part * MOST_ROWS * 16), "r"(codes[part][0] | codes[part][1] << 16),
                     "r"(codes[part][2] | codes[part][3] << 16) : "memory");
    }
    if ((threadIdx.x & 15) == 0) room.scales[group][row] = exponent < 255u ? __uint_as_float((exponent - 7u) << 23) : largest;  // infinite
}

// One lane: the tiles of a block's units into the ring.
__device__ __forceinline__ void fetch_units(const FewLaunch& p, FewRoom& room, uint32_t ring, int first, int last) {
    using namespace hopper;
    const uint32_t full = shared_address(room.full), empty = shared_address(room.empty);
    uint32_t stage = 0, parity = 1;
    int map = 0;
    for (int unit = first; unit < last; ++unit) {
        while (unit >= p.first_unit[map + 1]) ++map;
        const QuantMap& m = p.args.maps[map];
        const int output = (unit - p.first_unit[map]) * UNIT, row_bytes = m.scales == nullptr ? 2 * m.k : m.k;
        for (int step = 0; step * PIECES * TILE_BYTES < row_bytes; ++step) {
            wait_barrier(empty + 8 * stage, parity);
            const uint32_t barrier = full + 8 * stage;
            expect_bytes(barrier, TILE_ROOM);
            copy_box(ring + stage * TILE_ROOM, &p.weights[map], 0, output, step * PIECES, barrier, EVICT_FIRST);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
    }
}
#endif

__global__ void __launch_bounds__(CONSUMERS + 32, 1) wide_few_kernel(const __grid_constant__ FewLaunch p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using namespace hopper;
    extern __shared__ unsigned char dynamic[];
    const uint32_t ring = (shared_address(dynamic) + 1023) & ~1023u, x = ring + STAGES * TILE_ROOM;
    FewRoom& room = *reinterpret_cast<FewRoom*>(dynamic + (x + INPUT_ROOM - shared_address(dynamic)));
    const int warp = __shfl_sync(FULL, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, t = lane & 3, rows = p.args.rows;
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
        if (elect_lane()) fetch_units(p, room, ring, first, last);
        return;
    }
    wait_for_inputs();
    if (first >= last) return;

    // The rows from input `from` on as a map wants them; a thread has 8 inputs of each.
    const auto make_inputs = [&](const QuantMap& m, int from, bool is_first) {
        if (!is_first) sync_consumers();  // the ones before have been multiplied
        const int c = threadIdx.x * 8;
        uint4 values[MOST_ROWS];
#pragma unroll
        for (int row = 0; row < MOST_ROWS; ++row) {
            values[row] = make_uint4(0, 0, 0, 0);
            if (row < rows && from + c < m.k) values[row] = load16(m.x + static_cast<int64_t>(row) * m.k + from + c);
        }
#pragma unroll
        for (int row = 0; row < MOST_ROWS; ++row) {
            if (row >= rows) break;
            if (m.scales != nullptr) {
                store_parts(x, room, c, row, values[row], from + c < m.k);
            } else {  // zeros from the end on: a tile may go on behind it
                const uint32_t to = x + c / 128 * HALF_PAIR + c % 64 / 8 * HALF_STEP + (c / 64 % 2 * MOST_ROWS + row) * 16;
                asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(values[row].x), "r"(values[row].y),
                             "r"(values[row].z), "r"(values[row].w) : "memory");
            }
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        sync_consumers();
    };

    const int group = warp / 4, second = warp % 4 / 2;  // the warpgroup; which of two pieces side by side the warp's rows are
    const int output = warp % 2 * 16 + g;               // of the unit, and the one 8 behind
    int stage = group, parity = 0;  // of the warpgroup's next tile
    int made = -1, map = 0;
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
        const bool half = m.scales == nullptr;
        const int out = (unit - p.first_unit[map]) * UNIT + lane;  // of a thread of the first 8 warps, each a row's
        float scale = 1.0f;
        if (!half && warp < MOST_ROWS) scale = __ldg(static_cast<const float*>(m.scales) + out);
        const int depth = half ? PIECES * 64 : PIECES * GROUP_INPUTS;
        float sums[4] = {};  // of outputs g, g + 8 and rows 2t, 2t + 1
        const int turn = (group - before) & (WARPGROUPS - 1);  // its first tile of the unit, and of each part of the inputs
        before += (m.k + depth - 1) / depth;
        for (int from = 0; from < m.k; from += MOST_HELD) {
            if (map != made || m.k > MOST_HELD) {
                make_inputs(m, from, made < 0);
                made = map;
            }
            const int held = min(m.k - from, MOST_HELD), steps = (held + depth - 1) / depth;
            if (half) {
                float products[8] = {};
                for (int step = turn; step < steps; step += WARPGROUPS) {
                    wait_barrier(full + 8 * stage, parity);
                    const uint64_t a = describe_tile(ring + stage * TILE_ROOM);
                    const uint64_t b = describe_columns(x + step * 2 * HALF_PAIR, HALF_STEP, 8 * 16);
                    begin_products();
#pragma unroll
                    for (int pair = 0; pair < 2; ++pair) {
#pragma unroll
                        for (int j = 0; j < 4; ++j)
                            multiply_16_halves(products, a + pair * (TILE_ROOM / 2 / 16) + 2 * j, b + (pair * HALF_PAIR + 2 * j * HALF_STEP) / 16);
                    }
                    commit_products();
                    wait_products<0>();
                    release();
                }
#pragma unroll
                for (int i = 0; i < 8; ++i) asm volatile("" : "+f"(products[i])::"memory");
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[i] += second ? products[4 + i] : products[i];
            } else {
                const int groups = held / GROUP_INPUTS;
                for (int step = turn; step < steps; step += WARPGROUPS) {
                    wait_barrier(full + 8 * stage, parity);
                    float products[2][16];
                    begin_products();
#pragma unroll
                    for (int pair = 0; pair < 2; ++pair) {
                        const uint64_t a = describe_tile(ring + stage * TILE_ROOM + pair * (TILE_ROOM / 2));
                        const uint64_t b = describe_columns(x + (2 * step + pair) * CODE_PAIR, CODE_STEP, 8 * 16);
#pragma unroll
                        for (int j = 0; j < 4; ++j) multiply_fp8<32>(products[pair], a + 2 * j, b + 2 * j * CODE_STEP / 16, j);
                    }
                    commit_products();
                    float2 of_rows[2];
#pragma unroll
                    for (int pair = 0; pair < 2; ++pair)
                        of_rows[pair] = *reinterpret_cast<const float2*>(&room.scales[min(4 * step + 2 * pair + second, groups - 1)][2 * t]);
                    wait_products<0>();
                    release();
#pragma unroll
                    for (int pair = 0; pair < 2; ++pair) {
#pragma unroll
                        for (int i = 0; i < 16; ++i) asm volatile("" : "+f"(products[pair][i])::"memory");
                        if (4 * step + 2 * pair + second >= groups) continue;
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            const float one = second ? products[pair][8 + i] : products[pair][i], rest = second ? products[pair][12 + i] : products[pair][4 + i];
                            sums[i] = fmaf(fmaf(rest, 1.0f / 16, one), i & 1 ? of_rows[pair].y : of_rows[pair].x, sums[i]);
                        }
                    }
                }
            }
        }
        auto& of_unit = room.sums[unit & 1];
#pragma unroll
        for (int i = 0; i < 4; ++i) of_unit[2 * turn + second][2 * t + (i & 1)][output + (i >> 1) * 8] = sums[i];
        sync_consumers();
        if (warp < rows && out < m.n) {
            float y[1] = {};
#pragma unroll
            for (int i = 0; i < 2 * WARPGROUPS; ++i) y[0] += of_unit[i][warp][lane];
            y[0] *= scale;
            activate_sums<1>(y, m.activation);
            const int64_t at = static_cast<int64_t>(warp) * m.ld_y + out;
            if (m.float_out) {
                static_cast<float*>(m.y)[at] = y[0];
            } else {
                static_cast<__half*>(m.y)[at] = __float2half_rn(y[0]);
            }
        }
    }
#endif
}

// 2 to 8 rows of maps in fp8 or halves.
RWKV_API int rwkv_wide_few(const QuantArgs* args, void* stream) {
    if (args->rows < 1 || args->rows > MOST_ROWS || args->format != FP8 || args->norm.x != nullptr) return static_cast<int>(cudaErrorInvalidValue);
    if (encode_tiled() == nullptr) return static_cast<int>(cudaErrorNotSupported);
    FewLaunch p = {};
    p.args = *args;
    for (int i = 0; i < args->count; ++i) {
        const QuantMap& m = args->maps[i];
        const bool half = m.scales == nullptr;
        if (m.k % (half ? 64 : GROUP_INPUTS)) return static_cast<int>(cudaErrorInvalidValue);
        const int row_bytes = half ? 2 * m.k : m.k, units = (m.n + UNIT - 1) / UNIT;
        p.first_unit[i + 1] = p.first_unit[i] + units;
        p.first_byte[i + 1] = p.first_byte[i] + static_cast<int64_t>(units) * UNIT * row_bytes;
        const ElementType element = half ? HALVES : BYTES;
        if (!describe(&p.weights[i], m.codes, element, m.n, TILE_BYTES / element.bytes, row_bytes / element.bytes, row_bytes / TILE_BYTES, UNIT, PIECES)) {
            return static_cast<int>(cudaErrorInvalidValue);
        }
    }
    static bool raised[MAX_DEVICES] = {};
    const int bytes = 1024 + STAGES * TILE_ROOM + INPUT_ROOM + static_cast<int>(sizeof(FewRoom));
    if (!raised[this_device()]) {
        const cudaError_t error = cudaFuncSetAttribute(wide_few_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, this_machine().shared_bytes);
        if (error != cudaSuccess) return static_cast<int>(error);
        raised[this_device()] = true;
    }
    launch_with_split(wide_few_kernel, dim3(this_machine().processors), CONSUMERS + 32, bytes, 100, stream, p);
    return launch_result();
}
