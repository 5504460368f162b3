// Entry of the products of up to 256 rows of halves with weights of fp8 (wide_codes.cuh).
#include "wide_codes.cuh"

RWKV_API int rwkv_wide_codes_fp8(const WideCodesArgs* args, void* stream) {
    // ffn.value, [k, n], is multiplied by rows in two parts or by fp8 codes (wide.cuh).
    return args->transposed ? static_cast<int>(cudaErrorInvalidValue) : launch_codes<Codes<FP8, false>>(*args, stream);
}
