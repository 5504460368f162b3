// Transposes 8-bit weights for cuBLAS, which needs K-major weights: transposed[j, i] = qweight[i, j].
//
// in   qweight     [k, n] u8
//
// out  transposed  [n, k] u8
//
// A thread transposes 4 inputs x 16 outputs in registers.
//
// Grid: (n / 128, k / 128), a tile of 128 inputs x 128 outputs per CTA.
// Block: 256 threads.
// Shared memory: 16 KB, [128 outputs][32 words of 4 inputs], words swizzled over the banks.
// Bound: memory; 2 n k bytes. Share of 4.8 TB/s (H200, [16,384, 4,096]): about 89 %.
// Made for: k % 128 == 0, n % 16 == 0.
#include "common.cuh"

constexpr int TRANSPOSE_TILE = 128;

// Transposes a 4x4 matrix of bytes: byte j of word i comes from byte i of word j.
__device__ __forceinline__ void transpose_words(uint32_t (&w)[4]) {
    const uint32_t low = __byte_perm(w[0], w[1], 0x5140), high = __byte_perm(w[0], w[1], 0x7362);
    const uint32_t low2 = __byte_perm(w[2], w[3], 0x5140), high2 = __byte_perm(w[2], w[3], 0x7362);
    w[0] = __byte_perm(low, low2, 0x5410), w[1] = __byte_perm(low, low2, 0x7632);
    w[2] = __byte_perm(high, high2, 0x5410), w[3] = __byte_perm(high, high2, 0x7632);
}

__global__ void __launch_bounds__(256) transpose_weights_kernel(const uint8_t* codes, uint8_t* transposed, int k, int n) {
    __shared__ __align__(16) uint32_t tile[TRANSPOSE_TILE * TRANSPOSE_TILE / 4];
    allow_next_kernel();
    const int chunk = threadIdx.x % 8, quad = threadIdx.x / 8;  // of 16 outputs; of 4 inputs
    const int64_t first_k = static_cast<int64_t>(blockIdx.y) * TRANSPOSE_TILE;
    const int first_n = static_cast<int>(blockIdx.x) * TRANSPOSE_TILE, column = first_n + chunk * 16;
    uint4 rows[4] = {};
    if (column < n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) rows[i] = load16(codes + (first_k + quad * 4 + i) * n + column);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const auto word = [&](const uint4& v) { return j == 0 ? v.x : j == 1 ? v.y : j == 2 ? v.z : v.w; };
        uint32_t w[4] = {word(rows[0]), word(rows[1]), word(rows[2]), word(rows[3])};
        transpose_words(w);
#pragma unroll
        for (int i = 0; i < 4; ++i) tile[(chunk * 16 + j * 4 + i) * (TRANSPOSE_TILE / 4) + (quad ^ 4 * chunk)] = w[i];
    }
    __syncthreads();
    wait_for_previous_kernel();  // the previous kernel may still read `transposed`
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int output = i * 32 + threadIdx.x / 8, words = threadIdx.x % 8 * 4;
        if (first_n + output >= n) continue;
        const uint4 v = load16(tile + output * (TRANSPOSE_TILE / 4) + (words ^ output / 16 * 4));
        store16(transposed + static_cast<int64_t>(first_n + output) * k + first_k + words * 4, v);
    }
}

RWKV_API int rwkv_transpose_weights(const void* codes, void* transposed, int k, int n, void* stream) {
    if (k % TRANSPOSE_TILE != 0 || n % 16 != 0) return static_cast<int>(cudaErrorInvalidValue);
    const dim3 grid((n + TRANSPOSE_TILE - 1) / TRANSPOSE_TILE, k / TRANSPOSE_TILE);
    launch(transpose_weights_kernel, grid, 256, stream, static_cast<const uint8_t*>(codes), static_cast<uint8_t*>(transposed), k, n);
    return launch_result();
}
