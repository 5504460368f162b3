// Launcher: two-part rows x fp8 weights, optionally with fp16 GEMMs (gemm.cuh).
#include "gemm_fp8.cuh"

RWKV_API int rwkv_gemm_two_part(const Fp8LaunchArgs* args, void* stream) {
    GemmLaunch p;
    if (!fill_fp8_launch(p, *args)) return static_cast<int>(cudaErrorInvalidValue);
    return dispatch_tile<16, 32, 64>(args->tile_rows, args->splits, [&](auto rows, auto splits) {
        constexpr int COLUMNS = 2 * rows.value;
        if (args->transposed && p.count > 1) return static_cast<int>(cudaErrorInvalidValue);
        if (args->transposed) return launch_gemm<COLUMNS, splits.value, GEMM_TWO_PART_TRANSPOSED>(p, stream);
        if (p.num_full == p.count) return launch_gemm<COLUMNS, splits.value, GEMM_TWO_PART>(p, stream);
        constexpr bool supported = splits.value != 2;
        return supported ? launch_gemm<COLUMNS, supported ? splits.value : 1, GEMM_TWO_PART_AND_FP16>(p, stream) : static_cast<int>(cudaErrorInvalidValue);
    });
}
