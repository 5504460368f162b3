// Entry of the products of rows of fp8 codes with fp8 weights stored [k, n] (wide.cuh).
#include "wide_fp8.cuh"

RWKV_API int rwkv_wide_fp8_turned(const WideFp8Args* args, void* stream) {
    WideLaunch p;
    if (!args->turned || args->count != 1 || !describe_fp8(p, *args)) return static_cast<int>(cudaErrorInvalidValue);
    return launch_planned<96, 128, 160, 192, 224, 240, 256, 320>(args->tile_rows, args->splits, [&](auto rows, auto splits) {
        return launch_wide<rows.value, splits.value, WIDE_FP8_TURNED>(p, stream);
    });
}
