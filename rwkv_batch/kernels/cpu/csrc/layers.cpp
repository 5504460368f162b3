// What the binding calls: a stage's layers over one ragged step, and linear maps by themselves.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <initializer_list>
#include <numeric>
#include <vector>

#include "linear.h"
#include "mix.h"
#include "simd.h"

// Eight bytes a field, as the binding writes them.
struct Layer {
  Norm ln1, ln2, ln_x;
  const float *att_mix, *ffn_mix;               // [6, C] in the order r, w, k, v, a, g; [C]
  const float *w0, *a0, *v0, *k_k, *k_a, *r_k;  // [C]; v0 null in the model's first layer, v1 and v2 empty
  Map receptance, key, value, output, ffn_key, ffn_value;
  Map w1, a1, g1, v1, w2, a2, g2, v2;
};

// An adapter's pair beside a map: y += b (a x). Rank 0: it has none there.
struct Pair {
  const float *a, *b;  // [rank, in], [rank, out]
  int64_t rank;
};

// The maps that an adapter may have pairs beside, in the order of the binding.
enum Target : int64_t { RECEPTANCE, KEY, VALUE, OUTPUT, FFN_KEY, FFN_VALUE, TARGETS };

// What an adapter has in one layer; with experts, these stand in the places of FFN_KEY and FFN_VALUE.
struct AdapterLayer {
  Pair pairs[TARGETS];
  const float* router;  // [experts - 1, C]
  const Pair* experts;  // [experts, 2]: beside the key map, beside the value map; null: none
  int64_t num_experts, active;
};

struct Step {
  const Layer* layers;
  int64_t num_layers;
  const float* x;  // [T, C]
  float* out;      // [T, C]: x and what every layer adds
  float* v_first;  // [T, C]: written by the model's first layer, read by the others
  float* wkv;      // [slots, layers, H, 64, 64]
  float* shift;    // [slots, layers, 2, C]
  Rows rows;
  int64_t width, threads;
  const AdapterLayer* const* adapters;  // [T]: of each token its row's adapter, [layers], or null; null: no row has one
};

enum Failure : int64_t { DONE = 0, ROWS_DO_NOT_FIT = 1, NO_MEMORY = 2 };

namespace {

constexpr int64_t HEAD = 64;

// The maps of one phase; empty ones are left out.
struct Jobs {
  Job list[7];
  int64_t count = 0;

  void add(const Map& map, const float* x, float* y, Activation activation = NONE) {
    if (map.weight) list[count++] = {map, x, y, activation};
  }
};

// What layers pass on, in memory that all layers share. Without memory, only sizes are told.
struct Buffers {
  float *delta, *h, *y, *mixed, *hidden;  // [T, C], [T, C], [T, C], [6, T, C], [T, F]
  float *r, *w, *k, *v, *a, *g, *v_gate;  // [T, C]; the channel mix's hidden lies over them
  float *w_low, *a_low, *g_low, *v_low;   // [T, D]
  int64_t floats = 0;

  Buffers(const Step& s, float* memory) {
    auto take = [&](int64_t size) {
      float* at = memory ? memory + floats : nullptr;
      floats += (size + 15) / 16 * 16;
      return at;
    };
    const int64_t tokens = s.rows.tokens, plain = tokens * s.width;
    auto widest = [&](Map Layer::*map) {
      int64_t out = 0;
      for (int64_t i = 0; i < s.num_layers; ++i) out = std::max(out, (s.layers[i].*map).out);
      return tokens * out;
    };
    delta = take(plain), h = take(plain), y = take(plain), mixed = take(6 * plain);
    w_low = take(widest(&Layer::w1)), a_low = take(widest(&Layer::a1));
    g_low = take(widest(&Layer::g1)), v_low = take(widest(&Layer::v1));
    hidden = memory ? memory + floats : nullptr;
    const int64_t begin = floats;
    for (float** buffer : {&r, &w, &k, &v, &a, &g, &v_gate}) *buffer = take(plain);
    floats = std::max(floats, begin + (widest(&Layer::ffn_key) + 15) / 16 * 16);
  }
};

// The phases of linear maps in one layer; v is where its values go.
struct Phases {
  Jobs entrance, low_ranks, output, key, value;

