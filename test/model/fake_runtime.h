// For the test of launches: included before every CUDA source (nvcc -include). Calls of the CUDA runtime that ask about
// a card or launch a kernel go to a made-up card and a list.
#pragma once
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <cstring>
#include <map>
#include <string>
#include <vector>

namespace fake {

struct Card {
  int major, processors, shared_of_block, shared_of_processor, shared_kept;
};

struct Record {
  char kernel[512];
  int grid[3];
  int threads, dynamic_shared, raised, cluster, early;
};

inline Card cards[64];
inline int current = 0;
inline std::map<std::string, int> static_shared;
inline std::map<std::pair<int, std::string>, int> raised;  // by card
inline std::vector<Record> records;
inline cudaError_t error = cudaSuccess;

inline std::string name_of(const void* kernel) {
  Dl_info info = {};
  return dladdr(kernel, &info) && info.dli_sname ? info.dli_sname : "?";
}

inline cudaError_t attribute(int* value, cudaDeviceAttr which) {
  const Card& card = cards[current];
  switch (which) {
    case cudaDevAttrComputeCapabilityMajor: *value = card.major; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = card.shared_of_block; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = card.shared_of_processor; break;
    case cudaDevAttrReservedSharedMemoryPerBlock: *value = card.shared_kept; break;
    case cudaDevAttrMultiProcessorCount: *value = card.processors; break;
    case cudaDevAttrClusterLaunch: *value = card.major >= 9; break;
    default: return cudaErrorInvalidValue;
  }
  return cudaSuccess;
}

inline cudaError_t raise(const void* kernel, int bytes) {
  if (bytes + static_shared[name_of(kernel)] > cards[current].shared_of_block) return error = cudaErrorInvalidValue;
  raised[{current, name_of(kernel)}] = bytes;
  return cudaSuccess;
}

inline cudaError_t attributes(cudaFuncAttributes* found, const void* kernel) {
  *found = {};
  found->sharedSizeBytes = static_shared[name_of(kernel)];
  return cudaSuccess;
}

inline cudaError_t launch(const cudaLaunchConfig_t* config, const void* kernel) {
  Record r = {};
  std::strncpy(r.kernel, name_of(kernel).c_str(), sizeof r.kernel - 1);
  r.grid[0] = config->gridDim.x, r.grid[1] = config->gridDim.y, r.grid[2] = config->gridDim.z;
  r.threads = config->blockDim.x * config->blockDim.y * config->blockDim.z;
  r.dynamic_shared = static_cast<int>(config->dynamicSmemBytes);
  r.raised = raised[{current, r.kernel}];
  r.cluster = 1;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) r.cluster = config->attrs[i].val.clusterDim.x;
    if (config->attrs[i].id == cudaLaunchAttributeProgrammaticStreamSerialization) r.early = 1;
  }
  records.push_back(r);
  return cudaSuccess;
}

inline cudaError_t last_error() {
  const cudaError_t found = error;
  error = cudaSuccess;
  return found;
}

}  // namespace fake

#define cudaGetDevice(number) (*(number) = fake::current, cudaSuccess)
#define cudaDeviceGetAttribute(value, which, device) fake::attribute(value, which)
#define cudaFuncSetAttribute(kernel, which, bytes) fake::raise(reinterpret_cast<const void*>(kernel), bytes)
#define cudaFuncGetAttributes(found, kernel) fake::attributes(found, reinterpret_cast<const void*>(kernel))
#define cudaLaunchKernelEx(config, kernel, ...) fake::launch(config, reinterpret_cast<const void*>(kernel))
#define cudaGetLastError() fake::last_error()
