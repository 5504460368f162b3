// Tensor maps of the Hopper kernels.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

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

constexpr int SWIZZLE_BYTES = 128;  // of the usual swizzle: bytes of a box's row

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
    int box_planes, int box_bytes = SWIZZLE_BYTES, cuuint64_t plane_pitch = SWIZZLE_BYTES,
    CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
    const cuuint64_t size[3] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows), static_cast<cuuint64_t>(planes)};
    const cuuint64_t strides[2] = {static_cast<cuuint64_t>(pitch) * element.bytes, plane_pitch};
    const cuuint32_t box[3] = {static_cast<cuuint32_t>(box_bytes / element.bytes), static_cast<cuuint32_t>(box_rows),
                               static_cast<cuuint32_t>(box_planes)};
    const cuuint32_t step[3] = {1, 1, 1};
    return encode_tiled()(tensor_map, element.type, 3, const_cast<void*>(matrix), size, strides, box, step,
                          CU_TENSOR_MAP_INTERLEAVE_NONE, box_bytes == SWIZZLE_BYTES ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B, promotion,
                          CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}
