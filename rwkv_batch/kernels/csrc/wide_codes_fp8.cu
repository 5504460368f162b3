// Entry of the products of up to 256 rows of halves with weights of fp8 (wide_codes.cuh).
#include "wide_codes.cuh"

RWKV_API int rwkv_wide_codes_fp8(const WideCodesArgs* args, void* stream) { return launch_wide_codes<FP8>(*args, stream); }
