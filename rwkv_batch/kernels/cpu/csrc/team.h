// The threads of one call: free threads claim the items of a phase; a barrier ends it.
//
// A step has a dozen short phases per layer. OpenMP's threads sleep between parallel regions (OMP_WAIT_POLICY=PASSIVE
// in the service). One region per phase would cost 10 of one row's 25 ms. So a call is one
// parallel region.
#pragma once
#include <omp.h>

#include <atomic>
#include <cstdint>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <thread>
#endif

// State shared by the threads.
class Team {
 public:
  // Returns the next item of the phase.
  int64_t claim() { return next_.fetch_add(1, std::memory_order_relaxed); }

  // Barrier of `size` threads; earlier writes are visible after it.
  void barrier(int size) {
    const uint32_t round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < size) {
      wait_for_round(round);
      return;
    }
    next_.store(0, std::memory_order_relaxed);
    arrived_.store(0, std::memory_order_relaxed);
    round_.store(round + 1, std::memory_order_seq_cst);
    wake();
  }

 private:
  // About 50 us: longer than threads differ in a phase, shorter than a time slice taken by another process.
  static constexpr int SPINS = 1000;

  void wait_for_round(uint32_t round) {
    for (int i = 0; i < SPINS; ++i) {
      if (round_.load(std::memory_order_acquire) != round) return;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
#if defined(__linux__)
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (round_.load(std::memory_order_seq_cst) == round) {
      syscall(SYS_futex, &round_, FUTEX_WAIT_PRIVATE, round, nullptr, nullptr, 0);
    }
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
#else
    while (round_.load(std::memory_order_acquire) == round) std::this_thread::yield();
#endif
  }

  void wake() {
#if defined(__linux__)
    if (sleepers_.load(std::memory_order_seq_cst)) {
      syscall(SYS_futex, &round_, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
    }
#endif
  }

  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int> arrived_{0};
  std::atomic<int> sleepers_{0};
  alignas(64) std::atomic<uint32_t> round_{0};
};

// One thread of a team. All threads run the same phases in the same order.
class Member {
 public:
  Member(Team& team) : team_(team), size_(omp_get_num_threads()) {}

  // Runs work(0) .. work(items - 1), each on one thread; returns when all are done.
  template <typename Work>
  void run_items(int64_t items, Work work) {
    for (int64_t i = team_.claim(); i < items; i = team_.claim()) work(i);
    team_.barrier(size_);
  }

 private:
  Team& team_;
  const int size_;
};

// Runs work(member) on `threads` threads.
template <typename Work>
void with_team(int64_t threads, Work work) {
  Team team;
#pragma omp parallel num_threads(int(threads))
  {
    Member member(team);
    work(member);
  }
}
