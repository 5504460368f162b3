// Calls the CPU libraries with fixed numbers and prints the results; on each processor they have to be the same.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "linear.h"

extern "C" {
int64_t rwkv_packed_bytes(int64_t in, int64_t out, int64_t packing);
void rwkv_pack_fp32(const float*, int64_t, int64_t, int64_t in, int64_t out, float*, int64_t threads);
void rwkv_pack_bf16(const uint16_t*, int64_t, int64_t, int64_t in, int64_t out, uint16_t*, int64_t threads);
int64_t rwkv_linear(const void* gemms, int64_t count, int64_t rows, int64_t threads);
void* sampler_new(int64_t max_rows, int64_t vocab, const uint8_t* penalty_exempt);
void sampler_admit(void*, int64_t slot, const void* parameters, const int32_t*, const float*);
void sampler_sample(void*, float*, const uint32_t*, int64_t rows, const int64_t* slots, int64_t* tokens, int32_t threads);
}

struct Parameters {
  double top_p;
  int64_t top_k;
  uint64_t seed;
  float scale, noise, presence, frequency, decay;
  int32_t kind, penalised, num_bias;
};

constexpr int64_t IN = 96, OUT = 72, ROWS = 5, VOCAB = 512, DRAWS = 64;

int main() {
  uint32_t state = 1;
  auto number = [&] { return int32_t((state = state * 1664525u + 1013904223u) >> 8) / float(1 << 23) - 1.f; };
  std::vector<float> weight(OUT * IN), x(ROWS * IN), y(ROWS * OUT);
  std::vector<uint16_t> halves(OUT * IN);
  for (auto& one : x) one = number();
  for (int64_t i = 0; i < OUT * IN; ++i) {
    weight[i] = int8_t(number() * 127) / 128.f;  // exact in bf16
    halves[i] = uint16_t(reinterpret_cast<uint32_t&>(weight[i]) >> 16);
  }
  for (int64_t packing : {0, 1}) {
    void* packed = std::aligned_alloc(64, (rwkv_packed_bytes(IN, OUT, packing) + 127) / 64 * 64);
    if (packing == 0) rwkv_pack_fp32(weight.data(), IN, 1, IN, OUT, static_cast<float*>(packed), 2);
    if (packing == 1) rwkv_pack_bf16(halves.data(), IN, 1, IN, OUT, static_cast<uint16_t*>(packed), 2);
    const Gemm gemm{{packed, IN, OUT, packing, packing == 1 ? 3 : 1}, x.data(), y.data(), 0};
    rwkv_linear(&gemm, 1, ROWS, 2);
    for (float one : y) std::printf("%.9g\n", one);
  }
  std::vector<uint8_t> exempt(VOCAB);
  void* sampler = sampler_new(1, VOCAB, exempt.data());
  const int64_t slot = 0;
  for (uint64_t seed = 0; seed < DRAWS; ++seed) {
    const Parameters parameters{0.8, seed % 2 ? VOCAB : 20, seed, 1.2f, 0, 0, 0, 0, 1, 0, 0};
    sampler_admit(sampler, slot, &parameters, nullptr, nullptr);
    std::vector<float> logits(VOCAB);
    for (auto& one : logits) one = 4 * number();
    int64_t token = -1;
    sampler_sample(sampler, logits.data(), nullptr, 1, &slot, &token, 1);
    std::printf("%ld\n", long(token));
  }
}
