// mbarrier, TMA and wgmma instructions as functions. sm_90a only.
#pragma once

#include <cuda.h>
#include <stdint.h>

namespace hopper {

__device__ __forceinline__ uint32_t smem_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// True in one lane of a converged warp. The compiler then keeps that lane's operands in uniform registers.
__device__ __forceinline__ bool elect_one() {
    uint32_t elected;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
    return elected != 0;
}

// mbarriers --------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised mbarriers visible to the TMA unit.
__device__ __forceinline__ void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Makes this thread's writes, and those it has acquired, visible to later bulk copies.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

__device__ __forceinline__ void mbarrier_expect_tx(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1;\n"
        "@done bra.uni over;\n"
        "bra.uni again;\n"
        "over:\n"
        "}" ::"r"(barrier), "r"(parity)
        : "memory");
}

__device__ __forceinline__ void arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Waits for so many cycles, or until the barrier's first phase is complete.
__device__ __forceinline__ void throttle(uint32_t barrier, uint32_t cycles) {
    uint32_t begun, now, over;
    asm volatile("mov.u32 %0, %clock;" : "=r"(begun)::"memory");
    do {
        asm volatile("{\n.reg .pred over;\nmbarrier.test_wait.parity.shared::cta.b64 over, [%1], 0;\nselp.u32 %0, 1, 0, over;\n}"
                     : "=r"(over)
                     : "r"(barrier)
                     : "memory");
        asm volatile("mov.u32 %0, %clock;" : "=r"(now)::"memory");
    } while (over == 0 && now - begun < cycles);
}

// TMA --------------------------------------------------------------------------------------------------------------

constexpr uint64_t EVICT_NORMAL = 0x1000000000000000, EVICT_FIRST = 0x12F0000000000000, EVICT_LAST = 0x14F0000000000000;

// Copies a box that starts at (inner, outer, plane) into shared memory.
__device__ __forceinline__ void tma_load(
    uint32_t to, const CUtensorMap* map, int inner, int outer, int plane, uint32_t barrier, uint64_t hint) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to), "l"(map), "r"(inner), "r"(outer), "r"(plane), "r"(barrier), "l"(hint)
        : "memory");
}

// Copies contiguous bytes; `bytes` is a multiple of 16.
__device__ __forceinline__ void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
                 "r"(bytes), "r"(barrier)
                 : "memory");
}

// wgmma ------------------------------------------------------------------------------------------------------------

