// Entry of the products of rows in two bytes with int8 weights stored [k, n] (wide_int8.cuh).
#include "wide_int8.cuh"

RWKV_API int rwkv_wide_int8_turned(const WideInt8Args* args, void* stream) {
    Int8Launch p;
    const bool known = args->turned && args->count == 1 && args->groups == 1 && args->maps[0].y_scales == nullptr;
    if (!known || !describe_int8(p, *args)) return static_cast<int>(cudaErrorInvalidValue);
    return launch_planned<16, 32, 64>(args->tile_rows, args->splits, [&](auto rows, auto splits) {
        return launch_int8<rows.value, splits.value, WIDE_PARTS_TURNED>(p, stream);
    });
}
