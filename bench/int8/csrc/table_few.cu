// Launch table of the int8 products: 1 to 64 rows.
#include "int8_product.cuh"

#define INT8_FEW(ROWS, SPLITS) INT8_LAUNCH(2, 1, ROWS, SPLITS, 1, 0) INT8_LAUNCH(2, 1, ROWS, SPLITS, 1, 1)
#define INT8_SPLITS(ROWS) INT8_FEW(ROWS, 1) INT8_FEW(ROWS, 2) INT8_FEW(ROWS, 4) INT8_FEW(ROWS, 8)

int launch_few(const Int8Args& args, cudaStream_t stream) {
    INT8_SPLITS(8)
    INT8_SPLITS(16)
    INT8_SPLITS(32)
    INT8_SPLITS(64)
    INT8_GLOBAL(8, 4, 0) INT8_GLOBAL(8, 4, 1)
    INT8_GLOBAL(32, 4, 0) INT8_GLOBAL(32, 4, 1)
    return -1;
}
