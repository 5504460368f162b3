// Sparse ffn.value, fp16: y = h @ Wt over the active rows of Wt. A row of Wt is active if its h is non-zero in some row
// of the batch.
//
// in     h         [B, F] fp16; relu(k)^2, 88 % zero: one row needs 12 % of Wt, eight rows 64 %
//        Wt        [F, C] fp16
//
// out    y         [B, C] fp16
//
// inout  partials  [splits, B, C] fp32 workspace
//        counters  [C / 256] int32, zero between launches
//
// CTA: 256 columns x a split of F (512 or 1,024 rows, so that all SMs have work). It lists its active rows in order; 8
// warps take them in turn, 8 loads of 512 bytes in flight each. The last CTA of a column block reduces the splits in
// order, so the result is deterministic.
//
// Grid: (C / 256, F / 512 or F / 1,024).
// Block: 256 threads.
// Shared memory: 8 KB (B = 1) to 18 KB (B = 8), the list and its h, then sums.
// Bound: memory; 2 C bytes per active row, 2 B F for h, 8 splits B C for partials (L2). Share of 4.8 TB/s (H200, C =
// 4,096): 1 row 34 %, 8 rows 51 %.
// Made for: B <= 8, C % 8 == 0.
#include "../common.cuh"

constexpr int WARPS = 8;
constexpr int COLUMNS = 256;
constexpr int MIN_ROWS_PER_CTA = 512, MAX_ROWS_PER_CTA = 1024;  // rows of Wt per CTA

// A lane's eight columns of a row.
struct HalfRows {
    using Raw = uint4;
    static constexpr int LOADS_IN_FLIGHT = 8;
    const uint4* weight;

    __device__ __forceinline__ Raw load(int64_t row, int width, int column) const {
        return __ldcs(weight + (row * width + column) / 8);
    }
    __device__ __forceinline__ void unpack(const Raw& raw, int64_t, int, int, float (&w)[8]) const { unpack8(raw, w); }
    __device__ __forceinline__ float final_scale(int) const { return 1.0f; }
};

template <int BATCH>
struct Smem {
    static constexpr int REDUCED_ROWS = BATCH < 8 ? 1 : 2;  // rows of the batch that are reduced at once
    struct Active {
        __half values[MAX_ROWS_PER_CTA][BATCH];
        uint16_t list[MAX_ROWS_PER_CTA];
    };
    union {
        Active active;
        float4 sums[REDUCED_ROWS][WARPS][COLUMNS / 4];  // after the main loop
    };
    int warp_counts[WARPS];
    bool is_last;
};

template <typename Rows, int BATCH>
__global__ void __launch_bounds__(WARPS * 32) sparse_value_kernel(
    const __half* h, const Rows weight, __half* y, float* partials, int* counters, int rows, int width, int ffn, int rows_per_cta) {
    __shared__ __align__(16) Smem<BATCH> smem;
    auto& list = smem.active.list;
    auto& values = smem.active.values;
    auto& warp_counts = smem.warp_counts;
    allow_next_kernel();
    wait_for_previous_kernel();
    const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
    const int split = blockIdx.y, first = split * rows_per_cta, num_rows = min(rows_per_cta, ffn - first);

    // Each thread checks adjacent rows of Wt; active rows are listed in order.
    constexpr int ROWS_PER_THREAD = MAX_ROWS_PER_CTA / (WARPS * 32);
    __half mine[ROWS_PER_THREAD][BATCH];
    bool active[ROWS_PER_THREAD] = {};
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
        struct alignas(ROWS_PER_THREAD * sizeof(__half)) Vector {
            __half v[ROWS_PER_THREAD];
        } vector = {};
        if (b < rows && tid * ROWS_PER_THREAD < num_rows) vector = *reinterpret_cast<const Vector*>(h + static_cast<int64_t>(b) * ffn + first + tid * ROWS_PER_THREAD);
#pragma unroll
        for (int i = 0; i < ROWS_PER_THREAD; ++i) {
            mine[i][b] = vector.v[i];
            active[i] |= __half2float(vector.v[i]) != 0.0f;
        }
    }
    int own = 0;
#pragma unroll
    for (int i = 0; i < ROWS_PER_THREAD; ++i) own += active[i];
    int before = own;
