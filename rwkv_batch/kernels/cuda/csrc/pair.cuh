// Two blocks on neighbouring processors that reach into each other's shared memory (a cluster of two, sm_90 and later; on
// older ones nothing is launched that way, and these are empty).
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

namespace pair {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
__device__ __forceinline__ uint32_t local(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ int rank() {
    uint32_t r;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return static_cast<int>(r);
}

// Where the twin of `p` in the block of that rank is: as an address of its shared memory, and as a pointer.
__device__ __forceinline__ uint32_t twin(const void* p, int rank) {
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(local(p)), "r"(rank));
    return there;
}
template <typename T>
__device__ __forceinline__ T* twin_pointer(T* p, int rank) {
    uint64_t there;
    asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(p), "r"(rank));
    return reinterpret_cast<T*>(there);
}

// All threads of both blocks.
__device__ __forceinline__ void meet_all() {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
__device__ __forceinline__ void init(uint64_t* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(local(barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void publish() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// For a phase of this block's barrier, and all that was written before the arrivals that ended it, in either block.
__device__ __forceinline__ void wait(uint64_t* barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@done bra over;\n"
        "bra again;\n"
        "over:\n"
        "}" ::"r"(local(barrier)), "r"(parity)
        : "memory");
}
__device__ __forceinline__ void arrive_there(uint64_t* barrier, int rank) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(twin(barrier, rank)) : "memory");
}

// What this thread wrote to shared memory becomes visible to copies.
__device__ __forceinline__ void let_copy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// From here to the twin of `to`; the twin of `barrier` is done when it is there. One thread, 16-byte aligned.
template <typename T>
__device__ __forceinline__ void send(const T& from, T* to, uint64_t* barrier, int rank) {
    const uint32_t there = twin(barrier, rank);
    asm volatile("mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%0], %1;" ::"r"(there), "n"(sizeof(T))
                 : "memory");
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     twin(to, rank)), "r"(local(&from)), "n"(sizeof(T)), "r"(there)
                 : "memory");
}
#else
__device__ __forceinline__ int rank() { return 0; }
template <typename T>
__device__ __forceinline__ T* twin_pointer(T* p, int) { return p; }
__device__ __forceinline__ void meet_all() {}
__device__ __forceinline__ void init(uint64_t*, int) {}
__device__ __forceinline__ void publish() {}
__device__ __forceinline__ void wait(uint64_t*, uint32_t) {}
__device__ __forceinline__ void arrive_there(uint64_t*, int) {}
__device__ __forceinline__ void let_copy() {}
template <typename T>
__device__ __forceinline__ void send(const T&, T*, uint64_t*, int) {}
#endif

}  // namespace pair
