// Sums of products of small integers. They are exact, so their order does not matter.
#pragma once
#include <cstring>

#include "simd.h"

namespace int8 {

constexpr int64_t OUTPUTS = 2 * LANES;

typedef int8_t Bytes __attribute__((vector_size(OUTPUTS)));
inline Bytes load_bytes(const int8_t* from) {
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return bytes;
}

#if defined(__AVX512BW__)
using Sums = __m512i;
using Pairs = __m512i;
inline Sums zero() { return _mm512_setzero_si512(); }
inline Sums add(Sums a, Sums b) { return _mm512_add_epi32(a, b); }
inline Pairs widen(Bytes w) { return _mm512_cvtepi8_epi16((__m256i)w); }
inline Pairs spread(const uint16_t* pair) {
  int32_t both;
  std::memcpy(&both, pair, 4);
  return _mm512_set1_epi32(both);
}
inline Sums multiply_add(Sums sum, Pairs w, Pairs x) {
#if defined(__AVX512VNNI__)
  return _mm512_dpwssd_epi32(sum, w, x);
#else
  return _mm512_add_epi32(sum, _mm512_madd_epi16(w, x));
#endif
}
#elif defined(__AVX2__) && !defined(__AVX512F__)
using Sums = __m256i;
using Pairs = __m256i;
inline Sums zero() { return _mm256_setzero_si256(); }
inline Sums add(Sums a, Sums b) { return _mm256_add_epi32(a, b); }
inline Pairs widen(Bytes w) { return _mm256_cvtepi8_epi16((__m128i)w); }
inline Pairs spread(const uint16_t* pair) {
  int32_t both;
  std::memcpy(&both, pair, 4);
  return _mm256_set1_epi32(both);
}
inline Sums multiply_add(Sums sum, Pairs w, Pairs x) { return _mm256_add_epi32(sum, _mm256_madd_epi16(w, x)); }
#else
using Sums = vi;
struct Pairs {
  vi even, odd;
};
inline Sums zero() { return vi{}; }
inline Sums add(Sums a, Sums b) { return a + b; }
inline Pairs widen(Bytes w) {
  Pairs p;
  for (int i = 0; i < LANES; ++i) p.even[i] = w[2 * i], p.odd[i] = w[2 * i + 1];
  return p;
}
inline Pairs spread(const uint16_t* pair) { return {vi{} + int16_t(pair[0]), vi{} + int16_t(pair[1])}; }
inline Sums multiply_add(Sums sum, Pairs w, Pairs x) { return sum + w.even * x.even + w.odd * x.odd; }
#endif

}  // namespace int8
