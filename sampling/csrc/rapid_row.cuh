// A row of logits as a block of threads sees it: reading it in quads, the tokens with bias or penalties, reductions.
//
// Quad q is the four tokens 4q .. 4q+3, which also share one Philox block. A chunk is eight quads, 256 apart, all read
// by one thread; which quads make a chunk does not depend on the number of threads, so sums over chunks are the same
// for every launch shape. Masses are added as integers (2^-40 of the largest token's), in any order.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "philox.h"

namespace sampling {

constexpr int kLanes = 256;             // threads that share a block of chunks
constexpr int kBatch = 4;               // quads a thread reads at once
constexpr int kChunkBatches = 2;        // batches in a chunk
constexpr int kChunkBlock = kLanes * kBatch * kChunkBatches;  // quads in a block of chunks
constexpr float kMaxLogit = 1e30f;
constexpr float kLowest = -3.402823466e38f;
constexpr float kLog2e = 1.44269504088896341f;

enum Kind : int32_t { kGreedy = 0, kCut = 1, kOpen = 2, kNoise = 3 };

// What the device knows of a running row. Mirrored in sampling/rapid.py.
struct Seat {
  double top_p;   // infinite where off
  uint64_t seed;
  uint64_t step;
  int32_t top_k;  // the vocabulary where off
  float scale;    // 1 / T
  float noise;
  float presence, frequency, decay;
  int32_t kind;
  int32_t penalised;
  int32_t num_entries;
  int32_t unused;
};
static_assert(sizeof(Seat) == 64, "sampling/rapid.py writes 64 bytes");

// A token whose logit is changed: it has a bias, was seen, or both.
struct __align__(16) Entry {
  int32_t token;
  float bias;
  float count;  // negative: not seen
  float value;  // the changed logit of this step
};

template <class T>
struct Row {
  const T* logits;
  int vocab;
  const uint32_t* marks;  // bit per token in shared memory: has an entry; null if there are none
  Entry* entries;
  int num_entries;

  __device__ int quads() const { return (vocab + 3) / 4; }
  __device__ int chunk_blocks() const { return (quads() + kChunkBlock - 1) / kChunkBlock; }
};

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

// NaN to -inf, too large values to kMaxLogit: fmaxf and fminf return the operand that is a number.
__device__ __forceinline__ float cleaned(float value) { return fminf(fmaxf(value, minus_infinity()), kMaxLogit); }

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }

__device__ __forceinline__ void load_aligned(const float* at, float out[4]) {
  const float4 quad = __ldg(reinterpret_cast<const float4*>(at));
  out[0] = quad.x, out[1] = quad.y, out[2] = quad.z, out[3] = quad.w;
}

__device__ __forceinline__ void load_aligned(const __half* at, float out[4]) {
  const uint2 raw = __ldg(reinterpret_cast<const uint2*>(at));
  const float2 low = __half22float2(*reinterpret_cast<const __half2*>(&raw.x));
  const float2 high = __half22float2(*reinterpret_cast<const __half2*>(&raw.y));
  out[0] = low.x, out[1] = low.y, out[2] = high.x, out[3] = high.y;
}

// The raw logits of a quad; -inf beyond the vocabulary.
template <class T>
__device__ __forceinline__ void load_quad(const Row<T>& row, int quad, float out[4]) {
  if (row.vocab % 4 == 0) {
    if (quad < row.quads()) {
      load_aligned(row.logits + 4 * static_cast<int64_t>(quad), out);
    } else {
      out[0] = out[1] = out[2] = out[3] = minus_infinity();
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int token = 4 * quad + i;
    out[i] = token < row.vocab ? to_float(row.logits[token]) : minus_infinity();
  }
}

// Tokens with entries read as -inf here; they take part through their entries.
template <class T>
__device__ __forceinline__ void clean_quad(const Row<T>& row, int quad, float values[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) values[i] = cleaned(values[i]);
  if (row.marks && quad < row.quads()) {
    const uint32_t nibble = row.marks[quad >> 3] >> (4 * (quad & 7));
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (nibble >> i & 1) values[i] = minus_infinity();
  }
}

// Four quads of a thread: value[4 j + i] belongs to token 4 (first + 256 j) + i.
static_assert(kBatch == 4, "Batch::largest is written out");

struct Batch {
  float value[4 * kBatch];
  int first;

  __device__ __forceinline__ int token(int index) const { return 4 * (first + kLanes * (index / 4)) + index % 4; }

  __device__ __forceinline__ float largest() const {
    float most[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) most[i] = fmaxf(fmaxf(value[i], value[4 + i]), fmaxf(value[8 + i], value[12 + i]));
    return fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]));
  }
};

