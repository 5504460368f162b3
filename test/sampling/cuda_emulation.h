// CUDA's words for a CTA of 256 threads on a CPU. The threads are coroutines: one runs until it meets a barrier.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __align__(n) alignas(n)
#define __launch_bounds__(...)

using std::isfinite;
using std::max;
using std::min;

struct float4 {
  float x, y, z, w;
};

namespace emulation {

constexpr int kSize = 256, kStack = 1 << 16;

struct Meeting {
  int arrived = 0, number = 0;
};

inline int current;
inline ucontext_t scheduler, threads[kSize];
inline std::vector<char> stacks(kSize* kStack);
inline Meeting all, warps[kSize / 32];
inline uint64_t words[kSize];
inline void (*body)(void*);
inline void* argument;
inline bool is_done[kSize];

inline void meet(Meeting& meeting, int size) {
  const int number = meeting.number;
  if (++meeting.arrived == size) {
    meeting.arrived = 0, ++meeting.number;
    return;
  }
  while (meeting.number == number) {
    const int own = current;
    swapcontext(&threads[own], &scheduler);
  }
}

inline void begin() {
  body(argument);
  is_done[current] = true;
}

// Calls function(argument) in all threads.
inline void run(void (*function)(void*), void* given) {
  body = function, argument = given;
  for (int i = 0; i < kSize; ++i) {
    is_done[i] = false;
    getcontext(&threads[i]);
    threads[i].uc_stack.ss_sp = stacks.data() + i * kStack, threads[i].uc_stack.ss_size = kStack;
    threads[i].uc_link = &scheduler;
    makecontext(&threads[i], begin, 0);
  }
  for (bool goes_on = true; goes_on;) {
    goes_on = false;
    for (current = 0; current < kSize; ++current)
      if (!is_done[current]) goes_on = true, swapcontext(&scheduler, &threads[current]);
  }
}

// Gives all lanes of a warp its values; calls combine(values).
template <class T, class Combine>
T exchange(T value, Combine combine) {
  const int own = current, warp = own / 32;
  std::memcpy(&words[own], &value, sizeof(T));
  meet(warps[warp], 32);
  T values[32];
  for (int i = 0; i < 32; ++i) std::memcpy(&values[i], &words[32 * warp + i], sizeof(T));
  meet(warps[warp], 32);
  return combine(values, own % 32);
}

struct ThreadIndex {
  struct {
    operator unsigned() const { return static_cast<unsigned>(current); }
  } x;
};

}  // namespace emulation

inline emulation::ThreadIndex threadIdx;

inline void __syncthreads() { emulation::meet(emulation::all, emulation::kSize); }

template <class T>
T __shfl_up_sync(unsigned, T value, int offset) {
  return emulation::exchange(value, [&](const T* all, int lane) { return all[lane >= offset ? lane - offset : lane]; });
}

template <class T>
T __shfl_xor_sync(unsigned, T value, int offset) {
  return emulation::exchange(value, [&](const T* all, int lane) { return all[lane ^ offset]; });
}

inline uint32_t __reduce_max_sync(unsigned, uint32_t value) {
  return emulation::exchange(value, [](const uint32_t* all, int) { return *std::max_element(all, all + 32); });
}

inline uint32_t __reduce_add_sync(unsigned, uint32_t value) {
  return emulation::exchange(value, [](const uint32_t* all, int) {
    uint32_t sum = 0;
    for (int i = 0; i < 32; ++i) sum += all[i];
    return sum;
  });
}

template <class T>
T atomicAdd(T* at, T value) {
  const T before = *at;
  *at += value;
  return before;
}

template <class T>
T atomicMax(T* at, T value) {
  const T before = *at;
  *at = std::max(before, value);
  return before;
}

inline uint32_t atomicOr(uint32_t* at, uint32_t value) {
  const uint32_t before = *at;
  *at |= value;
  return before;
}

inline uint32_t atomicCAS(uint32_t* at, uint32_t expected, uint32_t value) {
  const uint32_t before = *at;
  if (before == expected) *at = value;
  return before;
}

template <class To, class From>
To same_bits(From from) {
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

inline float __int_as_float(int value) { return same_bits<float>(value); }
inline float __uint_as_float(uint32_t value) { return same_bits<float>(value); }
inline uint32_t __float_as_uint(float value) { return same_bits<uint32_t>(value); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline uint64_t __float2ull_rn(float value) { return static_cast<uint64_t>(std::llrint(value)); }
inline float __double2float_ru(double value) {
  const float rounded = static_cast<float>(value);
  return rounded < value ? std::nextafter(rounded, INFINITY) : rounded;
}
inline float4 __ldg(const float4* at) { return *at; }
inline unsigned __cvta_generic_to_shared(const void*) { return 0; }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline float __logf(float value) { return std::log(value); }
inline float __expf(float value) { return std::exp(value); }
inline int __any_sync(unsigned, int value) { return emulation::exchange(value, [](const int* all, int) { return std::any_of(all, all + 32, [](int one) { return one != 0; }); }); }

inline int __syncthreads_or(int value) {
  static int any;
  any |= value != 0;
  __syncthreads();
  const int result = any;
  __syncthreads();
  any = 0;
  __syncthreads();
  return result;
}
