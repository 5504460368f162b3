// The filters of sampling/filters.py, which is their definition, on one row of logits in one CTA.
//
// A thread owns its chunks (rapid_row.cuh): only it reads them in passes, and it keeps their maxima. So passes need no
// barriers, and skip chunks of which nothing is left. The temperature and limits of logits are lazy: `view` applies them
// to what is read, and `settle` writes them. Each pass is in the code once; `run` chooses what it does for a step.
// From the step on before which at most 3,800 tokens are left, these are in shared memory, and the row is not read.
// Their ids have 16 bits there, so rows of larger vocabularies are read to the end.
#pragma once

#include "rapid_launch.cuh"
#include "rapid_sample.cuh"
#include "vector_math.h"

namespace sampling {

constexpr int kSelectBits = 11;
constexpr int kSelectBins = 1 << kSelectBits;
constexpr int kOwnBins = kSelectBins / kThreads;
constexpr int kPairs = kMaxWindow;  // a window has fewer tokens before its newest one
constexpr uint32_t kFree = 0xffffffffu, kBreaker = 0x80000000u;
constexpr int kMaxVocab = 1 << kTokenBits;
constexpr int kAtOnce = 8;  // last tokens that a thread reads at once
constexpr int kMaxFew = 3800;  // tokens; with more, FilterShared would be larger than static shared memory
constexpr int kMaxBounded = kMaxChunks / 2;  // top_k

struct __align__(16) FilterShared {
  union {
    float maxima[kMaxChunks];  // -inf: nothing is left, the logits are not read
    float few[kMaxFew];  // few logits, as the row would have them
  };
  union {
    struct {
      union {
        struct {
          uint32_t low[kSelectBins], high[kSelectBins], count[kSelectBins];  // low, high: of the mass
        } bins;
        struct {
          uint64_t key[kThreads], mass[kThreads];
          float value[kThreads];
        } list;
        struct {
          float maxima[kMaxChunks];  // back if it is not few
          uint16_t chunk[kMaxChunks];
        } gathered;
      };
      uint16_t token[kMaxFew];  // of few logits
    };
    struct {
      uint32_t pairs[kPairs];  // a token and a length, by the token's hash
      uint32_t last[kMaxWindow];  // the last tokens, the newest first; kBreaker is set in breakers
    } repeated;
    uint32_t seen[kMaxVocab / 32];  // one bit per token
  };
  uint32_t touched[kMaxChunks / 32];  // one bit per chunk
  uint64_t half[2][2 * kWarps];
  double sums[2][5 * kWarps];
  uint64_t mass_before;
  uint32_t count_before;
  int32_t size, chosen;
};
static_assert(sizeof(FilterShared) <= 48 * 1024, "static shared memory has 48 KB");

// Sums over the tokens that are left: of m(token), m (s - largest), s - largest and its square; their number.
struct Sums {
  double mass, weighted, distance, square, count;
};

class FilteredRow {
 public:
  __device__ FilteredRow(float* logits, int vocab, int chunk_batches, FilterSlot& filters, const int32_t* history, FilterShared& shared)
      : s_(logits), vocab_(vocab), chunk_batches_(chunk_batches), quads_((vocab + 3) / 4),
        blocks_(((vocab + 3) / 4 + kBatchQuads * chunk_batches - 1) / (kBatchQuads * chunk_batches)),
        filters_(filters), p_(filters.p), history_(history), shared_(shared), buffers_{shared.half, 0} {}

