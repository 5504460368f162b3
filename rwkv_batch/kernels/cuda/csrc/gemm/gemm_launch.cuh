// Host side of the Hopper GEMMs: tensor maps, launch parameters, dispatch to the compiled tile sizes.
#pragma once

#include <type_traits>

#include "gemm_scheduler.cuh"

using EncodeTiled = CUresult (*)(
    CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
    const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// cuTensorMapEncodeTiled, found at run time: the library does not link libcuda. Null if the driver lacks it.
inline EncodeTiled encode_tiled() {
    static const EncodeTiled found = [] {
        void* function = nullptr;
        cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
#else
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &result);
#endif
        return result == cudaDriverEntryPointSuccess ? reinterpret_cast<EncodeTiled>(function) : nullptr;
    }();
    return found;
}

constexpr int TRANSPOSED_TILE_K = 128;  // rows of a stage's tile

struct ElementType {
    CUtensorMapDataType type;
    int bytes;
};
constexpr ElementType FP16 = {CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2}, BYTES = {CU_TENSOR_MAP_DATA_TYPE_UINT8, 1};

// Makes a tensor map of `planes` matrices [rows, columns] with row pitch `pitch`, plane_pitch bytes apart.
// Boxes are [box_planes][box_rows][box_bytes], swizzled over box_bytes (64 or 128). Returns false if the driver
// refuses.
inline bool make_tensor_map(
    CUtensorMap* tensor_map, const void* matrix, ElementType element, int rows, int columns, int pitch, int planes, int box_rows,
    int box_planes, int box_bytes = TILE_K_BYTES, cuuint64_t plane_pitch = TILE_K_BYTES,
    CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
    const cuuint64_t size[3] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows), static_cast<cuuint64_t>(planes)};
    const cuuint64_t strides[2] = {static_cast<cuuint64_t>(pitch) * element.bytes, plane_pitch};
    const cuuint32_t box[3] = {static_cast<cuuint32_t>(box_bytes / element.bytes), static_cast<cuuint32_t>(box_rows),
                               static_cast<cuuint32_t>(box_planes)};
    const cuuint32_t step[3] = {1, 1, 1};
    return encode_tiled()(tensor_map, element.type, 3, const_cast<void*>(matrix), size, strides, box, step,
                          CU_TENSOR_MAP_INTERLEAVE_NONE, box_bytes == TILE_K_BYTES ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B, promotion,
                          CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

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
int launch_planned(int tile_rows, int splits, const Launch& launch) {
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
