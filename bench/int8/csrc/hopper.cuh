// Hopper primitives of the int8 products: mbarriers, bulk copies, clusters, wgmma with s32 accumulators. sm_90a only.
#pragma once

#include <cuda.h>
#include <stdint.h>

namespace hopper {

__device__ __forceinline__ uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ bool elect_lane() {
    uint32_t elected;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
    return elected != 0;
}

// Programmatic dependent launch: waits until the kernels before have ended and their writes are visible.
__device__ __forceinline__ void wait_for_inputs() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// mbarriers --------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void init_barrier(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void expect_bytes(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ uint32_t of_cta(uint32_t address, uint32_t cta) {
    uint32_t remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(cta));
    return remote;
}
__device__ __forceinline__ void arrive_at(uint32_t barrier, uint32_t cta) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(of_cta(barrier, cta)) : "memory");
}

// A wait of seconds becomes an error instead of a hung GPU. A loop in C++ would cost ptxas its view of setmaxnreg.
__device__ __forceinline__ void wait_barrier(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred done;\n.reg .u32 spins;\nmov.u32 spins, 0;\nagain:\n"
        "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1;\n@done bra.uni over;\n"
        "add.u32 spins, spins, 1;\nsetp.gt.u32 done, spins, 4194304;\n@!done bra.uni again;\ntrap;\nover:\n}" ::"r"(barrier), "r"(parity)
        : "memory");
}

__device__ __forceinline__ void sync_threads(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void arrive_cluster() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void wait_cluster() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
__device__ __forceinline__ void sync_cluster() { arrive_cluster(), wait_cluster(); }

// Bulk copies ------------------------------------------------------------------------------------------------------

constexpr uint64_t EVICT_NORMAL = 0x1000000000000000, EVICT_FIRST = 0x12F0000000000000, EVICT_LAST = 0x14F0000000000000;

__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap* map, int column, int row, uint32_t barrier, uint64_t hint) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;"
                 ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(hint) : "memory");
}
// The same into the CTAs of `mask`, at the same place in each and counted by the barrier there.
__device__ __forceinline__ void multicast_box(
    uint32_t to, const CUtensorMap* map, int column, int row, uint32_t barrier, uint16_t mask, uint64_t hint) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
                 " [%0], [%1, {%2, %3}], [%4], %5, %6;"
                 ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(mask), "l"(hint) : "memory");
}
__device__ __forceinline__ void copy_bytes(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
__device__ __forceinline__ void store_remote(uint32_t to, int a, int b, int c, int d) {
    asm volatile("st.shared::cluster.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
template <typename T>
__device__ __forceinline__ void load_pair(T (&v)[2], uint32_t at) {
    uint32_t bits[2];
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(bits[0]), "=r"(bits[1]) : "r"(at) : "memory");
    v[0] = reinterpret_cast<const T&>(bits[0]), v[1] = reinterpret_cast<const T&>(bits[1]);
}
__device__ __forceinline__ int4 load_shared(uint32_t at) {
    int4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
    return v;
}

// 8x8 matrices of fp16, transposed on their way to shared memory.
__device__ __forceinline__ void store_transposed(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
// Whole: nvcc splits what it may.
__device__ __forceinline__ void store_global(void* to, const int4& v) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// wgmma ------------------------------------------------------------------------------------------------------------

// Descriptor of a matrix in shared memory: rows of 128 bytes, 128-byte swizzle, 8 rows repeated after 1024 bytes.
__device__ __forceinline__ uint64_t describe_tile(uint32_t address) {
    return static_cast<uint64_t>((address & 0x3ffff) >> 4) | (1ull << 16) | (static_cast<uint64_t>(1024 >> 4) << 32) | (1ull << 62);
}
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wait_products() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }

// The compiler moves no access of these registers across this point.
template <int COUNT>
__device__ __forceinline__ void settle(int (&registers)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

// sums [64 x N] += a [64 x 32] * b [N x 32]^T, or = without `add`. a s8, b s8 or u8, k inner.
// Thread t of the warpgroup holds sums[4j + i] at row t / 32 * 16 + t % 32 / 4 + i / 2 * 8, column 8j + t % 4 * 2 + i % 2.
template <int N, bool UNSIGNED>
struct Wgmma;

#define INT8_R0(i) "+r"(s[i]), "+r"(s[i + 1]), "+r"(s[i + 2]), "+r"(s[i + 3])
#define INT8_R8(i) INT8_R0(i), INT8_R0(i + 4)
#define INT8_R16(i) INT8_R8(i), INT8_R8(i + 8)
#define INT8_R32(i) INT8_R16(i), INT8_R16(i + 16)
#define INT8_R64(i) INT8_R32(i), INT8_R32(i + 32)
#define INT8_WGMMA(N, TYPE, UNSIGNED, PLACES, A, B, ADD, ...)                                                              \
    template <>                                                                                                            \
    struct Wgmma<N, UNSIGNED> {                                                                                            \
        __device__ __forceinline__ static void multiply(int* s, uint64_t a, uint64_t b, int add) {                         \
            asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #ADD ", 0;\n"                                            \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k32.s32.s8." TYPE " {" PLACES "}, %" #A ", %" #B ", add;\n}" \
                         : __VA_ARGS__                                                                                     \
                         : "l"(a), "l"(b), "r"(add));                                                                      \
        }                                                                                                                  \
    };
#define INT8_PRODUCT(N, ...) INT8_WGMMA(N, "s8", false, __VA_ARGS__) INT8_WGMMA(N, "u8", true, __VA_ARGS__)

#define INT8_P4 "%0,%1,%2,%3"
#define INT8_P8 INT8_P4 ",%4,%5,%6,%7"
#define INT8_P16 INT8_P8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define INT8_P24 INT8_P16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define INT8_P32 INT8_P24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define INT8_P40 INT8_P32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define INT8_P48 INT8_P40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define INT8_P56 INT8_P48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define INT8_P64 INT8_P56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define INT8_P72 INT8_P64 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define INT8_P80 INT8_P72 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define INT8_P96 INT8_P80 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define INT8_P112 INT8_P96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define INT8_P120 INT8_P112 ",%112,%113,%114,%115,%116,%117,%118,%119"
#define INT8_P128 INT8_P120 ",%120,%121,%122,%123,%124,%125,%126,%127"

INT8_PRODUCT(8, INT8_P4, 4, 5, 6, INT8_R0(0))
INT8_PRODUCT(16, INT8_P8, 8, 9, 10, INT8_R8(0))
INT8_PRODUCT(32, INT8_P16, 16, 17, 18, INT8_R16(0))
INT8_PRODUCT(64, INT8_P32, 32, 33, 34, INT8_R32(0))
INT8_PRODUCT(80, INT8_P40, 40, 41, 42, INT8_R32(0), INT8_R8(32))
INT8_PRODUCT(128, INT8_P64, 64, 65, 66, INT8_R64(0))
INT8_PRODUCT(160, INT8_P80, 80, 81, 82, INT8_R64(0), INT8_R16(64))
INT8_PRODUCT(192, INT8_P96, 96, 97, 98, INT8_R64(0), INT8_R32(64))
INT8_PRODUCT(240, INT8_P120, 120, 121, 122, INT8_R64(0), INT8_R32(64), INT8_R16(96), INT8_R8(112))
INT8_PRODUCT(256, INT8_P128, 128, 129, 130, INT8_R64(0), INT8_R64(64))

}  // namespace hopper
