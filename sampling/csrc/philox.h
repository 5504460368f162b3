// Philox4x32-10 (Salmon et al., SC 2011) and the counters of the samplers; the definition is sampling/philox.py.
#pragma once

#include <cstdint>

#if defined(__CUDACC__) || defined(__HIPCC__)
#define SAMPLER_FN __host__ __device__ __forceinline__
#else
#define SAMPLER_FN inline __attribute__((always_inline))
#endif

namespace sampling {

constexpr uint32_t kDomainGumbel = 0;
constexpr uint32_t kDomainNoise = 1;

struct Words {
  uint32_t at[4];
};

SAMPLER_FN uint32_t high_product(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>((static_cast<uint64_t>(a) * b) >> 32);
}

SAMPLER_FN Words philox4x32(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
#if defined(__GNUC__) && !defined(__CUDACC__) && !defined(__HIPCC__)
#pragma GCC unroll 10  // lets the enclosing loop vectorise
#endif
  for (int round = 0; round < 10; ++round) {
    const uint32_t high0 = high_product(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
    const uint32_t high1 = high_product(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
    c0 = high1 ^ c1 ^ k0;
    c1 = low1;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return Words{{c0, c1, c2, c3}};
}

// The words of tokens 4 * block .. 4 * block + 3.
SAMPLER_FN Words words_of_block(uint64_t seed, uint64_t step, uint32_t block, uint32_t domain) {
  return philox4x32(block, static_cast<uint32_t>(step), static_cast<uint32_t>(step >> 32), domain,
                    static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
}

// A word as a number strictly between 0 and 1.
SAMPLER_FN float to_uniform(uint32_t word) {
  const float u = (static_cast<float>(word) + 0.5f) * 0x1p-32f;
  return u < 0x1.fffffep-1f ? u : 0x1.fffffep-1f;
}

}  // namespace sampling
