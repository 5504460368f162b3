// Gradients of a frozen layer between its linear layers, in fp32: a time mix, and the norm with the token shift.
// One thread computes a row's head, or a token, in a fixed order, so results do not depend on the thread count.
#include <memory>

#include "time_mix.h"

namespace {

constexpr int CHUNK = 16;  // tokens; the state before each chunk is kept
constexpr int KEYS = HEAD / LANES;
constexpr int MATRIX = HEAD * HEAD;

// Fields of TimeCore (rwkv_batch/tuning/cpu.py). T = rows * chunks * 16.
struct Core {
  const float *r, *k, *v, *w, *a, *g;        // [T, C], products of the inputs
  const float *gate, *first_v;               // [T, C]; null in the first layer
  const float* first;                        // [H, 64 values, 64 keys] or null: zero
  const float* vectors;                      // [5, C]: w0, a0, v0, k_k, k_a
  const float* output_vectors;               // [3, C]: ln_x's weight and bias, r_k
  const uint8_t* keep;                       // [rows, chunks]: 0 where a document begins
  float *y, *out;                            // [T, C]: the recurrence's output, and the gated one
  float* states;                             // [rows, H, chunks, 64, 64]: before each chunk
  const float* grad;                         // [T, C], of out; the rest is for the backward
  float *dr, *dk, *dv, *dw, *da, *dg;        // [T, C]; null if only dfirst is needed
  float *dgate, *dfirst_v;                   // [T, C]; null in the first layer
  float* dfirst;                             // [rows, H, 64, 64] or null
  int64_t rows, chunks, heads, threads;
};

TimeMix as_time_mix(const Core& c) {
  const int64_t n = c.heads * HEAD;
  const float *v = c.vectors, *o = c.output_vectors;
  TimeMix mix = {};
  mix.r = c.r, mix.w = c.w, mix.k = c.k, mix.v = c.v, mix.a = c.a, mix.g = c.g;
  mix.v_gate = c.gate, mix.v_first = c.first_v;
  mix.w0 = v, mix.a0 = v + n, mix.v0 = v + 2 * n, mix.k_k = v + 3 * n, mix.k_a = v + 4 * n;
  mix.ln_x = {o, o + n}, mix.r_k = o + 2 * n;
  mix.y = c.out, mix.heads = c.heads;
  return mix;
}

void forward(const Core& c, int64_t row, int64_t head) {
  const TimeMix mix = as_time_mix(c);
  const int64_t width = c.heads * HEAD, channel = head * HEAD;
  float state[MATRIX] = {};
  Token token;
  for (int64_t chunk = 0; chunk < c.chunks; ++chunk) {
    if (!c.keep[row * c.chunks + chunk]) {
      if (c.first) std::memcpy(state, c.first + head * MATRIX, sizeof state);
      else std::memset(state, 0, sizeof state);
    }
    std::memcpy(c.states + ((row * c.heads + head) * c.chunks + chunk) * MATRIX, state, sizeof state);
    for (int i = 0; i < CHUNK; ++i) {
      const int64_t at = ((row * c.chunks + chunk) * CHUNK + i) * width + channel;
      prologue(mix, at, channel, token);
      advance(state, state, token, nullptr, c.y + at);
      epilogue(mix, at, channel, token, c.y + at);
    }
  }
}

// Gradients of a token's inputs.
struct Gradients {
  float r[HEAD], decay[HEAD], k[HEAD], v[HEAD], minus_kk[HEAD], b[HEAD];
};

// From the gradient s of the state after a token to that of the state before; dy is that of the token's output.
void retreat(const float* before, const float* after, float* s, const Token& o, const float* removed, const float* dy,
             Gradients& grads) {
  vf dr[KEYS] = {}, dk[KEYS] = {}, db[KEYS] = {}, ddecay[KEYS] = {}, dminus_kk[KEYS] = {};
  for (int first = 0; first < HEAD; first += LANES) {
    vf of_v[LANES], of_removed[LANES];
    for (int i = 0; i < LANES; ++i) {
      const int64_t row = (first + i) * HEAD;
      const vf dyi = splat(dy[first + i]), vi_ = splat(o.v[first + i]), ui = splat(removed[first + i]);
      vf v_sum = {}, removed_sum = {};
#pragma GCC unroll 16
      for (int j = 0; j < KEYS; ++j) {
        const int at = j * LANES;
        vf n = load(s + row + at) + dyi * load(o.r + at);
        store(s + row + at, n);
        dr[j] += dyi * load(after + row + at);
        dk[j] += vi_ * n;
        db[j] += ui * n;
        v_sum += n * load(o.k + at);
        removed_sum += n * load(o.b + at);
      }
      of_v[i] = v_sum, of_removed[i] = removed_sum;
    }
    store(grads.v + first, fold_rows<Add>(of_v));
    float dremoved[LANES];
    store(dremoved, fold_rows<Add>(of_removed));
    for (int i = 0; i < LANES; ++i) {
      const int64_t row = (first + i) * HEAD;
      const vf di = splat(dremoved[i]);
#pragma GCC unroll 16
      for (int j = 0; j < KEYS; ++j) {
        const int at = j * LANES;
        vf n = load(s + row + at), p = load(before + row + at);
        ddecay[j] += n * p;
        dminus_kk[j] += di * p;
        store(s + row + at, n * load(o.decay + at) + di * load(o.minus_kk + at));
      }
    }
  }
  for (int j = 0; j < KEYS; ++j) {
    const int at = j * LANES;
    store(grads.r + at, dr[j]), store(grads.k + at, dk[j]), store(grads.b + at, db[j]);
    store(grads.decay + at, ddecay[j]), store(grads.minus_kk + at, dminus_kk[j]);
  }
}

// The gradient of y from that of the gated output; also the gate's, and the bonus's factor [64].
void epilogue_gradient(const Core& c, const TimeMix& mix, int64_t at, int64_t channel, const Token& o, float* dy,
                       float* dbonus) {
  const float* y = c.y + at;
  const auto [mean, scale, extra] = head_norm(mix, channel, o, y);
  vf sum = {}, product = {}, of_bonus = {};
  for (int i = 0; i < HEAD; i += LANES) {
    const vf hat = (load(y + i) - mean) * scale, grad = load(c.grad + at + i), v = load(o.v + i);
    const vf weight = load(mix.ln_x.weight + channel + i), gated = grad * load(c.g + at + i);
    if (c.dg) store(c.dg + at + i, grad * (hat * weight + load(mix.ln_x.bias + channel + i) + extra * v));
    const vf of_hat = gated * weight;
    sum += of_hat, product += of_hat * hat, of_bonus += gated * v;
  }
  const vf sums = splat(hsum(sum) / HEAD), products = splat(hsum(product) / HEAD), bonuses = splat(hsum(of_bonus));
  for (int i = 0; i < HEAD; i += LANES) {
    const vf hat = (load(y + i) - mean) * scale;
    const vf gated = load(c.grad + at + i) * load(c.g + at + i);
    store(dy + i, (gated * load(mix.ln_x.weight + channel + i) - sums - hat * products) * scale);
    store(dbonus + i, bonuses * load(mix.r_k + channel + i));
  }
}

// Gradients of the products, from those of the recurrence's inputs. Norms and gates are computed again.
void prologue_gradient(const Core& c, const TimeMix& mix, int64_t at, int64_t channel, const Token& o,
                       const Gradients& grads, const float* dbonus) {
  vf norm = {}, bonus = {};
  for (int i = 0; i < HEAD; i += LANES) {
    vf kk = load(c.k + at + i) * load(mix.k_k + channel + i);
    norm += kk * kk;
    bonus += load(o.r + i) * load(o.k + i) * load(mix.r_k + channel + i);
  }
  const vf inverse = splat(1.f / std::max(std::sqrt(hsum(norm)), 1e-12f)), extra = splat(hsum(bonus));
  vf along = {};
  float dkk[HEAD], dk_final[HEAD];
  for (int i = 0; i < HEAD; i += LANES) {
    const vf rate = vsigmoid(load(mix.a0 + channel + i) + load(c.a + at + i));
    const vf of_kk = load(grads.b + i) * rate - load(grads.minus_kk + i);
    along -= of_kk * load(o.minus_kk + i);
    store(dkk + i, of_kk);
    store(dk_final + i, load(grads.k + i) + load(dbonus + i) * load(o.r + i));
  }
  const vf alongs = splat(hsum(along));
  for (int i = 0; i < HEAD; i += LANES) {
    const int64_t n = at + i, j = channel + i;
    const vf raw = load(c.k + n), k_a = load(mix.k_a + j), minus_kk = load(o.minus_kk + i), of_k = load(dk_final + i);
    const vf rate = vsigmoid(load(mix.a0 + j) + load(c.a + n));
    store(c.dr + n, load(grads.r + i) + load(dbonus + i) * load(o.k + i));
    const vf of_rate = of_k * raw * k_a - load(grads.b + i) * minus_kk;
    store(c.da + n, of_rate * rate * (1.f - rate));
    const vf of_kk = (load(dkk + i) + minus_kk * alongs) * inverse;
    store(c.dk + n, of_k * (1.f + (rate - 1.f) * k_a) + of_kk * load(mix.k_k + j));
    const vf share = vsigmoid(load(mix.w0 + j) + load(c.w + n));
    store(c.dw + n, load(grads.decay + i) * load(o.decay + i) * (DECAY_SCALE * share * (1.f - share)));
    vf of_v = load(grads.v + i) + extra * load(c.grad + n) * load(c.g + n);
    if (c.gate) {
      const vf gate = vsigmoid(load(mix.v0 + j) + load(c.gate + n));
      store(c.dgate + n, of_v * (load(c.first_v + n) - load(c.v + n)) * gate * (1.f - gate));
      store(c.dfirst_v + n, of_v * gate);
      of_v *= 1.f - gate;
    }
    store(c.dv + n, of_v);
  }
}

// What a thread computes again for a chunk.
struct Scratch {
  float states[CHUNK + 1][MATRIX];
  Token tokens[CHUNK];
  float removed[CHUNK][HEAD];
  float gradient[MATRIX];
  float begun[MATRIX];
};

void backward(const Core& c, int64_t row, int64_t head, Scratch& s) {
  const TimeMix mix = as_time_mix(c);
  const int64_t width = c.heads * HEAD, channel = head * HEAD;
  std::memset(s.gradient, 0, sizeof s.gradient);
  std::memset(s.begun, 0, sizeof s.begun);
  float y[HEAD], dy[HEAD], dbonus[HEAD];
  Gradients grads;
  for (int64_t chunk = c.chunks - 1; chunk >= 0; --chunk) {
    const int64_t start = ((row * c.chunks + chunk) * CHUNK) * width + channel;
    std::memcpy(s.states[0], c.states + ((row * c.heads + head) * c.chunks + chunk) * MATRIX, sizeof s.states[0]);
    for (int i = 0; i < CHUNK; ++i) {
      prologue(mix, start + i * width, channel, s.tokens[i]);
      advance(s.states[i], s.states[i + 1], s.tokens[i], s.removed[i], y);
    }
    for (int i = CHUNK - 1; i >= 0; --i) {
      const int64_t at = start + i * width;
      epilogue_gradient(c, mix, at, channel, s.tokens[i], dy, dbonus);
      retreat(s.states[i], s.states[i + 1], s.gradient, s.tokens[i], s.removed[i], dy, grads);
      if (c.dr) prologue_gradient(c, mix, at, channel, s.tokens[i], grads, dbonus);
    }
    if (c.keep[row * c.chunks + chunk]) continue;
    for (int i = 0; i < MATRIX; i += LANES) store(s.begun + i, load(s.begun + i) + load(s.gradient + i));
    std::memset(s.gradient, 0, sizeof s.gradient);
  }
  if (c.dfirst) std::memcpy(c.dfirst + (row * c.heads + head) * MATRIX, s.begun, sizeof s.begun);
}

constexpr int MAX_MIXES = 6;

// Fields of ShiftedNorm (rwkv_batch/tuning/cpu.py).
struct NormShift {
  const float *x, *y;      // [T, C], added
  const uint8_t* begins;   // [T]: 1 where a document begins
  const float* norm;       // [2, C]: weight and bias
  const float* mixes;      // [M, C]
  float *total, *stats;    // [T, C] = x + y, and [T, 2]: mean and 1/deviation
  float* outputs;          // [M, T, C]
  const float* grad;       // [T, C], of total; the rest is for the backward
  const float* grads[MAX_MIXES];  // [T, C] each
  float* dx;               // [T, C]
  int64_t tokens, width, count, threads;
};

void add_and_measure(const NormShift& c, int64_t t) {
  const int64_t n = c.width;
  float* x = c.total + t * n;
  vf total = {}, squares = {};
  for (int64_t i = 0; i < n; i += LANES) {
    const vf sum = load(c.x + t * n + i) + load(c.y + t * n + i);
    store(x + i, sum);
    total += sum;
  }
  const vf mean = splat(hsum(total) / float(n));
  for (int64_t i = 0; i < n; i += LANES) {
    vf d = load(x + i) - mean;
    squares += d * d;
  }
  c.stats[2 * t] = mean[0], c.stats[2 * t + 1] = 1.f / std::sqrt(hsum(squares) / float(n) + 1e-5f);
}

void mix_token(const NormShift& c, int64_t t) {
  const int64_t n = c.width;
  const bool has_before = t > 0 && !c.begins[t];
  const vf mean = splat(c.stats[2 * t]), scale = splat(c.stats[2 * t + 1]);
  const vf old_mean = splat(has_before ? c.stats[2 * t - 2] : 0.f);
  const vf old_scale = splat(has_before ? c.stats[2 * t - 1] : 0.f);
  for (int64_t i = 0; i < n; i += LANES) {
    const vf weight = load(c.norm + i), bias = load(c.norm + n + i);
    const vf h = (load(c.total + t * n + i) - mean) * scale * weight + bias;
    const vf before = has_before ? (load(c.total + (t - 1) * n + i) - old_mean) * old_scale * weight + bias : vf{};
    for (int64_t m = 0; m < c.count; ++m) {
      store(c.outputs + (m * c.tokens + t) * n + i, h + (before - h) * load(c.mixes + m * n + i));
    }
  }
}

void mix_gradient(const NormShift& c, int64_t t) {
  const int64_t n = c.width;
  const bool has_after = t + 1 < c.tokens && !c.begins[t + 1];
  const float* x = c.total + t * n;
  float* dx = c.dx + t * n;
  const vf mean = splat(c.stats[2 * t]), scale = splat(c.stats[2 * t + 1]);
  vf sum = {}, product = {};
  for (int64_t i = 0; i < n; i += LANES) {
    vf g = {};
    for (int64_t m = 0; m < c.count; ++m) {
      const vf mix = load(c.mixes + m * n + i);
      const float* grad = c.grads[m] + t * n + i;
      g += load(grad) * (1.f - mix);
      if (has_after) g += load(grad + n) * mix;
    }
    g *= load(c.norm + i);
    store(dx + i, g);
    sum += g, product += g * (load(x + i) - mean) * scale;
  }
  const vf sums = splat(hsum(sum) / float(n)), products = splat(hsum(product) / float(n));
  for (int64_t i = 0; i < n; i += LANES) {
    const vf hat = (load(x + i) - mean) * scale;
    store(dx + i, (load(dx + i) - sums - hat * products) * scale + load(c.grad + t * n + i));
  }
}

}  // namespace

EXPORT void training_core_forward(const Core* core) {
  const Core c = *core;
#pragma omp parallel for num_threads(int(c.threads)) schedule(dynamic, 1)
  for (int64_t task = 0; task < c.rows * c.heads; ++task) forward(c, task / c.heads, task % c.heads);
}

EXPORT void training_core_backward(const Core* core) {
  const Core c = *core;
#pragma omp parallel num_threads(int(c.threads))
  {
    const auto scratch = std::make_unique<Scratch>();
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < c.rows * c.heads; ++task) backward(c, task / c.heads, task % c.heads, *scratch);
  }
}

EXPORT void training_norm_forward(const NormShift* call) {
  const NormShift c = *call;
#pragma omp parallel num_threads(int(c.threads))
  {
#pragma omp for schedule(static)
    for (int64_t t = 0; t < c.tokens; ++t) add_and_measure(c, t);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < c.tokens; ++t) mix_token(c, t);
  }
}

EXPORT void training_norm_backward(const NormShift* call) {
  const NormShift c = *call;
#pragma omp parallel for num_threads(int(c.threads)) schedule(static)
  for (int64_t t = 0; t < c.tokens; ++t) mix_gradient(c, t);
}
