// What the kernels of rapid.cu and rapid_filters.cu share: their arguments and the filters' state.
#pragma once

#include "filters.h"
#include "rapid_row.cuh"

namespace sampling {

struct Chunk;

// Filters of one request slot. Mirrored in sampling/rapid_filters.py.
struct FilterSlot {
  FilterParameters p;
  double mu, log_total;
  const int32_t* lists;     // number of stops, stops; then each bad word: its length, its tokens
  const uint8_t* breakers;  // [vocab], or null
  uint32_t num_known;       // tokens so far; the last kMaxWindow are in the history
  int32_t num_listed;       // numbers in `lists`
  int32_t num_steps;
  int32_t steps[12];
  float largest;
  int32_t chosen;  // the token of this step if filter_rows has sampled it, else -1
};
static_assert(sizeof(FilterSlot) == 280, "sampling/rapid_filters.py writes 280 bytes");

// Appends a token to the history [kMaxWindow], a ring. Mirostat moves its bound by the token's surprise; logit: filtered.
__device__ __forceinline__ void remember(FilterSlot& filters, int32_t* history, int token, float logit) {
  history[filters.num_known++ % kMaxWindow] = token;
  if (filters.num_steps == 0 || filters.steps[filters.num_steps - 1] != kMirostat) return;
  const double error = (filters.log_total - (logit - filters.largest)) / kLog2 - filters.p.mirostat_tau;
  if (isfinite(error)) filters.mu -= filters.p.mirostat_eta * error;
}

struct Launch {
  const float* logits;       // [rows, vocab]
  const int32_t* req_slots;  // [rows]; numbers outside 0 .. max_rows - 1 are padding
  int64_t* tokens;           // [rows]
  SlotState* table;               // [max_rows]
  Entry* entries;            // [max_rows, capacity]
  const uint8_t* penalty_exempt;  // [vocab]
  Chunk* chunks;             // [max_rows, kMaxChunks]
  uint64_t* best;            // [max_rows, kMaxBlocks]
  uint32_t* arrived;         // [max_rows], zero between launches
  FilterSlot* filters;       // [max_rows], null while no row has filters
  int32_t* history;          // [max_rows, kMaxWindow]
  int32_t rows, vocab, max_rows, capacity, splits, chunk_batches;
  int32_t clustered;  // the CTAs of a row are a cluster
};

inline int chunk_batches_of(int vocab) {
  const int batches = ((vocab + 3) / 4 + kBatchQuads - 1) / kBatchQuads;
  return batches > 2 * kMaxBlocks ? (batches + kMaxBlocks - 1) / kMaxBlocks : 2;
}

// CTAs per SM, limited by shared memory.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kBlocks = 2;
#else
constexpr int kBlocks = 3;
#endif

}  // namespace sampling
