// Entry of the products of halves (wide.cuh): makes the tensor maps, and launches what the caller has planned.
#include "wide.cuh"

struct WideMap {
    const void* weight;  // [n, k] fp16, or [k, n] if transposed
    const void* x;       // [rows, k] fp16
    void* y;             // [rows, n] fp16, or fp32
    int n, k;
    int activation;
};

struct WideArgs {
    WideMap maps[MAX_WIDE_MAPS];
    int count;
    int rows;
    int transposed;  // of all maps alike
    int to_floats;   // y of all maps is fp32: one split, not transposed
    int tile_rows, splits;
    void* partial;   // see WideLaunch
    void* counters;
};

// A transposed matrix [k, n] as n / 64 columns of it, in boxes of [OUTPUTS / 64][64][64].
static bool describe_transposed(CUtensorMap* map, const void* matrix, int k, int n) {
    return describe(map, matrix, HALVES, k, 64, n, n / 64, 64, OUTPUTS / 64);
}

RWKV_API int rwkv_wide(const WideArgs* args, void* stream) {
    if (encode_tiled() == nullptr) return static_cast<int>(cudaErrorNotSupported);
    WideLaunch p;
    describe_maps(p, *args);
    for (int i = 0; i < args->count; ++i) {
        const WideMap& m = args->maps[i];
        const bool done = args->transposed ? describe_transposed(&p.weights[i], m.weight, m.k, m.n)
                                           : describe_weights(&p.weights[i], m.weight, HALVES, m.n, m.k);
        if (!done || !describe_rows(&p.inputs[i], m.x, HALVES, args->rows, m.k, args->tile_rows)) {
            return static_cast<int>(cudaErrorInvalidValue);
        }
    }
    if (args->to_floats) {
        return launch_planned<16, 32, 64, 80, 96, 112, 128, 160, 192, 224, 240, 256>(args->tile_rows, args->splits, [&](auto rows, auto splits) {
            const bool known = splits.value == 1 && !args->transposed;
            return known ? launch_wide<rows.value, 1, WIDE_TO_FLOATS>(p, stream) : static_cast<int>(cudaErrorInvalidValue);
        });
    }
    return launch_planned<16, 32, 64, 80, 96, 112, 128, 160, 192, 224, 240, 256>(args->tile_rows, args->splits, [&](auto rows, auto splits) {
        return args->transposed ? launch_wide<rows.value, splits.value, WIDE_TURNED>(p, stream)
                                : launch_wide<rows.value, splits.value, WIDE_PLAIN>(p, stream);
    });
}
