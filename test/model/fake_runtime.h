// For the test of launches: included before every CUDA source (nvcc -include). Calls of the CUDA runtime that ask about
// a card or launch a kernel go to a made-up card and a list in fake_runtime.cu. Every source includes this file, so it
// includes only headers that compile fast.
#pragma once
#include <cuda_runtime.h>

namespace fake {

cudaError_t device(int* number);
cudaError_t attribute(int* value, cudaDeviceAttr which);
cudaError_t raise(const void* kernel, int bytes);
cudaError_t attributes(cudaFuncAttributes* found, const void* kernel);
cudaError_t launch(const cudaLaunchConfig_t* config, const void* kernel);
cudaError_t last_error();

}  // namespace fake

#define cudaGetDevice(number) fake::device(number)
#define cudaDeviceGetAttribute(value, which, device) fake::attribute(value, which)
#define cudaFuncSetAttribute(kernel, which, bytes) fake::raise(reinterpret_cast<const void*>(kernel), bytes)
#define cudaFuncGetAttributes(found, kernel) fake::attributes(found, reinterpret_cast<const void*>(kernel))
#define cudaLaunchKernelEx(config, kernel, ...) fake::launch(config, reinterpret_cast<const void*>(kernel))
#define cudaGetLastError() fake::last_error()
