// Launcher: fp8 rows x fp8 weights, optionally with fp16 GEMMs (gemm.cuh).
#include "gemm_fp8.cuh"

RWKV_API int rwkv_gemm_fp8(const Fp8LaunchArgs* args, void* stream) {
    GemmLaunch p;
    if (!fill_fp8_launch(p, *args)) return static_cast<int>(cudaErrorInvalidValue);
    if (p.num_full < p.count && args->to_fp32) return static_cast<int>(cudaErrorInvalidValue);
    if (p.num_full < p.count) {
        return dispatch_tile<96, 128, 160, 192, 224, 256, 320>(args->tile_rows, args->splits, [&](auto rows, auto splits) {
            constexpr bool supported = splits.value != 2;
            return supported ? launch_gemm<rows.value, supported ? splits.value : 1, GEMM_FP8_AND_FP16>(p, stream) : static_cast<int>(cudaErrorInvalidValue);
        });
    }
    if (args->to_fp32) {
        return dispatch_tile<96, 128, 160, 192, 320>(args->tile_rows, args->splits, [&](auto rows, auto splits) {
            return splits.value == 1 ? launch_gemm<rows.value, 1, GEMM_FP8_TO_FP32>(p, stream) : static_cast<int>(cudaErrorInvalidValue);
        });
    }
    return dispatch_tile<32, 64, 96, 128, 160, 192, 224, 256, 320>(args->tile_rows, args->splits, [&](auto rows, auto splits) {
        return launch_gemm<rows.value, splits.value, GEMM_FP8>(p, stream);
    });
}
