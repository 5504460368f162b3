// Entry of the products of rows of fp8 codes with fp8 weights (wide.cuh).
#include "wide_maps.cuh"

struct WideFp8Map {
    const void* weight;         // [n, k] e4m3
    const void* x;              // [rows, k] e4m3
    const void* weight_scales;  // [n] fp32
    const void* input_scales;   // [rows] fp32
    void* y;                    // [rows, n] fp16
    int n, k;
    int activation;
};

struct WideFp8Args {
    WideFp8Map maps[MAX_WIDE_MAPS];
    int count;
    int rows;
    int tile_rows, splits;
    void* partial;  // see WideLaunch
    void* counters;
};

template <int ROWS>
static int launch_rows(const WideFp8Args& args, const WideLaunch& p, void* stream) {
    switch (args.splits) {
        case 1: return launch_wide<ROWS, 1, WIDE_FP8>(p, stream);
        case 2: return launch_wide<ROWS, 2, WIDE_FP8>(p, stream);
        case 4: return launch_wide<ROWS, 4, WIDE_FP8>(p, stream);
    }
    return static_cast<int>(cudaErrorInvalidValue);
}

RWKV_API int rwkv_wide_fp8(const WideFp8Args* args, void* stream) {
    if (encode_tiled() == nullptr) return static_cast<int>(cudaErrorNotSupported);
    WideLaunch p;
    int tiles = 0;
    for (int i = 0; i < args->count; ++i) {
        const WideFp8Map& m = args->maps[i];
        if (!describe(&p.weights[i], m.weight, BYTES, m.n, m.k, m.k, 1, OUTPUTS, 1) ||
            !describe(&p.inputs[i], m.x, BYTES, args->rows, m.k, m.k, 1, args->tile_rows > 256 ? args->tile_rows / 2 : args->tile_rows, 1)) {
            return static_cast<int>(cudaErrorInvalidValue);
        }
        p.y[i] = static_cast<__half*>(m.y);
        p.weight_scales[i] = static_cast<const float*>(m.weight_scales);
        p.input_scales[i] = static_cast<const float*>(m.input_scales);
        p.n[i] = m.n, p.k[i] = m.k, p.activation[i] = m.activation;
        p.first_tile[i] = tiles;
        tiles += (m.n + OUTPUTS - 1) / OUTPUTS;
    }
    p.first_tile[args->count] = tiles;
    p.count = args->count, p.rows = args->rows, p.row_blocks = (args->rows + args->tile_rows - 1) / args->tile_rows;
    p.partial = static_cast<float4*>(args->partial), p.counters = static_cast<int*>(args->counters);
    switch (args->tile_rows) {
        case 32: return launch_rows<32>(*args, p, stream);
        case 64: return launch_rows<64>(*args, p, stream);
        case 96: return launch_rows<96>(*args, p, stream);
        case 128: return launch_rows<128>(*args, p, stream);
        case 160: return launch_rows<160>(*args, p, stream);
        case 192: return launch_rows<192>(*args, p, stream);
        case 224: return launch_rows<224>(*args, p, stream);
        case 256: return launch_rows<256>(*args, p, stream);
        case 320: return launch_rows<320>(*args, p, stream);
    }
    return static_cast<int>(cudaErrorInvalidValue);
}
