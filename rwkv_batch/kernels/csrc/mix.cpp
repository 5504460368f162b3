// The parts of a layer between its linear maps, over ragged rows whose states stay in their slots.
//
// kernels/naive.py defines what is computed. Everything is fp32. Every token and head is computed by
// one thread in one order, so results depend on neither the other rows nor the number of threads.
#include <omp.h>

#include <algorithm>
#include <cmath>

#include "simd.h"

namespace {

constexpr int HEAD = 64;
constexpr int VECTORS = HEAD / LANES;  // vectors of a head
constexpr float DECAY_SCALE = -0.6065306597126334f;

// Below this many elements a call stays on its own thread: waking the others costs more.
constexpr int64_t PARALLEL_FROM = 8192;

}  // namespace

// Eight bytes a field, as the binding writes them.
struct ShiftMix {
  const float* x;      // [T, C]
  const float* delta;  // [T, C] or null
  float* sum;          // [T, C] = x + delta; unused without delta
  const float *weight, *bias;  // [C] of the norm
  const float* mix;    // [M, C]
  float* shift;        // [num_slots, C], rows `shift_stride` apart
  int64_t shift_stride;
  const int64_t *ends, *read, *write;  // cu_seqlens [B+1], slots [B]
  int64_t rows, tokens, slots, width, mixes;
  float* h;            // [T, C] scratch: the norm's output
  float* mixed;        // [M, T, C]
  int64_t threads;
};

struct TimeMix {
  const float *r, *w, *k, *v, *a, *g;  // [T, C]
  const float *v_gate, *v_first;       // [T, C] or null
  const float *w0, *a0, *v0, *k_k, *k_a, *r_k, *ln_weight, *ln_bias;  // [C]; v0 may be null
  float* y;            // [T, C]
  float* wkv;          // [num_slots, H, 64, 64], slots `slot_stride` apart
  int64_t slot_stride;
  const int64_t *ends, *read, *write;
  int64_t rows, tokens, slots, heads;
  int64_t threads;
};

