// The GPU's filters (sampling/csrc/rapid_filters.cuh) on a CPU, for test_rapid_filters.py.
#include "cuda_emulation.h"
//
#include "rapid_filters.cuh"

namespace {

struct Call {
  float* logits;
  const sampling::SlotState* slot;
  const sampling::Entry* entries;
  sampling::FilterSlot* filters;
  const int32_t* history;
  int vocab, chunk_batches;
  bool may_sample;
  sampling::FilterShared shared;
};

}  // namespace

// One row: logits [vocab] fp32, changed in place. Returns the token if it was sampled, else -1.
extern "C" __attribute__((visibility("default"))) int filter_row(
    float* logits, int32_t vocab, const void* slot, const void* entries, void* filters, const int32_t* history, int may_sample) {
  using namespace sampling;
  const int batches = ((vocab + 3) / 4 + kBatchQuads - 1) / kBatchQuads;
  static Call call;
  call.logits = logits, call.vocab = vocab, call.history = history, call.may_sample = may_sample;
  call.slot = static_cast<const SlotState*>(slot), call.entries = static_cast<const Entry*>(entries);
  call.filters = static_cast<FilterSlot*>(filters);
  call.chunk_batches = std::max(2, (batches + kMaxBlocks - 1) / kMaxBlocks);
  emulation::run(
      [](void* given) {
        Call& c = *static_cast<Call*>(given);
        FilteredRow row(c.logits, c.vocab, c.chunk_batches, *c.filters, c.history, c.shared);
        row.run(*c.slot, c.entries, c.may_sample);
      },
      &call);
  return call.filters->chosen;
}

extern "C" __attribute__((visibility("default"))) void remember_token(void* filters, int32_t* history, int32_t token, float logit) {
  sampling::remember(*static_cast<sampling::FilterSlot*>(filters), history, token, logit);
}
