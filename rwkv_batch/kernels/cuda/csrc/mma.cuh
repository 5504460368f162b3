// mma.m16n8k16 (fp16 in, fp32 sums), its register operands loaded by ldmatrix or made from accumulators; and
// mma.m16n8k32 of bytes.
#pragma once

#include "common.cuh"

struct Fragment {
    uint32_t x[4];
};

__device__ __forceinline__ uint32_t smem_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Loads four 8x8 fp16 matrices. Lane i passes the address of row i % 8 of matrix i / 8.
template <bool TRANSPOSED>
__device__ __forceinline__ Fragment load_matrix(const __half* row) {
    Fragment f;
    if constexpr (TRANSPOSED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(f.x[0]), "=r"(f.x[1]), "=r"(f.x[2]), "=r"(f.x[3]) : "r"(smem_address(row)) : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(f.x[0]), "=r"(f.x[1]), "=r"(f.x[2]), "=r"(f.x[3]) : "r"(smem_address(row)) : "memory");
    }
    return f;
}

__device__ __forceinline__ void mma(float (&c)[4], const Fragment& a, uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b0), "r"(b1));
}

// m16n8k32 of s8, with s32 sums. mma_s8_u8: the right operand is u8.
__device__ __forceinline__ void mma_s8(int (&c)[4], const uint4& a, uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_s8_u8(int (&c)[4], const uint4& a, uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t pack2(float lo, float hi) {
    const __half2 h = __floats2half2_rn(lo, hi);
    return *reinterpret_cast<const uint32_t*>(&h);
}

// Two adjacent accumulator tiles [16, 8] -> one left operand [16, 16].
__device__ __forceinline__ Fragment as_operand(const float (&lo)[4], const float (&hi)[4]) {
    return {{pack2(lo[0], lo[1]), pack2(lo[2], lo[3]), pack2(hi[0], hi[1]), pack2(hi[2], hi[3])}};
}

// Left operand [16, 16] from row-major m [16][ld], from column `at` on.
__device__ __forceinline__ Fragment left_operand(const __half* m, int ld, int at, int lane) {
    return load_matrix<false>(m + (lane & 15) * ld + at + (lane >> 4) * 8);
}

// Right operand [k 16, n 16] from row-major m [n][k]. Registers 0, 1 hold columns 0 to 7, registers 2, 3 the others.
__device__ __forceinline__ Fragment right_operand(const __half* m, int ld, int at, int lane) {
    return load_matrix<false>(m + ((lane & 7) + (lane >> 4) * 8) * ld + at + ((lane >> 3) & 1) * 8);
}

// Right operand [k 16, n 16] from row-major m [k][n], from column `at` on.
__device__ __forceinline__ Fragment right_operand_kn(const __half* m, int ld, int at, int lane) {
    return load_matrix<true>(m + ((lane & 7) + ((lane >> 3) & 1) * 8) * ld + at + (lane >> 4) * 8);
}

// Left operand [i 16, s 16] = m [s][i]^T, from column `at` on.
__device__ __forceinline__ Fragment left_operand_transposed(const __half* m, int ld, int at, int lane) {
    return load_matrix<true>(m + ((lane & 7) + (lane >> 4) * 8) * ld + at + ((lane >> 3) & 1) * 8);
}

__device__ __forceinline__ void unpack2(uint32_t packed, float& lo, float& hi) {
    const float2 f = __half22float2(*reinterpret_cast<const __half2*>(&packed));
    lo = f.x, hi = f.y;
}

// A left operand [16, 16] -> two adjacent accumulator tiles [16, 8].
__device__ __forceinline__ void as_accumulators(const Fragment& f, float (&sums)[2][4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) unpack2(f.x[i], sums[i >> 1][(i & 1) * 2], sums[i >> 1][(i & 1) * 2 + 1]);
}
