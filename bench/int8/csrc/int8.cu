// Entry of the int8 products.
#include "int8_product.cuh"

int launch_few(const Int8Args& args, cudaStream_t stream);
int launch_many(const Int8Args& args, cudaStream_t stream);

// A CUDA error code; -1: the table has no such line.
extern "C" __attribute__((visibility("default"))) int int8_product(const Int8Args* args, void* stream) {
    const int code = launch_few(*args, static_cast<cudaStream_t>(stream));
    return code != -1 ? code : launch_many(*args, static_cast<cudaStream_t>(stream));
}
