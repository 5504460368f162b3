// A layer's operations between its linear layers, over ragged rows whose states stay in their slots.
#pragma once
#include <cstdint>

#include "team.h"

struct Norm {
  const float *weight, *bias;  // [C]
};

constexpr int64_t CONTINUES = -1;

// Token range of each row, and the slots of its state.
struct Rows {
  const int64_t *ends, *read, *write;  // cu_seqlens [B+1], slots [B]; read: CONTINUES: the state after the row before
  int64_t rows, tokens, slots;
};

struct ShiftMix {
  const float* x;      // [T, C]
  const float* delta;  // [T, C] or null
  float* sum;          // [T, C] = x + delta, may be x; unused without delta
  Norm norm;
  const float* mix;    // [M, C]
  float* shift;        // [slots, C], rows `shift_stride` apart
  int64_t shift_stride, width, mixes;
  float* h;  // [T, C]: LayerNorm output, read until the end of the next phase
  float* mixed;        // [M, T, C]
};

struct TimeMix {
  const float *r, *w, *k, *v, *a, *g;  // [T, C]
  const float *v_gate, *v_first;       // [T, C]; v_gate null in the first layer
  const float *w0, *a0, *v0, *k_k, *k_a, *r_k;  // [C]; v0 null in the first layer
  Norm ln_x;
  float* y;            // [T, C]
  char* wkv;           // [slots, H] states of `head_bytes` each: fp32, fp16 or int8 (state.h)
  int64_t slot_bytes, head_bytes, heads;
};

// Whether every row has tokens and valid slots. Prevents out-of-bounds writes.
bool rows_fit(const Rows& rows);

void shift_mix(Member& me, const ShiftMix& call, const Rows& rows);
void time_mix(Member& me, const TimeMix& call, const Rows& rows);
