// Host side of the Hopper GEMMs: operands' tensor maps, launch parameters, dispatch to the compiled tile sizes.
#pragma once

#include <type_traits>

#include "../tensor_map.cuh"
#include "gemm_scheduler.cuh"

constexpr int TRANSPOSED_TILE_K = 128;  // rows of a stage's tile

// Matrix [rows, k] in boxes of [box_rows][128 bytes].
inline bool tensor_map_rows(CUtensorMap* tensor_map, const void* matrix, ElementType element, int rows, int k, int box_rows) {
    return make_tensor_map(tensor_map, matrix, element, rows, k, k, 1, box_rows, 1);
}

// W [n, k] in boxes of [128 outputs][128 bytes]. L2 promotion of 128 bytes: a larger one fetches the next stage's
// bytes, which L2 evicts first.
inline bool tensor_map_weights(CUtensorMap* tensor_map, const void* matrix, ElementType element, int n, int k) {
    return make_tensor_map(tensor_map, matrix, element, n, k, k, 1, TILE_N, 1, TILE_K_BYTES, TILE_K_BYTES, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
}

// 8-bit W [k, n] in boxes of [128 inputs][128 outputs], without L2 promotion.
inline bool tensor_map_transposed(CUtensorMap* tensor_map, const void* matrix, int n, int k) {
    return make_tensor_map(tensor_map, matrix, BYTES, k, n, n, 1, TRANSPOSED_TILE_K, 1, TILE_K_BYTES, TILE_K_BYTES, CU_TENSOR_MAP_L2_PROMOTION_NONE);
}

// Fills a launch's parameters, except tensor maps and scales.
template <typename Args>
void fill_launch(GemmLaunch& p, const Args& args) {
    int tiles = 0;
    for (int i = 0; i < args.count; ++i) {
        const auto& m = args.gemms[i];
        p.y[i] = static_cast<__half*>(m.y), p.y_two_part[i] = nullptr;
        p.n[i] = m.n, p.k[i] = m.k, p.activation[i] = m.activation;
        p.first_tile[i] = tiles;
        tiles += (m.n + TILE_N - 1) / TILE_N;
    }
    p.first_tile[args.count] = tiles;
    p.count = p.num_full = p.num_independent = args.count, p.rows = args.rows, p.row_blocks = (args.rows + args.tile_rows - 1) / args.tile_rows;
    p.partials = static_cast<float4*>(args.partials), p.counters = static_cast<int*>(args.counters);
}

// Calls launch(rows, splits) with compile-time constants; rows is one of ROWS. Returns a CUDA error code.
template <int... ROWS, typename Launch>
int dispatch_tile(int tile_rows, int splits, const Launch& launch) {
    int code = cudaErrorInvalidValue;
    const auto with_rows = [&](auto rows) {
        if (tile_rows != rows.value) return;
        switch (splits) {
            case 1: code = launch(rows, std::integral_constant<int, 1>()); break;
            case 2: code = launch(rows, std::integral_constant<int, 2>()); break;
            case 4: code = launch(rows, std::integral_constant<int, 4>()); break;
        }
    };
    (with_rows(std::integral_constant<int, ROWS>()), ...);
    return code;
}

// Launches one CTA per SM at most. With split-K all CTAs must be resident. raised: per device, set once the kernel may
// use its shared memory.
template <typename Params>
int launch_tiles(
    void (*kernel)(Params), bool (&raised)[MAX_DEVICES], int smem_bytes, int tiles, int splits, const Params& p, void* stream) {
    if (!raised[current_device()]) {
        const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
        if (error != cudaSuccess) return static_cast<int>(error);
        raised[current_device()] = true;
    }
    const int units = tiles * splits, room = device_info().num_sms;
    if (splits > 1 && units > room) return static_cast<int>(cudaErrorInvalidValue);
    launch_with_smem(kernel, dim3(min(units, room)), 384, smem_bytes, stream, p);
    return launch_result();
}
