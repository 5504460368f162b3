// Entry of the products of up to 256 rows (wide.cuh): makes the tensor maps, and launches what the caller has planned.
#include "wide_maps.cuh"

struct WideMap {
    const void* weight;  // [n, k] fp16, or [k, n] if transposed
    const void* x;       // [rows, k] fp16
    void* y;             // [rows, n] fp16
    int n, k;
    int activation;
};

struct WideArgs {
    WideMap maps[MAX_WIDE_MAPS];
    int count;
    int rows;
    int transposed;  // of all maps alike
    int tile_rows, splits;
    void* partial;   // see WideLaunch
    void* counters;
};

// A matrix [rows, k] in boxes of [box_rows][64].
static bool describe_rows(CUtensorMap* map, const void* matrix, int rows, int k, int box_rows) {
    return describe(map, matrix, HALVES, rows, k, k, 1, box_rows, 1);
}

// A transposed matrix [k, n] as n / 64 columns of it, in boxes of [OUTPUTS / 64][64][64].
static bool describe_transposed(CUtensorMap* map, const void* matrix, int k, int n) {
    return describe(map, matrix, HALVES, k, 64, n, n / 64, 64, OUTPUTS / 64);
}

template <int ROWS>
static int launch_rows(const WideArgs& args, const WideLaunch& p, void* stream) {
    switch (args.splits) {
        case 1: return args.transposed ? launch_wide<ROWS, 1, WIDE_TURNED>(p, stream) : launch_wide<ROWS, 1, WIDE_PLAIN>(p, stream);
        case 2: return args.transposed ? launch_wide<ROWS, 2, WIDE_TURNED>(p, stream) : launch_wide<ROWS, 2, WIDE_PLAIN>(p, stream);
        case 4: return args.transposed ? launch_wide<ROWS, 4, WIDE_TURNED>(p, stream) : launch_wide<ROWS, 4, WIDE_PLAIN>(p, stream);
    }
    return static_cast<int>(cudaErrorInvalidValue);
}

RWKV_API int rwkv_wide(const WideArgs* args, void* stream) {
    if (encode_tiled() == nullptr) return static_cast<int>(cudaErrorNotSupported);
    WideLaunch p;
    int tiles = 0;
    for (int i = 0; i < args->count; ++i) {
        const WideMap& m = args->maps[i];
        const bool done = args->transposed ? describe_transposed(&p.weights[i], m.weight, m.k, m.n)
                                       : describe_rows(&p.weights[i], m.weight, m.n, m.k, OUTPUTS);
        if (!done || !describe_rows(&p.inputs[i], m.x, args->rows, m.k, args->tile_rows)) {
            return static_cast<int>(cudaErrorInvalidValue);
        }
        p.y[i] = static_cast<__half*>(m.y);
        p.n[i] = m.n, p.k[i] = m.k, p.activation[i] = m.activation;
        p.first_tile[i] = tiles;
        tiles += (m.n + OUTPUTS - 1) / OUTPUTS;
    }
    p.first_tile[args->count] = tiles;
    p.count = args->count, p.rows = args->rows;
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
    }
    return static_cast<int>(cudaErrorInvalidValue);
}