  // Adds the bias, bans, cleans, runs the steps. Samples from few tokens if it may; else writes the row.
  __device__ void run(const SlotState& slot, const Entry* entries, bool may_sample) {
    for (int i = threadIdx.x; i < slot.num_entries; i += kThreads)
      if (entries[i].bias != 0) s_[entries[i].token] = __fadd_rn(s_[entries[i].token], entries[i].bias);
    for (int i = threadIdx.x; i < kMaxChunks / 32; i += kThreads) shared_.touched[i] = 0;
    if (threadIdx.x == 0) filters_.chosen = -1;
    __syncthreads();
    if (filters_.num_listed) ban(slot.step);
    int first_step = 0, last_seen = -1;  // penalties and DRY: those before all other steps, and the last one
    for (int i = 0; i < filters_.num_steps; ++i)
      if (changes_seen(filters_.steps[i])) last_seen = i;
    for (; first_step < filters_.num_steps && changes_seen(filters_.steps[first_step]); ++first_step)
      change_seen(filters_.steps[first_step] == kDry, slot, entries);
    clean();
    bool is_head = false, is_last = false;  // Mirostat 1 looks at the head first; both measure what is left
    bool is_truncated = slot.kind != kTruncated;  // by the limits that the sampler has for the end
    double zipf = 0;
    Sums moments{0, 0, 0, 0, 0};  // after a dynamic temperature
#pragma unroll 1
    for (int i = first_step;; i += !(is_head || is_last)) {
      if (may_be_few_ && i > last_seen) gather();
      bool is_end = i >= filters_.num_steps || largest_ == minus_infinity();
      const bool samples = is_end && may_sample && is_few_ && largest_ > minus_infinity();
      if (samples && is_truncated) return sample(slot);
      is_end &= !samples;
      const int step = is_end ? -1 : samples ? kTruncate : filters_.steps[i];
      const bool is_far = distance_ > minus_infinity() && reference_ != largest_;
      if (is_far || is_end || step == kPenalties || step == kDry || step == kTemperature) settle(is_end);
      if (is_end) return;
      if (changes_seen(step)) {
        change_seen(step == kDry, slot, entries);
        refresh();
        continue;
      }
      Sums all = moments;
      moments.count = 0;
      const bool is_dynamic = step == kTemperature && p_.dynatemp_range > 0;
      const bool crosses = step == kXtc && to_uniform(words_of_block(slot.seed, slot.step, 0, kDomainXtc).at[0]) < p_.xtc_probability;
      if (step == kXtc && !crosses) continue;
      const bool counts = step == kMinP || step == kTopK || (step == kMirostat && p_.mirostat == 1 && !is_last);
      const bool needs_sums = step == kTopNSigma ? all.count == 0 : !counts && (step != kTemperature || is_dynamic);
      double log_total = 0, entropy = 0;
      if (needs_sums) all = sums(), left_ = all.count, log_total = log(all.mass), entropy = log_total - all.weighted / all.mass;
      double top_k = INFINITY, enough = INFINITY, distance = -INFINITY;
      bool selects = false;
      if (step == kTemperature) {
        scale(entropy, log(all.count));
        if (is_dynamic) moments = all, moments.distance *= factor_, moments.square *= static_cast<double>(factor_) * factor_;
      } else if (step == kTopNSigma) {
        const double mean = all.distance / all.count, variance = all.square / all.count - mean * mean;
        floor_ = fmaxf(floor_, __double2float_ru(largest_ - p_.top_n_sigma * sqrt(fmax(variance, 0.0))));
      } else if (step == kMinP) {
        distance = log(p_.min_p);
      } else if (step == kEpsilon || step == kEta) {
        distance = log(step == kEta ? p_.eta_cutoff : p_.epsilon_cutoff);
        if (step == kEta) distance = fmin(distance, distance / 2 - entropy);
        distance = fmin(distance + log_total, 0.0);
      } else if (step == kTypP) {
        selects = true, enough = p_.typical_p * all.mass;
      } else if (step == kTopP) {
        selects = true, enough = p_.top_p * all.mass;
      } else if (step == kTopK) {
        selects = true, top_k = p_.top_k;
      } else if (step == kTruncate) {
        selects = is_truncated = true, top_k = slot.top_k, enough = slot.top_p * all.mass;
      } else if (step == kXtc) {
        enough = p_.xtc_threshold * all.mass;
      } else if (is_last) {
        is_last = false;
        if (threadIdx.x == 0) filters_.log_total = log_total, filters_.largest = largest_;
        continue;
      } else if (p_.mirostat == 1) {
        is_head = !is_head, is_last = !is_head, selects = true, top_k = is_head ? kMirostatTokens : zipf;
      } else {
        is_last = true, distance = log_total - filters_.mu * kLog2;
        if (distance > 0) selects = true, top_k = 1, distance = -INFINITY;
      }
      if (distance > -INFINITY)
        reference_ = largest_, distance_ = fmaxf(distance_, step == kMirostat ? __double2float_ru(distance) : static_cast<float>(distance));
      const bool is_typical = step == kTypP;
      const double center = is_typical ? log_total - entropy : 0;
      prune();
      uint64_t last = 0;
      if (selects) last = select(is_typical, center, top_k, enough);
      if (is_head) {
        zipf = zipf_top_k(last);
        continue;
      }
      if (selects) {
        // Just below what is kept; the exact comparison follows.
        if (!is_typical) floor_ = fmaxf(floor_, value_of(~static_cast<uint32_t>(last >> (kTokenBits + 14))));
        const double reach = static_cast<double>(last >> kTokenBits) * 0x1p-41, lowest = largest_ + center - reach;
        if (is_typical && reach < 31.9) floor_ = fmaxf(floor_, static_cast<float>(lowest - fabs(lowest) * 1e-6 - 1e-5));
        prune();
      }
      if (crosses) last = least_above(enough);
      if (selects || last) keep_if(crosses, is_typical, center, enough, last);
    }
  }

 private:
  static constexpr int kTruncate = -2;  // after all steps: the sampler's top_k and top_p

  static __device__ __forceinline__ bool changes_seen(int step) { return step == kPenalties || step == kDry; }

  // N quads of a chunk, 256 apart, as stored; -inf beyond the chunk.
  template <int N>
  struct Part {
    Quad quad[N];
    int first;

    __device__ __forceinline__ int token(int j, int i) const { return 4 * (first + kThreads * j) + i; }
    // The first four, without an index into registers.
    __device__ __forceinline__ Quad at(int j) const { return j & 2 ? (j & 1 ? quad[3] : quad[2]) : (j & 1 ? quad[1] : quad[0]); }
  };

  template <int N>
  __device__ __forceinline__ Part<N> load_part(int block, int from, int column) const {
    Part<N> part;
    part.first = (block * chunk_batches_ * kBatch + from) * kThreads + column;
    if (vocab_ % 4 == 0 && part.first + kThreads * (N - 1) < quads_ && from + N <= chunk_batches_ * kBatch) {
      const Quad* const at = reinterpret_cast<const Quad*>(s_) + part.first;
#pragma unroll
      for (int j = 0; j < N; ++j) part.quad[j] = at[kThreads * j];
      return part;
    }
#pragma unroll
    for (int j = 0; j < N; ++j) part.quad[j] = load(from + j < chunk_batches_ * kBatch ? part.first + kThreads * j : quads_);
    return part;
  }

  __device__ __forceinline__ float& maximum(int block) const { return shared_.maxima[block * kThreads + threadIdx.x]; }

