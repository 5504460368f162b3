// Operand B of hopper_row.cu: how a row is split into parts, where the parts lie, and the instructions that multiply
// them.
#pragma once

#include "hopper_row_smem.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr int PARTS = 3;  // parts per input
constexpr int PAIR_BYTES = 1024;  // two groups of 128 inputs: [16 inputs][group, part][16]

namespace hopper {
// Descriptor without swizzle: 8 rows of 16 contiguous bytes. along_k, along_rows: bytes to the next 16 inputs, 8 rows.
__device__ __forceinline__ uint64_t smem_descriptor_rows16(uint32_t address, uint32_t along_k, uint32_t along_rows) {
    return static_cast<uint64_t>((address & 0x3ffff) >> 4) | static_cast<uint64_t>(along_k >> 4) << 16 |
           static_cast<uint64_t>(along_rows >> 4) << 32;
}
__device__ __forceinline__ void fence_proxy_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// s [64, 8] = (add ? s : 0) + a [64, 32] @ b [8, 32]^T.
__device__ __forceinline__ void wgmma_e4m3_n8(float (&s)[4], uint64_t a, uint64_t b, int add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %6, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0,%1,%2,%3}, %4, %5, add, 1, 1;\n}"
                 : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3]) : "l"(a), "l"(b), "r"(add));
}
__device__ __forceinline__ void wgmma_s8s8_n8(int (&s)[4], uint64_t a, uint64_t b, int add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %6, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8 {%0,%1,%2,%3}, %4, %5, add;\n}"
                 : "+r"(s[0]), "+r"(s[1]), "+r"(s[2]), "+r"(s[3]) : "l"(a), "l"(b), "r"(add));
}
// Per warp: s [16, 8] += a [16, 32] @ b [8, 32]^T.
__device__ __forceinline__ void mma_u8s8(int (&s)[4], const uint32_t (&a)[4], uint32_t low, uint32_t high) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+r"(s[0]), "+r"(s[1]), "+r"(s[2]), "+r"(s[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(low), "r"(high));
}
// s [64, 8] = (add ? s : 0) + a [64, 16] @ b [8, 16]^T, fp16.
__device__ __forceinline__ void wgmma_fp16_n8(float (&s)[4], uint64_t a, uint64_t b, int add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %6, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0,%1,%2,%3}, %4, %5, add, 1, 1, 0, 0;\n}"
                 : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3]) : "l"(a), "l"(b), "r"(add));
}
}  // namespace hopper

__device__ __forceinline__ void sync_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }
__device__ __forceinline__ void st_shared_v2(uint32_t at, uint32_t a, uint32_t b) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(at), "r"(a), "r"(b) : "memory");
}

// NaN if either is NaN: such a group gets a NaN scale.
__device__ __forceinline__ float max_nan(float a, float b) {
    float v;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(v) : "f"(a), "f"(b));
    return v;
}
// Over a half-warp, which holds 128 inputs.
__device__ __forceinline__ float half_warp_max(float v) {
#pragma unroll
    for (int i = 8; i > 0; i >>= 1) v = max_nan(v, __shfl_xor_sync(FULL_MASK, v, i));
    return v;
}
__device__ __forceinline__ int half_warp_sum(int v) {
#pragma unroll
    for (int i = 8; i > 0; i >>= 1) v += __shfl_xor_sync(FULL_MASK, v, i);
    return v;
}
__device__ __forceinline__ uint32_t pack_bytes(int a, int b, int c, int d) {
    return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

// int4: address of the high bytes of 32 inputs, a quarter of a group. The low bytes lie SECOND_PART_OFFSET (xor) away.
constexpr uint32_t SECOND_PART_OFFSET = 128 | 64;
__device__ __forceinline__ uint32_t operand_address(uint32_t x, int group, int quarter) { return x + group * 256 + quarter * 32; }

// Loads 16 bytes, or returns zeros.
__device__ __forceinline__ uint4 ld_shared_u128_if(bool is_loaded, uint32_t at) {
    uint4 v;
    asm volatile("{\n.reg .pred wanted;\nsetp.ne.u32 wanted, %5, 0;\nmov.u32 %0, 0;\nmov.u32 %1, 0;\nmov.u32 %2, 0;\nmov.u32 %3, 0;\n"
                 "@wanted ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
                 : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w) : "r"(at), "r"(static_cast<uint32_t>(is_loaded)) : "memory");
    return v;
}

// W8A8: address of the code at a position. Only the first column of each group's four is written.
__device__ __forceinline__ uint32_t code_address(uint32_t x, int position) {
    const int group = position / GROUP_INPUTS;
    return x + group / 2 * PAIR_BYTES + group % 2 * 64 + position % GROUP_INPUTS / 16 * 128 + position % 16;
}

// A row in 8 bits, eight channels per consumer thread.
struct RowCodes {
    W8A8Octet octet = {};
    int partner = 0;  // of position threadIdx.x, below SEGMENT

