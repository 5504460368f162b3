// Launcher: W8A8 GEMMs of one tile of rows, with fp16 GEMMs in the same launch (gemm.cuh). Mirrored in
// cuda/w8a8/arguments.py.
#include "gemm.cuh"

struct MixedGemmArgs {
    const void* weight;         // [n, k] s8, or fp16
    const void* x;              // [rows, k] likewise
    void* y;                    // [rows, n] fp16
    const void *weight_scales, *weight_ratios, *input_scales, *input_ratios;  // w8a8.cuh; null: fp16 GEMM
    int n, k;
    int activation, unused;
};

struct MixedLaunchArgs {
    MixedGemmArgs gemms[MAX_HOPPER_GEMMS];  // W8A8 first, then fp16
    int count;
    int dependent;  // GEMMs at the end whose inputs are outputs of the fp16 GEMMs before them
    int rows;
    int tile_rows, splits;  // splits: of the independent fp16 GEMMs
    void* partials;  // see GemmLaunch
    void* counters;
};

RWKV_API int rwkv_gemm_w8a8(const MixedLaunchArgs* args, void* stream) {
    constexpr int REFUSED = static_cast<int>(cudaErrorInvalidValue);
    if (encode_tiled() == nullptr) return static_cast<int>(cudaErrorNotSupported);
    GemmLaunch p;
    fill_launch(p, *args);
    p.num_full = 0, p.num_independent = args->count - args->dependent;
    for (int i = 0; i < args->count; ++i) {
        const MixedGemmArgs& m = args->gemms[i];
        const bool is_int8 = m.weight_scales != nullptr;
        const ElementType type = is_int8 ? BYTES : FP16;
        const int box_rows = args->tile_rows > 256 ? args->tile_rows / 2 : args->tile_rows;
        if (!tensor_map_weights(&p.weights[i], m.weight, type, m.n, m.k) || !tensor_map_rows(&p.inputs[i], m.x, type, args->rows, m.k, box_rows)) return REFUSED;
        if (!is_int8) continue;
        if (i >= MAX_INT8_GEMMS || p.num_full != i) return REFUSED;
        ++p.num_full;
        p.weight_scales[i] = static_cast<const float*>(m.weight_scales), p.weight_ratios[i] = static_cast<const int*>(m.weight_ratios);
        p.input_scales[i] = static_cast<const float*>(m.input_scales), p.input_ratios[i] = static_cast<const int*>(m.input_ratios);
    }
    return dispatch_tile<32, 64, 128, 160, 256, 320>(args->tile_rows, args->splits, [&](auto rows, auto splits) {
        constexpr bool supported = splits.value == 4 || (splits.value == 1 && (rows.value == 32 || rows.value == 320));  // 1: for a single CTA
        return supported ? launch_gemm<rows.value, supported ? splits.value : 4, GEMM_W8A8_AND_FP16>(p, stream) : REFUSED;
    });
}
