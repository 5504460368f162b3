// The arithmetic of one token and one head of a time mix, in fp32.
#pragma once
#include <algorithm>
#include <cmath>

#include "mix.h"
#include "simd.h"

namespace {

constexpr int HEAD = 64;

constexpr float DECAY_SCALE = -0.6065306597126334f;

// One head's inputs for one token.
struct Token {
  float r[HEAD], decay[HEAD], k[HEAD], v[HEAD], minus_kk[HEAD], b[HEAD];
};

inline void prologue(const TimeMix& c, int64_t at, int64_t channel, Token& o) {
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
// removed_out: S minus_kk [64 values], or null. LANES values at a time: fold_rows makes their sums over the keys.
// Number: float, or Half of state.h. y is that of S' before it is rounded.
template <class Number>
inline void advance(const Number* from, Number* to, const Token& o, float* removed_out, float* y) {
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
      const Number* s = from + (first + i) * HEAD;
      vf sum = {};
#pragma GCC unroll 16
      for (int j = 0; j < KEYS; ++j) sum += load(s + j * LANES) * minus_kk[j];
      parts[i] = sum;
    }
    float sa[LANES];
    store(sa, fold_rows<Add>(parts));
    if (removed_out) store(removed_out + first, load(sa));
    for (int i = 0; i < LANES; ++i) {
      const Number* s = from + (first + i) * HEAD;
      Number* next = to + (first + i) * HEAD;
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
    store(y + first, fold_rows<Add>(parts));
  }
}

// One head's output y: its mean and 1 / deviation for the group norm, and the bonus r . (k r_k).
struct HeadNorm {
  vf mean, scale, bonus;
};

inline HeadNorm head_norm(const TimeMix& c, int64_t channel, const Token& o, const float* y) {
  vf total = {}, squares = {}, bonus = {};
  for (int i = 0; i < HEAD; i += LANES) {
    total += load(y + i);
    bonus += load(o.r + i) * load(o.k + i) * load(c.r_k + channel + i);
  }
  const vf mean = splat(hsum(total) / HEAD);
  for (int i = 0; i < HEAD; i += LANES) {
    vf d = load(y + i) - mean;
    squares += d * d;
  }
  return {mean, splat(1.f / std::sqrt(hsum(squares) / HEAD + 64e-5f)), splat(hsum(bonus))};
}

// Group norm, bonus and gate of one head.
inline void epilogue(const TimeMix& c, int64_t at, int64_t channel, const Token& o, const float* y) {
  const HeadNorm norm = head_norm(c, channel, o, y);
  for (int i = 0; i < HEAD; i += LANES) {
    vf n = (load(y + i) - norm.mean) * norm.scale * load(c.ln_x.weight + channel + i) + load(c.ln_x.bias + channel + i);
    store(c.y + at + i, (n + norm.bonus * load(o.v + i)) * load(c.g + at + i));
  }
}

}  // namespace
