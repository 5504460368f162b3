// Operand A of wgmma from 8-bit weights [k, n]: ldmatrix.trans on pairs of bytes, then one byte permutation per
// register.
//
// Tile: [128 inputs][128 outputs] u8, 128-byte swizzle, as TMA writes it. A warp holds 16 outputs: one 16-byte chunk of
// every row. Lane: g = lane / 4, t = lane % 4.
// ldmatrix gives a lane two inputs of outputs 2g and 2g + 1 from each matrix of 8 rows. These are operand rows g and g
// + 8.
// The inputs of a matrix's rows are chosen so that a lane gets inputs 4t .. 4t + 3 and the same 16 further, without
// bank conflicts. For t = 2, 3 the second pair comes first.
#pragma once

#include "../hopper.cuh"

// Output (0 .. 15) of operand row g + 8 * up.
__device__ __forceinline__ int transposed_output(int lane, int up) { return lane / 4 * 2 + up; }

// Loads four matrices of 8 rows of 16 bytes; lane i passes the address of row i % 8 of matrix i / 8. A lane gets bytes
// 2g and 2g + 1 of rows 2t and 2t + 1 of each.
__device__ __forceinline__ void load_pairs(uint32_t (&pairs)[4], uint32_t at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
                 : "r"(at)
                 : "memory");
}

class TransposedOperand {
public:
    static constexpr int ROW_BYTES = 128;
    static constexpr int STEP = 32;  // inputs of one wgmma

    // warp: 0 .. 7 of the CTA's consumers
    __device__ __forceinline__ TransposedOperand(int warp, int lane) {
        const int matrix = lane / 8, row = lane % 8, t = row / 2;
        const int input = matrix / 2 * 16 + 4 * t + row % 2 + 2 * (matrix % 2 ^ t / 2);
        offset = input * ROW_BYTES + ((warp ^ (input & 7)) << 4);
        const bool swapped = (lane & 2) != 0;
        even = swapped ? 0x2064 : 0x6420, odd = swapped ? 0x3175 : 0x7531;
    }

    // Keeps thread constants in registers: nvcc recomputes them for every tile otherwise.
    __device__ __forceinline__ void keep() { asm volatile("" : "+r"(offset), "+r"(even), "+r"(odd)); }

    // Registers of inputs STEP * step .. of `tile`: (row, k), (row + 8, k), (row, k + 16), (row + 8, k + 16).
    __device__ __forceinline__ void read(uint32_t (&a)[4], uint32_t tile, int step) const {
        uint32_t pairs[4];
        load_pairs(pairs, tile + offset + step * (STEP * ROW_BYTES));
#pragma unroll
        for (int right = 0; right < 2; ++right) {
            a[2 * right] = __byte_perm(pairs[2 * right], pairs[2 * right + 1], even);
            a[2 * right + 1] = __byte_perm(pairs[2 * right], pairs[2 * right + 1], odd);
        }
    }

private:
    uint32_t offset;  // of the lane's row in the tile's first step
    uint32_t even, odd;  // byte selectors of the two outputs
};
