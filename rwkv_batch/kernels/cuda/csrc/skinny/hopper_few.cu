// Skinny GEMM on Hopper for 2 to 8 rows and fp8 weights: y = act(x @ W^T), several weights per launch. As
// hopper_row.cu.
//
// in   qweight  [n, k] e4m3; or fp16 without scales
//      scales   [n] fp32
//      x        [rows, k] fp16
//
// out  y        [rows, ld_y] fp16 or fp32
//
// Operand B: an input as two e4m3 values, itself and 16 times the rounding error, with a power-of-two scale per 128
// inputs of a row (error <= 2^-9; the weights have 2^-4). Sums leave the tensor cores every 128 inputs.
// Unit: 32 outputs. Tile: 32 outputs x 4 pieces of 128 bytes. Two adjacent pieces are operand A's 64 rows, each with
// its own columns of B (fp8: 0 .. 15 and 16 .. 31). k > 4,096 is processed in pieces while the ring fills.
//
// Grid: one CTA per SM; units are assigned by bytes.
// Block: 544 threads: 4 consumer warpgroups and a producer warp.
// Shared memory: 214 KB; ring 128 KB, operand B 68 KB, partial sums.
// Bound: memory; W and scales once, x 16 k bytes per CTA. Share of 4.8 TB/s (H200, 4 rows): head [65,536, 4,096] 81 %,
// ffn.key [16,384, 4,096] 66 %.
// Made for: 2 to 8 rows, n % 32 == 0, k % 128 == 0 (fp16: 64).
#include "../quant.cuh"
#include "quant_args.cuh"
#include "../gemm/gemm_launch.cuh"

constexpr int OUTPUTS_PER_UNIT = 32, PIECES = 4, WARPGROUPS = 4, CONSUMERS = 128 * WARPGROUPS, MAX_ROWS = 8;
constexpr int STAGES = 2 * WARPGROUPS;  // stages; a multiple of WARPGROUPS, so that a stage always belongs to the same warpgroup
constexpr int TILE_DATA_BYTES = OUTPUTS_PER_UNIT * PIECES * TILE_K_BYTES;
// Operand B of two pieces: [16 bytes of k][columns][16], with a padded k step, so that stores hit other banks.
constexpr int CODE_COLUMNS = 4 * MAX_ROWS, HALF_COLUMNS = 2 * MAX_ROWS, STEPS = TILE_K_BYTES / 16;
constexpr int CODE_STEP = 16 * CODE_COLUMNS + 16, HALF_STEP = 16 * HALF_COLUMNS + 16;
constexpr int CODE_PAIR = STEPS * CODE_STEP, HALF_PAIR = STEPS * HALF_STEP;
constexpr int INPUT_BYTES = MAX_CACHED_K / (2 * TILE_K_BYTES) * CODE_PAIR > MAX_CACHED_K / TILE_K_BYTES * HALF_PAIR
                               ? MAX_CACHED_K / (2 * TILE_K_BYTES) * CODE_PAIR : MAX_CACHED_K / TILE_K_BYTES * HALF_PAIR;

struct HopperFewLaunch {
    CUtensorMap weights[MAX_GEMMS];
    QuantLaunchArgs args;
    int first_unit[MAX_GEMMS + 1];
    int64_t first_byte[MAX_GEMMS + 1];  // of W; units are dealt by bytes
};

// First unit that starts at this byte or later.
__host__ __device__ __forceinline__ int unit_from(const HopperFewLaunch& p, int64_t byte) {
    int gemm = 0;
    while (gemm + 1 < p.args.count && byte >= p.first_byte[gemm + 1]) ++gemm;
    const int units = p.first_unit[gemm + 1] - p.first_unit[gemm];
    if (units == 0) return p.first_unit[gemm];
    const int64_t each = (p.first_byte[gemm + 1] - p.first_byte[gemm]) / units, in_map = (byte - p.first_byte[gemm] + each - 1) / each;
    return p.first_unit[gemm] + static_cast<int>(in_map < units ? in_map : units);
}
__host__ __device__ __forceinline__ int first_unit_of(const HopperFewLaunch& p, int block, int blocks) {
    return unit_from(p, (p.first_byte[p.args.count] * block + blocks - 1) / blocks);
}

