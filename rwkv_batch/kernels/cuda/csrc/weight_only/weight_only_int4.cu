// Launcher: fp16 rows x int4 weights (weight_only.cuh).
#include "weight_only.cuh"

RWKV_API int rwkv_weight_only_int4(const WeightOnlyLaunchArgs* args, void* stream) { return launch_weight_only<INT4>(*args, stream); }