  // `apart`: the adapters' part comes between the key map and its activation.
  Phases(const Layer& l, const Buffers& b, float* v, int64_t plain, bool apart) {
    const float *xr = b.mixed, *xw = xr + plain, *xk = xw + plain, *xv = xk + plain, *xa = xv + plain, *xg = xa + plain;
    entrance.add(l.w1, xw, b.w_low, TANH);
    entrance.add(l.a1, xa, b.a_low);
    entrance.add(l.g1, xg, b.g_low, SIGMOID);
    entrance.add(l.v1, xv, b.v_low);
    entrance.add(l.receptance, xr, b.r);
    entrance.add(l.key, xk, b.k);
    entrance.add(l.value, xv, v);
    low_ranks.add(l.w2, b.w_low, b.w);
    low_ranks.add(l.a2, b.a_low, b.a);
    low_ranks.add(l.g2, b.g_low, b.g);
    low_ranks.add(l.v2, b.v_low, b.v_gate);
    output.add(l.output, b.y, b.delta);
    key.add(l.ffn_key, b.mixed, b.hidden, apart ? NONE : RELU_SQUARED);
    value.add(l.ffn_value, b.hidden, b.delta);
  }

  int64_t packed(int64_t rows) const {
    int64_t most = 0;
    for (const Jobs* jobs : {&entrance, &low_ranks, &output, &key, &value}) {
      most = std::max(most, packed_elements(jobs->list, jobs->count, rows));
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

// What a token's adapter adds to y beside a map. The order of the sums is the token's own, whoever else is in the step.
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
  const Map& map;
  const float* x;
  float* y;
};

// What the tokens' adapters add beside the maps of a phase.
void add_adapters(Member& me, const Step& s, int64_t layer, std::initializer_list<Addition> list) {
  me.deal(s.rows.tokens, [&](int64_t t) {
    for (const Addition& one : list) {
      float* y = one.y + t * one.map.out;
      if (const AdapterLayer* own = s.adapters[t]) {
        add_pair(own[layer].pairs[one.target], one.x + t * one.map.in, y, one.map.in, one.map.out);
      }
    }
  });
}

// A token's gates: the softmax of its `active` highest scores (the first of equal ones), 0 for the other experts.
void find_gates(const AdapterLayer& own, const float* x, int64_t width, float* gates) {
  std::vector<float> scores(own.num_experts, 0.f);
  for (int64_t e = 1; e < own.num_experts; ++e) scores[e] = dot(own.router + (e - 1) * width, x, width);
  std::vector<int64_t> order(own.num_experts);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return scores[a] > scores[b]; });
  float total = 0;
  for (int64_t i = 0; i < own.active; ++i) total += gates[order[i]] = std::exp(scores[order[i]] - scores[order[0]]);
  for (int64_t i = 0; i < own.active; ++i) gates[order[i]] /= total;
}

// A token's experts mixed: hidden holds what the key map gave and gets the sum of their hidden values, y what their pairs
// add beside the value map.
void mix_experts(const AdapterLayer& own, const Layer& l, const float* x, float* hidden, float* y) {
  const int64_t width = l.ffn_key.in, inner = l.ffn_key.out;
  std::vector<float> gates(own.num_experts, 0.f), of_expert(inner), added(width);
  const std::vector<float> key(hidden, hidden + inner);
  find_gates(own, x, width, gates.data());
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

// Behind the key map: what the tokens' adapters add, experts, and the activation.
void finish_key(Member& me, const Step& s, int64_t layer, const Buffers& b) {
  const Layer& l = s.layers[layer];
  const int64_t width = s.width, inner = l.ffn_key.out;
  me.deal(s.rows.tokens, [&](int64_t t) {
    const AdapterLayer* own = s.adapters[t] ? s.adapters[t] + layer : nullptr;
    const float* x = b.mixed + t * width;
    float* hidden = b.hidden + t * inner;
    if (own && own->experts) {
      mix_experts(*own, l, x, hidden, b.y + t * width);
      return;
    }
    if (own) add_pair(own->pairs[FFN_KEY], x, hidden, width, inner);
    for (int64_t i = 0; i < inner; ++i) hidden[i] = hidden[i] < 0 ? 0.f : hidden[i] * hidden[i];  // as linear.cpp has it
  });
}

// Behind the value map: what the tokens' adapters add, or their experts have added up.
void finish_value(Member& me, const Step& s, int64_t layer, const Buffers& b) {
  const Layer& l = s.layers[layer];
  const int64_t width = s.width, inner = l.ffn_key.out;
  me.deal(s.rows.tokens, [&](int64_t t) {
    const AdapterLayer* own = s.adapters[t] ? s.adapters[t] + layer : nullptr;
    if (!own) return;
    float *delta = b.delta + t * width, *y = b.y + t * width;
    add_pair(own->pairs[FFN_VALUE], b.hidden + t * inner, delta, inner, width);
    for (int64_t i = 0; own->experts && i < width; ++i) delta[i] += y[i];
  });
}

void run_layer(Member& me, const Step& s, int64_t i, const Buffers& b, uint16_t* packed) {
  const Layer& l = s.layers[i];
  const int64_t plain = s.rows.tokens * s.width, tokens = s.rows.tokens;
  const int64_t shift_stride = s.num_layers * 2 * s.width, wkv_size = s.width * HEAD;
  const float* x = i ? s.out : s.x;
  float* v = l.v0 ? b.v : s.v_first;
  float *shift = s.shift + i * 2 * s.width, *wkv = s.wkv + i * wkv_size;
  const Phases phases(l, b, v, plain, s.adapters);
  auto run = [&](const Jobs& jobs) { linear(me, jobs.list, jobs.count, tokens, packed); };

  shift_mix(me, {x, i ? b.delta : nullptr, s.out, l.ln1, l.att_mix, shift, shift_stride, s.width, 6, b.h, b.mixed},
            s.rows);
  run(phases.entrance);
  if (s.adapters) {
    add_adapters(me, s, i, {{RECEPTANCE, l.receptance, b.mixed, b.r},
                            {KEY, l.key, b.mixed + 2 * plain, b.k},
                            {VALUE, l.value, b.mixed + 3 * plain, v}});
  }
  run(phases.low_ranks);
  time_mix(me, {b.r, b.w, b.k, v, b.a, b.g, l.v0 ? b.v_gate : nullptr, s.v_first, l.w0, l.a0, l.v0, l.k_k, l.k_a, l.r_k,
                l.ln_x, b.y, wkv, s.num_layers * wkv_size, s.width / HEAD},
           s.rows);
  run(phases.output);
  if (s.adapters) add_adapters(me, s, i, {{OUTPUT, l.output, b.y, b.delta}});
  shift_mix(me, {x, b.delta, s.out, l.ln2, l.ffn_mix, shift + s.width, shift_stride, s.width, 1, b.h, b.mixed}, s.rows);
  run(phases.key);
  if (s.adapters) finish_key(me, s, i, b);
  run(phases.value);
  if (s.adapters) finish_value(me, s, i, b);
}

// Memory that grows and belongs to the calling thread.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }

  // `bytes` bytes at a 64-byte border; null if memory is short.
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

}  // namespace

// Runs the layers; their states are advanced in their slots. With a failure nothing is done.
EXPORT int64_t rwkv_layers(const Step* step) {
  const Step& s = *step;
  if (!rows_fit(s.rows)) return ROWS_DO_NOT_FIT;
  const Buffers sizes(s, nullptr);
  int64_t elements = 0;
  for (int64_t i = 0; i < s.num_layers; ++i) {
    elements = std::max(elements, Phases(s.layers[i], sizes, nullptr, 0, s.adapters).packed(s.rows.tokens));
  }
  float* memory = static_cast<float*>(scratch.take(sizes.floats * 4 + elements * 2));
  if (!memory) return NO_MEMORY;
  const Buffers buffers(s, memory);
  uint16_t* packed = reinterpret_cast<uint16_t*>(memory + buffers.floats);
  with_team(s.threads, [&](Member& me) {
    for (int64_t i = 0; i < s.num_layers; ++i) run_layer(me, s, i, buffers, packed);
    me.deal(s.rows.tokens, [&](int64_t t) {
      for (int64_t i = t * s.width; i < (t + 1) * s.width; i += LANES) {
        store(s.out + i, load(s.out + i) + load(buffers.delta + i));
      }
    });
  });
  return DONE;
}

// Runs `count` (at most 16) maps over the same number of rows.
EXPORT int64_t rwkv_linear(const Job* jobs, int64_t count, int64_t rows, int64_t threads) {
  const int64_t elements = packed_elements(jobs, count, rows);
  uint16_t* packed = static_cast<uint16_t*>(scratch.take(elements * 2));
  if (elements && !packed) return NO_MEMORY;
  with_team(threads, [&](Member& me) { linear(me, jobs, count, rows, packed); });
  return DONE;
}