// Descriptor of a K-major tile: rows of 128 bytes, 128-byte swizzle, 1,024 bytes per 8 rows.
__device__ __forceinline__ uint64_t smem_descriptor(uint32_t address) {
    return static_cast<uint64_t>((address & 0x3ffff) >> 4) | (1ull << 16) | (static_cast<uint64_t>(1024 >> 4) << 32) |
           (1ull << 62);
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// sums [64, N] = (add ? sums : 0) + a [64, 16] @ b [N, 16]^T, fp16 in, fp32 sums. a is K-major, or MN-major if
// TRANSPOSED. Thread t of the warpgroup holds in sums[4j + i] row t / 32 * 16 + t % 32 / 4 + i / 2 * 8, column 8j + t %
// 4 * 2 + i % 2.
template <int N, bool TRANSPOSED>
__device__ __forceinline__ void wgmma_fp16(float (&sums)[N / 2], uint64_t a, uint64_t b, int add);

#define HOPPER_P0 "%0,%1,%2,%3,%4,%5,%6,%7"
#define HOPPER_P1 HOPPER_P0 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define HOPPER_P2 HOPPER_P1 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define HOPPER_P3 HOPPER_P2 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define HOPPER_P4 HOPPER_P3 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define HOPPER_P5 HOPPER_P4 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define HOPPER_P6 HOPPER_P5 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define HOPPER_P7 HOPPER_P6 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define HOPPER_P8 HOPPER_P7 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define HOPPER_P2_8 HOPPER_P2 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define HOPPER_P3_8 HOPPER_P3 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define HOPPER_P7_8 HOPPER_P7 ",%112,%113,%114,%115,%116,%117,%118,%119"
#define HOPPER_D8(i)                                                                                    \
    "+f"(s[i]), "+f"(s[i + 1]), "+f"(s[i + 2]), "+f"(s[i + 3]), "+f"(s[i + 4]), "+f"(s[i + 5]), "+f"(s[i + 6]), \
        "+f"(s[i + 7])
#define HOPPER_D16(i) HOPPER_D8(i), HOPPER_D8(i + 8)
#define HOPPER_D32(i) HOPPER_D16(i), HOPPER_D16(i + 16)
#define HOPPER_D64(i) HOPPER_D32(i), HOPPER_D32(i + 32)
#define HOPPER_WGMMA_FP16(N, REGISTERS, A, B, ADD, TRANS_A, ...)                                                          \
    template <>                                                                                                  \
    __device__ __forceinline__ void wgmma_fp16<N, false>(float (&s)[N / 2], uint64_t a, uint64_t b, int add) {     \
        HOPPER_WGMMA(N, REGISTERS, A, B, ADD, TRANS_A, 0, __VA_ARGS__)                                                 \
    }                                                                                                            \
    template <>                                                                                                  \
    __device__ __forceinline__ void wgmma_fp16<N, true>(float (&s)[N / 2], uint64_t a, uint64_t b, int add) {      \
        HOPPER_WGMMA(N, REGISTERS, A, B, ADD, TRANS_A, 1, __VA_ARGS__)                                                 \
    }
#define HOPPER_WGMMA(N, REGISTERS, A, B, ADD, TRANS_A, transposed, ...)                                                    \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #ADD ", 0;\n"                                          \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" REGISTERS "}, %" #A ", %" #B            \
                 ", add, 1, 1, %" #TRANS_A ", 0;\n}"                                                                \
                 : __VA_ARGS__                                                                                   \
                 : "l"(a), "l"(b), "r"(add), "n"(transposed));

HOPPER_WGMMA_FP16(16, HOPPER_P0, 8, 9, 10, 11, HOPPER_D8(0))
HOPPER_WGMMA_FP16(32, HOPPER_P1, 16, 17, 18, 19, HOPPER_D16(0))
HOPPER_WGMMA_FP16(64, HOPPER_P2, 32, 33, 34, 35, HOPPER_D32(0))
HOPPER_WGMMA_FP16(80, HOPPER_P2_8, 40, 41, 42, 43, HOPPER_D32(0), HOPPER_D8(32))
HOPPER_WGMMA_FP16(96, HOPPER_P3, 48, 49, 50, 51, HOPPER_D32(0), HOPPER_D16(32))
HOPPER_WGMMA_FP16(112, HOPPER_P3_8, 56, 57, 58, 59, HOPPER_D32(0), HOPPER_D16(32), HOPPER_D8(48))
HOPPER_WGMMA_FP16(128, HOPPER_P4, 64, 65, 66, 67, HOPPER_D64(0))
HOPPER_WGMMA_FP16(160, HOPPER_P5, 80, 81, 82, 83, HOPPER_D64(0), HOPPER_D16(64))
HOPPER_WGMMA_FP16(192, HOPPER_P6, 96, 97, 98, 99, HOPPER_D64(0), HOPPER_D32(64))
HOPPER_WGMMA_FP16(224, HOPPER_P7, 112, 113, 114, 115, HOPPER_D64(0), HOPPER_D32(64), HOPPER_D16(96))
HOPPER_WGMMA_FP16(240, HOPPER_P7_8, 120, 121, 122, 123, HOPPER_D64(0), HOPPER_D32(64), HOPPER_D16(96), HOPPER_D8(112))
HOPPER_WGMMA_FP16(256, HOPPER_P8, 128, 129, 130, 131, HOPPER_D64(0), HOPPER_D64(64))

