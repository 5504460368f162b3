// Tiles of W8A8 GEMMs for many rows of s8 (w8a8.cuh).
#include "w8a8_launch.cuh"

int launch_w8a8_many(const W8A8Args& args, void* stream) {
    W8A8_ROWS(240, false)
    W8A8_ROWS(256, false)
    W8A8_TILE(2, 1, 256, 1, 2, false, false)
    W8A8_TILE(2, 1, 256, 1, 4, false, false)
    W8A8_ROWS(320, false)
    W8A8_TILE(2, 1, 320, 1, 2, false, false)
    W8A8_TILE(2, 2, 160, 1, 2, false, false)
    return NO_SUCH_TILE;
}
