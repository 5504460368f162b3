// Tiles of W8A8 GEMMs for many rows of u8 (w8a8.cuh).
#include "w8a8_launch.cuh"

int launch_w8a8_many_unsigned(const W8A8Args& args, void* stream) {
    W8A8_ROWS(240, true)
    W8A8_ROWS(256, true)
    W8A8_TILE(2, 1, 256, 1, 2, false, true)
    W8A8_TILE(2, 1, 256, 1, 4, false, true)
    W8A8_MEMORY(256, 4, true)
    return NO_SUCH_TILE;
}
