// Entry points of the binding: a stage's layers over one ragged step, and single linear layers.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <numeric>
#include <vector>

#include "linear.h"
#include "mix.h"
#include "simd.h"

// Mirrored in cpu/library.py, 8 bytes per field.
struct Layer {
  Norm ln1, ln2, ln_x;
  const float *att_mix, *ffn_mix;               // [6, C] in the order r, w, k, v, a, g; [C]
  const float *w0, *a0, *v0, *k_k, *k_a, *r_k;  // [C]; v0 null in the model's first layer, v1 and v2 empty
  PackedMatrix receptance, key, value, output, ffn_key, ffn_value;
  PackedMatrix w1, a1, g1, v1, w2, a2, g2, v2;
};

// An adapter's pair at a linear layer: y += b (a x). Rank 0: none.
struct Pair {
  const float *a, *b;  // [rank, in], [rank, out]
  int64_t rank;
};

// Linear layers that adapters may change, in the binding's order.
enum Target : int64_t { RECEPTANCE, KEY, VALUE, OUTPUT, FFN_KEY, FFN_VALUE, TARGETS };

// An adapter's part of one layer. With experts, these replace the pairs FFN_KEY and FFN_VALUE.
struct AdapterLayer {
  Pair pairs[TARGETS];
  const float* router;  // [experts - 1, C]
  const Pair* experts;  // [experts, 2]: pairs at ffn_key and ffn_value; null: none
  int64_t num_experts, active;
};

struct Step {
  const Layer* layers;
  int64_t num_layers;
  float* x;        // [T, C]: input of the first layer, then output of the last one
  float* v_first;  // [T, C]: written by the model's first layer, read by the others
  char* wkv;       // [slots, layers, H] states of `head_bytes` each
  float* shift;    // [slots, layers, 2, C]
  Rows rows;
  int64_t width, threads, head_bytes;
  int64_t begins_within, ends_within;  // 1: the first layer has no time mix here, the last one no channel mix
  const AdapterLayer* const* adapters;  // [T]: each token's adapter, [layers], or null; null: no adapters
};

enum Failure : int64_t { DONE = 0, ROWS_DO_NOT_FIT = 1, NO_MEMORY = 2 };

namespace {

constexpr int64_t HEAD = 64;

// Linear layers of one phase; empty ones are skipped.
struct Gemms {
  Gemm list[7];
  int64_t count = 0;

  void add(const PackedMatrix& matrix, const float* x, float* y, Activation activation = NONE) {
    if (matrix.data) list[count++] = {matrix, x, y, activation};
  }
};

// Activations, in memory shared by all layers. With null memory only the size is computed.
struct Buffers {
  float *delta, *h, *y, *mixed, *hidden;  // [T, C], [T, C], [T, C], [6, T, C], [T, F]
  float *r, *w, *k, *v, *a, *g, *v_gate;  // [T, C]; `hidden` of the channel mix overlaps them
  float *w_low, *a_low, *g_low, *v_low;   // [T, D]
  int64_t floats = 0;

  Buffers(const Step& s, float* memory) {
    auto take = [&](int64_t size) {
      float* at = memory ? memory + floats : nullptr;
      floats += (size + 15) / 16 * 16;
      return at;
    };
    const int64_t tokens = s.rows.tokens, size = tokens * s.width;
    auto widest = [&](PackedMatrix Layer::*matrix) {
      int64_t out = 0;
      for (int64_t i = 0; i < s.num_layers; ++i) out = std::max(out, (s.layers[i].*matrix).out);
      return tokens * out;
    };
    delta = take(size), h = take(size), y = take(size), mixed = take(6 * size);
    w_low = take(widest(&Layer::w1)), a_low = take(widest(&Layer::a1));
    g_low = take(widest(&Layer::g1)), v_low = take(widest(&Layer::v1));
    hidden = memory ? memory + floats : nullptr;
    const int64_t begin = floats;
    for (float** buffer : {&r, &w, &k, &v, &a, &g, &v_gate}) *buffer = take(size);
    floats = std::max(floats, begin + (widest(&Layer::ffn_key) + 15) / 16 * 16);
  }
};

// The phases of linear layers in one layer. v: where its values are stored.
struct Phases {
  Gemms input_projections, low_ranks, output, key, value;

