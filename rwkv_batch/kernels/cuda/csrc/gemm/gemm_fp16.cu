// Launches fp16 GEMMs (gemm.cuh): makes the tensor maps, and picks the kernel compiled for tile_rows and splits.
#include "gemm.cuh"

struct Fp16GemmArgs {
    const void* weight;  // [n, k] fp16, or [k, n] if transposed
    const void* x;       // [rows, k] fp16
    void* y;             // [rows, n] fp16, or fp32
    int n, k;
    int activation;  // of y: an Activation of activation.h
};

struct Fp16LaunchArgs {
    Fp16GemmArgs gemms[MAX_HOPPER_GEMMS];
    int count;
    int rows;
    int transposed;  // same for all GEMMs
    int to_fp32;  // y of all GEMMs is fp32: one split, not transposed
    int tile_rows, splits;  // rows of a tile; CTAs that share a tile's k
    void* partials;  // split-K workspace, see GemmLaunch
    void* counters;  // split-K: CTAs of a tile that have finished; zero between launches
};

// W [k, n] as n / 64 planes of 64 columns, in boxes of [2][64][64].
static bool tensor_map_fp16_transposed(CUtensorMap* tensor_map, const void* matrix, int k, int n) {
    return make_tensor_map(tensor_map, matrix, FP16, k, 64, n, n / 64, 64, TILE_N / 64);
}

RWKV_API int rwkv_gemm_fp16(const Fp16LaunchArgs* args, void* stream) {
    if (encode_tiled() == nullptr) return static_cast<int>(cudaErrorNotSupported);
    GemmLaunch p;
    fill_launch(p, *args);
    for (int i = 0; i < args->count; ++i) {
        const Fp16GemmArgs& m = args->gemms[i];
        const bool done = args->transposed ? tensor_map_fp16_transposed(&p.weights[i], m.weight, m.k, m.n)
                                           : tensor_map_weights(&p.weights[i], m.weight, FP16, m.n, m.k);
        if (!done || !tensor_map_rows(&p.inputs[i], m.x, FP16, args->rows, m.k, args->tile_rows)) {
            return static_cast<int>(cudaErrorInvalidValue);
        }
    }
    if (args->to_fp32) {
        return dispatch_tile<16, 32, 64, 80, 96, 112, 128, 160, 192, 224, 240, 256>(args->tile_rows, args->splits, [&](auto rows, auto splits) {
            const bool supported = splits.value == 1 && !args->transposed;
            return supported ? launch_gemm<rows.value, 1, GEMM_FP16_TO_FP32>(p, stream) : static_cast<int>(cudaErrorInvalidValue);
        });
    }
    return dispatch_tile<16, 32, 64, 80, 96, 112, 128, 160, 192, 224, 240, 256>(args->tile_rows, args->splits, [&](auto rows, auto splits) {
        return args->transposed ? launch_gemm<rows.value, splits.value, GEMM_FP16_TRANSPOSED>(p, stream)
                                : launch_gemm<rows.value, splits.value, GEMM_FP16>(p, stream);
    });
}
