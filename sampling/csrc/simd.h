// What compilers do not vectorise well by themselves: Philox, and moving kept values together.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "philox.h"

namespace sampling {

constexpr int kChunk = 64;  // tokens per chunk
constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

#if defined(__AVX512F__)
using Wide = __m512i;  // 64-bit lanes with a 32-bit number each
SAMPLER_FN Wide broadcast(uint32_t value) { return _mm512_set1_epi64(value); }
SAMPLER_FN Wide load_wide(const int32_t* at) { return _mm512_cvtepu32_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at))); }
SAMPLER_FN void store_wide(uint32_t* to, Wide a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi64_epi32(a)); }
SAMPLER_FN Wide product(Wide a, Wide b) { return _mm512_mul_epu32(a, b); }
SAMPLER_FN Wide high(Wide a) { return _mm512_srli_epi64(a, 32); }
SAMPLER_FN Wide quarter(Wide a) { return _mm512_srli_epi64(a, 2); }
SAMPLER_FN Wide xor3(Wide a, Wide b, Wide c) { return _mm512_ternarylogic_epi64(a, b, c, 0x96); }
SAMPLER_FN Wide lower(Wide a, Wide b) { return _mm512_min_epu32(a, b); }
SAMPLER_FN bool has_at_most(Wide a, Wide limit) { return _mm512_mask_cmple_epu32_mask(0x5555, a, limit); }
SAMPLER_FN Wide choose(Wide which, int number, Wide a, Wide b) {
  return _mm512_mask_mov_epi64(b, _mm512_cmpeq_epi64_mask(which, _mm512_set1_epi64(number)), a);
}
#elif defined(__AVX2__)
using Wide = __m256i;
SAMPLER_FN Wide broadcast(uint32_t value) { return _mm256_set1_epi64x(value); }
SAMPLER_FN Wide load_wide(const int32_t* at) { return _mm256_cvtepu32_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))); }
SAMPLER_FN void store_wide(uint32_t* to, Wide a) {
  const Wide packed = _mm256_permutevar8x32_epi32(a, _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(packed));
}
SAMPLER_FN Wide product(Wide a, Wide b) { return _mm256_mul_epu32(a, b); }
SAMPLER_FN Wide high(Wide a) { return _mm256_srli_epi64(a, 32); }
SAMPLER_FN Wide quarter(Wide a) { return _mm256_srli_epi64(a, 2); }
SAMPLER_FN Wide xor3(Wide a, Wide b, Wide c) { return _mm256_xor_si256(_mm256_xor_si256(a, b), c); }
SAMPLER_FN Wide lower(Wide a, Wide b) { return _mm256_min_epu32(a, b); }
SAMPLER_FN bool has_at_most(Wide a, Wide limit) {
  return _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(lower(a, limit), a))) & 0x55;
}
SAMPLER_FN Wide choose(Wide which, int number, Wide a, Wide b) {
  return _mm256_blendv_epi8(b, a, _mm256_cmpeq_epi64(which, _mm256_set1_epi64x(number)));
}
#endif

// The random words of one row and step.
class RowWords {
 public:
  RowWords(uint64_t seed, uint64_t step, uint32_t domain) : seed_(seed), step_(step), domain_(domain) {
#if defined(__AVX2__)
    for (uint32_t round = 0; round < 10; ++round) {
      keys_[round][0] = broadcast(static_cast<uint32_t>(seed) + round * 0x9E3779B9u);
      keys_[round][1] = broadcast(static_cast<uint32_t>(seed >> 32) + round * 0xBB67AE85u);
    }
#endif
  }

  uint32_t at(int32_t token) const { return words_of_block(seed_, step_, token >> 2, domain_).at[token & 3]; }

  // Writes the words of kChunk tokens.
  void of_tokens(const int32_t* tokens, uint32_t* words) const {
#if defined(__AVX2__)
    for (int i = 0; i < kChunk; i += kWide) {
      Wide c[4];
      const Wide ids = load_wide(tokens + i), which = ids & broadcast(3);
      generate(quarter(ids), c);
      store_wide(words + i, choose(which, 0, c[0], choose(which, 1, c[1], choose(which, 2, c[2], c[3]))));
    }
#else
    for (int i = 0; i < kChunk; ++i) words[i] = at(tokens[i]);
#endif
  }

  // Writes the words of a chunk's tokens.
  void of_chunk(int chunk, uint32_t* words) const {
    for (int block = 0; block < kChunk / 4; ++block) {
      const Words one = words_of_block(seed_, step_, chunk * (kChunk / 4) + block, domain_);
      std::copy_n(one.at, 4, words + 4 * block);
    }
  }