  // separate_activation: adapters add to the output of ffn_key before its activation.
  Phases(const Layer& l, const Buffers& b, float* v, int64_t size, bool separate_activation) {
    const float *xr = b.mixed, *xw = xr + size, *xk = xw + size, *xv = xk + size, *xa = xv + size, *xg = xa + size;
    input_projections.add(l.w1, xw, b.w_low, TANH);
    input_projections.add(l.a1, xa, b.a_low);
    input_projections.add(l.g1, xg, b.g_low, SIGMOID);
    input_projections.add(l.v1, xv, b.v_low);
    input_projections.add(l.receptance, xr, b.r);
    input_projections.add(l.key, xk, b.k);
    input_projections.add(l.value, xv, v);
    low_ranks.add(l.w2, b.w_low, b.w);
    low_ranks.add(l.a2, b.a_low, b.a);
    low_ranks.add(l.g2, b.g_low, b.g);
    low_ranks.add(l.v2, b.v_low, b.v_gate);
    output.add(l.output, b.y, b.delta);
    key.add(l.ffn_key, b.mixed, b.hidden, separate_activation ? NONE : RELU_SQUARED);
    value.add(l.ffn_value, b.hidden, b.delta);
  }

  int64_t packed(int64_t rows) const {
    int64_t most = 0;
    for (const Gemms* gemms : {&input_projections, &low_ranks, &output, &key, &value}) {
      most = std::max(most, packed_elements(gemms->list, gemms->count, rows));
    }
    return most;
  }
};

float dot(const float* a, const float* b, int64_t size) {
  vf sum{};
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) sum += load(a + i) * load(b + i);
  float total = hsum(sum);
  for (; i < size; ++i) total += a[i] * b[i];
  return total;
}

// Adds a token's adapter to y. The order of the sums is independent of other rows.
void add_pair(const Pair& pair, const float* x, float* y, int64_t in, int64_t out) {
  for (int64_t j = 0; j < pair.rank; ++j) {
    const float *a = pair.a + j * in, *b = pair.b + j * out;
    const float h = dot(a, x, in);
    const vf times = splat(h);
    int64_t i = 0;
    for (; i + LANES <= out; i += LANES) store(y + i, load(y + i) + times * load(b + i));
    for (; i < out; ++i) y[i] += h * b[i];
  }
}

struct Addition {
  Target target;
  const PackedMatrix& w;
  const float* x;
  float* y;
};

// Adds all tokens' adapters at the linear layers of a phase.
void add_adapters(Member& me, const Step& s, int64_t layer, std::initializer_list<Addition> list) {
  me.run_items(s.rows.tokens, [&](int64_t t) {
    for (const Addition& one : list) {
      float* y = one.y + t * one.w.out;
      if (const AdapterLayer* own = s.adapters[t]) {
        add_pair(own[layer].pairs[one.target], one.x + t * one.w.in, y, one.w.in, one.w.out);
      }
    }
  });
}

// Gates of a token: softmax of its `active` highest scores (ties: lower index), 0 for other experts.
void compute_gates(const AdapterLayer& own, const float* x, int64_t width, float* gates) {
  std::vector<float> scores(own.num_experts, 0.f);
  for (int64_t e = 1; e < own.num_experts; ++e) scores[e] = dot(own.router + (e - 1) * width, x, width);
  std::vector<int64_t> order(own.num_experts);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return scores[a] > scores[b]; });
  float total = 0;
  for (int64_t i = 0; i < own.active; ++i) total += gates[order[i]] = std::exp(scores[order[i]] - scores[order[0]]);
  for (int64_t i = 0; i < own.active; ++i) gates[order[i]] /= total;
}

