// y [B, C] = h [B, F] @ Wt [F, C] for B <= 8, skipping the rows of Wt whose h is zero in every row of the batch.
//
// h = relu(k)^2 is 88 % zero in trained models, so one row of the batch needs 12 % of ffn.value, eight 64 %.
// A block owns 256 columns (a warp reads 512 contiguous bytes of a row of Wt) and a share of F, so much that there is
// work for all processors; it lists its active rows in order, its 8 warps take them in turn, 8 loads in flight each; the
// partial sums of a column block go to `partial` [splits, B, C] fp32 and the block that finishes last adds them up in
// order: deterministic.
//
// Wt holds halves; of codes: sparse_codes.cu.
//
// Bytes: 2C per active row of Wt, 2BF for h, 8 * splits * B * C for the partial sums (L2).
// `counters` [C / 256] int32 are zero before the launch and left zero.
#include "common.cuh"

constexpr int WARPS = 8;
constexpr int COLUMNS = 256;
constexpr int LEAST_SHARE = 512, MOST_SHARE = 1024;  // rows of Wt of a block; there is room for the most

// A lane's eight columns of a row of Wt.
struct HalfRows {
    using Raw = uint4;
    static constexpr int FLIGHT = 8;
    const uint4* weight;

    __device__ __forceinline__ Raw load(int64_t row, int width, int column) const {
        return __ldcs(weight + (row * width + column) / 8);
    }
    __device__ __forceinline__ void unpack(const Raw& raw, int64_t, int, int, float (&w)[8]) const { unpack8(raw, w); }
    __device__ __forceinline__ float last_scale(int) const { return 1.0f; }
};

template <int BATCH>
struct Shared {
    static constexpr int TOGETHER = BATCH < 8 ? 1 : 2;  // rows of the batch that are summed over the warps at once
    struct Active {
        __half values[MOST_SHARE][BATCH];
        uint16_t list[MOST_SHARE];
    };
    union {
        Active active;
        float4 sums[TOGETHER][WARPS][COLUMNS / 4];  // when the active rows have been read
    };
    int warp_counts[WARPS];
    bool is_last;
};

template <typename Rows, int BATCH>
__global__ void __launch_bounds__(WARPS * 32) sparse_value_kernel(
    const __half* h, const Rows weight, __half* y, float* partial, int* counters, int rows, int width, int ffn, int most) {
    __shared__ __align__(16) Shared<BATCH> sh;
    auto& list = sh.active.list;
    auto& values = sh.active.values;
    auto& warp_counts = sh.warp_counts;
    let_next_start();
    wait_for_inputs();
    const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
    const int split = blockIdx.y, first = split * most, share = min(most, ffn - first);

    // Each thread looks at neighbouring rows of Wt; active ones are listed in rising order.
    constexpr int EACH = MOST_SHARE / (WARPS * 32);
    __half mine[EACH][BATCH];
    bool active[EACH] = {};
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
        struct alignas(EACH * sizeof(__half)) Few {
            __half v[EACH];
        } few = {};
        if (b < rows && tid * EACH < share) few = *reinterpret_cast<const Few*>(h + static_cast<int64_t>(b) * ffn + first + tid * EACH);
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            mine[i][b] = few.v[i];
            active[i] |= __half2float(few.v[i]) != 0.0f;
        }
    }
    int own = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) own += active[i];
    int before = own;
#pragma unroll
    for (int offset = 1; offset < 32; offset <<= 1) {
        const int other = __shfl_up_sync(FULL, before, offset);
        if (lane >= offset) before += other;
    }
    if (lane == 31) warp_counts[warp] = before;
    __syncthreads();
    int at = before - own, count = 0;
    for (int w = 0; w < WARPS; ++w) {
        if (w < warp) at += warp_counts[w];
        count += warp_counts[w];
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        if (!active[i]) continue;
        list[at] = static_cast<uint16_t>(tid * EACH + i);
#pragma unroll
        for (int b = 0; b < BATCH; ++b) values[at][b] = mine[i][b];
        ++at;
    }
    __syncthreads();

    const int column = blockIdx.x * COLUMNS + lane * 8;
    constexpr int FLIGHT = Rows::FLIGHT;
    float acc[BATCH][8] = {};
    for (int begin = warp; begin < count; begin += WARPS * FLIGHT) {
        typename Rows::Raw raw[FLIGHT];
#pragma unroll
        for (int f = 0; f < FLIGHT; ++f) {
            const int i = begin + f * WARPS;
            raw[f] = {};
            if (i < count && column < width) raw[f] = weight.load(first + list[i], width, column);
        }
#pragma unroll
        for (int f = 0; f < FLIGHT; ++f) {
            const int i = begin + f * WARPS;
            if (i >= count || column >= width) break;
            float w[8];
            weight.unpack(raw[f], first + list[i], width, column, w);
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                const float value = __half2float(values[i][b]);
#pragma unroll
                for (int c = 0; c < 8; ++c) acc[b][c] = fmaf(value, w[c], acc[b][c]);
            }
        }
    }
    const int block_column = blockIdx.x * COLUMNS;
