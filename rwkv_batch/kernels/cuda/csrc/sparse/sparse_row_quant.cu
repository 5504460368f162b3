// Sparse ffn.value for one row, 8 or 4 bits: y = h @ Wt over the active rows of Wt (h != 0).
//
// in   h        [F] fp16
//      qweight  [F, C] fp8 or int4, as in sparse_value_quant.cu
//      scales   as in sparse_value_quant.cu
//
// out  y        [C] fp16
//
// CTA: 32 columns x all of F; each of its 16 warps has a range of F and multiplies 16 active rows at a time.
// Active rows go to shared memory by cp.async, as many at once as a warp has slots. They bypass L1, which is small next
// to a kernel with most of the shared memory, and take no registers. So CTAs of this kernel and of hopper_row.cu fit on
// one SM, and the next GEMV's weights are loaded meanwhile.
//
// Grid: C / 32.
// Block: 512 threads; mma.m16n8k16.
// Shared memory: 63 KB (fp8) or 54 KB (int4), a ring of weight rows per warp, scales, sums.
// Bound: memory; C (int4: C / 2) bytes per active row in pieces of 32 (16), 2 F for h in every CTA. Share of 4.8 TB/s
// (H200, C = 4,096): fp8 27 %, int4 10 %: the latency of one pass over h and one load, 6 to 8 us.
// Made for: F <= 16,384.
#include <cuda_pipeline.h>

#include "../mma.cuh"
#include "../quant.cuh"

constexpr int WARPS = 16, COLUMNS = 32, STEP = 16;
constexpr int ROWS_PER_LISTING = 256;  // rows per pass, 8 per lane
constexpr int MAX_ROWS_PER_WARP = 1024;
constexpr int NUM_LISTINGS = MAX_ROWS_PER_WARP / ROWS_PER_LISTING, MAX_GROUPS = MAX_ROWS_PER_WARP / GROUP_INPUTS;

// Weight formats: ROW_BYTES of a CTA's columns, SLOTS row buffers per warp. A lane has four columns (Raw) of a row; two
// rows are converted to fp16 pairs.
struct Fp8Row {
    using Raw = uint32_t;
    using ScaleItem = uint32_t;
    static constexpr uint32_t PADDING = 0;  // zero weights
    static constexpr bool GROUPED = false;
    static constexpr int ROW_BYTES = 32, SLOTS = 112;
    const uint8_t* weight;
    const void* scales;

    __device__ static __forceinline__ int column(int g, int i) { return 4 * g + i; }
    __device__ static __forceinline__ void pair(Raw a, Raw b, const ScaleItem (&)[4], uint32_t (&out)[4]) {
        unpack_e4m3(__byte_perm(a, b, 0x5140), out[0], out[1]);
        unpack_e4m3(__byte_perm(a, b, 0x7362), out[2], out[3]);
    }
    __device__ static __forceinline__ float scale(ScaleItem) { return 1.0f; }
    __device__ __forceinline__ float final_scale(int column) const {
        return code_scale<FP8>() * __ldg(static_cast<const float*>(scales) + column);
    }
};

// Four nibbles of half a word: every other column. Scale item: (scale, 1024 + zero).
struct Int4Row {
    using Raw = uint16_t;
    using ScaleItem = uint32_t;
    static constexpr uint32_t PADDING = 0;  // lowest code
    static constexpr bool GROUPED = true;
    static constexpr int ROW_BYTES = 16, SLOTS = 128;
    const uint8_t* weight;
    const void* scales;

    __device__ static __forceinline__ int column(int g, int i) { return 8 * (g >> 1) + 2 * i + (g & 1); }
    __device__ static __forceinline__ void pair(Raw a, Raw b, const ScaleItem (&of)[4], uint32_t (&out)[4]) {
        const uint32_t both = a | static_cast<uint32_t>(b) << 16;
#pragma unroll
        for (int i = 0; i < 4; ++i) out[i] = unpack_nibbles(both, i, __byte_perm(of[i], 0, 0x3232));
    }
    __device__ static __forceinline__ float scale(ScaleItem of) {
        return __half2float(__ushort_as_half(static_cast<unsigned short>(of & 0xffffu)));
    }
    __device__ __forceinline__ float final_scale(int) const { return code_scale<INT4>(); }
};