// Mixes a token's experts. hidden: in, output of ffn_key; out, the gated sum of the experts' hidden values. y: the sum
// of their pairs at ffn_value.
void mix_experts(const AdapterLayer& own, const Layer& l, const float* x, float* hidden, float* y) {
  const int64_t width = l.ffn_key.in, inner = l.ffn_key.out;
  std::vector<float> gates(own.num_experts, 0.f), of_expert(inner), added(width);
  const std::vector<float> key(hidden, hidden + inner);
  compute_gates(own, x, width, gates.data());
  std::fill_n(hidden, inner, 0.f);
  std::fill_n(y, width, 0.f);
  for (int64_t e = 0; e < own.num_experts; ++e) {
    if (gates[e] == 0) continue;
    of_expert = key;
    add_pair(own.experts[2 * e], x, of_expert.data(), width, inner);
    for (float& h : of_expert) h = h < 0 ? 0.f : h * h;
    for (int64_t i = 0; i < inner; ++i) hidden[i] += gates[e] * of_expert[i];
    std::fill(added.begin(), added.end(), 0.f);
    add_pair(own.experts[2 * e + 1], of_expert.data(), added.data(), inner, width);
    for (int64_t i = 0; i < width; ++i) y[i] += gates[e] * added[i];
  }
}

// After ffn_key: adapters, experts and the activation.
void finish_key(Member& me, const Step& s, int64_t layer, const Buffers& b) {
  const Layer& l = s.layers[layer];
  const int64_t width = s.width, inner = l.ffn_key.out;
  me.run_items(s.rows.tokens, [&](int64_t t) {
    const AdapterLayer* own = s.adapters[t] ? s.adapters[t] + layer : nullptr;
    const float* x = b.mixed + t * width;
    float* hidden = b.hidden + t * inner;
    if (own && own->experts) {
      mix_experts(*own, l, x, hidden, b.y + t * width);
      return;
    }
    if (own) add_pair(own->pairs[FFN_KEY], x, hidden, width, inner);
    for (int64_t i = 0; i < inner; ++i) hidden[i] = hidden[i] < 0 ? 0.f : hidden[i] * hidden[i];  // as in linear.cpp
  });
}

// After ffn_value: adapters, and the experts' sum.
void finish_value(Member& me, const Step& s, int64_t layer, const Buffers& b) {
  const Layer& l = s.layers[layer];
  const int64_t width = s.width, inner = l.ffn_key.out;
  me.run_items(s.rows.tokens, [&](int64_t t) {
    const AdapterLayer* own = s.adapters[t] ? s.adapters[t] + layer : nullptr;
    if (!own) return;
    float *delta = b.delta + t * width, *y = b.y + t * width;
    add_pair(own->pairs[FFN_VALUE], b.hidden + t * inner, delta, inner, width);
    for (int64_t i = 0; own->experts && i < width; ++i) delta[i] += y[i];
  });
}

void run_layer(Member& me, const Step& s, int64_t i, const Buffers& b, uint16_t* packed) {
  const Layer& l = s.layers[i];
  const int64_t size = s.rows.tokens * s.width, tokens = s.rows.tokens, heads = s.width / HEAD;
  const int64_t shift_stride = s.num_layers * 2 * s.width, wkv_bytes = heads * s.head_bytes;
  const int64_t wkv_layer = i - s.begins_within, wkv_layers = s.num_layers - s.begins_within;
  const bool has_time_mix = i || !s.begins_within, has_channel_mix = i + 1 < s.num_layers || !s.ends_within;
  float* v = l.v0 ? b.v : s.v_first;
  float* shift = s.shift + i * 2 * s.width;
  const Phases phases(l, b, v, size, s.adapters);
  auto run = [&](const Gemms& gemms) { linear(me, gemms.list, gemms.count, tokens, packed); };

  if (has_time_mix) {
    shift_mix(me, {s.x, i ? b.delta : nullptr, s.x, l.ln1, l.att_mix, shift, shift_stride, s.width, 6, b.h, b.mixed},
              s.rows);
    run(phases.input_projections);
    if (s.adapters) {
      add_adapters(me, s, i, {{RECEPTANCE, l.receptance, b.mixed, b.r},
                              {KEY, l.key, b.mixed + 2 * size, b.k},
                              {VALUE, l.value, b.mixed + 3 * size, v}});
    }
    run(phases.low_ranks);
    time_mix(me, {b.r, b.w, b.k, v, b.a, b.g, l.v0 ? b.v_gate : nullptr, s.v_first, l.w0, l.a0, l.v0, l.k_k, l.k_a,
                  l.r_k, l.ln_x, b.y, s.wkv + wkv_layer * wkv_bytes, wkv_layers * wkv_bytes, s.head_bytes, heads},
             s.rows);
    run(phases.output);
    if (s.adapters) add_adapters(me, s, i, {{OUTPUT, l.output, b.y, b.delta}});
  }
  if (has_channel_mix) {
    shift_mix(me, {s.x, has_time_mix ? b.delta : nullptr, s.x, l.ln2, l.ffn_mix, shift + s.width, shift_stride, s.width,
                   1, b.h, b.mixed},
              s.rows);
    run(phases.key);
    if (s.adapters) finish_key(me, s, i, b);
    run(phases.value);
    if (s.adapters) finish_value(me, s, i, b);
  }
}

