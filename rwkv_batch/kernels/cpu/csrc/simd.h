// fp32 vectors of this machine's width, by GCC's vector extensions.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))

#if defined(__AVX512F__)
constexpr int LANES = 16;
constexpr int TILE_ROWS = 12;  // rows of x in registers: 12 x 2 accumulators of 32 registers
#elif defined(__AVX2__)
constexpr int LANES = 8;
constexpr int TILE_ROWS = 6;
#else
constexpr int LANES = 4;
constexpr int TILE_ROWS = 4;
#endif

typedef float vf __attribute__((vector_size(LANES * 4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));

static inline vf load(const float* p) {
  vf v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

static inline void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }

// x - 0 is x even for -0, so the compiler drops the subtraction. It keeps 0 + x.
static inline vf splat(float x) { return x - vf{}; }

// Rounds to the nearest integers, ties to even. Each is within int32.
static inline vi round_to_int(vf x) {
#if defined(__AVX512F__)
  return (vi)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
  return (vi)_mm256_cvtps_epi32((__m256)x);
#elif defined(__SSE2__)
  return (vi)_mm_cvtps_epi32((__m128)x);
#else
  vi n;
  for (int i = 0; i < LANES; ++i) n[i] = int32_t(__builtin_nearbyintf(x[i]));
  return n;
#endif
}

// e^x to about 2 ulp for x in [-87, 88], clamped outside.
static inline vf vexp(vf x) {
  x = x < splat(-87.f) ? splat(-87.f) : x;
  x = x > splat(88.f) ? splat(88.f) : x;
  const vf magic = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
  vf n = (x * 1.44269504088896341f + magic) - magic;
  vf r = x - n * 0.693359375f - n * -2.12194440e-4f;
  vf p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.f;
  vi scale = (__builtin_convertvector(n, vi) + 127) << 23;
  return p * (vf)scale;
}

static inline vf vsigmoid(vf x) { return 1.f / (1.f + vexp(-x)); }

static inline float hsum(vf v) {
  float total = 0;
  for (int i = 0; i < LANES; ++i) total += v[i];
  return total;
}

// Lane i of `a` (bit s of i clear) or `b` (set), plus its partner at distance s.
static inline vf fold(vf a, vf b, int s) {
#if defined(__clang__)
  vf out;
  for (int i = 0; i < LANES; ++i) out[i] = (i & s) ? b[i] + b[i ^ s] : a[i] + a[i ^ s];
  return out;
#else
  vi own, partner;
#pragma GCC unroll 16
  for (int i = 0; i < LANES; ++i) {
    own[i] = (i & s) ? LANES + i : i;
    partner[i] = (i & s) ? LANES + (i ^ s) : (i ^ s);
  }
  return __builtin_shuffle(a, b, own) + __builtin_shuffle(a, b, partner);
#endif
}

// Lane i of the result is the sum of p[i]'s lanes. Overwrites p.
static inline vf sum_rows(vf p[LANES]) {
#pragma GCC unroll 4
  for (int s = LANES / 2; s > 0; s /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < s; ++i) p[i] = fold(p[i], p[i + s], s);
  }
  return p[0];
}
