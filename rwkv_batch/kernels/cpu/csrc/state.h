// Formats of a head's state [64 values, 64 keys]; definition: model/state.py. Each rounds alike with all instructions.
#pragma once
#include "simd.h"
#include "time_mix.h"

// An fp16 number.
struct Half {
  uint16_t bits;
};

typedef uint16_t vh __attribute__((vector_size(LANES * 2)));

static inline vf load(const Half* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__) && defined(__F16C__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  vh half;
  std::memcpy(&half, p, sizeof half);
  const vu bits = __builtin_convertvector(half, vu), exponent = bits & 0x7C00;
  const vu number = ((bits & 0x7FFF) << 13) + (112u << 23);
  const vf small = (vf)(number + (1u << 23)) - 0x1p-14f;  // zeros and subnormal numbers
  vu result = exponent == 0 ? (vu)small : number;
  result = exponent == 0x7C00 ? number + (112u << 23) : result;
  return (vf)(result | (bits & 0x8000) << 16);
#endif
}

// Rounds to nearest, ties to even.
static inline void store(Half* p, vf x) {
#if defined(__AVX512F__)
  const __m256i half = _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__AVX2__) && defined(__F16C__)
  const __m128i half = _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
#else
  const vu bits = (vu)x, absolute = bits & 0x7FFFFFFF;
  const vf small = (vf)absolute + 0.5f;  // the sum's last bit is 2^-24, that of subnormal numbers
  vu rounded = (absolute - (112u << 23) + 0xFFF + (absolute >> 13 & 1)) >> 13;
  rounded = absolute < (113u << 23) ? (vu)small - (126u << 23) : rounded;
  rounded = absolute >= (143u << 23) ? vu{} + 0x7C00 : rounded;
  rounded = absolute > (255u << 23) ? vu{} + 0x7E00 : rounded;
  const vh half = __builtin_convertvector(rounded | (bits >> 16 & 0x8000), vh);
#endif
  std::memcpy(p, &half, sizeof half);
}

namespace {

// A state of numbers, from one slot to the next.
template <class Number>
class NumbersState {
 public:
  explicit NumbersState(const void* slot) : from_(static_cast<const Number*>(slot)) {}

  void advance_to(void* slot, const Token& token, float* y) {
    Number* to = static_cast<Number*>(slot);
    advance(from_, to, token, nullptr, y);
    from_ = to;
  }

 private:
  const Number* from_;
};

struct Int8Head {
  int8_t codes[HEAD * HEAD];
  uint16_t scales[HEAD];  // bf16
};
static_assert(sizeof(Int8Head) == 4224, "as in model/state.py");

// The numbers of an int8 state: what the last slot holds.
class Int8State {
 public:
  explicit Int8State(const void* slot) {
    const Int8Head& from = *static_cast<const Int8Head*>(slot);
    for (int i = 0; i < HEAD; i += LANES) {
      vh scale;
      std::memcpy(&scale, from.scales + i, sizeof scale);
      store(scales_ + i, (vf)(__builtin_convertvector(scale, vu) << 16));
    }
    for (int i = 0; i < HEAD; ++i) {
      for (int j = i * HEAD; j < (i + 1) * HEAD; ++j) numbers_[j] = from.codes[j] * scales_[i];
    }
  }

  void advance_to(void* slot, const Token& token, float* y) {
    advance(numbers_, numbers_, token, nullptr, y);
    quantise(*static_cast<Int8Head*>(slot));
  }

 private:
  static constexpr int FRACTION_BITS = 15;

  void quantise(Int8Head& to) {
    float inverse[HEAD];
    const uint32_t sum = choose_scales(inverse);
    for (int i = 0; i < HEAD; i += LANES) {
      const vh scale = __builtin_convertvector((vu)load(scales_ + i) >> 16, vh);
      std::memcpy(to.scales + i, &scale, sizeof scale);
    }
    for (int first = 0; first < HEAD * HEAD; first += HEAD) {
      const vf scale = splat(scales_[first / HEAD]), steps = splat(inverse[first / HEAD]);
      int32_t codes[HEAD];
      for (int j = 0; j < HEAD; j += LANES) {
        const vf x = load(numbers_ + first + j);
        const vu chance = ((vu)x + sum) * 0x9E3779B1u >> (32 - FRACTION_BITS);
        const vi code = (vi)((vu)round_to_int(x * steps) + chance) >> FRACTION_BITS;
        std::memcpy(codes + j, &code, sizeof code);
        store(numbers_ + first + j, __builtin_convertvector(code, vf) * scale);
      }
      for (int j = 0; j < HEAD; ++j) to.codes[first + j] = int8_t(codes[j]);
    }
  }

  // Sets the scale of each value, and inverse: 2^15 / scale. Returns the sum of the head's bits.
  uint32_t choose_scales(float* inverse) {
    vu bits_sum = {};
    for (int first = 0; first < HEAD; first += LANES) {
      vi parts[LANES];
      for (int i = 0; i < LANES; ++i) {
        vi most = {};
        for (int j = 0; j < HEAD; j += LANES) {
          const vi bits = (vi)load(numbers_ + (first + i) * HEAD + j);
          bits_sum += (vu)bits;
          most = Max()(most, bits & 0x7FFFFFFF);  // numbers that are not negative compare as integers, NaN is largest
        }
        parts[i] = most;
      }
      const vf largest = (vf)fold_rows<Max>(parts), old = load(scales_ + first);
      vf scale = (vf)(((vu)(largest / 127.f) + 0xFFFF) & 0xFFFF0000u);
      scale = (largest <= 127.f * old) & (largest >= 112.f * old) ? old : scale;
      scale = largest < 0x1p-100f ? vf{} : scale;
      store(scales_ + first, scale);
      store(inverse + first, scale == 0.f ? vf{} : float(1 << FRACTION_BITS) / scale);
    }
    uint32_t sum = 0;
    for (int i = 0; i < LANES; ++i) sum += bits_sum[i];
    return sum;
  }

  alignas(64) float numbers_[HEAD * HEAD];
  alignas(64) float scales_[HEAD];
};

}  // namespace
