// Tiles of W8A8 GEMMs for 65 to about 400 rows (w8a8.cuh).
#include "w8a8_launch.cuh"

int launch_w8a8_middle(const W8A8Args& args, void* stream) {
    W8A8_ROWS(80, false)
    W8A8_ROWS(128, false)
    W8A8_ROWS(128, true)
    W8A8_MEMORY(128, 4, false)
    W8A8_MEMORY(128, 4, true)
    W8A8_ROWS(160, false)
    W8A8_ROWS(160, true)
    W8A8_MEMORY(160, 2, false)
    W8A8_MEMORY(160, 2, true)
    W8A8_TILE(3, 1, 160, 1, 1, false, false)
    return NO_SUCH_TILE;
}
