// What launchers of wide.cuh, and of the kernels that are made like it, have in common: tensor maps, made by the driver, and launches that are planned.
#pragma once

#include <type_traits>

#include "wide_work.cuh"

using EncodeTiled = CUresult (*)(
    CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
    const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The driver's function, found at run time: nothing is linked against libcuda.
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

constexpr int TURNED_INPUTS = 128;  // of a tile of codes [k, n]

struct ElementType {
    CUtensorMapDataType type;
    int bytes;
};
constexpr ElementType HALVES = {CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2}, BYTES = {CU_TENSOR_MAP_DATA_TYPE_UINT8, 1};

// Boxes of [box_planes][box_rows][128 bytes, or box_bytes] out of `planes` matrices [rows][pitch] that lie 128 bytes
// of columns, or plane_pitch, apart, `columns` wide; swizzled over as many bytes (128 or 64).
inline bool describe(
    CUtensorMap* map, const void* matrix, ElementType element, int rows, int columns, int pitch, int planes, int box_rows,
    int box_planes, int box_bytes = TILE_BYTES, cuuint64_t plane_pitch = TILE_BYTES,
    CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
    const cuuint64_t size[3] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows), static_cast<cuuint64_t>(planes)};
    const cuuint64_t strides[2] = {static_cast<cuuint64_t>(pitch) * element.bytes, plane_pitch};
    const cuuint32_t box[3] = {static_cast<cuuint32_t>(box_bytes / element.bytes), static_cast<cuuint32_t>(box_rows),
                               static_cast<cuuint32_t>(box_planes)};
    const cuuint32_t step[3] = {1, 1, 1};
    return encode_tiled()(map, element.type, 3, const_cast<void*>(matrix), size, strides, box, step,
                          CU_TENSOR_MAP_INTERLEAVE_NONE, box_bytes == TILE_BYTES ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B, promotion,
                          CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// A matrix [rows, k] in boxes of [box_rows][128 bytes].
inline bool describe_rows(CUtensorMap* map, const void* matrix, ElementType element, int rows, int k, int box_rows) {
    return describe(map, matrix, element, rows, k, k, 1, box_rows, 1);
}

// W [n, k] in boxes of a tile's outputs. The L2 cache brings in what a stage wants, not the next one's too, which are the first to leave
// it again.
inline bool describe_weights(CUtensorMap* map, const void* matrix, ElementType element, int n, int k) {
    return describe(map, matrix, element, n, k, k, 1, OUTPUTS, 1, TILE_BYTES, TILE_BYTES, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
}

// Codes [k, n] in boxes of [128 inputs][128 outputs]; the L2 cache brings in no more than these.
inline bool describe_turned(CUtensorMap* map, const void* matrix, int n, int k) {
    return describe(map, matrix, BYTES, k, n, n, 1, TURNED_INPUTS, 1, TILE_BYTES, TILE_BYTES, CU_TENSOR_MAP_L2_PROMOTION_NONE);
}

// Of a launch all but its tensor maps and scales.
template <typename Args>
void describe_maps(WideLaunch& p, const Args& args) {
    int tiles = 0;
    for (int i = 0; i < args.count; ++i) {
        const auto& m = args.maps[i];
        p.y[i] = static_cast<__half*>(m.y), p.parts[i] = nullptr;
        p.n[i] = m.n, p.k[i] = m.k, p.activation[i] = m.activation;
        p.first_tile[i] = tiles;
        tiles += (m.n + OUTPUTS - 1) / OUTPUTS;
    }
    p.first_tile[args.count] = tiles;
    p.count = p.coded = p.early = args.count, p.rows = args.rows, p.row_blocks = (args.rows + args.tile_rows - 1) / args.tile_rows;
    p.partial = static_cast<float4*>(args.partial), p.counters = static_cast<int*>(args.counters);
}

// launch(rows, splits), as numbers that are known when it is compiled; rows is one of ROWS. A CUDA error code.
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

// As many blocks as run at once and have work; all of them at once when k is split. `raised`: on which devices the kernel
// may have its shared memory.
template <typename Params>
int launch_tiles(
    void (*kernel)(Params), bool (&raised)[MAX_DEVICES], int shared_bytes, int tiles, int splits, const Params& p, void* stream) {
    if (!raised[this_device()]) {
        const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
        if (error != cudaSuccess) return static_cast<int>(error);
        raised[this_device()] = true;
    }
    const int units = tiles * splits, room = this_machine().processors;
    if (splits > 1 && units > room) return static_cast<int>(cudaErrorInvalidValue);
    launch_with_shared(kernel, dim3(min(units, room)), 384, shared_bytes, stream, p);
    return launch_result();
}