    // Loads constants. Called before wait_for_previous_kernel.
    __device__ __forceinline__ void load(const QuantGemmArgs& m, int c) {
        if (c < m.k) octet.load(m.factors, c);
        if (threadIdx.x < SEGMENT) partner = __ldg(m.order + threadIdx.x);
    }

    // Rounds channels c .. c + 7 (zeros from k on) and stores them as operand B at x. All consumers call it; sync is
    // their barrier.
    template <typename Sync>
    __device__ __forceinline__ W8A8Row<false> store(uint32_t x, W8A8Maxima& maxima, int c, int k, const uint4& values, const Sync& sync) const {
        float v[8];
        octet.scale<false>(values, v);
        W8A8Largest largest;
        largest.add(octet, v);
        maxima.add(largest);
        sync();
        const W8A8Largest of_all = maxima.of_row(CONSUMERS / 32);
        const W8A8Row<false> row(of_all.rest, of_all.of_large());
        if (c < k) {
            const uint2 codes = octet.codes<false>(v, row.inverses());
            st_shared_v2(code_address(x, c), codes.x, codes.y);
        }
        sync();
        if (threadIdx.x < SEGMENT && partner != static_cast<int>(threadIdx.x)) {
            const uint32_t here = code_address(x, threadIdx.x), there = code_address(x, partner);
            uint32_t a, b;
            asm volatile("ld.shared.u8 %0, [%1];" : "=r"(a) : "r"(here) : "memory");
            asm volatile("ld.shared.u8 %0, [%1];" : "=r"(b) : "r"(there) : "memory");
            asm volatile("st.shared.u8 [%0], %1;" ::"r"(here), "r"(b) : "memory");
            asm volatile("st.shared.u8 [%0], %1;" ::"r"(there), "r"(a) : "memory");
        }
        return row;
    }
};

// Splits inputs c .. c + 7 (zeros if not `inside`) and stores them as operand B at x. All lanes of a warp call it.
template <Format FORMAT>
__device__ __forceinline__ void store_operand(uint32_t x, RowSmem& smem, int c, const uint4& values, bool inside) {
    float f[8], largest = 0.0f;
    unpack8(values, f);
#pragma unroll
    for (int j = 0; j < 8; ++j) largest = max_nan(largest, fabsf(f[j]));
    largest = half_warp_max(largest);
    const int group = c / GROUP_INPUTS;
    const uint32_t to = x + group / 2 * PAIR_BYTES + group % 2 * 64;
    if constexpr (FORMAT == FP8) {
        // Scaled so that the maximum is 128 to 256. A group that is not finite gets its maximum as scale.
        const uint32_t exponent = largest != 0.0f ? __float_as_uint(largest) >> 23 : 127u;
        const float inverse = __uint_as_float((261u - exponent) << 23);
        uint32_t codes[PARTS][4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float lo = f[2 * j] * inverse, hi = f[2 * j + 1] * inverse;
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                uint16_t code;
                asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(code) : "f"(hi), "f"(lo));
                codes[part][j] = code;
                const uint32_t pair = e4m3x2_to_half2(code);
                const float2 meant = __half22float2(*reinterpret_cast<const __half2*>(&pair));
                lo = (lo - meant.x) * 16.0f, hi = (hi - meant.y) * 16.0f;
            }
        }
        if (!inside) return;
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
            st_shared_v2(to + c % 128 / 16 * 128 + part * 16 + (c & 8), codes[part][0] | codes[part][1] << 16, codes[part][2] | codes[part][3] << 16);
        if ((threadIdx.x & 15) == 0) smem.scales[group] = exponent < 255u ? __uint_as_float((exponent - 7u) << 23) : largest;
    } else {
        static_assert(FORMAT == INT4);
        // Two bytes, ordered as a lane unpacks a word: low nibbles of its bytes, then high nibbles. The weights are 16
        // times as large.
        constexpr float MAX_INTEGER = 127.0f * 256.0f;
        const float inverse = largest > 0.0f ? MAX_INTEGER / largest : 0.0f;
        int high[8], low[8], sum = 0;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const int v = __float2int_rn(f[j] * inverse);
            high[j] = (v + 128) >> 8, low[j] = v - (high[j] << 8), sum += v;
        }
        sum = half_warp_sum(sum);
        if (!inside) return;
        const int word = c % 128 / 8;
        const uint32_t at = operand_address(x, group, word / 4) + word % 4 * 8;
        st_shared_v2(at, pack_bytes(high[0], high[4], high[1], high[5]), pack_bytes(high[2], high[6], high[3], high[7]));
        st_shared_v2(at ^ SECOND_PART_OFFSET, pack_bytes(low[0], low[4], low[1], low[5]), pack_bytes(low[2], low[6], low[3], low[7]));
        if ((threadIdx.x & 15) == 0) {
            smem.scales[group] = largest / (16.0f * MAX_INTEGER);
            smem.input_sums[group] = static_cast<float>(16 * sum);
        }
    }
}
#endif
