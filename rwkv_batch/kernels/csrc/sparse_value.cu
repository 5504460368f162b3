// y [B, C] = h [B, F] @ Wt [F, C] for B <= 8, skipping the rows of Wt whose h is zero in every row of the batch.
//
// h = relu(k)^2 is 88 % zero in trained models, so one row of the batch needs 12 % of ffn.value, eight 64 %.
// A block owns 256 columns (a warp reads 512 contiguous bytes of a row of Wt) and a share of F, so much that there is
// work for all processors; it lists its active rows in order, its 8 warps take them in turn, 8 loads in flight each; the
// partial sums of a column block go to `partial` [splits, B, C] fp32 and the block that finishes last adds them up in
// order: deterministic.
//
// Bytes: 2C per active row of Wt, 2BF for h, 8 * splits * B * C for the partial sums (L2).
// `counters` [C / 256] int32 are zero before the launch and left zero.
#include <type_traits>

#include "common.cuh"

constexpr int WARPS = 8;
constexpr int COLUMNS = 256;
constexpr int FLIGHT = 8;
constexpr int LEAST_SHARE = 512, MOST_SHARE = 1024;  // rows of Wt of a block

template <int BATCH, int SHARE>
struct Shared {
    static constexpr int TOGETHER = BATCH < 8 ? 1 : 2;  // rows of the batch that are summed over the warps at once
    struct Active {
        __half values[SHARE][BATCH];
        uint16_t list[SHARE];
    };
    union {
        Active active;
        float4 sums[TOGETHER][WARPS][COLUMNS / 4];  // when the active rows have been read
    };
    int warp_counts[WARPS];
    bool is_last;
};

template <int BATCH, int SHARE>
__global__ void __launch_bounds__(WARPS * 32) sparse_value_kernel(
    const __half* h, const __half* weight, __half* y, float* partial, int* counters, int rows, int width, int ffn) {
    __shared__ __align__(16) Shared<BATCH, SHARE> sh;
    auto& list = sh.active.list;
    auto& values = sh.active.values;
    auto& warp_counts = sh.warp_counts;
    let_next_start();
    wait_for_inputs();
    const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
    const int split = blockIdx.y, first = split * SHARE, share = min(SHARE, ffn - first);

    // Each thread looks at neighbouring rows of Wt; active ones are listed in rising order.
    constexpr int EACH = SHARE / (WARPS * 32);
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
    const __half* base = weight + static_cast<int64_t>(first) * width + column;
    float acc[BATCH][8] = {};
    for (int begin = warp; begin < count; begin += WARPS * FLIGHT) {
        uint4 raw[FLIGHT];
#pragma unroll
        for (int f = 0; f < FLIGHT; ++f) {
            const int i = begin + f * WARPS;
            raw[f] = make_uint4(0, 0, 0, 0);
            if (i < count && column < width) raw[f] = __ldcs(reinterpret_cast<const uint4*>(base + static_cast<int64_t>(list[i]) * width));
        }
#pragma unroll
        for (int f = 0; f < FLIGHT; ++f) {
            const int i = begin + f * WARPS;
            if (i >= count) break;
            float w[8];
            unpack8(raw[f], w);
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
        const __half2 halves[2] = {__floats2half2_rn(sum.x, sum.y), __floats2half2_rn(sum.z, sum.w)};
        *reinterpret_cast<uint2*>(y + static_cast<int64_t>(b) * width + out) = *reinterpret_cast<const uint2*>(halves);
    }
    if (tid == 0) counters[blockIdx.x] = 0;
}

// partial: at least ceil(ffn / 512) * rows * width floats; counters: ceil(width / 256) zeros.
RWKV_API int rwkv_sparse_value(
    const void* h, const void* weight, void* y, void* partial, void* counters, int rows, int width, int ffn, void* stream) {
    const int columns = (width + COLUMNS - 1) / COLUMNS;
    const auto splits = [&](int share) { return (ffn + share - 1) / share; };
    const auto run = [&](auto kernel, int share) {
        launch_streaming(kernel, dim3(columns, splits(share)), WARPS * 32, stream, static_cast<const __half*>(h),
                         static_cast<const __half*>(weight), static_cast<__half*>(y), static_cast<float*>(partial),
                         static_cast<int*>(counters), rows, width, ffn);
    };
    const auto run_batch = [&](auto batch) {
        constexpr int BATCH = decltype(batch)::value;
        if (columns * splits(LEAST_SHARE) <= this_machine().processors) {
            run(sparse_value_kernel<BATCH, LEAST_SHARE>, LEAST_SHARE);
        } else {
            run(sparse_value_kernel<BATCH, MOST_SHARE>, MOST_SHARE);
        }
    };
    if (rows == 1) {
        run_batch(std::integral_constant<int, 1>());
    } else if (rows == 2) {
        run_batch(std::integral_constant<int, 2>());
    } else if (rows <= 4) {
        run_batch(std::integral_constant<int, 4>());
    } else {
        run_batch(std::integral_constant<int, 8>());
    }
    return launch_result();
}
