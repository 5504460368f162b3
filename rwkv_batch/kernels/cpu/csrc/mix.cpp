// fp32 implementation of mix.h; definition: kernels/naive.py. One thread computes a token's head in a fixed order, so
// results do not depend on other rows or the thread count.
#include "mix.h"

#include <algorithm>
#include <cmath>

#include "simd.h"

namespace {

constexpr int HEAD = 64;

constexpr float DECAY_SCALE = -0.6065306597126334f;

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
    store(h + i, (load(x + i) - mean) * scale * load(c.norm.weight + i) + load(c.norm.bias + i));
  }
}

void token_mixes(const ShiftMix& c, const Rows& rows, int64_t t) {
  const int64_t n = c.width, row = std::upper_bound(rows.ends, rows.ends + rows.rows + 1, t) - rows.ends - 1;
  const float* h = c.h + t * n;
  const float* previous = t == rows.ends[row] ? c.shift + rows.read[row] * c.shift_stride : h - n;
  for (int64_t m = 0; m < c.mixes; ++m) {
    const float* mix = c.mix + m * n;
    float* to = c.mixed + (m * rows.tokens + t) * n;
    for (int64_t i = 0; i < n; i += LANES) {
      vf own = load(h + i);
      store(to + i, own + (load(previous + i) - own) * load(mix + i));
    }
  }
}

// One head's inputs for one token.
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
  constexpr int KEYS = HEAD / LANES;
  vf minus_kk[KEYS], decay[KEYS], b[KEYS], k[KEYS], r[KEYS];  // in registers: stores to `to` could change o
  for (int j = 0; j < KEYS; ++j) {
    const int at = j * LANES;
    minus_kk[j] = load(o.minus_kk + at), decay[j] = load(o.decay + at);
    b[j] = load(o.b + at), k[j] = load(o.k + at), r[j] = load(o.r + at);
  }
  for (int first = 0; first < HEAD; first += LANES) {
    vf parts[LANES];
    for (int i = 0; i < LANES; ++i) {
      const float* s = from + (first + i) * HEAD;
      vf sum = {};
#pragma GCC unroll 16
      for (int j = 0; j < KEYS; ++j) sum += load(s + j * LANES) * minus_kk[j];
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
      for (int j = 0; j < KEYS; ++j) {
        vf n = load(s + j * LANES) * decay[j] + removed * b[j] + added * k[j];
        store(next + j * LANES, n);
        sum += n * r[j];
      }
      parts[i] = sum;
    }
    store(y + first, sum_rows(parts));
  }
}

// Group norm, bonus and gate of one head.
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
    vf n = (load(y + i) - mean) * scale * load(c.ln_x.weight + channel + i) + load(c.ln_x.bias + channel + i);
    store(c.y + at + i, (n + extra * load(o.v + i)) * load(c.g + at + i));
  }
}

void head_of_row(const TimeMix& c, const Rows& rows, int64_t row, int64_t head) {
  const int64_t channel = head * HEAD, width = c.heads * HEAD, matrix = head * HEAD * HEAD;
  const float* from = c.wkv + rows.read[row] * c.slot_stride + matrix;
  float* to = c.wkv + rows.write[row] * c.slot_stride + matrix;
  Token token;
  float y[HEAD];
  for (int64_t t = rows.ends[row]; t < rows.ends[row + 1]; ++t, from = to) {
    const int64_t at = t * width + channel;
    for (const float* input : {c.r, c.w, c.k, c.v, c.a, c.g, c.v_gate, c.v_first}) {  // the next token's are pages on
      for (int i = 0; input && i < HEAD; i += 16) __builtin_prefetch(input + at + width + i);
    }
    prologue(c, at, channel, token);
    advance(from, to, token, y);
    epilogue(c, at, channel, token, y);
  }
}

}  // namespace

bool rows_fit(const Rows& r) {
  if (r.ends[0] != 0 || r.ends[r.rows] != r.tokens) return false;
  for (int64_t b = 0; b < r.rows; ++b) {
    if (r.ends[b] >= r.ends[b + 1]) return false;
    if (r.read[b] < 0 || r.read[b] >= r.slots || r.write[b] < 0 || r.write[b] >= r.slots) return false;
  }
  return true;
}

// LayerNorm of every token, then the mixes (which read the slots), then the slots' new values.
void shift_mix(Member& me, const ShiftMix& c, const Rows& rows) {
  me.run_items(rows.tokens, [&](int64_t t) { layer_norm(c, t); });
  me.run_items(rows.tokens, [&](int64_t t) { token_mixes(c, rows, t); });
  me.run_items(rows.rows, [&](int64_t b) {
    const float* last = c.h + (rows.ends[b + 1] - 1) * c.width;
    std::memcpy(c.shift + rows.write[b] * c.shift_stride, last, c.width * sizeof(float));
  });
}

void time_mix(Member& me, const TimeMix& c, const Rows& rows) {
  me.run_items(rows.rows * c.heads, [&](int64_t task) { head_of_row(c, rows, task / c.heads, task % c.heads); });
}