  __device__ __forceinline__ Quad load(int quad) const {
    if (vocab_ % 4 == 0 && quad < quads_) return *reinterpret_cast<const Quad*>(s_ + 4 * static_cast<int64_t>(quad));
    Quad raw;
#pragma unroll
    for (int i = 0; i < 4; ++i) raw.at[i] = 4 * quad + i < vocab_ ? s_[4 * quad + i] : minus_infinity();
    return raw;
  }

  __device__ __forceinline__ void store(int quad, const Quad& value) const {
    if (vocab_ % 4 == 0 && quad < quads_) {
      *reinterpret_cast<Quad*>(s_ + 4 * static_cast<int64_t>(quad)) = value;
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (4 * quad + i < vocab_) s_[4 * quad + i] = value.at[i];
  }

  // A logit with the lazy temperature and limits.
  __device__ __forceinline__ float view(float raw) const {
    const float value = __fmul_rn(raw, factor_);
    return value >= floor_ && __fsub_rn(value, reference_) >= distance_ ? value : minus_infinity();
  }

  __device__ __forceinline__ float mass(float value) const { return exp_nonpositive(__fsub_rn(value, largest_)); }

  // Calls visit(part, block) for the thread's chunks with a maximum of at least `floor`, N quads at a time.
  template <int N, class Visit>
  __device__ __forceinline__ void each(float floor, Visit visit) const {
#pragma unroll 1
    for (int block = 0; block < blocks_; ++block) {
      if (maximum(block) == minus_infinity() || !(maximum(block) >= floor)) continue;
#pragma unroll 1
      for (int from = 0; from < chunk_batches_ * kBatch; from += N) visit(load_part<N>(block, from, threadIdx.x), block);
    }
  }

  // Calls visit(value, token) for what is left in these chunks. Its code is there five times only.
  template <class Visit>
  __device__ __forceinline__ void each_left(float floor, Visit visit) const {
#pragma unroll 1
    for (int i = threadIdx.x; i < num_few_; i += kThreads) {
      const float value = view(shared_.few[i]);
      if (value > minus_infinity()) visit(value, shared_.token[i]);
    }
    if (is_few_) return;
    each<kBatch>(floor, [&](const Part<kBatch>& part, int) {
#pragma unroll 1
      for (int j = 0; j < kBatch; ++j) {
        const Quad quad = part.at(j);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float value = view(quad.at[i]);
          if (value > minus_infinity()) visit(value, part.token(j, i));
        }
      }
    });
  }

  // Rewrites these chunks: each logit becomes rewritten(raw, token).
  template <class Rewritten>
  __device__ __forceinline__ void rewrite(float floor, Rewritten rewritten) {
    for (int i = threadIdx.x; i < num_few_; i += kThreads) shared_.few[i] = rewritten(shared_.few[i], shared_.token[i]);
    if (is_few_) return find_largest();
    int last = -1;
    float highest = minus_infinity();
    each<kBatch>(floor, [&](const Part<kBatch>& part, int block) {
      if (block != last) highest = minus_infinity(), last = block;
#pragma unroll 1
      for (int j = 0; j < kBatch; ++j) {
        Quad quad = part.at(j);
        bool changes = false;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float raw = quad.at[i];
          quad.at[i] = rewritten(raw, part.token(j, i));
          changes |= quad.at[i] != raw;
          highest = fmaxf(highest, view(quad.at[i]));
        }
        if (changes) store(part.first + kThreads * j, quad);
      }
      if ((part.first / kBatchQuads + 1) % chunk_batches_ == 0) maximum(block) = highest;
    });
    find_largest();
  }

  __device__ __forceinline__ void clean() {
    bool is_odd = false;
#pragma unroll 1
    for (int block = 0; block < blocks_; ++block) {
      float highest = minus_infinity();
#pragma unroll 1
      for (int from = 0; from < chunk_batches_ * kBatch; from += 8) {
        const Part<8> part = load_part<8>(block, from, threadIdx.x);
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
          for (int i = 0; i < 4; ++i) highest = fmaxf(highest, part.quad[j].at[i]), is_odd |= !(part.quad[j].at[i] <= kMaxLogit);
      }
      maximum(block) = highest;
    }
    is_clean_ = true;
    if (!__syncthreads_or(is_odd)) return find_largest();
    for (int block = 0; block < blocks_; ++block) maximum(block) = INFINITY;
    rewrite(minus_infinity(), [](float raw, int) { return cleaned(raw); });
  }