namespace {

// Whether every row has tokens and its slots exist: what would otherwise be a write anywhere.
template <typename Call>
bool rows_fit(const Call& c) {
  if (c.ends[0] != 0 || c.ends[c.rows] != c.tokens) return false;
  for (int64_t b = 0; b < c.rows; ++b) {
    if (c.ends[b] >= c.ends[b + 1]) return false;
    if (c.read[b] < 0 || c.read[b] >= c.slots || c.write[b] < 0 || c.write[b] >= c.slots) return false;
  }
  return true;
}

void layer_norm(const ShiftMix& c, int64_t t) {
  const int64_t n = c.width;
  const float* x = c.x + t * n;
  if (c.delta) {
    float* sum = c.sum + t * n;
    for (int64_t i = 0; i < n; i += LANES) store(sum + i, load(x + i) + load(c.delta + t * n + i));
    x = sum;
  }
  vf total = {}, squares = {};
  for (int64_t i = 0; i < n; i += LANES) total += load(x + i);
  const vf mean = splat(hsum(total) / float(n));
  for (int64_t i = 0; i < n; i += LANES) {
    vf d = load(x + i) - mean;
    squares += d * d;
  }
  const vf scale = splat(1.f / std::sqrt(hsum(squares) / float(n) + 1e-5f));
  float* h = c.h + t * n;
  for (int64_t i = 0; i < n; i += LANES) {
    store(h + i, (load(x + i) - mean) * scale * load(c.weight + i) + load(c.bias + i));
  }
}

void token_mixes(const ShiftMix& c, int64_t t) {
  const int64_t n = c.width, row = std::upper_bound(c.ends, c.ends + c.rows + 1, t) - c.ends - 1;
  const float* h = c.h + t * n;
  const float* previous = t == c.ends[row] ? c.shift + c.read[row] * c.shift_stride : h - n;
  for (int64_t m = 0; m < c.mixes; ++m) {
    const float* mix = c.mix + m * n;
    float* to = c.mixed + (m * c.tokens + t) * n;
    for (int64_t i = 0; i < n; i += LANES) {
      vf own = load(h + i);
      store(to + i, own + (load(previous + i) - own) * load(mix + i));
    }
  }
}

// What one head needs for one token.
struct Token {
  float r[HEAD], decay[HEAD], k[HEAD], v[HEAD], minus_kk[HEAD], b[HEAD];
};

void prologue(const TimeMix& c, int64_t at, int64_t channel, Token& o) {
  vf norm = {};
  for (int i = 0; i < HEAD; i += LANES) {
    vf kk = load(c.k + at + i) * load(c.k_k + channel + i);
    norm += kk * kk;
  }
  const vf scale = splat(1.f / std::max(std::sqrt(hsum(norm)), 1e-12f));
  for (int i = 0; i < HEAD; i += LANES) {
    const int64_t n = at + i, j = channel + i;
    vf raw = load(c.k + n), v = load(c.v + n);
    vf a = vsigmoid(load(c.a0 + j) + load(c.a + n));
    vf kk = raw * load(c.k_k + j) * scale;
    if (c.v_gate) v += (load(c.v_first + n) - v) * vsigmoid(load(c.v0 + j) + load(c.v_gate + n));
    store(o.r + i, load(c.r + n));
    store(o.decay + i, vexp(DECAY_SCALE * vsigmoid(load(c.w0 + j) + load(c.w + n))));
    store(o.k + i, raw * (1.f + (a - 1.f) * load(c.k_a + j)));
    store(o.v + i, v);
    store(o.minus_kk + i, -kk);
    store(o.b + i, kk * a);
  }
}

// S' = S diag(decay) + (S minus_kk) b^T + v k^T, y = S' r; from -> to, both [64 values, 64 keys].
// LANES values at a time: their sums over the keys are made together by sum_rows.
void advance(const float* from, float* to, const Token& o, float* y) {
  for (int first = 0; first < HEAD; first += LANES) {
    vf parts[LANES];
    for (int i = 0; i < LANES; ++i) {
      const float* s = from + (first + i) * HEAD;
      vf sum = {};
#pragma GCC unroll 16
      for (int j = 0; j < HEAD; j += LANES) sum += load(s + j) * load(o.minus_kk + j);
      parts[i] = sum;
    }
    float sa[LANES];
    store(sa, sum_rows(parts));
    for (int i = 0; i < LANES; ++i) {
      const float* s = from + (first + i) * HEAD;
      float* next = to + (first + i) * HEAD;
      const vf removed = splat(sa[i]), added = splat(o.v[first + i]);
      vf sum = {};
#pragma GCC unroll 16
      for (int j = 0; j < HEAD; j += LANES) {
        vf n = load(s + j) * load(o.decay + j) + removed * load(o.b + j) + added * load(o.k + j);
        store(next + j, n);
        sum += n * load(o.r + j);
      }
      parts[i] = sum;
    }
    store(y + first, sum_rows(parts));
  }
}

// Group norm of one head, the bonus, the gate.
void epilogue(const TimeMix& c, int64_t at, int64_t channel, const Token& o, const float* y) {
  vf total = {}, squares = {}, bonus = {};
  for (int i = 0; i < HEAD; i += LANES) {
    total += load(y + i);
    bonus += load(o.r + i) * load(o.k + i) * load(c.r_k + channel + i);
  }
  const vf mean = splat(hsum(total) / HEAD), extra = splat(hsum(bonus));
  for (int i = 0; i < HEAD; i += LANES) {
    vf d = load(y + i) - mean;
    squares += d * d;
  }
  const vf scale = splat(1.f / std::sqrt(hsum(squares) / HEAD + 64e-5f));
  for (int i = 0; i < HEAD; i += LANES) {
    vf n = (load(y + i) - mean) * scale * load(c.ln_weight + channel + i) + load(c.ln_bias + channel + i);
    store(c.y + at + i, (n + extra * load(o.v + i)) * load(c.g + at + i));
  }
}

void head_of_row(const TimeMix& c, int64_t row, int64_t head) {
  const int64_t channel = head * HEAD, width = c.heads * HEAD, matrix = head * HEAD * HEAD;
  const float* from = c.wkv + c.read[row] * c.slot_stride + matrix;
  float* to = c.wkv + c.write[row] * c.slot_stride + matrix;
  Token token;
  float y[HEAD];
  for (int64_t t = c.ends[row]; t < c.ends[row + 1]; ++t, from = to) {
    const int64_t at = t * width + channel;
    prologue(c, at, channel, token);
    advance(from, to, token, y);
    epilogue(c, at, channel, token, y);
  }
}

}  // namespace

// The norm of every token, then the mixes (which read the slots), then the slots' new values.
// Returns 0, or 1 with nothing done when rows or slots do not fit.
EXPORT int64_t rwkv_shift_mix(const ShiftMix* call) {
  const ShiftMix& c = *call;
  if (!rows_fit(c)) return 1;
#pragma omp parallel num_threads(int(c.threads)) if (c.tokens * c.width >= PARALLEL_FROM)
  {
#pragma omp for schedule(static)
    for (int64_t t = 0; t < c.tokens; ++t) layer_norm(c, t);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < c.tokens; ++t) token_mixes(c, t);
#pragma omp for schedule(static) nowait
    for (int64_t b = 0; b < c.rows; ++b) {
      std::memcpy(c.shift + c.write[b] * c.shift_stride, c.h + (c.ends[b + 1] - 1) * c.width, c.width * sizeof(float));
    }
  }
  return 0;
}

// Returns 0, or 1 with nothing done when rows or slots do not fit.
EXPORT int64_t rwkv_time_mix(const TimeMix* call) {
  const TimeMix& c = *call;
  if (!rows_fit(c)) return 1;
#pragma omp parallel for num_threads(int(c.threads)) schedule(dynamic, 1)
  for (int64_t task = 0; task < c.rows * c.heads; ++task) head_of_row(c, task / c.heads, task % c.heads);
  return 0;
}
