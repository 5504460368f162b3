// CUDA on one CPU thread, for tests of kernels' logic. Blocks run one after the other, those of a cluster together; their
// threads are coroutines that switch at barriers. Included before everything else (-include).
#pragma once
#include <cuda.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#undef __shared__
#define __shared__ static
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__

namespace emulation {

struct Thread {
  bool done = false;
  int waits_for_block = 0, waits_for_warpgroups = 0, waits_for_warp = 0, waits_for_cluster = 0;  // barriers arrived at so far
  uint32_t operands[8];
};

// An mbarrier: arrivals and bytes that its phase still wants.
struct Barrier {
  int arrivals, missing, bytes, phase;

  void settle() {
    if (missing > 0 || bytes != 0) return;
    missing = arrivals;
    ++phase;
  }
};

// What the driver keeps in a tensor map.
struct TensorMap {
  const unsigned char* from;
  int64_t item, size[3], pitch[2], box[3];
  bool swizzled_64;
};

constexpr size_t STACK_BYTES = 256 << 10;

// Where a thread goes on, and its stack; each runs the threads of its number of all blocks, one after the other.
struct Coroutine {
  ucontext_t entry;
  jmp_buf at;
  std::unique_ptr<char[]> stack;
  bool entered = false;
};

inline std::vector<Thread> threads;
inline std::vector<std::unique_ptr<Coroutine>> coroutines;
inline jmp_buf scheduler;
inline int running = 0;
inline dim3 thread_index, block_index, block_size, grid_size;
inline std::vector<unsigned char> dynamic_shared;  // of all blocks of a cluster, one after the other
inline int threads_of_block = 1, resident_blocks = 1;  // resident: so many run together, without a cluster
inline size_t shared_of_block = 0;
inline std::map<uint32_t, Barrier> barriers;
inline int num_sms = 4, smem_bytes = 227 << 10;

// By setjmp, not swapcontext, which asks the kernel for the mask of signals each time.
inline void yield() {
  if (_setjmp(coroutines[running]->at) == 0) _longjmp(scheduler, 1);
}
inline void resume() {
  Coroutine& c = *coroutines[running];
  if (_setjmp(scheduler) != 0) return;
  if (c.entered) _longjmp(c.at, 1);
  c.entered = true;
  setcontext(&c.entry);
}

// Until all threads first .. last-1 that still run have arrived as often as this one.
inline void meet(int Thread::* count, int first, int last) {
  const int mine = ++(threads[running].*count);
  const auto all = [&] {
    for (int i = first; i < last; ++i)
      if (!threads[i].done && threads[i].*count < mine) return false;
    return true;
  };
  while (!all()) yield();
}
inline void meet_block() {
  const int first = running / threads_of_block * threads_of_block;
  meet(&Thread::waits_for_block, first, first + threads_of_block);
}
inline void arrive_cluster() { ++threads[running].waits_for_cluster; }
inline void wait_cluster() {
  --threads[running].waits_for_cluster;  // counted again
  meet(&Thread::waits_for_cluster, 0, static_cast<int>(threads.size()));
}
inline void sync_warpgroups() {  // those that multiply
  const int first = running / threads_of_block * threads_of_block;
  meet(&Thread::waits_for_warpgroups, first + 128, first + 384);
}
// One thread of each of `count` blocks that run together.
inline void meet_blocks(unsigned* counter, int count) {
  const unsigned wanted = *counter / count * count + count;
  ++*counter;
  while (static_cast<int>(*counter - wanted) < 0) yield();
}
// Named barriers of a block.
struct Named {
  int arrived = 0, phase = 0;
};
inline std::map<int, Named> named;
inline void arrive_named(int barrier, int count) {
  Named& b = named[barrier];
  if (++b.arrived == count) b.arrived = 0, ++b.phase;
}
inline void meet_named(int barrier, int count) {
  const Named& b = named[barrier];
  const int phase = b.phase;
  arrive_named(barrier, count);
  while (b.phase == phase) yield();
}
inline void meet_warp() { meet(&Thread::waits_for_warp, running / 32 * 32, running / 32 * 32 + 32); }

inline std::function<void()> body;
inline void enter() {
  for (;;) {
    body();
    threads[running].done = true;
    yield();
  }
}

// Runs `size` neighbouring blocks from `first` on.
inline void run_blocks(int number_of_threads, unsigned first, unsigned size) {
  threads_of_block = number_of_threads;
  number_of_threads *= size;
  threads.assign(number_of_threads, {});
  while (coroutines.size() < threads.size()) {
    coroutines.push_back(std::make_unique<Coroutine>());
    Coroutine& c = *coroutines.back();
    c.stack.reset(new char[STACK_BYTES]);
    getcontext(&c.entry);
    c.entry.uc_stack.ss_sp = c.stack.get();
    c.entry.uc_stack.ss_size = STACK_BYTES;
    makecontext(&c.entry, enter, 0);
  }
  for (bool any = true; any;) {
    any = false;
    for (running = 0; running < number_of_threads; ++running) {
      if (threads[running].done) continue;
      any = true;
      thread_index = dim3(running % threads_of_block);
      const unsigned i = first + running / threads_of_block;
      block_index = dim3(i % grid_size.x, i / grid_size.x % grid_size.y, i / grid_size.x / grid_size.y);
      resume();
    }
  }
}

template <typename Kernel, typename... Args>
void launch_clusters(Kernel kernel, int size, dim3 grid, int number_of_threads, size_t dynamic, const Args&... args) {
  shared_of_block = (dynamic + 1023) / 1024 * 1024;
  dynamic_shared.assign(size * shared_of_block, 0xff);
  grid_size = grid, block_size = dim3(number_of_threads);
  for (unsigned i = 0; i < grid.x * grid.y * grid.z; i += size) {
    std::fill(dynamic_shared.begin(), dynamic_shared.end(), 0xff);
    barriers.clear(), named.clear();
    body = [&] { kernel(args...); };
    run_blocks(number_of_threads, i, size);
  }
}
template <typename Kernel, typename... Args>
void launch(Kernel kernel, dim3 grid, int number_of_threads, size_t dynamic, const Args&... args) {
  launch_clusters(kernel, resident_blocks, grid, number_of_threads, dynamic, args...);
}
inline unsigned char* block_shared() { return dynamic_shared.data() + running / threads_of_block * shared_of_block; }
inline uint32_t peer_address(uint32_t at, uint32_t rank) { return at % shared_of_block + rank * shared_of_block; }
inline void store_words(uint32_t at, std::initializer_list<int> words) {
  std::memcpy(dynamic_shared.data() + at, words.begin(), 4 * words.size());
}

template <typename T>
T shared(uint32_t at) {
  T v;
  std::memcpy(&v, dynamic_shared.data() + at, sizeof v);
  return v;
}
inline uint32_t address(const void* p) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(p) - dynamic_shared.data());
}
template <typename T>
T* peer_pointer(T* p, int rank) {
  return reinterpret_cast<T*>(dynamic_shared.data() + peer_address(address(p), rank));
}