  // Whether any word of the chunk's tokens, xor `flip`, is at most `limit`.
  bool any_at_most(int chunk, uint32_t flip, uint32_t limit) const {
#if defined(__AVX2__)
    static constexpr int32_t kCount[] = {0, 1, 2, 3, 4, 5, 6, 7};
    const Wide flips = broadcast(flip), first = load_wide(kCount) + broadcast(chunk * (kChunk / 4));
    Wide lowest = broadcast(~0u);
    for (int block = 0; block < kChunk / 4; block += 2 * kWide) {
      Wide c[4], d[4];
      generate(first + broadcast(block), c, first + broadcast(block + kWide), d);
      for (int i = 0; i < 4; ++i) lowest = lower(lowest, lower(c[i] ^ flips, d[i] ^ flips));
    }
    return has_at_most(lowest, broadcast(limit));
#else
    uint32_t words[kChunk], lowest = ~0u;
#pragma omp simd
    for (int block = 0; block < kChunk / 4; ++block) {
      const Words one = words_of_block(seed_, step_, chunk * (kChunk / 4) + block, domain_);
      for (int i = 0; i < 4; ++i) words[i * (kChunk / 4) + block] = one.at[i];
    }
#pragma omp simd reduction(min : lowest)
    for (int i = 0; i < kChunk; ++i) lowest = std::min(lowest, words[i] ^ flip);
    return lowest <= limit;
#endif
  }

 private:
#if defined(__AVX2__)
  static constexpr int kWide = sizeof(Wide) / 8;

  SAMPLER_FN void start(Wide blocks, Wide (&c)[4]) const {
    c[0] = blocks, c[1] = broadcast(static_cast<uint32_t>(step_));
    c[2] = broadcast(static_cast<uint32_t>(step_ >> 32)), c[3] = broadcast(domain_);
  }

  // The upper halves of lanes are not used.
  SAMPLER_FN void advance(int round, Wide (&c)[4]) const {
    const Wide product0 = product(c[0], broadcast(0xD2511F53u)), product1 = product(c[2], broadcast(0xCD9E8D57u));
    c[0] = xor3(high(product1), c[1], keys_[round][0]);
    c[1] = product1;
    c[2] = xor3(high(product0), c[3], keys_[round][1]);
    c[3] = product0;
  }

  SAMPLER_FN void generate(Wide blocks, Wide (&c)[4]) const {
    start(blocks, c);
    for (int round = 0; round < 10; ++round) advance(round, c);
  }

  // Two at a time hide the products' latency.
  SAMPLER_FN void generate(Wide blocks, Wide (&c)[4], Wide more_blocks, Wide (&d)[4]) const {
    start(blocks, c), start(more_blocks, d);
    for (int round = 0; round < 10; ++round) advance(round, c), advance(round, d);
  }

  Wide keys_[10][2];
#endif
  uint64_t seed_, step_;
  uint32_t domain_;
};

#if defined(__AVX2__) && !defined(__AVX512F__)
// By the bits of a mask: the numbers of the set ones, one per byte.
struct SetBits {
  uint64_t at[256] = {};
  constexpr SetBits() {
    for (int mask = 0; mask < 256; ++mask)
      for (int bit = 0, found = 0; bit < 8; ++bit)
        if (mask >> bit & 1) at[mask] |= static_cast<uint64_t>(bit) << 8 * found++;
  }
};
inline constexpr SetBits kSetBits;
#endif

// Appends those of kChunk values that are above -inf to `to`, and their ids. Both have room for kChunk more. Returns how
// many there are.
inline int append_finite(const float* values, const int32_t* ids, float* to, int32_t* to_ids) {
  int count = 0;
#if defined(__AVX512F__)
  const __m512 none = _mm512_set1_ps(kNegativeInfinity);
  for (int i = 0; i < kChunk; i += 16) {
    const __m512 value = _mm512_loadu_ps(values + i);
    const __mmask16 kept = _mm512_cmp_ps_mask(value, none, _CMP_GT_OQ);
    _mm512_storeu_ps(to + count, _mm512_maskz_compress_ps(kept, value));
    _mm512_storeu_si512(to_ids + count, _mm512_maskz_compress_epi32(kept, _mm512_loadu_si512(ids + i)));
    count += __builtin_popcount(kept);
  }
#elif defined(__AVX2__)
  const __m256 none = _mm256_set1_ps(kNegativeInfinity);
  for (int i = 0; i < kChunk; i += 8) {
    const __m256 value = _mm256_loadu_ps(values + i);
    const int kept = _mm256_movemask_ps(_mm256_cmp_ps(value, none, _CMP_GT_OQ));
    if (!kept) continue;
    const __m256i order = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(kSetBits.at[kept])));
    const __m256i id = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(ids + i));
    _mm256_storeu_ps(to + count, _mm256_permutevar8x32_ps(value, order));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to_ids + count), _mm256_permutevar8x32_epi32(id, order));
    count += __builtin_popcount(kept);
  }
#else
  for (int i = 0; i < kChunk; ++i) {
    to[count] = values[i], to_ids[count] = ids[i];
    count += values[i] > kNegativeInfinity;
  }
#endif
  return count;
}

}  // namespace sampling
