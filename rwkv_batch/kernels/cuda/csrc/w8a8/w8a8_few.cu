// Tiles of W8A8 GEMMs for up to 64 rows, and the entry of all (w8a8.cuh).
#include "w8a8_launch.cuh"

int launch_w8a8_middle(const W8A8Args& args, void* stream);
int launch_w8a8_many(const W8A8Args& args, void* stream);
int launch_w8a8_many_unsigned(const W8A8Args& args, void* stream);

static int launch_w8a8_few(const W8A8Args& args, void* stream) {
    W8A8_ROWS(8, false)
    W8A8_CLUSTER(8, 2, false)
    W8A8_MEMORY(8, 4, false)
    W8A8_MEMORY(8, 4, true)
    W8A8_ROWS(32, false)
    W8A8_ROWS(32, true)
    W8A8_CLUSTER(32, 2, false)
    W8A8_CLUSTER(32, 2, true)
    W8A8_MEMORY(32, 4, true)
    W8A8_ROWS(64, false)
    W8A8_ROWS(64, true)
    W8A8_CLUSTER(64, 2, false)
    W8A8_MEMORY(64, 4, false)
    W8A8_MEMORY(64, 4, true)
    return NO_SUCH_TILE;
}

// Returns a CUDA error code, or -1 for a tile that is not compiled.
RWKV_API int rwkv_w8a8(const W8A8Args* args, void* stream) {
    for (const auto launch : {launch_w8a8_few, launch_w8a8_middle, launch_w8a8_many, launch_w8a8_many_unsigned}) {
        const int code = launch(*args, stream);
        if (code != NO_SUCH_TILE) return code;
    }
    return NO_SUCH_TILE;
}