template <typename To, typename From>
To bits(From value) {
  To out;
  std::memcpy(&out, &value, sizeof out);
  return out;
}
inline float half_of(uint32_t word, int which) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(word >> (16 * which))));
}
// mma.m16n8k16
inline void multiply(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  const int first = running / 32 * 32, g = running % 32 / 4, t = running % 4;
  const uint32_t mine[6] = {a0, a1, a2, a3, b0, b1};
  std::memcpy(threads[running].operands, mine, sizeof mine);
  meet_warp();
  for (int i = 0; i < 4; ++i) {
    const int n = 2 * t + i % 2;
    for (int k = 0; k < 16; ++k) {
      const int lane = k % 8 / 2, right = k / 8;
      const float a = half_of(threads[first + g * 4 + lane].operands[i / 2 + 2 * right], k % 2);
      c[i] += a * half_of(threads[first + n * 4 + lane].operands[4 + right], k % 2);
    }
  }
  meet_warp();
}
// mma.m16n8k32 of s8 with s8 or u8
template <typename Right>
void multiply_codes(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  const int first = running / 32 * 32, g = running % 32 / 4, t = running % 4;
  const uint32_t mine[6] = {a0, a1, a2, a3, b0, b1};
  std::memcpy(threads[running].operands, mine, sizeof mine);
  meet_warp();
  for (int i = 0; i < 4; ++i) {
    const int n = 2 * t + i % 2;
    for (int k = 0; k < 32; ++k) {
      const int lane = k % 16 / 4, right = k / 16, shift = 8 * (k % 4);
      const auto a = static_cast<int8_t>(threads[first + g * 4 + lane].operands[i / 2 + 2 * right] >> shift);
      c[i] += a * static_cast<Right>(threads[first + n * 4 + lane].operands[4 + right] >> shift);
    }
  }
  meet_warp();
}
inline int saturated(float x, float lowest, float largest) {
  return std::isnan(x) ? 0 : static_cast<int>(std::max(lowest, std::min(largest, std::nearbyint(x))));
}
inline uint32_t packed(const float (&values)[4], float lowest, float largest) {
  uint32_t word = 0;
  for (int i = 0; i < 4; ++i) word |= (saturated(values[i], lowest, largest) & 0xffu) << (8 * i);
  return word;
}
template <typename T>
T exchange(T value, int from) {
  static_assert(sizeof(T) == 4, "a word");
  std::memcpy(threads[running].operands, &value, 4);
  meet_warp();
  T other;
  std::memcpy(&other, threads[running / 32 * 32 + from % 32].operands, 4);
  meet_warp();
  return other;
}

