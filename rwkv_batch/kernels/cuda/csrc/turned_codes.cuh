// Codes of 8 bits of weights stored [k, n] as the first operand of wgmma, which wants four inputs of an output in a register: out of
// a tile in shared memory by ldmatrix, which turns pairs of bytes, and one byte permutation a register.
//
// The tile: 128 inputs, a row of 128 outputs each, 128-byte swizzle, as one bulk tensor copy leaves it. A warp has 16 outputs, the
// 16 bytes of one place of each row. ldmatrix gives a lane two inputs of outputs 2g and 2g + 1 (g = lane / 4) from each matrix of 8
// rows; the operand's rows g and g + 8 are these two. Which inputs the rows of a matrix are is free: they are chosen so that a lane
// gets those that its place of the operand wants, 4t .. 4t + 3 (t = lane % 4) and the same 16 further, and so that the 8 rows of a
// matrix lie in different banks: for t of 2 and 3 the second pair comes first.
#pragma once

#include "hopper.cuh"

// The output of 16 that a lane's sums of the one or the other row of the operand are of.
__device__ __forceinline__ int turned_output(int lane, int up) { return lane / 4 * 2 + up; }

// Four matrices of 8 rows of 16 bytes, lane i giving the address of row i % 8 of matrix i / 8: a lane gets bytes 2g and 2g + 1 of
// rows 2t and 2t + 1 of each.
__device__ __forceinline__ void load_pairs(uint32_t (&pairs)[4], uint32_t at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
                 : "r"(at)
                 : "memory");
}

class TurnedCodes {
public:
    static constexpr int ROW_BYTES = 128;
    static constexpr int STEP = 32;  // inputs of a product

    // warp: 0 .. 7, of the tile's 128 outputs.
    __device__ __forceinline__ TurnedCodes(int warp, int lane) {
        const int matrix = lane / 8, row = lane % 8, t = row / 2;
        const int input = matrix / 2 * 16 + 4 * t + row % 2 + 2 * (matrix % 2 ^ t / 2);
        offset = input * ROW_BYTES + ((warp ^ (input & 7)) << 4);
        const bool swapped = (lane & 2) != 0;
        even = swapped ? 0x2064 : 0x6420, odd = swapped ? 0x3175 : 0x7531;
    }

    // What depends on the thread alone stays in registers: nvcc makes it anew for every tile otherwise.
    __device__ __forceinline__ void keep() { asm volatile("" : "+r"(offset), "+r"(even), "+r"(odd)); }

    // The operand's registers for inputs STEP * step .. of the tile at `tile`: (row, k), (row + 8, k), (row, k + 16), (row + 8, k + 16).
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
    uint32_t offset;     // of the lane's row in a tile's first step
    uint32_t even, odd;  // which bytes of two registers are of the one output, and of the other
};
