// A row of logits in a CTA: reading it in quads, tokens with bias or penalties, reductions.
//
// quad   four tokens 4q .. 4q + 3; they share one Philox block
// batch  4 x 256 consecutive quads; a thread reads four of them, 256 apart
// chunk  one thread's part of chunk_batches consecutive batches: two (32 tokens) up to a vocabulary of 65,536, and
//        more above, so that a row has at most 2,048 chunks
// Chunks do not depend on the number of CTAs per row, so sums over chunks are the same for every launch shape. Masses
// are added as integers (2^-40 of the largest token's), in any order.
#pragma once

#include <cstdint>

#include "philox.h"

namespace sampling {

constexpr int kThreads = 256;  // per CTA
constexpr int kWarps = kThreads / 32;
constexpr int kBatch = 4;  // quads of a batch per thread
constexpr int kBatchQuads = kThreads * kBatch;  // quads in a batch
constexpr int kMaxBlocks = 8;  // maximum chunks of a row per thread
constexpr int kMaxChunks = kThreads * kMaxBlocks;
constexpr int kTokenBits = 18;  // token id: sampling/rapid.py allows vocabularies up to 2^18
constexpr unsigned kAll = 0xffffffffu;
constexpr float kMaxLogit = 1e30f;
constexpr float kLowest = -3.402823466e38f;
constexpr float kLog2e = 1.44269504088896341f;

enum Kind : int32_t { kGreedy = 0, kTruncated = 1, kUntruncated = 2, kNoise = 3 };

// A running row's state on the device. Mirrored in sampling/rapid.py.
struct SlotState {
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
  int32_t filtered;  // filter_rows has applied biases and penalties
};
static_assert(sizeof(SlotState) == 64, "sampling/rapid.py writes 64 bytes");

// A token with a bias, a count, or both.
struct __align__(16) Entry {
  int32_t token;
  float bias;
  float count;  // negative: not seen
  float value;  // the adjusted logit of this step
};

constexpr int kHeld = 1;  // entries per thread in registers

struct Row {
  const float* logits;
  int vocab;
  int chunk_batches;
  const uint32_t* marks;  // one bit per token in shared memory: has an entry; null: none
  Entry* entries;
  int num_entries;
  Entry held[kHeld];  // entries threadIdx.x + 256 h, while the row is sampled

  __device__ int quads() const { return (vocab + 3) / 4; }
};

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

// NaN -> -inf, too large -> kMaxLogit. fmaxf and fminf return the operand that is a number.
__device__ __forceinline__ float cleaned(float value) { return fminf(fmaxf(value, minus_infinity()), kMaxLogit); }

// A quad's logits as stored.
struct __align__(16) Quad {
  float at[4];
};

__device__ __forceinline__ Quad load_aligned(const float* at) {
  const float4 raw = __ldg(reinterpret_cast<const float4*>(at));
  return Quad{{raw.x, raw.y, raw.z, raw.w}};
}

// 16 bytes to shared memory, past the L1 cache.
__device__ __forceinline__ void copy_async(Quad* to, const float* from) {
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
}

// The raw logits of a quad; -inf beyond the vocabulary.
__device__ __forceinline__ Quad load_quad(const Row& row, int quad) {
  if (row.vocab % 4 == 0 && quad < row.quads()) return load_aligned(row.logits + 4 * static_cast<int64_t>(quad));
  Quad raw;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int token = 4 * quad + i;
    raw.at[i] = token < row.vocab ? row.logits[token] : minus_infinity();
  }
  return raw;
}

// One bit per token of a quad: it has an entry.
__device__ __forceinline__ uint32_t marked(const Row& row, int quad) {
  return quad < row.quads() ? row.marks[quad >> 3] >> (4 * (quad & 7)) & 15u : 0u;
}

__device__ __forceinline__ bool has_entry(const Row& row, int token) {
  return row.marks && row.marks[token >> 5] >> (token & 31) & 1;
}

// A thread's share of a batch: value[4 j + i] belongs to token 4 (first + 256 j) + i.
static_assert(kBatch == 4, "Batch::largest is written out");

struct Batch {
  float value[4 * kBatch];
  int first;

  __device__ __forceinline__ int token(int index) const { return 4 * (first + kThreads * (index / 4)) + index % 4; }

  __device__ __forceinline__ float largest() const {
    float max_value[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) max_value[i] = fmaxf(fmaxf(value[i], value[4 + i]), fmaxf(value[8 + i], value[12 + i]));
    return fmaxf(fmaxf(max_value[0], max_value[1]), fmaxf(max_value[2], max_value[3]));
  }
};

// A batch as stored.
struct RawBatch {
  Quad quad[kBatch];
  int first;

  __device__ __forceinline__ Batch arrived() const {
    Batch batch;
    batch.first = first;
#pragma unroll
    for (int i = 0; i < 4 * kBatch; ++i) batch.value[i] = quad[i / 4].at[i % 4];
    return batch;
  }
};

__device__ __forceinline__ bool is_whole(const Row& row, int first) {
  return row.vocab % 4 == 0 && first + kThreads * (kBatch - 1) < row.quads();
}