// mbarriers, bulk copies and wgmma of Hopper.
inline void mbarrier_wait(uint32_t at, uint32_t parity) {
  while ((barriers[at].phase & 1) == static_cast<int>(parity)) yield();
}
inline void arrive(uint32_t at, int bytes = 0) {
  Barrier& b = barriers[at];
  b.bytes += bytes, --b.missing;
  b.settle();
}
inline void arrived(uint32_t at, int bytes) {
  barriers[at].bytes -= bytes;
  barriers[at].settle();
}
inline uint32_t swizzled(uint32_t at, bool by_64) {
  return by_64 ? at ^ (at >> 7 & 3) << 4 : at ^ (at >> 7 & 7) << 4;
}
inline CUresult encode(
    CUtensorMap* map, CUtensorMapDataType type, cuuint32_t, void* from, const cuuint64_t* size, const cuuint64_t* strides,
    const cuuint32_t* box, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
    CUtensorMapFloatOOBfill) {
  TensorMap t = {static_cast<unsigned char*>(from), type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 1 : 2};
  for (int i = 0; i < 3; ++i) t.size[i] = size[i], t.box[i] = box[i];
  t.pitch[0] = strides[0], t.pitch[1] = strides[1], t.swizzled_64 = swizzle == CU_TENSOR_MAP_SWIZZLE_64B;
  std::memcpy(map, &t, sizeof t);
  const int64_t inner = t.box[0] * t.item;
  const bool fits = inner <= (t.swizzled_64 ? 64 : 128) && strides[0] % 16 == 0 && strides[1] % 16 == 0 && box[1] <= 256;
  return fits && reinterpret_cast<uint64_t>(from) % 16 == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
inline void tma_load(uint32_t to, const CUtensorMap* map, int inner, int outer, int plane, uint32_t barrier) {
  TensorMap t;
  std::memcpy(&t, map, sizeof t);
  const int64_t row_bytes = t.box[0] * t.item;
  for (int64_t p = 0; p < t.box[2]; ++p) {
    for (int64_t r = 0; r < t.box[1]; ++r) {
      for (int64_t b = 0; b < row_bytes; ++b) {
        const int64_t column = inner + b / t.item;
        const bool inside = column < t.size[0] && outer + r < t.size[1] && plane + p < t.size[2];
        const int64_t at = (outer + r) * t.pitch[0] + (plane + p) * t.pitch[1] + inner * t.item + b;
        dynamic_shared[swizzled(to + static_cast<uint32_t>((p * t.box[1] + r) * row_bytes + b), t.swizzled_64)] = inside ? t.from[at] : 0;
      }
    }
  }
  arrived(barrier, static_cast<int>(row_bytes * t.box[1] * t.box[2]));
}
inline void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  std::memcpy(dynamic_shared.data() + to, from, bytes);
  arrived(barrier, static_cast<int>(bytes));
}
// A warp's 16 rows of wgmma.m64nNk16, its first operand in registers; b: the address of the second.
template <int N>
void multiply_rows(float (&sums)[N / 2], const uint32_t (&a)[4], uint64_t b, int add) {
  const int first = running / 32 * 32, g = running % 32 / 4, t = running % 4;
  std::memcpy(threads[running].operands, a, sizeof a);
  meet_warp();
  for (int i = 0; i < N / 2; ++i) {
    const int n = i / 4 * 8 + 2 * t + i % 2, low = i % 4 / 2;
    float sum = add ? sums[i] : 0.0f;
    for (int k = 0; k < 16; ++k) {
      const uint32_t word = threads[first + g * 4 + k % 8 / 2].operands[low + k / 8 * 2];
      const uint32_t at = swizzled(static_cast<uint32_t>(b) + n * 128 + 2 * k, false);
      sum += half_of(word, k % 2) * half_of(shared<uint16_t>(at), 0);
    }
    sums[i] = sum;
  }
  meet_warp();
}
// The same of bytes, m64nNk32: what `product` makes of one of each operand.
template <int N, typename Sum, typename Product>
void multiply_rows_of_bytes(Sum (&sums)[N / 2], const uint32_t (&a)[4], uint64_t b, int add, const Product& product) {
  const int first = running / 32 * 32, g = running % 32 / 4, t = running % 4;
  std::memcpy(threads[running].operands, a, sizeof a);
  meet_warp();
  for (int i = 0; i < N / 2; ++i) {
    const int n = i / 4 * 8 + 2 * t + i % 2, low = i % 4 / 2;
    Sum sum = add ? sums[i] : Sum();
    for (int k = 0; k < 32; ++k) {
      const uint32_t word = threads[first + g * 4 + k % 16 / 4].operands[low + k / 16 * 2];
      sum += product(word >> (8 * (k % 4)) & 0xff, shared<uint8_t>(swizzled(static_cast<uint32_t>(b) + n * 128 + k, false)));
    }
    sums[i] = sum;
  }
  meet_warp();
}
// Of codes: e4m3 in registers, b of e4m3 or of e5m2.
template <int N, __nv_fp8_interpretation_t SECOND>
void multiply_code_rows(float (&sums)[N / 2], const uint32_t (&a)[4], uint64_t b, int add) {
  const auto number = [](uint32_t byte, auto kind) { return __half2float(__half(__nv_cvt_fp8_to_halfraw(byte, kind))); };
  multiply_rows_of_bytes<N>(sums, a, b, add, [&](uint32_t x, uint32_t y) { return number(x, __NV_E4M3) * number(y, SECOND); });
}
// Of whole numbers: u8 in registers, b of s8.
template <int N>
void multiply_byte_rows(int (&sums)[N / 2], const uint32_t (&a)[4], uint64_t b, int add) {
  multiply_rows_of_bytes<N>(sums, a, b, add, [](uint32_t x, uint32_t y) { return static_cast<int>(x) * static_cast<int8_t>(y); });
}
// The same with the first operand [64][32 bytes] in shared memory as well; of halves, or of e4m3 codes with such or with e5m2.
enum Operands { WORDS, CODES, PARTS };
inline float operand(Operands operands, uint64_t tile, int row, int k) {
  const uint32_t at = swizzled(static_cast<uint32_t>(tile) + row * 128 + (operands == WORDS ? 2 * k : k), false);
  if (operands == WORDS) return half_of(shared<uint16_t>(at), 0);
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(shared<uint8_t>(at), operands == CODES ? __NV_E4M3 : __NV_E5M2)));
}
template <int N, Operands OPERANDS, Operands SECOND = OPERANDS>
void multiply_shared(float (&sums)[N / 2], uint64_t a, uint64_t b, int add) {
  const int row = running / 32 % 4 * 16 + running % 32 / 4, t = running % 4;
  for (int i = 0; i < N / 2; ++i) {
    const int n = i / 4 * 8 + 2 * t + i % 2, m = row + i % 4 / 2 * 8;
    float sum = add ? sums[i] : 0.0f;
    for (int k = 0; k < (OPERANDS == CODES ? 32 : 16); ++k) sum += operand(OPERANDS, a, m, k) * operand(SECOND, b, n, k);
    sums[i] = sum;
  }
  meet_warp();
}
// The same of whole numbers.
template <int N, typename Left, typename Right>
void multiply_bytes(int* sums, uint64_t a, uint64_t b, int add) {
  const int row = running / 32 % 4 * 16 + running % 32 / 4, t = running % 4;
  const auto at = [](uint64_t tile, int line, int k) { return swizzled(static_cast<uint32_t>(tile) + line * 128 + k, false); };
  for (int i = 0; i < N / 2; ++i) {
    const int n = i / 4 * 8 + 2 * t + i % 2, m = row + i % 4 / 2 * 8;
    int sum = add ? sums[i] : 0;
    for (int k = 0; k < 32; ++k) sum += shared<Left>(at(a, m, k)) * shared<Right>(at(b, n, k));
    sums[i] = sum;
  }
  meet_warp();
}
// ldmatrix.x4.trans: four 8x8 matrices of pairs of bytes, lane i giving the address of a row of matrix i / 8.
inline void load_pairs(uint32_t (&pairs)[4], uint32_t at) {
  const int first = running / 32 * 32, g = running % 32 / 4, t = running % 4;
  threads[running].operands[0] = at;
  meet_warp();
  for (int matrix = 0; matrix < 4; ++matrix) {
    const auto row = [&](int i) { return uint32_t(shared<uint16_t>(threads[first + matrix * 8 + i].operands[0] + 2 * g)); };
    pairs[matrix] = row(2 * t) | row(2 * t + 1) << 16;
  }
  meet_warp();
}
// ldmatrix.x4 of halves, likewise.
template <bool TRANSPOSED>
void load_matrices(uint32_t (&words)[4], const __half* row) {
  const int first = running / 32 * 32, g = running % 32 / 4, t = running % 4;
  std::memcpy(threads[running].operands, &row, sizeof row);
  meet_warp();
  for (int matrix = 0; matrix < 4; ++matrix) {
    const auto at = [&](int i, int column) {
      const uint16_t* from;
      std::memcpy(&from, threads[first + matrix * 8 + i].operands, sizeof from);
      return uint32_t(from[column]);
    };
    words[matrix] = TRANSPOSED ? at(2 * t, g) | at(2 * t + 1, g) << 16 : at(g, 2 * t) | at(g, 2 * t + 1) << 16;
  }
  meet_warp();
}
// stmatrix.trans: 8x8 matrices of halves, lane i giving the address of a row of matrix i / 8.
template <int MATRICES>
void stmatrix_transposed(uint32_t to, const uint32_t (&words)[MATRICES]) {
  const int first = running / 32 * 32, g = running % 32 / 4, t = running % 4;
  threads[running].operands[0] = to;
  meet_warp();
  for (int matrix = 0; matrix < MATRICES; ++matrix) {
    for (int i = 0; i < 2; ++i) {  // element (g, 2t + i) goes to row 2t + i, column g
      const uint16_t value = static_cast<uint16_t>(words[matrix] >> (16 * i));
      std::memcpy(dynamic_shared.data() + threads[first + matrix * 8 + 2 * t + i].operands[0] + 2 * g, &value, 2);
    }
  }
  meet_warp();
}

}  // namespace emulation