struct FewSmem {
    uint64_t full[STAGES], empty[STAGES];
    float scales[MAX_CACHED_K / GROUP_INPUTS][MAX_ROWS];  // scales of x
    float sums[2][2 * WARPGROUPS][MAX_ROWS][OUTPUTS_PER_UNIT];  // partial sums of a unit, two per warpgroup; two buffers
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
namespace hopper {
// Descriptor without swizzle: 8 columns of 16 bytes. along_k, along_columns: bytes to the next 16 bytes of k, 8
// columns.
__device__ __forceinline__ uint64_t smem_descriptor_columns(uint32_t address, uint32_t along_k, uint32_t along_columns) {
    return static_cast<uint64_t>((address & 0x3ffff) >> 4) | static_cast<uint64_t>(along_k >> 4) << 16 |
           static_cast<uint64_t>(along_columns >> 4) << 32;
}
// s [64, 16] += a [64, 16] @ b [16, 16]^T, fp16.
__device__ __forceinline__ void wgmma_fp16_n16(float (&s)[8], uint64_t a, uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7}, %8, %9, 1, 1, 1, 0, 0;"
                 : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3]), "+f"(s[4]), "+f"(s[5]), "+f"(s[6]), "+f"(s[7])
                 : "l"(a), "l"(b));
}
}  // namespace hopper

__device__ __forceinline__ void sync_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }

// Splits inputs c .. c + 7 of a row and stores them as operand B at x. All lanes call it; a half-warp holds 128 inputs.
__device__ __forceinline__ void store_operand(uint32_t x, FewSmem& smem, int c, int row, const uint4& values, bool inside) {
    float f[8], largest = 0.0f;
    unpack8(values, f);
#pragma unroll
    for (int j = 0; j < 8; ++j) largest = fmaxf(largest, fabsf(f[j]));
#pragma unroll
    for (int i = 8; i > 0; i >>= 1) largest = fmaxf(largest, __shfl_xor_sync(FULL_MASK, largest, i));
    // Scaled so that the maximum is 128 to 256.
    const uint32_t exponent = largest > 0.0f ? __float_as_uint(largest) >> 23 : 127u;
    const float inverse = __uint_as_float((261u - exponent) << 23);
    uint32_t codes[2][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const float lo = f[2 * j] * inverse, hi = f[2 * j + 1] * inverse;
        uint16_t code, rest;
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(code) : "f"(hi), "f"(lo));
        const uint32_t pair = e4m3x2_to_half2(code);
        const float2 meant = __half22float2(*reinterpret_cast<const __half2*>(&pair));
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(rest) : "f"((hi - meant.y) * 16.0f), "f"((lo - meant.x) * 16.0f));
        codes[0][j] = code, codes[1][j] = rest;
    }
    if (!inside) return;
    const int group = c / GROUP_INPUTS;
    const uint32_t to = x + group / 2 * CODE_PAIR + c % GROUP_INPUTS / 16 * CODE_STEP + (group % 2 * 2 * MAX_ROWS + row) * 16 + (c & 8);
#pragma unroll
    for (int part = 0; part < 2; ++part) {
        asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to + part * MAX_ROWS * 16), "r"(codes[part][0] | codes[part][1] << 16),
                     "r"(codes[part][2] | codes[part][3] << 16) : "memory");
    }
    if ((threadIdx.x & 15) == 0) smem.scales[group][row] = exponent < 255u ? __uint_as_float((exponent - 7u) << 23) : largest;  // infinite
}