// a [64, 32] e4m3, b [N, 32] e4m3 (wgmma_fp8) or e5m2 (wgmma_two_part), both K-major.
template <int N>
__device__ __forceinline__ void wgmma_fp8(float (&sums)[N / 2], uint64_t a, uint64_t b, int add);
template <int N>
__device__ __forceinline__ void wgmma_two_part(float (&sums)[N / 2], uint64_t a, uint64_t b, int add);

#define HOPPER_WGMMA_FP8(N, ...) HOPPER_WGMMA_8BIT(wgmma_fp8, "e4m3", N, __VA_ARGS__)
#define HOPPER_WGMMA_8BIT(NAME, TYPE, N, REGISTERS, A, B, ADD, ...)                                               \
    template <>                                                                                                  \
    __device__ __forceinline__ void NAME<N>(float (&s)[N / 2], uint64_t a, uint64_t b, int add) {                \
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #ADD ", 0;\n"                                     \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3." TYPE " {" REGISTERS "}, %" #A ", %" #B       \
                     ", add, 1, 1;\n}"                                                                           \
                     : __VA_ARGS__                                                                               \
                     : "l"(a), "l"(b), "r"(add));                                                                \
    }

HOPPER_WGMMA_8BIT(wgmma_two_part, "e5m2", 32, HOPPER_P1, 16, 17, 18, HOPPER_D16(0))
HOPPER_WGMMA_8BIT(wgmma_two_part, "e5m2", 64, HOPPER_P2, 32, 33, 34, HOPPER_D32(0))
HOPPER_WGMMA_8BIT(wgmma_two_part, "e5m2", 128, HOPPER_P4, 64, 65, 66, HOPPER_D64(0))
HOPPER_WGMMA_FP8(16, HOPPER_P0, 8, 9, 10, HOPPER_D8(0))
HOPPER_WGMMA_FP8(32, HOPPER_P1, 16, 17, 18, HOPPER_D16(0))
HOPPER_WGMMA_FP8(64, HOPPER_P2, 32, 33, 34, HOPPER_D32(0))
HOPPER_WGMMA_FP8(80, HOPPER_P2_8, 40, 41, 42, HOPPER_D32(0), HOPPER_D8(32))
HOPPER_WGMMA_FP8(96, HOPPER_P3, 48, 49, 50, HOPPER_D32(0), HOPPER_D16(32))
HOPPER_WGMMA_FP8(112, HOPPER_P3_8, 56, 57, 58, HOPPER_D32(0), HOPPER_D16(32), HOPPER_D8(48))
HOPPER_WGMMA_FP8(128, HOPPER_P4, 64, 65, 66, HOPPER_D64(0))
HOPPER_WGMMA_FP8(160, HOPPER_P5, 80, 81, 82, HOPPER_D64(0), HOPPER_D16(64))
HOPPER_WGMMA_FP8(192, HOPPER_P6, 96, 97, 98, HOPPER_D64(0), HOPPER_D32(64))
HOPPER_WGMMA_FP8(224, HOPPER_P7, 112, 113, 114, HOPPER_D64(0), HOPPER_D32(64), HOPPER_D16(96))
HOPPER_WGMMA_FP8(240, HOPPER_P7_8, 120, 121, 122, HOPPER_D64(0), HOPPER_D32(64), HOPPER_D16(96), HOPPER_D8(112))
HOPPER_WGMMA_FP8(256, HOPPER_P8, 128, 129, 130, HOPPER_D64(0), HOPPER_D64(64))

// a [64, 32] e4m3 from registers, in the layout of mma.m16n8k32 per warp; b [N, 32] e4m3, or e5m2 if PARTS.
template <int N, bool PARTS>
__device__ __forceinline__ void wgmma_rs(float (&sums)[N / 2], const uint32_t (&a)[4], uint64_t b, int add);

