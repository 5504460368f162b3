// Codes of 8 bits [k, n] -> [n, k], for products of very many rows by cuBLAS, which wants the inputs of an output side by side.
//
// A block turns 128 inputs of 128 outputs: a thread 4 inputs of 16 outputs, in registers, four bytes by four, then through shared
// memory [128 outputs][128 inputs], whose words of four inputs are swizzled over the banks. k a multiple of 128, n of 16. Bytes 2nk.
#include "common.cuh"

constexpr int TURN_TILE = 128;

// Byte j of word i from byte i of word j.
__device__ __forceinline__ void turn_words(uint32_t (&w)[4]) {
    const uint32_t low = __byte_perm(w[0], w[1], 0x5140), high = __byte_perm(w[0], w[1], 0x7362);
    const uint32_t low2 = __byte_perm(w[2], w[3], 0x5140), high2 = __byte_perm(w[2], w[3], 0x7362);
    w[0] = __byte_perm(low, low2, 0x5410), w[1] = __byte_perm(low, low2, 0x7632);
    w[2] = __byte_perm(high, high2, 0x5410), w[3] = __byte_perm(high, high2, 0x7632);
}

__global__ void __launch_bounds__(256) turn_codes_kernel(const uint8_t* codes, uint8_t* turned, int k, int n) {
    __shared__ __align__(16) uint32_t tile[TURN_TILE * TURN_TILE / 4];
    let_next_start();
    const int chunk = threadIdx.x % 8, quad = threadIdx.x / 8;  // of 16 outputs, of 4 inputs
    const int64_t first_k = static_cast<int64_t>(blockIdx.y) * TURN_TILE;
    const int first_n = static_cast<int>(blockIdx.x) * TURN_TILE, column = first_n + chunk * 16;
    uint4 rows[4] = {};
    if (column < n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) rows[i] = load16(codes + (first_k + quad * 4 + i) * n + column);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const auto word = [&](const uint4& v) { return j == 0 ? v.x : j == 1 ? v.y : j == 2 ? v.z : v.w; };
        uint32_t w[4] = {word(rows[0]), word(rows[1]), word(rows[2]), word(rows[3])};
        turn_words(w);
#pragma unroll
        for (int i = 0; i < 4; ++i) tile[(chunk * 16 + j * 4 + i) * (TURN_TILE / 4) + (quad ^ 4 * chunk)] = w[i];
    }
    __syncthreads();
    wait_for_inputs();  // what was in its place has been read
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int output = i * 32 + threadIdx.x / 8, words = threadIdx.x % 8 * 4;
        if (first_n + output >= n) continue;
        const uint4 v = load16(tile + output * (TURN_TILE / 4) + (words ^ output / 16 * 4));
        store16(turned + static_cast<int64_t>(first_n + output) * k + first_k + words * 4, v);
    }
}

RWKV_API int rwkv_turn_codes(const void* codes, void* turned, int k, int n, void* stream) {
    if (k % TURN_TILE != 0 || n % 16 != 0) return static_cast<int>(cudaErrorInvalidValue);
    const dim3 grid((n + TURN_TILE - 1) / TURN_TILE, k / TURN_TILE);
    launch(turn_codes_kernel, grid, 256, stream, static_cast<const uint8_t*>(codes), static_cast<uint8_t*>(turned), k, n);
    return launch_result();
}
