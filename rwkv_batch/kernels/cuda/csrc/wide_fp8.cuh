// What launches over fp8 weights are given, and maps of halves beside them (wide.cuh). Mirrored in cuda/library.py.
#pragma once

#include "wide.cuh"

struct WideFp8Map {
    const void* weight;         // [n, k] e4m3, or fp16
    const void* x;              // [rows, k] likewise, or in two parts [rows, 2, k] e5m2
    const void* weight_scales;  // [n] fp32; null: halves
    const void* input_scales;   // [rows] fp32, null of parts
    void* y;                    // [rows, n] fp16, or fp32, or likewise in parts
    int n, k;
    int activation;
    int in_parts;               // y
};

struct WideFp8Args {
    WideFp8Map maps[MAX_WIDE_MAPS];  // those in codes first, then those of halves
    int count;
    int late;  // of the last ones the inputs are results of the halves before them
    int rows;
    int tile_rows;
    int splits;  // where there are maps of halves: of these alone, of none that is late
    int to_floats;  // y of all maps is fp32: codes only, of one split
    int turned;     // the only map's weight is [k, n]
    int to_shares;  // y of the only map, of inputs in parts, is fp32 [splits, rows, n], whose sum over the splits is meant
    void* partial;  // see WideLaunch
    void* counters;
};

// The launch with its tensor maps; false: there can be none.
inline bool describe_fp8(WideLaunch& p, const WideFp8Args& args) {
    if (encode_tiled() == nullptr) return false;
    describe_maps(p, args);
    p.coded = 0, p.early = args.count - args.late, p.to_shares = args.to_shares;
    for (int i = 0; i < args.count; ++i) {
        const WideFp8Map& m = args.maps[i];
        const int box_rows = args.tile_rows > 256 ? args.tile_rows / 2 : args.tile_rows;
        const ElementType type = m.weight_scales == nullptr ? HALVES : BYTES;
        p.coded += m.weight_scales != nullptr;
        if (m.in_parts) p.parts[i] = static_cast<uint8_t*>(m.y);
        const bool parts = m.weight_scales != nullptr && m.input_scales == nullptr;
        const bool described = parts ? describe(&p.inputs[i], m.x, type, args.rows, m.k, 2 * m.k, 2, box_rows, 2, TILE_BYTES, m.k)
                                     : describe_rows(&p.inputs[i], m.x, type, args.rows, m.k, box_rows);
        const bool weights = args.turned ? describe_turned(&p.weights[i], m.weight, m.n, m.k)
                                         : describe_weights(&p.weights[i], m.weight, type, m.n, m.k);
        if (!described || !weights) return false;
        p.weight_scales[i] = static_cast<const float*>(m.weight_scales);
        p.input_scales[i] = static_cast<const float*>(m.input_scales);
    }
    return true;
}
