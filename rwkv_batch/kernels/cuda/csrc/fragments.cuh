// Operands of mma.m16n8k16 in registers, from shared memory and from sums: fp16 in, fp32 sums.
#pragma once

#include "common.cuh"

struct Fragment {
    uint32_t x[4];
};

__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Four 8x8 tiles of halves; lane i gives the address of a row of tile i / 8.
template <bool TRANSPOSED>
__device__ __forceinline__ Fragment load_matrix(const __half* row) {
    Fragment f;
    if constexpr (TRANSPOSED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(f.x[0]), "=r"(f.x[1]), "=r"(f.x[2]), "=r"(f.x[3]) : "r"(shared_address(row)) : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(f.x[0]), "=r"(f.x[1]), "=r"(f.x[2]), "=r"(f.x[3]) : "r"(shared_address(row)) : "memory");
    }
    return f;
}

__device__ __forceinline__ void mma(float (&c)[4], const Fragment& a, uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t pack2(float lo, float hi) {
    const __half2 h = __floats2half2_rn(lo, hi);
    return *reinterpret_cast<const uint32_t*>(&h);
}

// Two neighbouring accumulator tiles [16 x 8] as one left operand [16 x 16].
__device__ __forceinline__ Fragment as_operand(const float (&lo)[4], const float (&hi)[4]) {
    return {{pack2(lo[0], lo[1]), pack2(lo[2], lo[3]), pack2(hi[0], hi[1]), pack2(hi[2], hi[3])}};
}

// Left operand [16 x 16] from row-major m[16 rows][ld] at column `at`.
__device__ __forceinline__ Fragment left_operand(const __half* m, int ld, int at, int lane) {
    return load_matrix<false>(m + (lane & 15) * ld + at + (lane >> 4) * 8);
}

// Right operand k16 x n16 from row-major m[n][k]: registers 0, 1 are the first 8 columns, 2, 3 the others.
__device__ __forceinline__ Fragment right_operand(const __half* m, int ld, int at, int lane) {
    return load_matrix<false>(m + ((lane & 7) + (lane >> 4) * 8) * ld + at + ((lane >> 3) & 1) * 8);
}

// Right operand k16 x n16 from row-major m[k][n] at column `at`: as above, transposed on the way.
__device__ __forceinline__ Fragment right_operand_kn(const __half* m, int ld, int at, int lane) {
    return load_matrix<true>(m + ((lane & 7) + ((lane >> 3) & 1) * 8) * ld + at + (lane >> 4) * 8);
}

// Left operand [16 i x 16 s] = v[s][i]^T at column `at`.
__device__ __forceinline__ Fragment left_operand_transposed(const __half* m, int ld, int at, int lane) {
    return load_matrix<true>(m + ((lane & 7) + (lane >> 4) * 8) * ld + at + ((lane >> 3) & 1) * 8);
}

__device__ __forceinline__ void unpack2(uint32_t packed, float& lo, float& hi) {
    const float2 f = __half22float2(*reinterpret_cast<const __half2*>(&packed));
    lo = f.x, hi = f.y;
}

// A left operand [16 x 16] as two neighbouring accumulator tiles [16 x 8].
__device__ __forceinline__ void as_sums(const Fragment& f, float (&sums)[2][4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) unpack2(f.x[i], sums[i >> 1][(i & 1) * 2], sums[i >> 1][(i & 1) * 2 + 1]);
}