// Producer: one lane.
__device__ __forceinline__ void produce_tiles(const HopperFewLaunch& p, FewSmem& smem, uint32_t ring, int first, int last) {
    using namespace hopper;
    const uint32_t full = smem_address(smem.full), empty = smem_address(smem.empty);
    uint32_t stage = 0, parity = 1;
    int gemm = 0;
    for (int unit = first; unit < last; ++unit) {
        while (unit >= p.first_unit[gemm + 1]) ++gemm;
        const QuantGemmArgs& m = p.args.gemms[gemm];
        const int output = (unit - p.first_unit[gemm]) * OUTPUTS_PER_UNIT, row_bytes = m.scales == nullptr ? 2 * m.k : m.k;
        for (int step = 0; step * PIECES * TILE_K_BYTES < row_bytes; ++step) {
            mbarrier_wait(empty + 8 * stage, parity);
            const uint32_t barrier = full + 8 * stage;
            mbarrier_expect_tx(barrier, TILE_DATA_BYTES);
            tma_load(ring + stage * TILE_DATA_BYTES, &p.weights[gemm], 0, output, step * PIECES, barrier, EVICT_FIRST);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
    }
}
#endif

__global__ void __launch_bounds__(CONSUMERS + 32, 1) hopper_few_kernel(const __grid_constant__ HopperFewLaunch p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using namespace hopper;
    extern __shared__ unsigned char dynamic[];
    const uint32_t ring = (smem_address(dynamic) + 1023) & ~1023u, x = ring + STAGES * TILE_DATA_BYTES;
    FewSmem& smem = *reinterpret_cast<FewSmem*>(dynamic + (x + INPUT_BYTES - smem_address(dynamic)));
    const int warp = __shfl_sync(FULL_MASK, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, t = lane & 3, rows = p.args.rows;
    const uint32_t full = smem_address(smem.full), empty = smem_address(smem.empty);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            mbarrier_init(full + 8 * i, 1);
            mbarrier_init(empty + 8 * i, 4);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    allow_next_kernel();
    const int first = first_unit_of(p, blockIdx.x, gridDim.x), last = first_unit_of(p, blockIdx.x + 1, gridDim.x);
    if (warp == CONSUMERS / 32) {
        if (elect_one()) produce_tiles(p, smem, ring, first, last);
        return;
    }
    wait_for_previous_kernel();
    if (first >= last) return;

    // Loads the rows from input `from` on as operand B; a thread has 8 inputs of each row.
    const auto load_inputs = [&](const QuantGemmArgs& m, int from, bool is_first) {
        if (!is_first) sync_consumers();  // the previous inputs have been multiplied
        const int c = threadIdx.x * 8;
        uint4 values[MAX_ROWS];
#pragma unroll
        for (int row = 0; row < MAX_ROWS; ++row) {
            values[row] = make_uint4(0, 0, 0, 0);
            if (row < rows && from + c < m.k) values[row] = load16(m.x + static_cast<int64_t>(row) * m.k + from + c);
        }
#pragma unroll
        for (int row = 0; row < MAX_ROWS; ++row) {
            if (row >= rows) break;
            if (m.scales != nullptr) {
                store_operand(x, smem, c, row, values[row], from + c < m.k);
            } else {  // zeros past the end: the last tile may exceed k
                const uint32_t to = x + c / 128 * HALF_PAIR + c % 64 / 8 * HALF_STEP + (c / 64 % 2 * MAX_ROWS + row) * 16;
                asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(values[row].x), "r"(values[row].y),
                             "r"(values[row].z), "r"(values[row].w) : "memory");
            }
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        sync_consumers();
    };

    const int group = warp / 4, k_half = warp % 4 / 2;  // warpgroup; which of two adjacent pieces the warp's rows are
    const int output = warp % 2 * 16 + g;  // output of the unit, and the one 8 further
    int stage = group, parity = 0;  // stage of the warpgroup's next tile
    int loaded_gemm = -1, gemm = 0;
    // A warpgroup's tiles have indices = warpgroup modulo WARPGROUPS. To wait for a refilled stage it must have seen
    // the previous fill: a parity distinguishes only two fills.
    const auto release = [&] {
        __syncwarp();
        if (lane == 0) arrive(empty + 8 * stage);
        stage += WARPGROUPS;
        if (stage >= STAGES) stage -= STAGES, parity ^= 1;
    };
    int tiles_before = 0;  // tiles of earlier units
    for (int unit = first; unit < last; ++unit) {
        while (unit >= p.first_unit[gemm + 1]) ++gemm;
        const QuantGemmArgs& m = p.args.gemms[gemm];
        const bool is_fp16 = m.scales == nullptr;
        const int out = (unit - p.first_unit[gemm]) * OUTPUTS_PER_UNIT + lane;  // output of a thread of the first 8 warps, one row each
        float scale = 1.0f;
        if (!is_fp16 && warp < MAX_ROWS) scale = __ldg(static_cast<const float*>(m.scales) + out);
        const int depth = is_fp16 ? PIECES * 64 : PIECES * GROUP_INPUTS;
        float sums[4] = {};  // outputs g, g + 8; rows 2t, 2t + 1
        const int first_step = (group - tiles_before) & (WARPGROUPS - 1);  // warpgroup's first tile of the unit, and of each piece of k
        tiles_before += (m.k + depth - 1) / depth;
        for (int from = 0; from < m.k; from += MAX_CACHED_K) {
            if (gemm != loaded_gemm || m.k > MAX_CACHED_K) {
                load_inputs(m, from, loaded_gemm < 0);
                loaded_gemm = gemm;
            }
            const int num_cached = min(m.k - from, MAX_CACHED_K), steps = (num_cached + depth - 1) / depth;
            if (is_fp16) {
                float products[8] = {};
                for (int step = first_step; step < steps; step += WARPGROUPS) {
                    mbarrier_wait(full + 8 * stage, parity);
                    const uint64_t a = smem_descriptor(ring + stage * TILE_DATA_BYTES);
                    const uint64_t b = smem_descriptor_columns(x + step * 2 * HALF_PAIR, HALF_STEP, 8 * 16);
                    wgmma_fence();
#pragma unroll
                    for (int pair = 0; pair < 2; ++pair) {
#pragma unroll
                        for (int j = 0; j < 4; ++j)
                            wgmma_fp16_n16(products, a + pair * (TILE_DATA_BYTES / 2 / 16) + 2 * j, b + (pair * HALF_PAIR + 2 * j * HALF_STEP) / 16);
                    }
                    wgmma_commit();
                    wgmma_wait<0>();
                    release();
                }
#pragma unroll
                for (int i = 0; i < 8; ++i) asm volatile("" : "+f"(products[i])::"memory");
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[i] += k_half ? products[4 + i] : products[i];
            } else {
                const int groups = num_cached / GROUP_INPUTS;
                for (int step = first_step; step < steps; step += WARPGROUPS) {
                    mbarrier_wait(full + 8 * stage, parity);
                    float products[2][16];
                    wgmma_fence();
#pragma unroll
                    for (int pair = 0; pair < 2; ++pair) {
                        const uint64_t a = smem_descriptor(ring + stage * TILE_DATA_BYTES + pair * (TILE_DATA_BYTES / 2));
                        const uint64_t b = smem_descriptor_columns(x + (2 * step + pair) * CODE_PAIR, CODE_STEP, 8 * 16);
#pragma unroll
                        for (int j = 0; j < 4; ++j) wgmma_fp8<32>(products[pair], a + 2 * j, b + 2 * j * CODE_STEP / 16, j);
                    }
                    wgmma_commit();
                    float2 row_scales[2];
#pragma unroll
                    for (int pair = 0; pair < 2; ++pair)
                        row_scales[pair] = *reinterpret_cast<const float2*>(&smem.scales[min(4 * step + 2 * pair + k_half, groups - 1)][2 * t]);
                    wgmma_wait<0>();
                    release();
#pragma unroll
                    for (int pair = 0; pair < 2; ++pair) {
#pragma unroll
                        for (int i = 0; i < 16; ++i) asm volatile("" : "+f"(products[pair][i])::"memory");
                        if (4 * step + 2 * pair + k_half >= groups) continue;
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            const float one = k_half ? products[pair][8 + i] : products[pair][i], rest = k_half ? products[pair][12 + i] : products[pair][4 + i];
                            sums[i] = fmaf(fmaf(rest, 1.0f / 16, one), i & 1 ? row_scales[pair].y : row_scales[pair].x, sums[i]);
                        }
                    }
                }
            }
        }
        auto& unit_sums = smem.sums[unit & 1];
#pragma unroll
        for (int i = 0; i < 4; ++i) unit_sums[2 * first_step + k_half][2 * t + (i & 1)][output + (i >> 1) * 8] = sums[i];
        sync_consumers();
        if (warp < rows && out < m.n) {
            float y[1] = {};
#pragma unroll
            for (int i = 0; i < 2 * WARPGROUPS; ++i) y[0] += unit_sums[i][warp][lane];
            y[0] *= scale;
            activate_sums<1>(y, m.activation);
            const int64_t at = static_cast<int64_t>(warp) * m.ld_y + out;
            if (m.out_fp32) {
                static_cast<float*>(m.y)[at] = y[0];
            } else {
                static_cast<__half*>(m.y)[at] = __float2half_rn(y[0]);
            }
        }
    }
#endif
}

// 2 to 8 rows, fp8 or fp16.
RWKV_API int rwkv_hopper_few(const QuantLaunchArgs* args, void* stream) {
    if (args->rows < 1 || args->rows > MAX_ROWS || args->format != FP8 || args->norm.x != nullptr) return static_cast<int>(cudaErrorInvalidValue);
    if (encode_tiled() == nullptr) return static_cast<int>(cudaErrorNotSupported);
    HopperFewLaunch p = {};
    p.args = *args;
    for (int i = 0; i < args->count; ++i) {
        const QuantGemmArgs& m = args->gemms[i];
        const bool is_fp16 = m.scales == nullptr;
        if (m.k % (is_fp16 ? 64 : GROUP_INPUTS)) return static_cast<int>(cudaErrorInvalidValue);
        const int row_bytes = is_fp16 ? 2 * m.k : m.k, units = (m.n + OUTPUTS_PER_UNIT - 1) / OUTPUTS_PER_UNIT;
        p.first_unit[i + 1] = p.first_unit[i] + units;
        p.first_byte[i + 1] = p.first_byte[i] + static_cast<int64_t>(units) * OUTPUTS_PER_UNIT * row_bytes;
        const ElementType element = is_fp16 ? FP16 : BYTES;
        if (!make_tensor_map(&p.weights[i], m.qweight, element, m.n, TILE_K_BYTES / element.bytes, row_bytes / element.bytes, row_bytes / TILE_K_BYTES, OUTPUTS_PER_UNIT, PIECES)) {
            return static_cast<int>(cudaErrorInvalidValue);
        }
    }
    static bool raised[MAX_DEVICES] = {};
    const int bytes = 1024 + STAGES * TILE_DATA_BYTES + INPUT_BYTES + static_cast<int>(sizeof(FewSmem));
    if (!raised[current_device()]) {
        const cudaError_t error = cudaFuncSetAttribute(hopper_few_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, device_info().smem_bytes);
        if (error != cudaSuccess) return static_cast<int>(error);
        raised[current_device()] = true;
    }
    launch_with_carveout(hopper_few_kernel, dim3(device_info().num_sms), CONSUMERS + 32, bytes, 100, stream, p);
    return launch_result();
}
