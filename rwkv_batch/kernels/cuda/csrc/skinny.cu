// y = act(x @ W^T) for few rows (up to 8 or 16) and W of halves, several maps in one launch (skinny.cuh).
//
// A map: W [n, k] fp16 (n a multiple of 32, k of 64), x [rows, k] fp16, y [rows, ld_y] fp16 or fp32. Groups are of 32 rows
// of W, or of 16 with twice as much of k at a time, where a block per processor then still does it all. In a piece of 32
// inputs lane t of a quad holds k = 8t .. 8t+7.
//
// Bytes: 2nk per map, read past L1; x comes through L1 (2 * rows * k once per multiprocessor). A thread keeps
// 8 x 16 bytes in flight, a multiprocessor 64 KiB.
#include "skinny.cuh"

struct Map {
    const __half* weight;
    const __half* x;
    void* y;
    int n, k, ld_y;
    int activation;
    int float_out;
    int warps_k;      // 1, 2, 4 or 8
    int first_block, blocks;  // of this map in the grid
};

struct SkinnyArgs {
    Map maps[MAX_MAPS];
    int count;
    int rows;
};

// Weights of one chunk: HEIGHT tiles of 16 rows x PARTS pieces of 32 k. [tile][row g, row g+8][piece of the chunk]
template <int TILES_HIGH>
struct WeightChunk {
    static constexpr int HEIGHT = TILES_HIGH, PARTS = 4 / HEIGHT, DEPTH = PARTS * 32, LANE = 8;
    static constexpr bool SUMMED = false;
    uint4 w[HEIGHT][2][PARTS];

    __device__ static __forceinline__ int depth(const Map&) { return DEPTH; }
    __device__ static __forceinline__ int lane(const Map&) { return LANE; }
    __device__ __forceinline__ void load(const Map& m, int row0, int k0, int g, int t) {
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

    // TILES * 8 rows of x against the chunk.
    template <int TILES, typename Rows>
    __device__ __forceinline__ void multiply(float (&sums)[HEIGHT][TILES][4], const Map&, const Rows& x, int g) const {
        multiply_halves(sums, w, x, g);
    }

    __device__ static __forceinline__ float scaled(float sum, const Map&, int) { return sum; }
};

template <int TILES, int HEIGHT>
__global__ void __launch_bounds__(WARPS * 32, 2) skinny_kernel(const __grid_constant__ SkinnyArgs args) {
    stream_maps<WeightChunk<HEIGHT>, TILES, IN_MEMORY>(args);
}

// Fills in first_block and blocks; rows <= 16.
RWKV_API int rwkv_skinny(SkinnyArgs* args, void* stream) {
    const bool few = args->rows <= 8;
    const auto bytes_of = [](const Map& m) { return 2LL * m.k; };
    bool deep = true;
    for (int i = 0; i < args->count; ++i) deep = deep && args->maps[i].k % (args->maps[i].warps_k * 128) == 0;
    const Deal narrow = deal_blocks(*args, 16, bytes_of);
    if (deep && narrow.blocks <= this_machine().processors) {
        return launch_maps(few ? skinny_kernel<1, 1> : skinny_kernel<2, 1>, *args, narrow.blocks, stream);
    }
    const Deal wide = deal_blocks(*args, 32, bytes_of);
    return launch_maps(few ? skinny_kernel<1, 2> : skinny_kernel<2, 2>, *args, wide.blocks, stream);
}
