// Entry of the products of rows in two bytes with int8 weights, and of halves beside them (wide_int8.cuh).
#include "wide_int8.cuh"

RWKV_API int rwkv_wide_int8(const WideInt8Args* args, void* stream) {
    Int8Launch p;
    if (args->turned || !describe_int8(p, *args)) return static_cast<int>(cudaErrorInvalidValue);
    return launch_planned<16, 32, 64>(args->tile_rows, args->splits, [&](auto rows, auto splits) {
        if (p.wide.coded == p.wide.count) return launch_int8<rows.value, splits.value, WIDE_PARTS>(p, stream);
        constexpr bool known = splits.value != 2;
        return known ? launch_int8<rows.value, known ? splits.value : 1, WIDE_PARTS_MIXED>(p, stream) : static_cast<int>(cudaErrorInvalidValue);
    });
}