#define HOPPER_WGMMA_8BIT_RS(PARTS, TYPE, N, REGISTERS, A0, A1, A2, A3, B, ADD, ...)                            \
    template <>                                                                                                  \
    __device__ __forceinline__ void wgmma_rs<N, PARTS>(float (&s)[N / 2], const uint32_t (&a)[4], uint64_t b, int add) { \
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #ADD ", 0;\n"                                     \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3." TYPE " {" REGISTERS "}, {%" #A0 ",%" #A1 \
                     ",%" #A2 ",%" #A3 "}, %" #B ", add, 1, 1;\n}"                                                \
                     : __VA_ARGS__                                                                               \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                             \
    }
#define HOPPER_WGMMA_FP8_RS(N, ...) HOPPER_WGMMA_8BIT_RS(false, "e4m3", N, __VA_ARGS__)

HOPPER_WGMMA_8BIT_RS(true, "e5m2", 32, HOPPER_P1, 16, 17, 18, 19, 20, 21, HOPPER_D16(0))
HOPPER_WGMMA_8BIT_RS(true, "e5m2", 64, HOPPER_P2, 32, 33, 34, 35, 36, 37, HOPPER_D32(0))
HOPPER_WGMMA_8BIT_RS(true, "e5m2", 128, HOPPER_P4, 64, 65, 66, 67, 68, 69, HOPPER_D64(0))
HOPPER_WGMMA_FP8_RS(96, HOPPER_P3, 48, 49, 50, 51, 52, 53, HOPPER_D32(0), HOPPER_D16(32))
HOPPER_WGMMA_FP8_RS(128, HOPPER_P4, 64, 65, 66, 67, 68, 69, HOPPER_D64(0))
HOPPER_WGMMA_FP8_RS(160, HOPPER_P5, 80, 81, 82, 83, 84, 85, HOPPER_D64(0), HOPPER_D16(64))
HOPPER_WGMMA_FP8_RS(192, HOPPER_P6, 96, 97, 98, 99, 100, 101, HOPPER_D64(0), HOPPER_D32(64))
HOPPER_WGMMA_FP8_RS(224, HOPPER_P7, 112, 113, 114, 115, 116, 117, HOPPER_D64(0), HOPPER_D32(64), HOPPER_D16(96))
HOPPER_WGMMA_FP8_RS(240, HOPPER_P7_8, 120, 121, 122, 123, 124, 125, HOPPER_D64(0), HOPPER_D32(64), HOPPER_D16(96), HOPPER_D8(112))
HOPPER_WGMMA_FP8_RS(256, HOPPER_P8, 128, 129, 130, 131, 132, 133, HOPPER_D64(0), HOPPER_D64(64))

// a [64, 16] fp16 from registers, in the layout of mma.m16n8k16 per warp; b [N, 16] fp16.
template <int N>
__device__ __forceinline__ void wgmma_rs(float (&sums)[N / 2], const uint32_t (&a)[4], uint64_t b, int add);

#define HOPPER_WGMMA_FP16_RS(N, REGISTERS, A0, A1, A2, A3, B, ADD, ...)                                              \
    template <>                                                                                                  \
    __device__ __forceinline__ void wgmma_rs<N>(float (&s)[N / 2], const uint32_t (&a)[4], uint64_t b, int add) { \
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #ADD ", 0;\n"                                     \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" REGISTERS "}, {%" #A0 ",%" #A1 ",%" #A2 \
                     ",%" #A3 "}, %" #B ", add, 1, 1, 0;\n}"                                                       \
                     : __VA_ARGS__                                                                               \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                             \
    }

HOPPER_WGMMA_FP16_RS(32, HOPPER_P1, 16, 17, 18, 19, 20, 21, HOPPER_D16(0))
HOPPER_WGMMA_FP16_RS(64, HOPPER_P2, 32, 33, 34, 35, 36, 37, HOPPER_D32(0))
HOPPER_WGMMA_FP16_RS(128, HOPPER_P4, 64, 65, 66, 67, 68, 69, HOPPER_D64(0))
HOPPER_WGMMA_FP16_RS(256, HOPPER_P8, 128, 129, 130, 131, 132, 133, HOPPER_D64(0), HOPPER_D64(64))

}  // namespace hopper