// A growing buffer of the calling thread.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }

  // Returns 64-byte aligned memory, or null if out of memory.
  void* take(size_t bytes) {
    if (bytes > size_) {
      std::free(data_);
      size_ = (bytes + 4095) / 4096 * 4096;
      data_ = std::aligned_alloc(64, size_);
      if (!data_) size_ = 0;
    }
    return data_;
  }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

thread_local Scratch scratch;

// Bytes of the step's activations and packed inputs.
size_t scratch_bytes(const Step& s, const Buffers& sizes, bool adapters) {
  int64_t elements = 0;
  for (int64_t i = 0; i < s.num_layers; ++i) {
    elements = std::max(elements, Phases(s.layers[i], sizes, nullptr, 0, adapters).packed(s.rows.tokens));
  }
  return sizes.floats * 4 + elements * 2;
}

}  // namespace

// Allocates and touches the calling thread's memory for steps of up to s.rows.tokens tokens.
EXPORT int64_t rwkv_reserve(const Step* step) {
  const Step& s = *step;
  const Buffers sizes(s, nullptr);
  const size_t bytes = std::max(scratch_bytes(s, sizes, false), scratch_bytes(s, sizes, true));
  void* memory = scratch.take(bytes);
  if (!memory) return NO_MEMORY;
  std::memset(memory, 0, bytes);
  return DONE;
}

// Runs the layers and updates their states in place. Does nothing if it fails.
EXPORT int64_t rwkv_layers(const Step* step) {
  const Step& s = *step;
  if (!rows_fit(s.rows)) return ROWS_DO_NOT_FIT;
  const Buffers sizes(s, nullptr);
  float* memory = static_cast<float*>(scratch.take(scratch_bytes(s, sizes, s.adapters)));
  if (!memory) return NO_MEMORY;
  const Buffers buffers(s, memory);
  uint16_t* packed = reinterpret_cast<uint16_t*>(memory + buffers.floats);
  with_team(s.threads, [&](Member& me) {
    for (int64_t i = 0; i < s.num_layers; ++i) run_layer(me, s, i, buffers, packed);
    me.run_items(s.rows.tokens, [&](int64_t t) {
      for (int64_t i = t * s.width; i < (t + 1) * s.width; i += LANES) {
        store(s.x + i, load(s.x + i) + load(buffers.delta + i));
      }
    });
  });
  return DONE;
}

// Runs up to 16 GEMMs over the same rows.
EXPORT int64_t rwkv_linear(const Gemm* gemms, int64_t count, int64_t rows, int64_t threads) {
  const int64_t elements = packed_elements(gemms, count, rows);
  uint16_t* packed = static_cast<uint16_t*>(scratch.take(elements * 2));
  if (elements && !packed) return NO_MEMORY;
  with_team(threads, [&](Member& me) { linear(me, gemms, count, rows, packed); });
  return DONE;
}
