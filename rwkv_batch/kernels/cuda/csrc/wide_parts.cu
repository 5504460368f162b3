// Entry of the products of rows in two parts with fp8 weights, and of halves beside them (wide.cuh).
#include "wide_fp8.cuh"

RWKV_API int rwkv_wide_parts(const WideFp8Args* args, void* stream) {
    WideLaunch p;
    if (!describe_fp8(p, *args)) return static_cast<int>(cudaErrorInvalidValue);
    return launch_planned<16, 32, 64>(args->tile_rows, args->splits, [&](auto rows, auto splits) {
        constexpr int COLUMNS = 2 * rows.value;
        if (args->turned && p.count > 1) return static_cast<int>(cudaErrorInvalidValue);
        if (args->turned) return launch_wide<COLUMNS, splits.value, WIDE_PARTS_TURNED>(p, stream);
        if (p.coded == p.count) return launch_wide<COLUMNS, splits.value, WIDE_PARTS>(p, stream);
        constexpr bool known = splits.value != 2;
        return known ? launch_wide<COLUMNS, known ? splits.value : 1, WIDE_PARTS_MIXED>(p, stream) : static_cast<int>(cudaErrorInvalidValue);
    });
}
