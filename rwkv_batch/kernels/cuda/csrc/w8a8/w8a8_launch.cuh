// Host side of w8a8.cuh: arguments, tensor maps, dispatch to the compiled tiles.
#pragma once

#include "../tensor_map.cuh"
#include "w8a8.cuh"

constexpr int NO_SUCH_TILE = -1;
constexpr int64_t BAND_BYTES = 32 << 20;  // of x, which stays in L2 while all weights pass
constexpr int MAX_BAND = 16;              // about as many rows as a wave has outputs, or twice as many

// x and W in boxes of `rows` rows and 128 bytes.
inline bool tensor_map_bytes(CUtensorMap* map, const void* matrix, int rows, int k, int box_rows, CUtensorMapL2promotion promotion) {
    return make_tensor_map(map, matrix, BYTES, rows, k, k, 1, box_rows, 1, SWIZZLE_BYTES, SWIZZLE_BYTES, promotion);
}

// Clusters that run at once. Parts of the GPU may have SMs left over.
template <typename Kernel>
int max_clusters(Kernel kernel, int size, int threads, int smem_bytes) {
    static int known[MAX_DEVICES] = {};
    int& clusters = known[current_device()];
    if (clusters == 0) {
        cudaLaunchAttribute shape = {};
        shape.id = cudaLaunchAttributeClusterDimension;
        shape.val.clusterDim.x = size, shape.val.clusterDim.y = shape.val.clusterDim.z = 1;
        const cudaLaunchConfig_t config = {dim3(size), dim3(threads), static_cast<size_t>(smem_bytes), nullptr, &shape, 1};
        if (cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) != cudaSuccess || clusters < 1) clusters = device_info().num_sms / size;
    }
    return clusters;
}

// Returns a CUDA error code.
template <typename Tile, bool UNSIGNED>
int launch_w8a8(const W8A8Args& args, void* stream) {
    constexpr int REFUSED = static_cast<int>(cudaErrorInvalidValue);
    const int stages = args.k / DEPTH;
    if (args.k % DEPTH != 0 || stages < Tile::SPLITS || args.rows % (1 + args.is_two_byte) != 0 || encode_tiled() == nullptr) return REFUSED;
    W8A8Launch p = {};
    p.exchange = static_cast<int4*>(args.exchange), p.counters = static_cast<unsigned*>(args.counters);
    p.count = args.count, p.rows = args.rows, p.k = args.k, p.lead = Tile::SPLITS == 1 ? args.lead : 0;
    p.pitch = args.pitch, p.is_two_byte = args.is_two_byte;
    p.row_blocks = (args.rows + Tile::ROWS * Tile::STACKED - 1) / (Tile::ROWS * Tile::STACKED), p.band = 1;
    while (p.band * 2 * Tile::STACKED <= MAX_BAND && static_cast<int64_t>(p.band) * 2 * Tile::STACKED * Tile::ROWS * args.k <= BAND_BYTES) p.band *= 2;
    if (p.lead > stages || p.lead >= Tile::STAGES || args.pitch < (args.rows + Tile::ROWS - 1) / Tile::ROWS * Tile::ROWS) return REFUSED;
    p.fed_factors = args.fed_factors, p.fed_largest = args.fed_largest;
    if (p.fed_largest != nullptr && (!Tile::FEEDS || args.count > 1 || args.is_two_byte || args.gemms[0].out_fp32)) return REFUSED;
    for (int i = 0; i < args.count; ++i) {
        const W8A8GemmArgs& m = args.gemms[i];
        W8A8Gemm& gemm = p.gemms[i];
        if (m.n % BLOCK_OUTPUTS != 0) return REFUSED;
        gemm.y = static_cast<uint8_t*>(m.y), gemm.n = m.n, gemm.out_fp32 = m.out_fp32, gemm.first_group = p.groups;
        gemm.weight_scales = static_cast<const float*>(m.weight_scales), gemm.weight_ratios = static_cast<const int*>(m.weight_ratios);
        gemm.input_scales = static_cast<const float*>(m.input_scales), gemm.input_ratios = static_cast<const int*>(m.input_ratios);
        p.groups += (m.n + Tile::OUTPUTS * Tile::ABREAST - 1) / (Tile::OUTPUTS * Tile::ABREAST);
        // L2 promotion of 128 bytes for W: a larger one fetches the next stage's bytes, which L2 evicts first.
        if (!tensor_map_bytes(&gemm.weights, m.weights, m.n, args.k, Tile::BOX_OUTPUTS, CU_TENSOR_MAP_L2_PROMOTION_L2_128B) ||
            !tensor_map_bytes(&gemm.inputs, m.x, args.rows, args.k, Tile::BOX_ROWS, CU_TENSOR_MAP_L2_PROMOTION_L2_256B))
            return REFUSED;
    }
    const auto kernel = w8a8_kernel<Tile, UNSIGNED>;
    static bool raised[MAX_DEVICES] = {};
    if (!raised[current_device()]) {
        const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::SHARED_BYTES);
        if (error != cudaSuccess) return static_cast<int>(error);
        raised[current_device()] = true;
    }
    const int num_sms = device_info().num_sms, works = p.groups * p.row_blocks;
    if (Tile::GLOBAL && works * Tile::TOGETHER > num_sms) return REFUSED;  // a CTA would wait for one that is not resident
    // Row scales of two tiles fit shared memory. With fewer stages than the ring, loads could run two tiles ahead.
    const bool is_persistent = Tile::SPLITS == 1 && stages >= Tile::STAGES;
    int resident = num_sms * (Tile::LEAN ? args.ctas_per_sm : 1) / Tile::PAIR;
    if constexpr (Tile::PAIR > 2) resident = max_clusters(kernel, Tile::CLUSTER, Tile::THREADS + 128, Tile::SHARED_BYTES);
    const int clusters = is_persistent ? min(works, resident) : works;
    const dim3 grid(clusters * Tile::TOGETHER);
    if constexpr (Tile::CLUSTER > 1) {
        launch_clusters(kernel, Tile::CLUSTER, grid, Tile::THREADS + 128, Tile::SHARED_BYTES, stream, p);
    } else {
        launch_with_smem(kernel, grid, Tile::THREADS + 128, Tile::SHARED_BYTES, stream, p);
    }
    return launch_result();
}

// Returns from a table of tiles if args name this one. Each .cu file holds a part of the table.
#define W8A8_TILE(WARPGROUPS, BLOCKS, ROWS, SPLITS, PAIR, GLOBAL, UNSIGNED)                                                               \
    if (args.warpgroups == WARPGROUPS && args.blocks == BLOCKS && args.tile_rows == ROWS && args.splits == SPLITS && args.pair == PAIR && \
        args.is_unsigned == UNSIGNED && args.in_memory == GLOBAL)                                                                         \
        return launch_w8a8<W8A8Tile<WARPGROUPS, BLOCKS, ROWS, SPLITS, PAIR, GLOBAL>, UNSIGNED>(args, stream);
#define W8A8_ROWS(ROWS, UNSIGNED) W8A8_TILE(2, 1, ROWS, 1, 1, false, UNSIGNED)
#define W8A8_CLUSTER(ROWS, SPLITS, UNSIGNED) W8A8_TILE(2, 1, ROWS, SPLITS, 1, false, UNSIGNED)
#define W8A8_MEMORY(ROWS, SPLITS, UNSIGNED) W8A8_TILE(2, 1, ROWS, SPLITS, 1, true, UNSIGNED)
