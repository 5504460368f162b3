// Launcher: two-byte rows x int8 weights stored [k, n] (gemm_int8.cuh).
#include "gemm_int8.cuh"

RWKV_API int rwkv_gemm_int8_transposed(const Int8LaunchArgs* args, void* stream) {
    Int8Launch p;
    const bool supported = args->transposed && args->count == 1 && args->groups == 1 && args->gemms[0].y_scales == nullptr;
    if (!supported || !fill_int8_launch(p, *args)) return static_cast<int>(cudaErrorInvalidValue);
    return dispatch_tile<16, 32, 64>(args->tile_rows, args->splits, [&](auto rows, auto splits) {
        return launch_int8<rows.value, splits.value, GEMM_TWO_PART_TRANSPOSED>(p, stream);
    });
}
