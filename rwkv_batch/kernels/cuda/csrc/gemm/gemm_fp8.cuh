// Arguments of launches over fp8 weights, optionally with fp16 GEMMs (gemm.cuh). Mirrored in cuda/library.py.
#pragma once

#include "gemm.cuh"

struct Fp8GemmArgs {
    const void* weight;         // [n, k] e4m3, or fp16
    const void* x;  // [rows, k] likewise, or two-part [rows, 2, k] e5m2
    const void* weight_scales;  // [n] fp32; null: fp16 GEMM
    const void* input_scales;  // [rows] fp32; null: two-part rows
    void* y;  // [rows, n] fp16 or fp32; two-part [rows, 2, n] e5m2; partials [splits, rows, n] fp32
    int n, k;
    int activation;
    int is_two_part;               // y
};

struct Fp8LaunchArgs {
    Fp8GemmArgs gemms[MAX_HOPPER_GEMMS];  // fp8 first, then fp16
    int count;
    int dependent;  // GEMMs at the end whose inputs are outputs of the fp16 GEMMs before them
    int rows;
    int tile_rows;
    int splits;  // with fp16 GEMMs: of the independent ones only
    int to_fp32;  // y of all GEMMs is fp32: fp8 only, one split
    int transposed;  // W of the only GEMM is [k, n]
    int to_partials;  // y of the only GEMM, with two-part rows, is split-K partials
    void* partials;  // see GemmLaunch
    void* counters;
};

// Fills the launch and its tensor maps. Returns false if a tensor map is refused.
inline bool fill_fp8_launch(GemmLaunch& p, const Fp8LaunchArgs& args) {
    if (encode_tiled() == nullptr) return false;
    fill_launch(p, args);
    p.num_full = 0, p.num_independent = args.count - args.dependent, p.to_partials = args.to_partials;
    for (int i = 0; i < args.count; ++i) {
        const Fp8GemmArgs& m = args.gemms[i];
        const int box_rows = args.tile_rows > 256 ? args.tile_rows / 2 : args.tile_rows;
        const ElementType type = m.weight_scales == nullptr ? FP16 : BYTES;
        p.num_full += m.weight_scales != nullptr;
        if (m.is_two_part) p.y_two_part[i] = static_cast<uint8_t*>(m.y);
        const bool two_part = m.weight_scales != nullptr && m.input_scales == nullptr;
        const bool described = two_part ? make_tensor_map(&p.inputs[i], m.x, type, args.rows, m.k, 2 * m.k, 2, box_rows, 2, TILE_K_BYTES, m.k)
                                     : tensor_map_rows(&p.inputs[i], m.x, type, args.rows, m.k, box_rows);
        const bool weights = args.transposed ? tensor_map_transposed(&p.weights[i], m.weight, m.n, m.k)
                                         : tensor_map_weights(&p.weights[i], m.weight, type, m.n, m.k);
        if (!described || !weights) return false;
        p.weight_scales[i] = static_cast<const float*>(m.weight_scales);
        p.input_scales[i] = static_cast<const float*>(m.input_scales);
    }
    return true;
}
