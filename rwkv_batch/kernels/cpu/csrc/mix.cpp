// fp32 arithmetic of mix.h; definition: kernels/naive.py. One thread computes a token's head in a fixed order, so
// results do not depend on other rows or the thread count.
#include "mix.h"

#include <algorithm>
#include <cmath>

#include "simd.h"
#include "state.h"
#include "time_mix.h"

namespace {

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
  const bool has_slot = t == rows.ends[row] && rows.read[row] != CONTINUES;
  const float* previous = has_slot ? c.shift + rows.read[row] * c.shift_stride : h - n;
  for (int64_t m = 0; m < c.mixes; ++m) {
    const float* mix = c.mix + m * n;
    float* to = c.mixed + (m * rows.tokens + t) * n;
    for (int64_t i = 0; i < n; i += LANES) {
      vf own = load(h + i);
      store(to + i, own + (load(previous + i) - own) * load(mix + i));
    }
  }
}

// With the rows that continue it. A state is stored after each token, so a prompt's pieces do not change it.
template <class State>
void head_of_row(const TimeMix& c, const Rows& rows, int64_t row, int64_t head) {
  if (rows.read[row] == CONTINUES) return;
  const int64_t channel = head * HEAD, width = c.heads * HEAD;
  char* states = c.wkv + head * c.head_bytes;
  State state(states + rows.read[row] * c.slot_bytes);
  Token token;
  float y[HEAD];
  do {
    char* to = states + rows.write[row] * c.slot_bytes;
    for (int64_t t = rows.ends[row]; t < rows.ends[row + 1]; ++t) {
      const int64_t at = t * width + channel;
      for (const float* input : {c.r, c.w, c.k, c.v, c.a, c.g, c.v_gate, c.v_first}) {  // the next token's are pages on
        for (int i = 0; input && i < HEAD; i += 16) __builtin_prefetch(input + at + width + i);
      }
      prologue(c, at, channel, token);
      state.advance_to(to, token, y);
      epilogue(c, at, channel, token, y);
    }
  } while (++row < rows.rows && rows.read[row] == CONTINUES);
}

}  // namespace

bool rows_fit(const Rows& r) {
  if (r.ends[0] != 0 || r.ends[r.rows] != r.tokens) return false;
  for (int64_t b = 0; b < r.rows; ++b) {
    if (r.ends[b] >= r.ends[b + 1]) return false;
    if (r.read[b] >= r.slots || (r.read[b] < 0 && (r.read[b] != CONTINUES || b == 0))) return false;
    if (r.write[b] < 0 || r.write[b] >= r.slots) return false;
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
  const auto run = c.head_bytes == sizeof(Int8Head)           ? head_of_row<Int8State>
                   : c.head_bytes == HEAD * HEAD * sizeof(Half) ? head_of_row<NumbersState<Half>>
                                                                : head_of_row<NumbersState<float>>;
  me.run_items(rows.rows * c.heads, [&](int64_t task) { run(c, rows, task / c.heads, task % c.heads); });
}
