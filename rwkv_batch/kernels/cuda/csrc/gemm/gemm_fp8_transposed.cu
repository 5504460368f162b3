// Launcher: fp8 rows x fp8 weights stored [k, n] (gemm.cuh).
#include "gemm_fp8.cuh"

RWKV_API int rwkv_gemm_fp8_transposed(const Fp8LaunchArgs* args, void* stream) {
    GemmLaunch p;
    if (!args->transposed || args->count != 1 || !fill_fp8_launch(p, *args)) return static_cast<int>(cudaErrorInvalidValue);
    return dispatch_tile<96, 128, 160, 192, 224, 240, 256, 320>(args->tile_rows, args->splits, [&](auto rows, auto splits) {
        return launch_gemm<rows.value, splits.value, GEMM_FP8_TRANSPOSED>(p, stream);
    });
}
