// Skinny GEMM with fp16 weights (skinny.cuh): y = act(x @ W^T) for up to 16 rows, several weights per launch.
//
// in   W  [n, k] fp16
//      x  [rows, k] fp16
//
// out  y  [rows, ld_y] fp16 or fp32
//
// Warp tile: 32 outputs; 16 with twice the k if one CTA per SM then suffices. Lane t of a quad holds k = 8t .. 8t + 7
// of 32. A thread keeps 8 x 16 bytes in flight, an SM 64 KB.
//
// Grid, block: as in skinny.cuh, at most two CTAs per SM of 256 threads.
// Shared memory: 10 to 21 KB, partial sums.
// Bound: memory; 2 n k bytes. x comes through L1. Share of 4.8 TB/s (H200): head [65,536, 4,096] 1 row 77 %, 8 rows
// 81 %.
// Made for: rows <= 16, n % 32 == 0, k % 64 == 0.
#include "skinny.cuh"

struct SkinnyGemmArgs {
    const __half* weight;
    const __half* x;
    void* y;
    int n, k, ld_y;
    int activation;
    int out_fp32;
    int warps_k;  // warps of a CTA that share k: 1, 2, 4 or 8
    int first_block, blocks;  // CTAs of this GEMM
};

struct SkinnyLaunchArgs {
    SkinnyGemmArgs gemms[MAX_GEMMS];
    int count;
    int rows;
};

// A chunk of W: HEIGHT tiles of 16 outputs x PARTS pieces of 32 inputs. w [tile][output g, g + 8][piece]
template <int TILES_HIGH>
struct WeightChunk {
    static constexpr int HEIGHT = TILES_HIGH, PARTS = 4 / HEIGHT, DEPTH = PARTS * 32, LANE = 8;
    static constexpr bool SUMMED = false;
    uint4 w[HEIGHT][2][PARTS];

    __device__ static __forceinline__ int depth(const SkinnyGemmArgs&) { return DEPTH; }
    __device__ static __forceinline__ int lane(const SkinnyGemmArgs&) { return LANE; }
    __device__ __forceinline__ void load(const SkinnyGemmArgs& m, int row0, int k0, int g, int t) {
        const __half* at = m.weight + static_cast<int64_t>(row0 + g) * m.k + k0 + LANE * t;
#pragma unroll
        for (int tile = 0; tile < HEIGHT; ++tile) {
#pragma unroll
            for (int up = 0; up < 2; ++up) {
                const __half* row = at + static_cast<int64_t>(tile * 16 + up * 8) * m.k;
#pragma unroll
                for (int part = 0; part < PARTS; ++part) w[tile][up][part] = load_stream(row + 32 * part);
            }
        }
    }

    // Multiplies TILES * 8 rows of x.
    template <int TILES, typename Rows>
    __device__ __forceinline__ void multiply(float (&sums)[HEIGHT][TILES][4], const SkinnyGemmArgs&, const Rows& x, int g) const {
        multiply_fp16(sums, w, x, g);
    }

    __device__ static __forceinline__ float scaled(float sum, const SkinnyGemmArgs&, int) { return sum; }
};

template <int TILES, int HEIGHT>
__global__ void __launch_bounds__(WARPS * 32, 2) skinny_kernel(const __grid_constant__ SkinnyLaunchArgs args) {
    stream_gemms<WeightChunk<HEIGHT>, TILES, FROM_GLOBAL>(args);
}

// Fills first_block and blocks; rows <= 16.
RWKV_API int rwkv_skinny(SkinnyLaunchArgs* args, void* stream) {
    const bool few = args->rows <= 8;
    const auto bytes_of = [](const SkinnyGemmArgs& m) { return 2LL * m.k; };
    bool deep = true;
    for (int i = 0; i < args->count; ++i) deep = deep && args->gemms[i].k % (args->gemms[i].warps_k * 128) == 0;
    const CtaAssignment narrow = assign_ctas(*args, 16, bytes_of);
    if (deep && narrow.blocks <= device_info().num_sms) {
        return launch_gemms(few ? skinny_kernel<1, 1> : skinny_kernel<2, 1>, *args, narrow.blocks, stream);
    }
    const CtaAssignment wide = assign_ctas(*args, 32, bytes_of);
    return launch_gemms(few ? skinny_kernel<1, 2> : skinny_kernel<2, 2>, *args, wide.blocks, stream);
}
