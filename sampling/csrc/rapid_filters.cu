// Filters of rows before sampler "rapid" (rapid.cu) samples them. Definition: sampling/filters.py.
//
// in     req_slots  [rows] int32; a number outside 0 .. max_rows - 1 is padding
//        table, entries, filters, history  by request slot: see rapid_launch.cuh
// inout  logits     [rows, vocab] fp32
//
// Grid: rows; one CTA reads the row four times at most while many tokens are left, then only the chunks of 32 tokens
// that hold the rest. Its result does not depend on the batch.
// Block: 256 threads.
// Shared memory: 48 KB, so that three CTAs fit an SM.
// Bound: memory, 4 vocab bytes per row and pass; then latency.
// Made for: vocabularies of 65,536, 1 to 1,000 rows.
#include <cuda_runtime.h>

#include "rapid_filters.cuh"

namespace sampling {

__global__ void __launch_bounds__(kThreads, kBlocks) filter_rows(Launch launch, float* logits, bool may_sample) {
  __shared__ FilterShared shared;
  const int number = launch.req_slots[blockIdx.x];
  if (number < 0 || number >= launch.max_rows || !launch.table[number].filtered) return;
  const int32_t* const history = launch.history + static_cast<int64_t>(number) * kMaxWindow;
  FilteredRow row(logits + static_cast<int64_t>(blockIdx.x) * launch.vocab, launch.vocab, launch.chunk_batches,
                  launch.filters[number], history, shared);
  row.run(launch.table[number], launch.entries + static_cast<int64_t>(number) * launch.capacity, may_sample);
}

}  // namespace sampling

// Applies the filters of the rows that have some, in place: logits [rows, vocab] fp32. may_sample: rows with few tokens
// left are sampled and not written; rapid_sample then takes their tokens. Returns a CUDA error code.
extern "C" __attribute__((visibility("default"))) int rapid_filter(const sampling::Launch* launch, float* logits, int32_t may_sample, void* stream) {
  sampling::Launch sized = *launch;
  sized.chunk_batches = sampling::chunk_batches_of(sized.vocab);
  sampling::filter_rows<<<sized.rows, sampling::kThreads, 0, static_cast<cudaStream_t>(stream)>>>(sized, logits, may_sample);
  return cudaGetLastError();
}
