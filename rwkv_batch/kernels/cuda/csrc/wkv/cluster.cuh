// A cluster of two CTAs that access each other's shared memory (sm_90). Before sm_90 nothing launches it; functions are
// empty.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

namespace cluster {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
__device__ __forceinline__ uint32_t local_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ int rank() {
    uint32_t r;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return static_cast<int>(r);
}

// Address of `p` in the CTA of that rank: in its shared memory, or as a generic pointer.
__device__ __forceinline__ uint32_t peer_address(const void* p, int rank) {
    uint32_t remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local_address(p)), "r"(rank));
    return remote;
}
template <typename T>
__device__ __forceinline__ T* peer_pointer(T* p, int rank) {
    uint64_t remote;
    asm("mapa.u64 %0, %1, %2;" : "=l"(remote) : "l"(p), "r"(rank));
    return reinterpret_cast<T*>(remote);
}

// All threads of both CTAs.
__device__ __forceinline__ void sync() {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
__device__ __forceinline__ void init(uint64_t* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(local_address(barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void publish() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Waits for a phase of this CTA's mbarrier; earlier writes of both CTAs are visible after it.
__device__ __forceinline__ void wait(uint64_t* barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@done bra over;\n"
        "bra again;\n"
        "over:\n"
        "}" ::"r"(local_address(barrier)), "r"(parity)
        : "memory");
}
__device__ __forceinline__ void arrive_remote(uint64_t* barrier, int rank) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(peer_address(barrier, rank)) : "memory");
}

// Makes this thread's shared memory writes visible to bulk copies.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Copies `from` to `to` in the other CTA, then completes `barrier` there. One thread; 16-byte aligned.
template <typename T>
__device__ __forceinline__ void send(const T& from, T* to, uint64_t* barrier, int rank) {
    const uint32_t remote = peer_address(barrier, rank);
    asm volatile("mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%0], %1;" ::"r"(remote), "n"(sizeof(T))
                 : "memory");
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     peer_address(to, rank)), "r"(local_address(&from)), "n"(sizeof(T)), "r"(remote)
                 : "memory");
}
#else
__device__ __forceinline__ int rank() { return 0; }
template <typename T>
__device__ __forceinline__ T* peer_pointer(T* p, int rank) { return p; }
__device__ __forceinline__ void sync() {}
__device__ __forceinline__ void init(uint64_t*, int) {}
__device__ __forceinline__ void publish() {}
__device__ __forceinline__ void wait(uint64_t*, uint32_t) {}
__device__ __forceinline__ void arrive_remote(uint64_t*, int) {}
__device__ __forceinline__ void fence_proxy_async() {}
template <typename T>
__device__ __forceinline__ void send(const T&, T*, uint64_t*, int) {}
#endif

}  // namespace cluster