template <typename Rows>
struct Smem {
    uint8_t codes[WARPS][Rows::SLOTS][Rows::ROW_BYTES];
    typename Rows::ScaleItem scales[Rows::GROUPED ? WARPS : 1][MAX_GROUPS][COLUMNS];
    __half x[WARPS][Rows::SLOTS];
    uint8_t groups[WARPS][Rows::SLOTS / STEP];  // of a warp's, that a step is of
    float final_scales[COLUMNS];
    float sums[WARPS][COLUMNS];
};

// A warp's ring of row buffers. Positions count up; a slot is position % SLOTS.
template <typename Rows>
struct Queue {
    static constexpr int SLOTS = Rows::SLOTS, STEPS = SLOTS / STEP;
    Smem<Rows>& smem;
    const int warp, lane, g, t;
    int used = 0;  // rows multiplied so far, a multiple of STEP
    float sums[2][4] = {};

    // Multiplies the next 16 rows, which have arrived.
    __device__ __forceinline__ void multiply() {
        const int place = used / STEP % STEPS, first = place * STEP;
        typename Rows::Raw raw[4];
        uint32_t x[2];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            raw[i] = *reinterpret_cast<const typename Rows::Raw*>(&smem.codes[warp][first + 4 * i + t][g * sizeof(typename Rows::Raw)]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint32_t lo = __half_as_ushort(smem.x[warp][first + 8 * half + t]), hi = __half_as_ushort(smem.x[warp][first + 8 * half + 4 + t]);
            x[half] = g == 0 ? lo | hi << 16 : 0u;
        }
        typename Rows::ScaleItem scale_items[4] = {};
        if constexpr (Rows::GROUPED) {
            const int group = smem.groups[warp][place];
#pragma unroll
            for (int i = 0; i < 4; ++i) scale_items[i] = smem.scales[warp][group][Rows::column(g, i)];
        }
        uint32_t low[4], high[4];
        Rows::pair(raw[0], raw[1], scale_items, low);
        Rows::pair(raw[2], raw[3], scale_items, high);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            const Fragment a = {{low[2 * m], low[2 * m + 1], high[2 * m], high[2 * m + 1]}};
            if constexpr (Rows::GROUPED) {
                float own[4] = {};
                mma(own, a, x[0], x[1]);
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[m][i] = fmaf(own[i], Rows::scale(scale_items[2 * m + i / 2]), sums[m][i]);
            } else {
                mma(sums[m], a, x[0], x[1]);
            }
        }
        used += STEP;
    }

    // Multiplies whole steps before `end`, which have arrived.
    __device__ __forceinline__ void multiply_until(int end) {
        __syncwarp();
        while (used + STEP <= end) multiply();
        __syncwarp();
    }
};