#define threadIdx emulation::thread_index
#define blockIdx emulation::block_index
#define blockDim emulation::block_size
#define gridDim emulation::grid_size
#define __syncthreads() emulation::meet_block()
#define __syncwarp() emulation::meet_warp()
#define __threadfence() ((void)0)
#define __expf(x) std::exp(x)
#define __shfl_xor_sync(mask, value, offset) emulation::exchange(value, (emulation::running % 32) ^ (offset))
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
template <typename T>
T reduce_max(T value) {
  for (int offset = 16; offset > 0; offset /= 2) value = std::max(value, __shfl_xor_sync(0, value, offset));
  return value;
}
inline int reduce_add(int value) {
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0, value, offset);
  return value;
}
#define __reduce_add_sync(mask, value) reduce_add(value)
#define __ballot_sync(mask, value) static_cast<uint32_t>(reduce_add((value) ? static_cast<int>(1u << emulation::running % 32) : 0))
inline int __dp4a(int a, int b, int sum) {
  for (int i = 0; i < 32; i += 8) sum += static_cast<int8_t>(a >> i) * static_cast<int8_t>(b >> i);
  return sum;
}
inline uint32_t __vmaxs2(uint32_t a, uint32_t b) {
  const auto larger = [](int x, int y) { return static_cast<uint16_t>(std::max(static_cast<int16_t>(x), static_cast<int16_t>(y))); };
  return static_cast<uint32_t>(larger(a >> 16, b >> 16)) << 16 | larger(a, b);
}
inline bool any_of_warp(bool value) { return reduce_max<uint32_t>(value) != 0; }
#define __any_sync(mask, value) any_of_warp(value)
#define __reduce_max_sync(mask, value) reduce_max(value)
inline uint32_t __float_as_uint(float x) { return emulation::bits<uint32_t>(x); }
inline int __float_as_int(float x) { return emulation::bits<int>(x); }
inline float __uint_as_float(uint32_t x) { return emulation::bits<float>(x); }
#define __shfl_up_sync(mask, value, offset) \
  emulation::exchange(value, emulation::running % 32 < static_cast<int>(offset) ? emulation::running % 32 : emulation::running % 32 - static_cast<int>(offset))
