// fp32 vectors of this machine's width, by GCC's vector extensions.
#pragma once
#include <cstdint>
#include <cstring>
#include <utility>
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
typedef uint32_t vu __attribute__((vector_size(LANES * 4)));

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

struct Add {
  template <class V>
  V operator()(V a, V b) const { return a + b; }
};

struct Max {
  template <class V>
  V operator()(V a, V b) const { return a > b ? a : b; }
};

// Lane i of `a` (bit S of i clear) or `b` (set), combined with its partner at distance S. The indices are constants:
// GCC would make those of a loop at run time.
template <int S, class Op, class V, int... I>
inline V fold_lanes(V a, V b, std::integer_sequence<int, I...>) {
#if defined(__clang__)
  return Op()(__builtin_shufflevector(a, b, ((I & S) ? LANES + I : I)...),
              __builtin_shufflevector(a, b, ((I & S) ? LANES + (I ^ S) : (I ^ S))...));
#else
  return Op()(__builtin_shuffle(a, b, vi{((I & S) ? LANES + I : I)...}),
              __builtin_shuffle(a, b, vi{((I & S) ? LANES + (I ^ S) : (I ^ S))...}));
#endif
}

template <int S, class Op, class V>
inline V fold(V a, V b) {
  return fold_lanes<S, Op>(a, b, std::make_integer_sequence<int, LANES>{});
}

// The sum of v's lanes, in pairs: few additions depend on each other.
template <int S = LANES / 2>
inline float hsum(vf v) {
  v = fold<S, Add>(v, v);
  if constexpr (S > 1) return hsum<S / 2>(v);
  return v[0];
}

// Lane i of the result is the sum (or maximum) of p[i]'s lanes. Overwrites p.
template <class Op, int S = LANES / 2, class V>
inline V fold_rows(V p[LANES]) {
#pragma GCC unroll 8
  for (int i = 0; i < S; ++i) p[i] = fold<S, Op>(p[i], p[i + S]);
  if constexpr (S > 1) return fold_rows<Op, S / 2>(p);
  return p[0];
}