#pragma unroll
    for (int first_b = 0; first_b < BATCH; first_b += sh.TOGETHER) {
        if (first_b >= rows) break;
        __syncthreads();
#pragma unroll
        for (int b = 0; b < sh.TOGETHER; ++b) {
            const float(&a)[8] = acc[first_b + b];
            sh.sums[b][warp][2 * lane] = make_float4(a[0], a[1], a[2], a[3]);
            sh.sums[b][warp][2 * lane + 1] = make_float4(a[4], a[5], a[6], a[7]);
        }
        __syncthreads();
#pragma unroll
        for (int b = 0; b < sh.TOGETHER; ++b) {
            if (first_b + b >= rows || block_column + tid >= width) break;
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) sum += reinterpret_cast<const float*>(sh.sums[b][w])[tid];
            partial[(static_cast<int64_t>(split) * rows + first_b + b) * width + block_column + tid] = sum;
        }
    }

    __threadfence();
    __syncthreads();
    if (tid == 0) sh.is_last = atomicAdd(&counters[blockIdx.x], 1) == static_cast<int>(gridDim.y) - 1;
    __syncthreads();
    if (!sh.is_last) return;
    __threadfence();
    // Four columns a thread, 8 splits on their way at once.
    for (int i = tid; i < rows * (COLUMNS / 4); i += WARPS * 32) {
        const int b = i / (COLUMNS / 4), out = block_column + i % (COLUMNS / 4) * 4;
        if (out >= width) continue;
        const int splits = gridDim.y;
        const auto part = [&](int s) {
            return __ldcg(reinterpret_cast<const float4*>(&partial[(static_cast<int64_t>(s) * rows + b) * width + out]));
        };
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (int from = 0; from < splits; from += 8) {
            float4 parts[8];
#pragma unroll
            for (int s = 0; s < 8; ++s) parts[s] = from + s < splits ? part(from + s) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
            for (int s = 0; s < 8; ++s) sum.x += parts[s].x, sum.y += parts[s].y, sum.z += parts[s].z, sum.w += parts[s].w;
        }
        sum.x *= weight.last_scale(out), sum.y *= weight.last_scale(out + 1);
        sum.z *= weight.last_scale(out + 2), sum.w *= weight.last_scale(out + 3);
        const __half2 halves[2] = {__floats2half2_rn(sum.x, sum.y), __floats2half2_rn(sum.z, sum.w)};
        *reinterpret_cast<uint2*>(y + static_cast<int64_t>(b) * width + out) = *reinterpret_cast<const uint2*>(halves);
    }
    if (tid == 0) counters[blockIdx.x] = 0;
}

struct SparseArgs {
    const __half* h;
    __half* y;
    float* partial;  // at least ceil(ffn / 512) * rows * width
    int* counters;   // ceil(width / 256) zeros
    int rows, width, ffn;
};

template <typename Rows, int BATCH>
static void launch_batch(const SparseArgs& a, const Rows& weight, void* stream) {
    const int columns = (a.width + COLUMNS - 1) / COLUMNS;
    const auto splits = [&](int share) { return (a.ffn + share - 1) / share; };
    const int share = columns * splits(LEAST_SHARE) <= this_machine().processors ? LEAST_SHARE : MOST_SHARE;
    launch_streaming(sparse_value_kernel<Rows, BATCH>, dim3(columns, splits(share)), WARPS * 32, stream, a.h, weight, a.y,
                     a.partial, a.counters, a.rows, a.width, a.ffn, share);
}

template <typename Rows>
static int launch_rows(const SparseArgs& a, const Rows& weight, void* stream) {
    if (a.rows == 1) {
        launch_batch<Rows, 1>(a, weight, stream);
    } else if (a.rows == 2) {
        launch_batch<Rows, 2>(a, weight, stream);
    } else if (a.rows <= 4) {
        launch_batch<Rows, 4>(a, weight, stream);
    } else {
        launch_batch<Rows, 8>(a, weight, stream);
    }
    return launch_result();
}

static SparseArgs sparse_args(const void* h, void* y, void* partial, void* counters, int rows, int width, int ffn) {
    return {static_cast<const __half*>(h), static_cast<__half*>(y), static_cast<float*>(partial),
            static_cast<int*>(counters), rows, width, ffn};
}

RWKV_API int rwkv_sparse_value(
    const void* h, const void* weight, void* y, void* partial, void* counters, int rows, int width, int ffn, void* stream) {
    return launch_rows(sparse_args(h, y, partial, counters, rows, width, ffn), HalfRows{static_cast<const uint4*>(weight)}, stream);
}
