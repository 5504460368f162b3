// Entry of the products of the entrance of a time mix in halves: r, k, v, the low ranks, and the low ranks' exits, which read
// what the launch itself gives (wide.cuh). Mirrored in cuda/library.py.
#include "wide.cuh"

struct WideEntranceMap {
    const void* weight;  // [n, k] fp16
    const void* x;       // [rows, k] fp16
    void* y;             // [rows, n] fp16
    int n, k;
    int activation;
};

struct WideEntranceArgs {
    WideEntranceMap maps[MAX_WIDE_MAPS];
    int count;
    int whole, late;  // the first maps, of which a tile is a block's; the last ones, whose inputs are results of those between
    int rows;
    int tile_rows, splits;  // k of a tile that is neither is shared by so many blocks
    void* partial;    // see WideLaunch
    void* counters;
};

RWKV_API int rwkv_wide_entrance(const WideEntranceArgs* args, void* stream) {
    if (encode_tiled() == nullptr) return static_cast<int>(cudaErrorNotSupported);
    WideLaunch p;
    describe_maps(p, *args);
    p.coded = args->whole, p.early = args->count - args->late;
    for (int i = 0; i < args->count; ++i) {
        const WideEntranceMap& m = args->maps[i];
        if (!describe_weights(&p.weights[i], m.weight, HALVES, m.n, m.k) || !describe_rows(&p.inputs[i], m.x, HALVES, args->rows, m.k, args->tile_rows)) {
            return static_cast<int>(cudaErrorInvalidValue);
        }
    }
    return launch_planned<80, 96, 112, 128, 160, 192, 224, 240, 256>(args->tile_rows, args->splits, [&](auto rows, auto splits) {
        constexpr bool known = splits.value == 4 || (splits.value == 1 && rows.value == 80);  // one: for a single block
        return known ? launch_wide<rows.value, known ? splits.value : 4, WIDE_ENTRANCE>(p, stream) : static_cast<int>(cudaErrorInvalidValue);
    });
}
