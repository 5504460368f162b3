// Clusters, multicast copies, stmatrix and wgmma with s32 sums, as functions. sm_90a only.
#pragma once

#include "../hopper.cuh"

namespace hopper {

// Returns the same shared address in another CTA of the cluster.
__device__ __forceinline__ uint32_t peer_address(uint32_t address, uint32_t rank) {
    uint32_t remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    return remote;
}
__device__ __forceinline__ void arrive_peer(uint32_t barrier, uint32_t rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(peer_address(barrier, rank)) : "memory");
}
__device__ __forceinline__ void arrive_cluster() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void wait_cluster() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
__device__ __forceinline__ void sync_cluster() { arrive_cluster(), wait_cluster(); }

// Barrier of one consumer warpgroup, or of all.
__device__ __forceinline__ void sync_consumers(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// tma_load into all CTAs of `mask`, at the same address in each. The mbarrier at that address counts the bytes.
__device__ __forceinline__ void tma_multicast(
    uint32_t to, const CUtensorMap* map, int inner, int outer, int plane, uint32_t barrier, uint16_t mask, uint64_t hint) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
        " [%0], [%1, {%2, %3, %4}], [%5], %6, %7;" ::"r"(to), "l"(map), "r"(inner), "r"(outer), "r"(plane), "r"(barrier), "h"(mask),
        "l"(hint)
        : "memory");
}

__device__ __forceinline__ void store_peer(uint32_t to, int a, int b, int c, int d) {
    asm volatile("st.shared::cluster.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
template <typename T>
__device__ __forceinline__ void load_shared_pair(T (&v)[2], uint32_t at) {
    uint32_t bits[2];
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(bits[0]), "=r"(bits[1]) : "r"(at) : "memory");
    v[0] = reinterpret_cast<const T&>(bits[0]), v[1] = reinterpret_cast<const T&>(bits[1]);
}
__device__ __forceinline__ int4 load_shared_int4(uint32_t at) {
    int4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
    return v;
}
// Four 8x8 matrices of fp16, transposed.
__device__ __forceinline__ void stmatrix_x4_transposed(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}
// In assembly: nvcc would split the store.
__device__ __forceinline__ void store_global_int4(void* to, const int4& v) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// Stores eight fp16 values, as fp32 if asked.
__device__ __forceinline__ void store_outputs(void* to, const int4& halves, bool as_fp32) {
    if (!as_fp32) return store_global_int4(to, halves);
    const int packed[4] = {halves.x, halves.y, halves.z, halves.w};
    float2 v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = __half22float2(*reinterpret_cast<const __half2*>(&packed[i]));
    store_global_int4(to, *reinterpret_cast<const int4*>(&v[0]));
    store_global_int4(static_cast<int4*>(to) + 1, *reinterpret_cast<const int4*>(&v[2]));
}

// Keeps the compiler from moving accesses of these registers across this point.
template <int COUNT>
__device__ __forceinline__ void settle(int (&registers)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

// sums [64, N] = (add ? sums : 0) + a [64, 32] @ b [N, 32]^T: a s8, b s8 or u8, both K-major. Registers as in wgmma_fp16.
template <int N, bool UNSIGNED>
struct WgmmaInt8;

#define INT8_D4(i) "+r"(s[i]), "+r"(s[i + 1]), "+r"(s[i + 2]), "+r"(s[i + 3])
#define INT8_D8(i) INT8_D4(i), INT8_D4(i + 4)
#define INT8_D16(i) INT8_D8(i), INT8_D8(i + 8)
#define INT8_D32(i) INT8_D16(i), INT8_D16(i + 16)
#define INT8_D64(i) INT8_D32(i), INT8_D32(i + 32)
#define INT8_WGMMA_OF(N, TYPE, UNSIGNED, REGISTERS, A, B, ADD, ...)                                                            \
    template <>                                                                                                                \
    struct WgmmaInt8<N, UNSIGNED> {                                                                                            \
        __device__ __forceinline__ static void multiply(int* s, uint64_t a, uint64_t b, int add) {                             \
            asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #ADD ", 0;\n"                                                \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k32.s32.s8." TYPE " {" REGISTERS "}, %" #A ", %" #B ", add;\n}" \
                         : __VA_ARGS__                                                                                         \
                         : "l"(a), "l"(b), "r"(add));                                                                          \
        }                                                                                                                      \
    };
#define INT8_WGMMA(N, ...) INT8_WGMMA_OF(N, "s8", false, __VA_ARGS__) INT8_WGMMA_OF(N, "u8", true, __VA_ARGS__)

INT8_WGMMA(8, "%0,%1,%2,%3", 4, 5, 6, INT8_D4(0))
INT8_WGMMA(32, HOPPER_P1, 16, 17, 18, INT8_D16(0))
INT8_WGMMA(64, HOPPER_P2, 32, 33, 34, INT8_D32(0))
INT8_WGMMA(80, HOPPER_P2_8, 40, 41, 42, INT8_D32(0), INT8_D8(32))
INT8_WGMMA(128, HOPPER_P4, 64, 65, 66, INT8_D64(0))
INT8_WGMMA(160, HOPPER_P5, 80, 81, 82, INT8_D64(0), INT8_D16(64))
INT8_WGMMA(240, HOPPER_P7_8, 120, 121, 122, INT8_D64(0), INT8_D32(64), INT8_D16(96), INT8_D8(112))
INT8_WGMMA(256, HOPPER_P8, 128, 129, 130, INT8_D64(0), INT8_D64(64))

}  // namespace hopper