#define __shfl_sync(mask, value, lane) emulation::exchange(value, lane)
template <typename T>
T __ldg(const T* p) { return *p; }
template <typename T>
T __ldcs(const T* p) { return *p; }
template <typename T>
T __ldcg(const T* p) { return *p; }
template <typename T>
void __stcg(T* p, const T& v) { *p = v; }
inline void __pipeline_memcpy_async(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }
inline void __pipeline_commit() {}
inline void __pipeline_wait_prior(int) {}
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
  const float2 x = __half22float2(a), y = __half22float2(b), z = __half22float2(c);
  return __floats2half2_rn(std::fma(x.x, y.x, z.x), std::fma(x.y, y.y, z.y));
}
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t both = low | static_cast<uint64_t>(high) << 32;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) out |= static_cast<uint32_t>(both >> (8 * (selector >> (4 * i) & 7)) & 0xff) << (8 * i);
  return out;
}
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline uint32_t __umulhi(uint32_t x, uint32_t y) { return static_cast<uint64_t>(x) * y >> 32; }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int atomicAdd(int* at, int by) { return std::exchange(*at, *at + by); }
inline unsigned long long atomicAdd(unsigned long long* at, unsigned long long by) { return std::exchange(*at, *at + by); }
inline unsigned atomicMax(unsigned* at, unsigned by) { return std::exchange(*at, std::max(*at, by)); }
inline long long __float2ll_rn(float x) { return std::llrint(x); }
using std::max;
using std::min;

extern "C" __attribute__((visibility("default"), used)) inline void emulation_set(int num_sms, int smem_bytes) {
  emulation::num_sms = num_sms, emulation::smem_bytes = smem_bytes;
}
extern "C" __attribute__((visibility("default"), used)) inline void emulation_set_resident(int blocks) {
  emulation::resident_blocks = blocks;
}
