// Launcher of a time mix's fp16 input projections in one launch (gemm.cuh): r, k, v, the low ranks down, and the low
// ranks up, which read outputs of this launch. Mirrored in cuda/library.py.
#include "gemm.cuh"

struct Fp16GemmArgs {
    const void* weight;  // [n, k] fp16
    const void* x;       // [rows, k] fp16
    void* y;             // [rows, n] fp16
    int n, k;
    int activation;
};

struct InputProjectionArgs {
    Fp16GemmArgs gemms[MAX_HOPPER_GEMMS];
    int count;
    int full, dependent;  // the first GEMMs: one CTA per tile; the last ones: inputs are outputs of the GEMMs in between
    int rows;
    int tile_rows, splits;  // CTAs that share k of the other GEMMs' tiles
    void* partials;  // see GemmLaunch
    void* counters;
};

RWKV_API int rwkv_gemm_input_projections(const InputProjectionArgs* args, void* stream) {
    if (encode_tiled() == nullptr) return static_cast<int>(cudaErrorNotSupported);
    GemmLaunch p;
    fill_launch(p, *args);
    p.num_full = args->full, p.num_independent = args->count - args->dependent;
    for (int i = 0; i < args->count; ++i) {
        const Fp16GemmArgs& m = args->gemms[i];
        if (!tensor_map_weights(&p.weights[i], m.weight, FP16, m.n, m.k) || !tensor_map_rows(&p.inputs[i], m.x, FP16, args->rows, m.k, args->tile_rows)) {
            return static_cast<int>(cudaErrorInvalidValue);
        }
    }
    return dispatch_tile<80, 96, 112, 128, 160, 192, 224, 240, 256>(args->tile_rows, args->splits, [&](auto rows, auto splits) {
        constexpr bool supported = splits.value == 4 || (splits.value == 1 && rows.value == 80);  // 1: for a single CTA
        return supported ? launch_gemm<rows.value, supported ? splits.value : 4, GEMM_INPUT_PROJECTIONS>(p, stream) : static_cast<int>(cudaErrorInvalidValue);
    });
}
