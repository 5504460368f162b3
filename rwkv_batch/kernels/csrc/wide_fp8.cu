// Entry of the products of rows of fp8 codes with fp8 weights, and of halves beside them (wide.cuh).
#include "wide_maps.cuh"

struct WideFp8Map {
    const void* weight;         // [n, k] e4m3, or fp16
    const void* x;              // [rows, k] likewise
    const void* weight_scales;  // [n] fp32; null: halves
    const void* input_scales;   // [rows] fp32
    void* y;                    // [rows, n] fp16, or fp32
    int n, k;
    int activation;
};

struct WideFp8Args {
    WideFp8Map maps[MAX_WIDE_MAPS];  // those in codes first, then those of halves
    int count;
    int late;  // of the last ones the inputs are results of the halves before them
    int rows;
    int tile_rows;
    int splits;  // where there are maps of halves: of these alone, of none that is late
    int to_floats;  // y of all maps is fp32: codes only, of one split
    void* partial;  // see WideLaunch
    void* counters;
};

RWKV_API int rwkv_wide_fp8(const WideFp8Args* args, void* stream) {
    if (encode_tiled() == nullptr) return static_cast<int>(cudaErrorNotSupported);
    WideLaunch p;
    describe_maps(p, *args);
    p.coded = 0, p.early = args->count - args->late;
    for (int i = 0; i < args->count; ++i) {
        const WideFp8Map& m = args->maps[i];
        const int box_rows = args->tile_rows > 256 ? args->tile_rows / 2 : args->tile_rows;
        const ElementType type = m.weight_scales == nullptr ? HALVES : BYTES;
        p.coded += m.weight_scales != nullptr;
        if (!describe_rows(&p.weights[i], m.weight, type, m.n, m.k, OUTPUTS) ||
            !describe_rows(&p.inputs[i], m.x, type, args->rows, m.k, box_rows)) {
            return static_cast<int>(cudaErrorInvalidValue);
        }
        p.weight_scales[i] = static_cast<const float*>(m.weight_scales);
        p.input_scales[i] = static_cast<const float*>(m.input_scales);
    }
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
