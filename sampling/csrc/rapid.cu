// "rapid": one block of threads per row draws a token from logits in one pass over them where the parameters allow,
// and counts it for the penalties. The definition is sampling/naive.py; all state is in device memory by seat, nothing
// is allocated and the host is not asked, so launches can be captured in a graph.
//
// Shared memory of a block: Chunk[256 * chunk blocks] | uint32 marks[words] | List
#include <cuda_runtime.h>

#include "rapid_list.cuh"

namespace sampling {

struct Launch {
  const void* logits;     // [rows, vocab]
  const int32_t* seats;   // [rows]; anything outside 0 .. max_rows-1 is padding
  int64_t* tokens;        // [rows]
  Seat* table;            // [max_rows]
  Entry* entries;         // [max_rows, capacity]
  const uint8_t* countless;  // [vocab]
  int32_t rows, vocab, max_rows, capacity;
};

// Values the tokens with entries and marks them.
template <int kThreads, class T>
__device__ void value_entries(const Row<T>& row, const Seat& seat, uint32_t* marks) {
  for (int word = threadIdx.x; word < (row.vocab + 31) / 32; word += kThreads) marks[word] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < row.num_entries; i += kThreads) {
    const Entry entry = row.entries[i];
    float value = __fadd_rn(to_float(row.logits[entry.token]), entry.bias);
    if (seat.penalised && entry.count >= 0.0f)
      value = __fsub_rn(value, __fadd_rn(__fmul_rn(entry.count, seat.frequency), seat.presence));
    row.entries[i].value = cleaned(value);
    atomicOr(&marks[entry.token >> 5], 1u << (entry.token & 31));
  }
  __syncthreads();
}

// Decays the counts and counts the token.
template <int kThreads>
__device__ void count_token(Entry* entries, Seat& stored, const Seat& seat, int token, bool countless, int capacity) {
  bool known = false;
  for (int i = threadIdx.x; i < seat.num_entries; i += kThreads) {
    Entry entry = entries[i];
    const bool is_it = entry.token == token;
    if (entry.count >= 0.0f) entry.count = __fmul_rn(entry.count, seat.decay);
    if (is_it) entry.count = __fadd_rn(fmaxf(entry.count, 0.0f), countless ? 0.0f : 1.0f);
    if (is_it || entry.count >= 0.0f) entries[i].count = entry.count;
    known |= is_it;
  }
  known = __syncthreads_or(known);
  if (threadIdx.x == 0 && !known && seat.num_entries < capacity) {
    entries[seat.num_entries] = Entry{token, 0.0f, countless ? 0.0f : 1.0f, 0.0f};
    stored.num_entries = seat.num_entries + 1;
  }
}

template <int kThreads, class T>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads) sample_rows(Launch launch) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ uint64_t words[64];
  Room room{words, 0};
  const int number = launch.seats[blockIdx.x];
  if (number < 0 || number >= launch.max_rows) {
    if (threadIdx.x == 0) launch.tokens[blockIdx.x] = 0;
    return;
  }
  const Seat seat = launch.table[number];
  Entry* entries = launch.entries + static_cast<int64_t>(number) * launch.capacity;
  const T* logits = static_cast<const T*>(launch.logits) + static_cast<int64_t>(blockIdx.x) * launch.vocab;
  Row<T> row{logits, launch.vocab, nullptr, entries, seat.num_entries};
  Chunk* chunks = reinterpret_cast<Chunk*>(shared);
  uint32_t* marks = reinterpret_cast<uint32_t*>(chunks + kLanes * row.chunk_blocks());
  List* list = reinterpret_cast<List*>(marks + ((launch.vocab + 127) / 128) * 4);
  if (row.num_entries) {
    value_entries<kThreads>(row, seat, marks);
    row.marks = marks;
  }
  int token;
  if (seat.kind == kCut) {
    token = draw_cut<kThreads>(row, seat, chunks, list, room);
  } else {
    const uint64_t best = seat.kind == kGreedy ? largest_logit<kThreads>(row, room)
                                               : best_score<kThreads>(row, seat, kBehindAll, room);
    token = best ? token_of(best) : 0;
  }
  if (seat.penalised)
    count_token<kThreads>(entries, launch.table[number], seat, token, launch.countless[token], launch.capacity);
  if (threadIdx.x == 0) {
    launch.tokens[blockIdx.x] = token;
    launch.table[number].step = seat.step + 1;
  }
}

size_t shared_bytes(int vocab) {
  const size_t quads = (vocab + 3) / 4, blocks = (quads + kChunkBlock - 1) / kChunkBlock;
  return blocks * kLanes * sizeof(Chunk) + (static_cast<size_t>(vocab) + 127) / 128 * 16 + sizeof(List);
}

template <int kThreads, class T>
int launch_rows(const Launch& launch, cudaStream_t stream) {
  const size_t bytes = shared_bytes(launch.vocab);
  sample_rows<kThreads, T><<<launch.rows, kThreads, bytes, stream>>>(launch);
  return cudaGetLastError();
}

template <class T>
int launch_typed(const Launch& launch, int processors, cudaStream_t stream) {
  // Few rows: many threads each; many rows: several blocks on each processor, so that all run at once.
  if (launch.rows <= processors) return launch_rows<1024, T>(launch, stream);
  if (launch.rows <= 2 * processors) return launch_rows<512, T>(launch, stream);
  return launch_rows<256, T>(launch, stream);
}

template <class T>
int allow_shared(int bytes) {
  const auto attribute = cudaFuncAttributeMaxDynamicSharedMemorySize;
  int code = cudaFuncSetAttribute(sample_rows<1024, T>, attribute, bytes);
  if (code == 0) code = cudaFuncSetAttribute(sample_rows<512, T>, attribute, bytes);
  if (code == 0) code = cudaFuncSetAttribute(sample_rows<256, T>, attribute, bytes);
  return code;
}

}  // namespace sampling

#define EXPORT extern "C" __attribute__((visibility("default")))

// Once per device, before the first launch: makes room for the vocabulary. A CUDA error code.
EXPORT int rapid_prepare(int32_t vocab) {
  const int bytes = static_cast<int>(sampling::shared_bytes(vocab));
  const int code = sampling::allow_shared<float>(bytes);
  return code ? code : sampling::allow_shared<__half>(bytes);
}

// `processors`: multiprocessors of the device. A CUDA error code.
EXPORT int rapid_sample(const sampling::Launch* launch, int32_t half, int32_t processors, void* stream) {
  const cudaStream_t on = static_cast<cudaStream_t>(stream);
  return half ? sampling::launch_typed<__half>(*launch, processors, on)
              : sampling::launch_typed<float>(*launch, processors, on);
}
