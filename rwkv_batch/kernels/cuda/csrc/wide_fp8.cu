// Entry of the products of rows of fp8 codes with fp8 weights, and of halves beside them (wide.cuh).
#include "wide_fp8.cuh"

RWKV_API int rwkv_wide_fp8(const WideFp8Args* args, void* stream) {
    WideLaunch p;
    if (!describe_fp8(p, *args)) return static_cast<int>(cudaErrorInvalidValue);
    if (p.coded < p.count && args->to_floats) return static_cast<int>(cudaErrorInvalidValue);
    if (p.coded < p.count) {
        return launch_planned<96, 128, 160, 192, 224, 256, 320>(args->tile_rows, args->splits, [&](auto rows, auto splits) {
            constexpr bool known = splits.value != 2;
            return known ? launch_wide<rows.value, known ? splits.value : 1, WIDE_MIXED>(p, stream) : static_cast<int>(cudaErrorInvalidValue);
        });
    }
    if (args->to_floats) {
        return launch_planned<96, 128, 160, 192, 320>(args->tile_rows, args->splits, [&](auto rows, auto splits) {
            return splits.value == 1 ? launch_wide<rows.value, 1, WIDE_FP8_TO_FLOATS>(p, stream) : static_cast<int>(cudaErrorInvalidValue);
        });
    }
    return launch_planned<32, 64, 96, 128, 160, 192, 224, 256, 320>(args->tile_rows, args->splits, [&](auto rows, auto splits) {
        return launch_wide<rows.value, splits.value, WIDE_FP8>(p, stream);
    });
}