__device__ __forceinline__ RawBatch load_batch(const Row& row, int first) {
  RawBatch raw;
  raw.first = first;
  if (is_whole(row, first)) {
    const float* at = row.logits + 4 * static_cast<int64_t>(first);
#pragma unroll
    for (int j = 0; j < kBatch; ++j) raw.quad[j] = load_aligned(at + 4 * kThreads * j);
  } else {
#pragma unroll
    for (int j = 0; j < kBatch; ++j) raw.quad[j] = load_quad(row, first + kThreads * j);
  }
  return raw;
}

// Cleans a batch. Tokens with entries become -inf; their entries stand for them.
__device__ __forceinline__ void clean(const Row& row, Batch& batch) {
#pragma unroll
  for (int i = 0; i < 4 * kBatch; ++i) batch.value[i] = cleaned(batch.value[i]);
  if (!row.marks) return;
#pragma unroll
  for (int j = 0; j < kBatch; ++j) {
    const uint32_t bits = marked(row, batch.first + kThreads * j);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (bits >> i & 1) batch.value[4 * j + i] = minus_infinity();
  }
}

// Batches first .. last - 1 of a row.
struct Range {
  int first, last;
};

// Batches in flight to shared memory. A thread reads only its own copies, so there are no barriers.
constexpr int kAhead = 3;
constexpr int kRingBytes = kAhead * kBatchQuads * 16;

struct Ring {
  Quad* at;  // [kAhead][kBatch][kThreads]

  __device__ __forceinline__ Quad* slot(int number) const {
    return at + number % kAhead * kBatchQuads + threadIdx.x;
  }

  // Waits for the oldest batch in flight; returns its quads, 256 apart.
  __device__ __forceinline__ const Quad* arrived(int number) const {
    asm volatile("cp.async.wait_group %0;" ::"n"(kAhead - 1) : "memory");
    return slot(number);
  }

  // Starts copying a batch if it is in the range.
  __device__ __forceinline__ void send_for(const Row& row, Range range, int number) const {
    if (number < range.last) {
      const int first = number * kBatchQuads + static_cast<int>(threadIdx.x);
      Quad* const to = slot(number);
      if (is_whole(row, first)) {
        const float* from = row.logits + 4 * static_cast<int64_t>(first);
#pragma unroll
        for (int j = 0; j < kBatch; ++j) copy_async(to + kThreads * j, from + 4 * kThreads * j);
      } else {
#pragma unroll
        for (int j = 0; j < kBatch; ++j) to[kThreads * j] = load_quad(row, first + kThreads * j);
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  // Starts copying the first batches of a range.
  __device__ __forceinline__ void begin(const Row& row, Range range) const {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) send_for(row, range, range.first + i);
  }
};

// Calls visit(number, batch) for the thread's part of each batch; call begin before.
template <class Visit>
__device__ __forceinline__ void for_each_batch(const Row& row, Range range, const Ring& ring, Visit visit) {
#pragma unroll 1
  for (int number = range.first; number < range.last; ++number) {
    const Quad* const quads = ring.arrived(number);
    RawBatch raw;
    raw.first = number * kBatchQuads + static_cast<int>(threadIdx.x);
#pragma unroll
    for (int j = 0; j < kBatch; ++j) raw.quad[j] = quads[kThreads * j];
    const Batch batch = raw.arrived();
    ring.send_for(row, range, number + kAhead);
    visit(number, batch);
  }
}

// Calls visit(token, value) for the thread's tokens with entries.
template <class Visit>
__device__ __forceinline__ void for_each_entry(const Row& row, Visit visit) {
#pragma unroll
  for (int h = 0; h < kHeld; ++h)
    if (static_cast<int>(threadIdx.x) + h * kThreads < row.num_entries) visit(row.held[h].token, row.held[h].value);
  for (int i = threadIdx.x + kHeld * kThreads; i < row.num_entries; i += kThreads)
    visit(row.entries[i].token, row.entries[i].value);
}

// An integer that orders like the float; -0 and 0 are equal. 0 orders before all floats.
__device__ __forceinline__ uint32_t ordered(float value) {
  const uint32_t raw = __float_as_uint(value + 0.0f);
  return raw & 0x80000000u ? ~raw : raw | 0x80000000u;
}

__device__ __forceinline__ float value_of(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// A (value, token) key. The maximum is the largest value, among equal ones the lowest token.
__device__ __forceinline__ uint64_t pair_of(float value, int token) {
  return static_cast<uint64_t>(ordered(value)) << 32 | static_cast<uint32_t>(~token);
}

__device__ __forceinline__ int token_of(uint64_t pair) { return static_cast<int>(~static_cast<uint32_t>(pair)); }

__device__ __forceinline__ uint64_t larger(uint64_t a, uint64_t b) { return a > b ? a : b; }

// The CTAs of a row as a cluster: they wait for each other and read each other's shared memory.
struct RowCluster {
  int count;

  // Cluster barrier; earlier writes of all CTAs are visible after it.
  __device__ __forceinline__ void sync() const {
    if (count == 1) return __syncthreads();
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
  }

  // Reads the same address in another CTA's shared memory; T has 4 or 8 bytes.
  template <class T>
  __device__ __forceinline__ T load(const T* own, int rank) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (count > 1) {
      uint32_t at;
      asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(own))), "r"(rank));
      if constexpr (sizeof(T) == 8) {
        uint64_t raw;
        asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(raw) : "r"(at) : "memory");
        return *reinterpret_cast<const T*>(&raw);
      } else {
        uint32_t raw;
        asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(raw) : "r"(at) : "memory");
        return *reinterpret_cast<const T*>(&raw);
      }
    }
