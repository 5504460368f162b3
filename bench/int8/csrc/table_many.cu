// Launch table of the int8 products: more than 64 rows.
#include "int8_product.cuh"

#define INT8_MANY(WARPGROUPS, BLOCKS, ROWS, SPLITS, PAIR) \
    INT8_LAUNCH(WARPGROUPS, BLOCKS, ROWS, SPLITS, PAIR, 0) INT8_LAUNCH(WARPGROUPS, BLOCKS, ROWS, SPLITS, PAIR, 1)

int launch_many(const Int8Args& args, cudaStream_t stream) {
    INT8_MANY(2, 1, 80, 1, 1)
    INT8_MANY(2, 1, 128, 1, 1)
    INT8_MANY(2, 1, 128, 1, 2)
    INT8_MANY(2, 1, 128, 2, 1)
    INT8_MANY(2, 1, 128, 4, 1)
    INT8_MANY(2, 1, 160, 1, 1)
    INT8_MANY(2, 1, 160, 1, 2)
    INT8_MANY(2, 1, 160, 2, 1)
    INT8_MANY(2, 1, 240, 1, 1)
    INT8_MANY(2, 1, 240, 1, 2)
    INT8_MANY(2, 1, 256, 1, 1)
    INT8_MANY(2, 1, 256, 1, 2)
    INT8_MANY(2, 1, 320, 1, 1)
    INT8_MANY(2, 1, 320, 1, 2)
    INT8_MANY(2, 1, 320, 4, 1)
    INT8_MANY(2, 2, 160, 1, 1)
    INT8_MANY(2, 2, 160, 1, 2)
    INT8_MANY(2, 2, 192, 1, 1)
    INT8_MANY(2, 2, 192, 1, 2)
    INT8_MANY(3, 1, 160, 1, 1)
    INT8_MANY(3, 1, 192, 1, 1)
    INT8_GLOBAL(64, 2, 0) INT8_GLOBAL(64, 2, 1)
    INT8_GLOBAL(64, 4, 0) INT8_GLOBAL(64, 4, 1)
    INT8_GLOBAL(128, 2, 0) INT8_GLOBAL(128, 2, 1)
    INT8_GLOBAL(128, 4, 0) INT8_GLOBAL(128, 4, 1)
    INT8_GLOBAL(160, 2, 0) INT8_GLOBAL(160, 2, 1)
    INT8_GLOBAL(320, 4, 0) INT8_GLOBAL(320, 4, 1)
    return -1;
}
