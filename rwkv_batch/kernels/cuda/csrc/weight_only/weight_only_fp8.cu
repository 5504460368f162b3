// Launcher: fp16 rows x fp8 weights (weight_only.cuh).
#include "weight_only.cuh"

RWKV_API int rwkv_weight_only_fp8(const WeightOnlyLaunchArgs* args, void* stream) {
    // A transposed weight (ffn.value) is multiplied by gemm_two_part or gemm_fp8_transposed.
    return args->transposed ? static_cast<int>(cudaErrorInvalidValue) : launch_kind<WeightKind<FP8, false>>(*args, stream);
}
