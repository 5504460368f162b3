// Entry of the products of up to 256 rows of halves with weights of int4 (wide_codes.cuh).
#include "wide_codes.cuh"

RWKV_API int rwkv_wide_codes_int4(const WideCodesArgs* args, void* stream) { return launch_wide_codes<INT4>(*args, stream); }