#endif
    return *own;
  }
};

// Shared memory for reductions. Two buffers in turn, so that one barrier per reduction suffices.
struct ReduceBuffers {
  uint64_t (*half)[2 * kWarps];
  int turn;

  __device__ __forceinline__ uint64_t* next() { return half[turn++ & 1]; }
};

// Over a warp, to every lane; 0 is neutral.
__device__ __forceinline__ uint64_t max_over_warp(uint64_t value) {
  const uint32_t high = static_cast<uint32_t>(value >> 32), max_value = __reduce_max_sync(kAll, high);
  const uint32_t low = __reduce_max_sync(kAll, high == max_value ? static_cast<uint32_t>(value) : 0u);
  return static_cast<uint64_t>(max_value) << 32 | low;
}

__device__ __forceinline__ uint64_t sum_over_warp(uint64_t value) {
  constexpr uint32_t kLimb = (1u << 27) - 1;
  const uint64_t low = __reduce_add_sync(kAll, static_cast<uint32_t>(value) & kLimb);
  const uint64_t middle = __reduce_add_sync(kAll, static_cast<uint32_t>(value >> 27) & kLimb);
  const uint64_t high = __reduce_add_sync(kAll, static_cast<uint32_t>(value >> 54));
  return low + (middle << 27) + (high << 54);
}

// Over the CTA, to every thread; 0 is neutral.
__device__ __forceinline__ uint64_t max_over_block(uint64_t value, ReduceBuffers& buffers) {
  uint64_t* const at = buffers.next();
  value = max_over_warp(value);
  if (threadIdx.x % 32 == 0) at[threadIdx.x / 32] = value;
  __syncthreads();
  return max_over_warp(at[threadIdx.x % kWarps]);
}

struct TwoKeys {
  uint32_t a, b;
};

// The maxima of two values.
__device__ __forceinline__ TwoKeys max_over_block(TwoKeys keys, ReduceBuffers& buffers) {
  uint64_t* const at = buffers.next();
  keys = TwoKeys{__reduce_max_sync(kAll, keys.a), __reduce_max_sync(kAll, keys.b)};
  if (threadIdx.x % 32 == 0) at[threadIdx.x / 32] = static_cast<uint64_t>(keys.a) << 32 | keys.b;
  __syncthreads();
  const uint64_t both = at[threadIdx.x % kWarps];
  return TwoKeys{__reduce_max_sync(kAll, static_cast<uint32_t>(both >> 32)),
                 __reduce_max_sync(kAll, static_cast<uint32_t>(both))};
}

// A number of tokens and their mass.
struct Tally {
  uint64_t mass;
  uint32_t count;
};

__device__ __forceinline__ Tally sum_over_block(Tally tally, ReduceBuffers& buffers) {
  uint64_t* const at = buffers.next();
  tally = Tally{sum_over_warp(tally.mass), __reduce_add_sync(kAll, tally.count)};
  if (threadIdx.x % 32 == 0) at[threadIdx.x / 32] = tally.mass, at[kWarps + threadIdx.x / 32] = tally.count;
  __syncthreads();
  const int lane = threadIdx.x % 32;
  const uint64_t mass = lane < kWarps ? at[lane] : 0, count = lane < kWarps ? at[kWarps + lane] : 0;
  return Tally{sum_over_warp(mass), __reduce_add_sync(kAll, static_cast<uint32_t>(count))};
}

// Inclusive prefix sum over the CTA; V has 4 or 8 bytes.
template <class V>
__device__ __forceinline__ V sum_up_to(V value, ReduceBuffers& buffers) {
  V* const at = reinterpret_cast<V*>(buffers.next());
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const V other = __shfl_up_sync(kAll, value, offset);
    if (lane >= offset) value += other;
  }
  if (lane == 31) at[warp] = value;
  __syncthreads();
  V before = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) before += i < warp ? at[i] : V(0);
  return before + value;
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

// Mass of a logit relative to another; scale2 = log2(e) / T.
__device__ __forceinline__ float mass_of(float value, float relative_to, float scale2) {
  return fast_exp2((value - relative_to) * scale2);
}

__device__ __forceinline__ uint64_t to_fixed(float mass) {
  return __float2ull_rn(mass * 1099511627776.0f);  // 2^40: 65536 tokens of mass 1 fit 57 bits
}

}  // namespace sampling