  // Copies what is left to shared memory, if it is few.
  __device__ __forceinline__ void gather() {
    may_be_few_ = false;
    if (vocab_ > 1 << 16) return;
    uint32_t alive = 0, num_chunks = 0, size = 0;
    for (int block = 0; block < blocks_; ++block) alive += maximum(block) > minus_infinity();
    uint32_t at = places(alive, num_chunks);
    for (int block = 0; block < blocks_; ++block)
      if (maximum(block) > minus_infinity()) shared_.gathered.chunk[at++] = static_cast<uint16_t>(block * kThreads + static_cast<int>(threadIdx.x));
    for (int i = threadIdx.x; i < kMaxChunks; i += kThreads) shared_.gathered.maxima[i] = shared_.maxima[i];
    __syncthreads();
    // A thread reads 16 tokens of a chunk.
    const int parts = static_cast<int>(num_chunks) * chunk_batches_;
#pragma unroll 1
    for (int first = 0; first < parts; first += kThreads) {
      const int i = first + static_cast<int>(threadIdx.x), chunk = i < parts ? shared_.gathered.chunk[i / chunk_batches_] : 0;
      const Part<kBatch> part = load_part<kBatch>(chunk / kThreads, i % chunk_batches_ * kBatch, chunk % kThreads);
      uint32_t left = 0;
#pragma unroll
      for (int j = 0; j < 4 * kBatch; ++j) left += i < parts && view(part.quad[j / 4].at[j % 4]) > minus_infinity();
      at = size;
      at += places(left, size);
      if (size > kMaxFew) break;
#pragma unroll
      for (int j = 0; j < 4 * kBatch; ++j)
        if (i < parts && view(part.quad[j / 4].at[j % 4]) > minus_infinity()) shared_.few[at] = part.quad[j / 4].at[j % 4], shared_.token[at++] = static_cast<uint16_t>(part.token(j / 4, j % 4));
    }
    __syncthreads();
    is_few_ = size <= kMaxFew;
    if (is_few_) left_ = num_few_ = size;
    for (int i = threadIdx.x; i < kMaxChunks && !is_few_; i += kThreads) shared_.maxima[i] = shared_.gathered.maxima[i];
    __syncthreads();
  }

  // Returns the sum of `count` in the threads before this one. Adds all to `total`.
  __device__ __forceinline__ uint32_t places(uint32_t count, uint32_t& total) {
    uint64_t* const at = buffers_.next();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t before = count;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const uint32_t other = __shfl_up_sync(kAll, before, offset);
      if (lane >= offset) before += other;
    }
    if (lane == 31) at[warp] = before;
    __syncthreads();
    before -= count;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) before += i < warp ? static_cast<uint32_t>(at[i]) : 0u, total += static_cast<uint32_t>(at[i]);
    return before;
  }

  // Marks chunks as empty where the lazy limits leave nothing.
  __device__ __forceinline__ void prune() {
    if (is_few_) return;
    may_be_few_ = true;
    for (int block = 0; block < blocks_; ++block) {
      const float highest = maximum(block);
      if (!(highest >= floor_ && __fsub_rn(highest, reference_) >= distance_)) maximum(block) = minus_infinity();
    }
  }

  __device__ __forceinline__ void find_largest() {
    float highest = minus_infinity();
    for (int i = threadIdx.x; i < num_few_; i += kThreads) highest = fmaxf(highest, view(shared_.few[i]));
    for (int block = 0; block < blocks_ && !is_few_; ++block) highest = fmaxf(highest, maximum(block));
    largest_ = value_of(max_over_block(TwoKeys{ordered(highest), 0}, buffers_).a);
  }

  // Writes the lazy temperature and limits. At the end also the chunks of which nothing is left.
  __device__ __forceinline__ void settle(bool is_end) {
    const bool is_lazy = factor_ != 1 || floor_ > minus_infinity() || distance_ > minus_infinity();
    for (int i = threadIdx.x; i < num_few_; i += kThreads) shared_.few[i] = view(shared_.few[i]);
#pragma unroll 1
    for (int block = 0; block < blocks_ && (is_end || !is_few_); ++block) {
      const bool is_empty = is_few_ || maximum(block) == minus_infinity();
      if (is_empty ? !is_end : !is_lazy) continue;
      const int first = block * chunk_batches_ * kBatchQuads + static_cast<int>(threadIdx.x);
#pragma unroll 8
      for (int i = 0; i < chunk_batches_ * kBatch; ++i) {
        Quad quad{{minus_infinity(), minus_infinity(), minus_infinity(), minus_infinity()}};
        if (!is_empty) quad = load(first + kThreads * i);
#pragma unroll
        for (int j = 0; j < 4; ++j) quad.at[j] = view(quad.at[j]);
        store(first + kThreads * i, quad);
      }
    }
    factor_ = 1, floor_ = distance_ = minus_infinity(), reference_ = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < num_few_ && is_end; i += kThreads) s_[shared_.token[i]] = shared_.few[i];
  }

  // Changes one logit from any thread. If the maxima are known, `refresh` then updates its chunk's.
  __device__ __forceinline__ void change(int token, float before, float value) const {
    value = fminf(value, kMaxLogit);
    s_[token] = value;
    if (!is_clean_) return;
    const int quad = token / 4, chunk = quad / (kBatchQuads * chunk_batches_) * kThreads + quad % kThreads;
    const float highest = shared_.maxima[chunk];
    if (value > highest || before >= highest) atomicOr(&shared_.touched[chunk / 32], 1u << chunk % 32);
  }

  __device__ __forceinline__ void refresh() {
    __syncthreads();
    bool is_touched = false;
#pragma unroll 1
    for (int block = 0; block < blocks_; ++block) {
      const int chunk = block * kThreads + static_cast<int>(threadIdx.x);
      if (!(shared_.touched[chunk / 32] >> chunk % 32 & 1) || maximum(block) == minus_infinity()) continue;
      is_touched = true;
      float highest = minus_infinity();
#pragma unroll 1
      for (int from = 0; from < chunk_batches_ * kBatch; from += kBatch) {
        const Part<kBatch> part = load_part<kBatch>(block, from, threadIdx.x);
#pragma unroll
        for (int j = 0; j < kBatch; ++j)
#pragma unroll
          for (int i = 0; i < 4; ++i) highest = fmaxf(highest, part.quad[j].at[i]);
      }
      maximum(block) = highest;
    }
    if (!__syncthreads_or(is_touched)) return;
    for (int i = threadIdx.x; i < kMaxChunks / 32; i += kThreads) shared_.touched[i] = 0;
    find_largest();  // with a barrier
  }

  // The number of last tokens in a window; last_n -1: the largest one.
  __device__ __forceinline__ int window(double last_n) const {
    const double limit = last_n < 0 ? kMaxWindow : fmin(last_n, static_cast<double>(kMaxWindow));
    return static_cast<int>(fmin(limit, static_cast<double>(filters_.num_known)));
  }

  // age 1: the newest token.
  __device__ __forceinline__ int token_at(int age) const { return history_[(filters_.num_known - age) % kMaxWindow]; }

  __device__ __forceinline__ void ban(uint64_t step) {
    const int* at = filters_.lists;
    const int* const end = at + filters_.num_listed;
    const int num_stops = *at++;
    if (static_cast<double>(step) < p_.min_tokens)
      for (int i = threadIdx.x; i < num_stops; i += kThreads) s_[at[i]] = minus_infinity();
    at += num_stops;
    for (int word = 0; at < end; ++word, at += 1 + *at) {
      const int before = *at - 1;
      if (word % kThreads != static_cast<int>(threadIdx.x) || before > window(-1)) continue;
      bool completes = true;
      for (int i = 0; i < before; ++i) completes &= token_at(before - i) == at[1 + i];
      if (completes) s_[at[1 + before]] = minus_infinity();
    }
    __syncthreads();
  }

  // Enters a token; the longest of its lengths stays.
  __device__ __forceinline__ void enter(uint32_t token, int length) const {
    const uint32_t pair = token << 7 | static_cast<uint32_t>(length);
    for (uint32_t at = token * 2654435761u >> 20;; at = (at + 1) % kPairs) {
      const uint32_t found = atomicCAS(&shared_.repeated.pairs[at], kFree, pair);
      if (found == kFree) return;
      if (found >> 7 == token) return static_cast<void>(atomicMax(&shared_.repeated.pairs[at], pair));
    }
  }

  // Penalties for tokens of the history: of repeated sequences (DRY), or of repetition, presence and frequency.
  __device__ __forceinline__ void change_seen(bool is_dry, const SlotState& slot, const Entry* entries) {
    if (is_dry) return change_repeated();
    const int size = p_.repetition_penalty == 1 ? 0 : window(p_.repeat_last_n);
    const float by = static_cast<float>(p_.repetition_penalty);
    for (int i = threadIdx.x; i < (vocab_ + 31) / 32 && size; i += kThreads) shared_.seen[i] = 0;
    __syncthreads();
#pragma unroll 1
    for (int from = threadIdx.x; from < size; from += kAtOnce * kThreads) {
      int token[kAtOnce];  // -1: none
      float before[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) token[j] = from + kThreads * j < size ? token_at(1 + from + kThreads * j) : -1;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const uint32_t bit = 1u << (token[j] & 31);
        if (token[j] >= 0 && atomicOr(&shared_.seen[token[j] >> 5], bit) & bit) token[j] = -1;
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) before[j] = token[j] >= 0 ? cleaned(s_[token[j]]) : 0.0f;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        if (token[j] >= 0) change(token[j], before[j], before[j] > 0 ? __fdiv_rn(before[j], by) : __fmul_rn(before[j], by));
    }
    __syncthreads();