// At most 48 registers per thread: 16 warps fit next to hopper_row.cu.
template <typename Rows>
__global__ void __launch_bounds__(640, 2)
sparse_row_quant_kernel(const __half* h, const Rows weight, __half* y, int width, int ffn, int rows_per_warp) {
    extern __shared__ __align__(16) unsigned char dynamic[];
    Smem<Rows>& smem = *reinterpret_cast<Smem<Rows>*>(dynamic);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int first_column = blockIdx.x * COLUMNS, first = warp * rows_per_warp;
    const int rows = max(0, min(rows_per_warp, ffn - first));
    constexpr int ROW_BYTES = Rows::ROW_BYTES, SLOTS = Rows::SLOTS;
    if (threadIdx.x < COLUMNS) smem.final_scales[threadIdx.x] = weight.final_scale(first_column + threadIdx.x);
    allow_next_kernel();
    if constexpr (Rows::GROUPED) {
        constexpr int LINE = COLUMNS * sizeof(typename Rows::ScaleItem), PIECES = LINE / 16;
        for (int i = lane; i < rows / GROUP_INPUTS * PIECES; i += 32) {
            const int group = i / PIECES, piece = i % PIECES;
            const auto* from = static_cast<const typename Rows::ScaleItem*>(weight.scales) + static_cast<int64_t>(first / GROUP_INPUTS + group) * width + first_column;
            __pipeline_memcpy_async(reinterpret_cast<uint8_t*>(smem.scales[warp][group]) + 16 * piece, reinterpret_cast<const uint8_t*>(from) + 16 * piece, 16);
        }
        __pipeline_commit();
    }
    wait_for_previous_kernel();
    uint4 loaded[NUM_LISTINGS];
#pragma unroll
    for (int i = 0; i < NUM_LISTINGS; ++i) {
        const int at = i * ROWS_PER_LISTING + 8 * lane;
        loaded[i] = make_uint4(0, 0, 0, 0);
        if (at < rows) loaded[i] = __ldg(reinterpret_cast<const uint4*>(h + first + at));
    }

    Queue<Rows> queue = {smem, warp, lane, g, t};
    constexpr int64_t SCALE = ROW_BYTES == 16 ? 2 : 1;
    const uint8_t* const column_weights = weight.weight + first_column / SCALE;
    const int64_t row_bytes = width / SCALE;
    int end = 0, ends[NUM_LISTINGS];  // entries so far; with groups a multiple of STEP at a group's end
#pragma unroll
    for (int i = 0; i < NUM_LISTINGS; ++i) {
        const uint32_t words[4] = {loaded[i].x, loaded[i].y, loaded[i].z, loaded[i].w};
        uint32_t active = 0;  // one bit per row of the lane; -0 counts as zero
#pragma unroll
        for (int w = 0; w < 4; ++w)
            active |= ((words[w] & 0x7fffu) != 0 ? 1u : 0u) << (2 * w) | ((words[w] & 0x7fff0000u) != 0 ? 2u : 0u) << (2 * w);
        const int own = __popc(active);
        int before = own;  // prefix sum over the 16 lanes of a group
#pragma unroll
        for (int offset = 1; offset < 16; offset <<= 1) {
            const int other = __shfl_up_sync(FULL_MASK, before, offset);
            if ((lane & 15) >= offset) before += other;
        }
        const int low = __shfl_sync(FULL_MASK, before, 15), high = __shfl_sync(FULL_MASK, before, 31);
        const auto padded = [](int count) { return (count + STEP - 1) / STEP * STEP; };
        const int low_padded = Rows::GROUPED ? padded(low) : low;
        int at = end + before - own + (lane < 16 ? 0 : low_padded);
        const int listed = end + low_padded + high;  // end of the list
        end = Rows::GROUPED || i == NUM_LISTINGS - 1 ? padded(listed) : listed;
        int pad_from = listed, pads = end - listed;  // entries without a row
        const int between = Rows::GROUPED ? low_padded - low : 0, begin = end - padded(high);
        // Frees slots: multiplies the oldest pending rows first.
#pragma unroll
        for (int older = 0; older < i; ++older) {
            if (end <= queue.used + SLOTS || queue.used + STEP > ends[older]) continue;
            __pipeline_wait_prior(i - 1 - older);
            queue.multiply_until(ends[older]);
        }
        ends[i] = end;
        while (true) {
            const int limit = queue.used + SLOTS;
            while (active != 0 && at < limit) {
                const int j = __popc((active & -active) - 1), slot = at % SLOTS;
                const uint32_t word = j & 4 ? (j & 2 ? words[3] : words[2]) : (j & 2 ? words[1] : words[0]);
                const uint8_t* const from = column_weights + static_cast<int64_t>(first + i * ROWS_PER_LISTING + 8 * lane + j) * row_bytes;
#pragma unroll
                for (int piece = 0; piece < ROW_BYTES; piece += 16)
                    __pipeline_memcpy_async(&smem.codes[warp][slot][piece], from + piece, 16);
                smem.x[warp][slot] = __ushort_as_half(static_cast<unsigned short>(j & 1 ? word >> 16 : word & 0xffffu));
                active &= active - 1, ++at;
            }
            // Entries without a row are zero times zero. Their weights must be finite numbers of the usual size. Stale
            // bytes may be NaN, and mma rounds sums by the largest exponent of their factors, even if the other factor
            // is zero.
            const auto clear = [&](int position) {
                if (position < queue.used || position >= limit) return;
                const int slot = position % SLOTS;
                smem.x[warp][slot] = __ushort_as_half(0);
                constexpr uint32_t PADDING = Rows::PADDING;
#pragma unroll
                for (int piece = 0; piece < ROW_BYTES; piece += 16) *reinterpret_cast<uint4*>(&smem.codes[warp][slot][piece]) = make_uint4(PADDING, PADDING, PADDING, PADDING);
            };
            if (lane < pads) clear(pad_from + lane);
            if (Rows::GROUPED) {
                if (lane < between) clear(begin - between + lane);
                const int steps = end / STEP, at_first = max(queue.used / STEP, (begin - low_padded) / STEP);
                for (int step = at_first + lane; step < min(steps, limit / STEP); step += 32)
                    smem.groups[warp][step % (SLOTS / STEP)] = static_cast<uint8_t>(2 * i + (step * STEP >= begin ? 1 : 0));
            }
            __pipeline_commit();
            if (end <= limit) break;
            __pipeline_wait_prior(0);
            queue.multiply_until(limit);
        }
    }
    __pipeline_wait_prior(0);
    queue.multiply_until(end);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (t == 0) smem.sums[warp][Rows::column(g, 2 * m + i)] = queue.sums[m][2 * i];
        }
    }
    __syncthreads();
    if (threadIdx.x >= COLUMNS) return;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += smem.sums[w][threadIdx.x];
    y[first_column + threadIdx.x] = __float2half_rn(sum * smem.final_scales[threadIdx.x]);
}