template <class T>
__device__ __forceinline__ Batch load_batch(const Row<T>& row, int first) {
  Batch batch;
  batch.first = first;
#pragma unroll
  for (int j = 0; j < kBatch; ++j) load_quad(row, first + kLanes * j, batch.value + 4 * j);
#pragma unroll
  for (int j = 0; j < kBatch; ++j) clean_quad(row, first + kLanes * j, batch.value + 4 * j);
  return batch;
}

// Calls visit(chunk, batch) for the calling thread's share of the row; the batches of a chunk follow each other.
template <int kThreads, class T, class Visit>
__device__ __forceinline__ void for_each_batch(const Row<T>& row, Visit visit) {
  const int lane = threadIdx.x % kLanes;
  for (int block = threadIdx.x / kLanes; block < row.chunk_blocks(); block += kThreads / kLanes)
#pragma unroll
    for (int part = 0; part < kChunkBatches; ++part)
      visit(block * kLanes + lane, load_batch(row, block * kChunkBlock + part * kLanes * kBatch + lane));
}

// Calls visit(token, value) for the calling thread's share of the tokens with entries.
template <int kThreads, class T, class Visit>
__device__ __forceinline__ void for_each_entry(const Row<T>& row, Visit visit) {
  for (int i = threadIdx.x; i < row.num_entries; i += kThreads) visit(row.entries[i].token, row.entries[i].value);
}

// An integer that orders like the float; -0 and 0 are equal.
__device__ __forceinline__ uint32_t ordered(float value) {
  const uint32_t raw = __float_as_uint(value + 0.0f);
  return raw & 0x80000000u ? ~raw : raw | 0x80000000u;
}

// A (value, token) pair whose maximum is the largest value's, of equal ones the lowest token's.
__device__ __forceinline__ uint64_t pair_of(float value, int token) {
  return static_cast<uint64_t>(ordered(value)) << 32 | static_cast<uint32_t>(~token);
}

__device__ __forceinline__ int token_of(uint64_t pair) { return static_cast<int>(~static_cast<uint32_t>(pair)); }

__device__ __forceinline__ float value_of(uint64_t pair) {
  const uint32_t key = static_cast<uint32_t>(pair >> 32);
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

struct Largest {
  __device__ uint64_t operator()(uint64_t a, uint64_t b) const { return a > b ? a : b; }
};
struct Sum {
  __device__ uint64_t operator()(uint64_t a, uint64_t b) const { return a + b; }
};

// Shared memory for reductions. Two halves are used in turn, so that one barrier for each reduction is enough.
struct Room {
  uint64_t* at;  // 64 words
  int turn;
};

// Every thread's value combined, for every thread; 0 must be neutral.
template <int kThreads, class Combine>
__device__ __forceinline__ uint64_t over_block(uint64_t value, Combine combine, Room& room) {
  uint64_t* const half = room.at + 32 * (room.turn++ & 1);
#pragma unroll
  for (int offset = 16; offset; offset /= 2) value = combine(value, __shfl_xor_sync(0xffffffffu, value, offset));
  if (threadIdx.x % 32 == 0) half[threadIdx.x / 32] = value;
  __syncthreads();
  value = threadIdx.x % 32 < kThreads / 32 ? half[threadIdx.x % 32] : 0;
#pragma unroll
  for (int offset = 16; offset; offset /= 2) value = combine(value, __shfl_xor_sync(0xffffffffu, value, offset));
  return value;
}

// 2^x within 2 ulp, 0 below -126.
__device__ __forceinline__ float fast_exp2(float x) {
#if defined(__HIPCC__)
  return exp2f(x);
#else
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#endif
}

// Mass of a logit relative to another one; scale2 = log2(e) / T.
__device__ __forceinline__ float mass_of(float value, float relative_to, float scale2) {
  return fast_exp2((value - relative_to) * scale2);
}

__device__ __forceinline__ uint64_t to_fixed(float mass) {
  return __float2ull_rn(mass * 1099511627776.0f);  // 2^40: 65536 tokens of mass 1 fit 57 bits
}

}  // namespace sampling
