// What fake_runtime.h declares: a made-up card and a list of launches, and what the test of launches asks of them.
#include <dlfcn.h>

#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#define FAKE_API extern "C" __attribute__((visibility("default")))

namespace fake {

struct Card {
  int major, processors, shared_of_block, shared_of_processor, shared_kept;
};

struct Record {
  char kernel[512];
  int grid[3];
  int threads, dynamic_shared, raised, cluster, early;
};

static Card cards[64];
static int current = 0;
static std::map<std::string, int> static_shared;
static std::map<std::pair<int, std::string>, int> raised;  // by card
static std::vector<Record> records;
static cudaError_t error = cudaSuccess;

static std::string name_of(const void* kernel) {
  Dl_info info = {};
  return dladdr(kernel, &info) && info.dli_sname ? info.dli_sname : "?";
}

cudaError_t device(int* number) {
  *number = current;
  return cudaSuccess;
}

cudaError_t attribute(int* value, cudaDeviceAttr which) {
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

cudaError_t raise(const void* kernel, int bytes) {
  if (bytes + static_shared[name_of(kernel)] > cards[current].shared_of_block) return error = cudaErrorInvalidValue;
  raised[{current, name_of(kernel)}] = bytes;
  return cudaSuccess;
}

cudaError_t attributes(cudaFuncAttributes* found, const void* kernel) {
  *found = {};
  found->sharedSizeBytes = static_shared[name_of(kernel)];
  return cudaSuccess;
}

cudaError_t launch(const cudaLaunchConfig_t* config, const void* kernel) {
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

cudaError_t last_error() {
  const cudaError_t found = error;
  error = cudaSuccess;
  return found;
}

}  // namespace fake

// The card that the next calls find, under a number of its own: sources remember what they asked a card.
FAKE_API void fake_card(int number, int major, int processors, int of_block, int of_processor, int kept) {
  fake::current = number;
  fake::cards[number] = {major, processors, of_block, of_processor, kept};
  fake::static_shared.clear();
}

FAKE_API void fake_static_shared(const char* kernel, int bytes) { fake::static_shared[kernel] = bytes; }

// Moves up to `room` launches to `out`; how many there were.
FAKE_API int fake_take(fake::Record* out, int room) {
  const int count = static_cast<int>(fake::records.size());
  for (int i = 0; i < count && i < room; ++i) out[i] = fake::records[i];
  fake::records.clear();
  return count;
}