template <typename Rows>
static int launch_rows(const __half* h, __half* y, const Rows& weight, int width, int ffn, void* stream) {
    const int rows_per_warp = (ffn + WARPS * GROUP_INPUTS - 1) / (WARPS * GROUP_INPUTS) * GROUP_INPUTS;
    if (rows_per_warp > MAX_ROWS_PER_WARP || width % COLUMNS != 0 || ffn % 8 != 0) return static_cast<int>(cudaErrorInvalidValue);
    static bool raised[MAX_DEVICES] = {};
    const auto kernel = sparse_row_quant_kernel<Rows>;
    if (!raised[current_device()]) {
        const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Smem<Rows>));
        if (error != cudaSuccess) return static_cast<int>(error);
        raised[current_device()] = true;
    }
    launch_with_carveout(kernel, dim3(width / COLUMNS), WARPS * 32, sizeof(Smem<Rows>), 100, stream, h, weight, y, width, ffn, rows_per_warp);
    return launch_result();
}

RWKV_API int rwkv_sparse_row_quant(
    const void* h, const void* qweight, const void* scales, void* y, int format, int width, int ffn, void* stream) {
    const auto* const from = static_cast<const __half*>(h);
    auto* const to = static_cast<__half*>(y);
    const auto* const w = static_cast<const uint8_t*>(qweight);
    switch (format) {
        case FP8: return launch_rows(from, to, Fp8Row{w, scales}, width, ffn, stream);
        case INT4: return launch_rows(from, to, Int4Row{w, scales}, width, ffn, stream);
    }
    return static_cast<int>(cudaErrorInvalidValue);
}