#pragma unroll
    for (int offset = 1; offset < 32; offset <<= 1) {
        const int other = __shfl_up_sync(FULL_MASK, before, offset);
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
    for (int i = 0; i < ROWS_PER_THREAD; ++i) {
        if (!active[i]) continue;
        list[at] = static_cast<uint16_t>(tid * ROWS_PER_THREAD + i);
#pragma unroll
        for (int b = 0; b < BATCH; ++b) values[at][b] = mine[i][b];
        ++at;
    }
    __syncthreads();

    const int column = blockIdx.x * COLUMNS + lane * 8;
    constexpr int LOADS_IN_FLIGHT = Rows::LOADS_IN_FLIGHT;
    float acc[BATCH][8] = {};
    for (int begin = warp; begin < count; begin += WARPS * LOADS_IN_FLIGHT) {
        typename Rows::Raw raw[LOADS_IN_FLIGHT];
#pragma unroll
        for (int f = 0; f < LOADS_IN_FLIGHT; ++f) {
            const int i = begin + f * WARPS;
            raw[f] = {};
            if (i < count && column < width) raw[f] = weight.load(first + list[i], width, column);
        }
#pragma unroll
        for (int f = 0; f < LOADS_IN_FLIGHT; ++f) {
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
    for (int first_b = 0; first_b < BATCH; first_b += smem.REDUCED_ROWS) {
        if (first_b >= rows) break;
        __syncthreads();
#pragma unroll
        for (int b = 0; b < smem.REDUCED_ROWS; ++b) {
            const float(&a)[8] = acc[first_b + b];
            smem.sums[b][warp][2 * lane] = make_float4(a[0], a[1], a[2], a[3]);
            smem.sums[b][warp][2 * lane + 1] = make_float4(a[4], a[5], a[6], a[7]);
        }
        __syncthreads();
#pragma unroll
        for (int b = 0; b < smem.REDUCED_ROWS; ++b) {
            if (first_b + b >= rows || block_column + tid >= width) break;
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) sum += reinterpret_cast<const float*>(smem.sums[b][w])[tid];
            partials[(static_cast<int64_t>(split) * rows + first_b + b) * width + block_column + tid] = sum;
        }
    }

    __threadfence();
    __syncthreads();
    if (tid == 0) smem.is_last = atomicAdd(&counters[blockIdx.x], 1) == static_cast<int>(gridDim.y) - 1;
    __syncthreads();
    if (!smem.is_last) return;
    __threadfence();
    // Four columns per thread, 8 splits in flight.
    for (int i = tid; i < rows * (COLUMNS / 4); i += WARPS * 32) {
        const int b = i / (COLUMNS / 4), out = block_column + i % (COLUMNS / 4) * 4;
        if (out >= width) continue;
        const int splits = gridDim.y;
        const auto part = [&](int s) {
            return __ldcg(reinterpret_cast<const float4*>(&partials[(static_cast<int64_t>(s) * rows + b) * width + out]));
        };
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (int from = 0; from < splits; from += 8) {
            float4 parts[8];
#pragma unroll
            for (int s = 0; s < 8; ++s) parts[s] = from + s < splits ? part(from + s) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
            for (int s = 0; s < 8; ++s) sum.x += parts[s].x, sum.y += parts[s].y, sum.z += parts[s].z, sum.w += parts[s].w;
        }
        sum.x *= weight.final_scale(out), sum.y *= weight.final_scale(out + 1);
        sum.z *= weight.final_scale(out + 2), sum.w *= weight.final_scale(out + 3);
        const __half2 halves[2] = {__floats2half2_rn(sum.x, sum.y), __floats2half2_rn(sum.z, sum.w)};
        *reinterpret_cast<uint2*>(y + static_cast<int64_t>(b) * width + out) = *reinterpret_cast<const uint2*>(halves);
    }
    if (tid == 0) counters[blockIdx.x] = 0;
}

struct SparseArgs {
    const __half* h;
    __half* y;
    float* partials;  // >= ceil(ffn / 512) * rows * width
    int* counters;  // ceil(width / 256) zeros
    int rows, width, ffn;
};

template <typename Rows, int BATCH>
static void launch_batch(const SparseArgs& a, const Rows& weight, void* stream) {
    const int columns = (a.width + COLUMNS - 1) / COLUMNS;
    const auto splits = [&](int num_rows) { return (a.ffn + num_rows - 1) / num_rows; };
    const int num_rows = columns * splits(MIN_ROWS_PER_CTA) <= device_info().num_sms ? MIN_ROWS_PER_CTA : MAX_ROWS_PER_CTA;
    launch_streaming(sparse_value_kernel<Rows, BATCH>, dim3(columns, splits(num_rows)), WARPS * 32, stream, a.h, weight, a.y,
                     a.partials, a.counters, a.rows, a.width, a.ffn, num_rows);
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

static SparseArgs sparse_args(const void* h, void* y, void* partials, void* counters, int rows, int width, int ffn) {
    return {static_cast<const __half*>(h), static_cast<__half*>(y), static_cast<float*>(partials),
            static_cast<int*>(counters), rows, width, ffn};
}

RWKV_API int rwkv_sparse_value(
    const void* h, const void* weight, void* y, void* partials, void* counters, int rows, int width, int ffn, void* stream) {
    return launch_rows(sparse_args(h, y, partials, counters, rows, width, ffn), HalfRows{static_cast<const uint4*>(weight)}, stream);
}