#pragma unroll 4
    for (int i = threadIdx.x; i < (slot.penalised ? slot.num_entries : 0); i += kThreads) {
      const Entry entry = entries[i];
      if (entry.count < 0) continue;
      const float before = cleaned(s_[entry.token]);
      change(entry.token, before, __fsub_rn(before, __fadd_rn(__fmul_rn(entry.count, slot.frequency), slot.presence)));
    }
    __syncthreads();
  }

  // DRY.
  __device__ __forceinline__ void change_repeated() {
    const int size = window(p_.dry_penalty_last_n), allowed = static_cast<int>(p_.dry_allowed_length);
    if (size < 2) return;
    uint32_t* const last = shared_.repeated.last;
    const uint8_t* const breakers = filters_.breakers;
    const uint32_t newest = static_cast<uint32_t>(token_at(1));
    bool is_repeated = false;
#pragma unroll 8
    for (int i = threadIdx.x; i < size; i += kThreads) {
      last[i] = static_cast<uint32_t>(token_at(1 + i));
      is_repeated |= last[i] == newest && i > 0;
    }
    if (!__syncthreads_or(is_repeated)) return;
#pragma unroll 8
    for (int i = threadIdx.x; i < size && breakers; i += kThreads)
      if (breakers[last[i]]) last[i] |= kBreaker;
    for (int i = threadIdx.x; i < kPairs; i += kThreads) shared_.repeated.pairs[i] = kFree;
    __syncthreads();
    bool is_entered = false;
    for (int i = threadIdx.x; i < size; i += kThreads) {
      int length = 0;  // of the sequence that ends here
      while (i > 0 && length < kMaxMatch && i + length < size && last[i + length] == last[length] && last[length] < kBreaker) ++length;
      if (i > 0 && length >= allowed && last[i - 1] < kBreaker) enter(last[i - 1], length), is_entered = true;
    }
    if (!__syncthreads_or(is_entered)) return;
#pragma unroll 4
    for (int i = threadIdx.x; i < kPairs; i += kThreads) {
      const uint32_t pair = shared_.repeated.pairs[i];
      if (pair == kFree) continue;
      const int token = static_cast<int>(pair >> 7);
      const float before = cleaned(s_[token]);
      const double penalty = p_.dry_multiplier * pow(p_.dry_base, static_cast<double>(static_cast<int>(pair & 127u) - allowed));
      change(token, before, __fsub_rn(before, static_cast<float>(fmin(penalty, static_cast<double>(kMaxLogit)))));
    }
    __syncthreads();
  }

  __device__ __forceinline__ Sums sums() {
    Sums sums{0, 0, 0, 0, 0};
    const bool is_lazy = factor_ != 1 || floor_ > minus_infinity() || distance_ > minus_infinity();
    for (int i = threadIdx.x; i < num_few_; i += kThreads) {
      const float value = view(shared_.few[i]), distance = __fsub_rn(value, largest_), term = exp_nonpositive(distance);
      if (value == minus_infinity()) continue;
      sums.mass += term, sums.weighted += term * distance, sums.distance += distance, sums.square += distance * distance, sums.count += 1;
    }
    if (is_few_) {
    } else if (is_lazy) {
      each<8>(minus_infinity(), [&](const Part<8>& part, int) { add(part, sums, [&](float raw) { return view(raw); }); });
    } else {
      each<8>(minus_infinity(), [&](const Part<8>& part, int) { add(part, sums, [](float raw) { return raw; }); });
    }
    return added(sums);
  }

  // Adds a part: fp32 sums of eight terms, then fp64.
  template <class Viewed>
  __device__ __forceinline__ void add(const Part<8>& part, Sums& sums, Viewed viewed) const {
    float mass[4] = {}, weighted[4] = {}, distances[4] = {}, squares[4] = {};
    int count = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float value = viewed(part.quad[j].at[i]);
        const bool is_left = value > minus_infinity();
        const float distance = is_left ? __fsub_rn(value, largest_) : 0.0f, term = is_left ? __expf(distance) : 0.0f;
        mass[i] += term, weighted[i] += term * distance, distances[i] += distance, squares[i] += distance * distance, count += is_left;
      }
    const auto sum = [](const float* at) { return static_cast<double>((at[0] + at[1]) + (at[2] + at[3])); };
    sums.mass += sum(mass), sums.weighted += sum(weighted), sums.distance += sum(distances), sums.square += sum(squares);
    sums.count += count;
  }

  // Adds sums over the CTA, in a fixed order.
  __device__ __forceinline__ Sums added(Sums sums) {
    double* const at = shared_.sums[buffers_.turn++ & 1];
#pragma unroll 1
    for (int offset = 16; offset; offset /= 2) {
      sums.mass += __shfl_xor_sync(kAll, sums.mass, offset), sums.weighted += __shfl_xor_sync(kAll, sums.weighted, offset);
      sums.distance += __shfl_xor_sync(kAll, sums.distance, offset), sums.square += __shfl_xor_sync(kAll, sums.square, offset);
      sums.count += __shfl_xor_sync(kAll, sums.count, offset);
    }
    if (threadIdx.x % 32 == 0) *reinterpret_cast<Sums*>(at + threadIdx.x / 32 * 5) = sums;
    __syncthreads();
    Sums all{0, 0, 0, 0, 0};
#pragma unroll 1
    for (int i = 0; i < 5 * kWarps; i += 5)
      all.mass += at[i], all.weighted += at[i + 1], all.distance += at[i + 2], all.square += at[i + 3], all.count += at[i + 4];
    return all;
  }

  // most: the entropy of equal probabilities.
  __device__ __forceinline__ void scale(double entropy, double most) {
    double temperature = p_.temperature;
    if (p_.dynatemp_range > 0) {
      const double share = pow(most > 0 ? fmin(fmax(entropy / most, 0.0), 1.0) : 0.0, p_.dynatemp_exponent);
      const double low = fmax(temperature - p_.dynatemp_range, 0.0);
      temperature = low + (temperature + p_.dynatemp_range - low) * share;
    }
    factor_ = static_cast<float>(1 / fmax(temperature, 1e-8));
    for (int block = 0; block < blocks_ && !is_few_; ++block) maximum(block) = __fmul_rn(maximum(block), factor_);
    largest_ = __fmul_rn(largest_, factor_);
  }

  // A number that rises with the rank: 46 bits of the logit or of the distance from the center, and the token.
  __device__ __forceinline__ uint64_t key_of(float value, int token, bool is_typical, double center) const {
    uint64_t key = static_cast<uint64_t>(~ordered(value)) << 14;
    if (is_typical) key = static_cast<uint64_t>(fmin(fabs(center - __fsub_rn(value, largest_)), 31.99) * 0x1p41);
    return key << kTokenBits | static_cast<uint64_t>(token);
  }

  // The distance of a token from the center: as in a key without its token, and within kUnsure.
  static constexpr float kUnsure = 1e-4f;
  static __device__ __forceinline__ float distance_of(uint64_t key) { return static_cast<float>(static_cast<double>(key) * 0x1p-41); }
  __device__ __forceinline__ float rough_distance(float value, double center) const { return fminf(fabsf(static_cast<float>(center) - __fsub_rn(value, largest_)), 31.99f); }

  // 32 bits at a time: a GPU adds 64 bits in shared memory by a loop.
  __device__ __forceinline__ void add_to_bin(int bin, uint64_t mass, uint32_t count) const {
    atomicAdd(&shared_.bins.count[bin], count);
    if (mass == 0) return;
    const uint32_t low = static_cast<uint32_t>(mass), carry = atomicAdd(&shared_.bins.low[bin], low) + low < low;
    const uint32_t high = static_cast<uint32_t>(mass >> 32) + carry;
    if (high) atomicAdd(&shared_.bins.high[bin], high);
  }

  __device__ __forceinline__ uint64_t mass_of_bin(int bin) const {
    return static_cast<uint64_t>(shared_.bins.high[bin]) << 32 | shared_.bins.low[bin];
  }

  // Just below the maximum of the k-th chunk, so k tokens reach it. -inf: there are fewer chunks.
  __device__ __forceinline__ float floor_of_top(double k) {
    for (int i = threadIdx.x; i < kSelectBins; i += kThreads) shared_.bins.count[i] = 0;
    if (threadIdx.x == 0) shared_.chosen = kSelectBins - 1;
    __syncthreads();
    for (int block = 0; block < blocks_; ++block)  // 64 bins for a distance of 1
      if (maximum(block) > minus_infinity())
        atomicAdd(&shared_.bins.count[static_cast<int>(fminf(64 * (largest_ - maximum(block)), kSelectBins - 1.0f))], 1u);
    __syncthreads();
    const int first = kOwnBins * static_cast<int>(threadIdx.x);
    uint32_t count = 0;
    for (int i = 0; i < kOwnBins; ++i) count += shared_.bins.count[first + i];
    count = static_cast<uint32_t>(sum_up_to(count, buffers_)) - count;
    for (int i = 0; i < kOwnBins; ++i) {
      const uint32_t before = count;
      count += shared_.bins.count[first + i];
      if (before < k && count >= k) shared_.chosen = first + i;
    }
    __syncthreads();
    const int bin = shared_.chosen;
    __syncthreads();
    return bin == kSelectBins - 1 ? minus_infinity() : largest_ - (bin + 1) / 64.0f - fabsf(largest_) * 1e-6f - 1e-4f;
  }

  // Returns the key of the last token among the first top_k ranks with less than `enough` mass before it.
  __device__ __forceinline__ uint64_t select(bool is_typical, double center, double top_k, double enough) {
    const bool weighs = enough < INFINITY;
    enough *= 0x1p40;  // as to_fixed
    uint64_t prefix = 0, mass_before = 0;
    uint32_t count_before = 0;
    int shift = 64, size = 0;
    const float floor = is_typical || is_few_ || top_k > kMaxBounded ? minus_infinity() : floor_of_top(top_k);
    // Takes 11 bits of the key at a time, until few tokens have the last one's first bits: these are listed.
#pragma unroll 1
    for (bool is_listed = left_ <= kThreads;; is_listed = size <= kThreads || shift == 0) {
      const int bits = min(shift, kSelectBits), next = shift - bits;
      for (int i = threadIdx.x; i < kSelectBins && !is_listed; i += kThreads) shared_.bins.low[i] = shared_.bins.high[i] = shared_.bins.count[i] = 0;
      if (threadIdx.x == 0) shared_.chosen = -1, shared_.size = 0;
      __syncthreads();
      int bin = 0;  // runs of equal bins are added at once
      uint64_t mass_here = 0;
      uint32_t count = 0;
      const bool is_bounded = is_typical && shift < 64 && shift >= kTokenBits;
      const float near = is_bounded ? distance_of(prefix << (shift - kTokenBits)) : 0, far = is_bounded ? distance_of((prefix + 1) << (shift - kTokenBits)) : 0;
      each_left(floor, [&](float value, int token) {
        if (is_bounded && !(rough_distance(value, center) >= near - kUnsure && rough_distance(value, center) <= far + kUnsure)) return;
        const uint64_t key = key_of(value, token, is_typical, center);
        if (shift < 64 && key >> shift != prefix) return;
        if (is_listed) {
          const int at = atomicAdd(&shared_.size, 1);
          shared_.list.key[at] = key, shared_.list.mass[at] = weighs ? to_fixed(mass(value)) : 0;
          return;
        }
        const int at = static_cast<int>(key >> next & ((1u << bits) - 1));
        if (at != bin && count) {
          add_to_bin(bin, mass_here, count);
          mass_here = 0, count = 0;
        }
        bin = at, mass_here += weighs ? to_fixed(mass(value)) : 0, ++count;
      });
      if (count) add_to_bin(bin, mass_here, count);
      __syncthreads();
      if (is_listed) break;
      const int first = kOwnBins * static_cast<int>(threadIdx.x);
      mass_here = 0, count = 0;
      for (int i = 0; i < kOwnBins; ++i) mass_here += mass_of_bin(first + i), count += shared_.bins.count[first + i];
      mass_here = mass_before + sum_up_to(mass_here, buffers_) - mass_here;
      count = count_before + sum_up_to(count, buffers_) - count;
      int own = -1;
      for (int i = 0; i < kOwnBins; ++i) {
        if (shared_.bins.count[first + i] && is_within(count, mass_here, top_k, enough)) own = first + i, mass_before = mass_here, count_before = count;
        mass_here += mass_of_bin(first + i), count += shared_.bins.count[first + i];
      }
      if (own >= 0) atomicMax(&shared_.chosen, own);
      __syncthreads();
      if (own >= 0 && own == shared_.chosen)
        shared_.mass_before = mass_before, shared_.count_before = count_before, shared_.size = static_cast<int>(shared_.bins.count[own]);
      __syncthreads();
      prefix = prefix << bits | static_cast<uint64_t>(shared_.chosen), shift = next, size = shared_.size;
      mass_before = shared_.mass_before, count_before = shared_.count_before;
      __syncthreads();
    }
    uint64_t last = 0;
    if (static_cast<int>(threadIdx.x) < shared_.size) {
      const uint64_t key = shared_.list.key[threadIdx.x];
      for (int i = 0; i < shared_.size; ++i)
        if (shared_.list.key[i] < key) ++count_before, mass_before += shared_.list.mass[i];
      if (is_within(count_before, mass_before, top_k, enough)) last = key;
    }
    return max_over_block(last, buffers_);
  }

  // Whether a token with these before it is kept; the first one always is.
  static __device__ __forceinline__ bool is_within(uint32_t count, uint64_t mass, double top_k, double enough) {
    return count == 0 || (count < top_k && static_cast<double>(mass) < enough);
  }

  __device__ __forceinline__ bool is_above(float value, double enough) const { return static_cast<double>(mass(value)) >= enough; }

  // XTC: the least probable of the probable tokens, among equal ones the last: ~ordered(logit), token; 0: none.
  __device__ __forceinline__ uint64_t least_above(double enough) {
    uint64_t least = 0;
    each_left(probable_floor(enough), [&](float value, int token) {
      if (is_above(value, enough)) least = larger(least, static_cast<uint64_t>(~ordered(value)) << 32 | static_cast<uint32_t>(token));
    });
    return max_over_block(least, buffers_);
  }

  // Just below the logits with a mass of `enough`.
  __device__ __forceinline__ float probable_floor(double enough) const {
    return enough > 0 ? static_cast<float>(largest_ + log(enough) - fabs(static_cast<double>(largest_)) * 1e-6 - 1e-4) : minus_infinity();
  }

  // Keeps the keys up to `last`; XTC: removes the probable tokens but that of `last`.
  __device__ __forceinline__ void keep_if(bool crosses, bool is_typical, double center, double enough, uint64_t last) {
    const float reach = distance_of(last >> kTokenBits);
    rewrite(crosses ? probable_floor(enough) : minus_infinity(), [&](float raw, int token) {
      const float value = view(raw);
      if (is_typical && fabsf(rough_distance(value, center) - reach) > kUnsure) return rough_distance(value, center) < reach ? raw : minus_infinity();
      if (value == minus_infinity()) return crosses ? raw : value;
      const bool is_kept = crosses ? token == static_cast<int>(static_cast<uint32_t>(last)) || !is_above(value, enough)
                                   : key_of(value, token, is_typical, center) <= last;
      return is_kept ? raw : minus_infinity();
    });
    if (!crosses) floor_ = distance_ = minus_infinity(), reference_ = 0;  // all are written
  }

  // Samples one of few tokens.
  __device__ __forceinline__ void sample(const SlotState& slot) {
    uint64_t best = 0;
    float logit = 0;
    each_left(minus_infinity(), [&](float value, int token) {
      const uint64_t pair = pair_of(slot.kind == kGreedy ? value : exact_score(slot, token, value), token);
      if (pair > best) best = pair, logit = value;
    });
    const uint64_t winner = max_over_block(best, buffers_);
    if (best && best == winner) filters_.chosen = token_of(winner), s_[token_of(winner)] = logit;
  }

  // Mirostat 1: how many tokens Zipf's law gives for the bound, from the head up to `last`.
  __device__ __forceinline__ double zipf_top_k(uint64_t last) {
    if (threadIdx.x == 0) shared_.size = 0;
    __syncthreads();
    each_left(value_of(~static_cast<uint32_t>(last >> (kTokenBits + 14))), [&](float value, int token) {
      const uint64_t key = key_of(value, token, false, 0);
      if (key > last) return;
      const int at = atomicAdd(&shared_.size, 1);
      shared_.list.key[at] = key, shared_.list.value[at] = value;
    });
    __syncthreads();
    const int own = threadIdx.x, size = shared_.size;
    int rank = 0, next = -1;  // next: the index of the next rank
    for (int i = 0; own < size && i < size; ++i) {
      const uint64_t key = shared_.list.key[i], mine = shared_.list.key[own];
      rank += key < mine;
      if (key > mine && (next < 0 || key < shared_.list.key[next])) next = i;
    }
    Sums sums{0, 0, 0, 0, 0};
    if (next >= 0) {
      const double t = log((rank + 2.0) / (rank + 1.0));
      sums.weighted = t * (static_cast<double>(shared_.list.value[own]) - shared_.list.value[next]), sums.square = t * t;
    }
    sums = added(sums);
    const double exponent = sums.weighted / sums.square, excess = exponent - 1;
    const double k = pow(excess * exp2(filters_.mu) / (1 - pow(static_cast<double>(vocab_), -excess)), 1 / exponent);
    return k >= 1 ? floor(fmin(k, static_cast<double>(vocab_))) : (k < 1 ? 1 : vocab_);
  }

  float* s_;
  int vocab_, chunk_batches_, quads_, blocks_;
  FilterSlot& filters_;
  const FilterParameters& p_;
  const int32_t* history_;
  FilterShared& shared_;
  ReduceBuffers buffers_;
  float largest_ = minus_infinity();
  double left_ = INFINITY;  // tokens, at most
  bool is_clean_ = false;  // the maxima are known
  bool may_be_few_ = true, is_few_ = false;
  int num_few_ = 0;
  // What `view` applies: a factor, the least logit, the least distance from a reference.
  float factor_ = 1, floor_ = minus_infinity(), reference_ = 0, distance_ = minus_infinity();
};

}  // namespace sampling
