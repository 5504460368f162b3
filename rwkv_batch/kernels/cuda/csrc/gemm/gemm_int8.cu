// Launcher: two-byte rows x int8 weights, optionally with fp16 GEMMs (gemm_int8.cuh).
#include "gemm_int8.cuh"

RWKV_API int rwkv_gemm_int8(const Int8LaunchArgs* args, void* stream) {
    Int8Launch p;
    if (args->transposed || !fill_int8_launch(p, *args)) return static_cast<int>(cudaErrorInvalidValue);
    return dispatch_tile<16, 32, 64>(args->tile_rows, args->splits, [&](auto rows, auto splits) {
        if (p.base.num_full == p.base.count) return launch_int8<rows.value, splits.value, GEMM_TWO_PART>(p, stream);
        constexpr bool supported = splits.value != 2;
        return supported ? launch_int8<rows.value, supported ? splits.value : 1, GEMM_TWO_PART_AND_FP16>(p, stream) : static_cast<int>(cudaErrorInvalidValue);
    });
}
