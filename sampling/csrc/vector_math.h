// exp and log in vectorisable form. Coefficients: Cephes (expf, logf).
#pragma once

#include <cstdint>
#include <cstring>

#include "philox.h"

namespace sampling {

template <class To, class From>
SAMPLER_FN To bits(From from) {
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// a * b + c, rounded once where the CPU can.
SAMPLER_FN float multiply_add(float a, float b, float c) {
#if defined(__FMA__) && !defined(__CUDACC__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// exp(x) for x <= 0, within 2 ulp; 0 below -87 and for -inf.
SAMPLER_FN float exp_nonpositive(float x) {
  const float clamped = x > -87.0f ? x : -87.0f;
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const float rounded = multiply_add(clamped, 1.44269504088896341f, magic);
  const float n = rounded - magic;
  const float r = multiply_add(n, 2.12194440e-4f, multiply_add(n, -0.693359375f, clamped));
  float p = 1.9875691500e-4f;
  p = multiply_add(p, r, 1.3981999507e-3f);
  p = multiply_add(p, r, 8.3334519073e-3f);
  p = multiply_add(p, r, 4.1665795894e-2f);
  p = multiply_add(p, r, 1.6666665459e-1f);
  p = multiply_add(p, r, 5.0000001201e-1f);
  p = multiply_add(p * r, r, r) + 1.0f;
  const uint32_t exponent = static_cast<uint32_t>(bits<int32_t>(rounded) - bits<int32_t>(magic) + 127) << 23;
  return x > -87.0f ? p * bits<float>(exponent) : 0.0f;
}

// log(x) for normal x > 0, within 1e-6.
inline float log_positive(float x) {
  const int32_t raw = bits<int32_t>(x) - 0x3f3504f3;  // sqrt(1/2): the mantissa lands in [sqrt(1/2), sqrt(2))
  const int32_t exponent = raw >> 23;
  const float m = bits<float>((raw & 0x007fffff) + 0x3f3504f3) - 1.0f;
  float p = 7.0376836292e-2f;
  p = p * m - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  const float square = m * m;
  return p * m * square - 0.5f * square + m + static_cast<float>(exponent) * 0.69314718056f;
}

// -log(-log(1 - u)) within 1e-4: enough to tell which tokens may win.
inline float rough_gumbel(float u) {
  const float series = u * (1.0f + u * (0.5f + u * 0.333333333f));
  const float direct = -log_positive(1.0f - u);
  return -log_positive(u < 0.01f ? series : direct);
}

}  // namespace sampling
