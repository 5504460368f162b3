// y [C] = h [F] @ Wt [F, C] for one row and Wt in small codes, skipping the rows of Wt whose h is zero.
//
// As sparse_codes.cu has several rows: a block owns 32 columns and all of F, each of its 16 warps a share of F, taken 16
// active rows at a time on the tensor cores (m16n8k16, fp32 sums). Here a warp's active rows go to shared memory by
// asynchronous copies, as many at once as it has places for. They pass by L1, which is small beside a kernel that has most
// of a processor's shared memory, and take no registers: blocks of this kernel and of such a one (wide_row.cu) fit on a
// processor together, so that the next product's weights are on their way meanwhile.
//
// Wt holds codes of 8 or 4 bits [F, C] with scales (quant.cuh): fp8 [C] fp32, int8 [F / 128][C] fp16, int4
// [F / 128][C] pairs of fp16; its nibbles are columns. With scales of groups, 16 rows at a time are of one group.
//
// Bytes: C (C / 2) per active row of Wt, in pieces of 32 (16); 2F for h in every block.
#include <cuda_pipeline.h>

#include "fragments.cuh"
#include "quant.cuh"

constexpr int WARPS = 16, COLUMNS = 32, STEP = 16;
constexpr int LISTED = 256;       // rows of Wt that a warp looks at at once, 8 a lane
constexpr int MOST_SHARE = 1024;  // rows of Wt of a warp
constexpr int TIMES = MOST_SHARE / LISTED, MOST_GROUPS = MOST_SHARE / GROUP_INPUTS;

// Rows of Wt: ROW_BYTES of a block's columns, SLOTS places for them a warp. A lane has four columns (Raw) of a row, two of
// which become pairs of halves.
struct Fp8Row {
    using Raw = uint32_t;
    using Item = uint32_t;  // none
    static constexpr uint32_t NOTHING = 0;  // codes of zero
    static constexpr bool GROUPED = false;
    static constexpr int ROW_BYTES = 32, SLOTS = 112;
    const uint8_t* weight;
    const void* scales;

    __device__ static __forceinline__ int column(int g, int i) { return 4 * g + i; }
    __device__ static __forceinline__ void pair(Raw a, Raw b, const Item (&)[4], uint32_t (&out)[4]) {
        unpack_bytes<FP8>(__byte_perm(a, b, 0x5140), out[0], out[1]);
        unpack_bytes<FP8>(__byte_perm(a, b, 0x7362), out[2], out[3]);
    }
    __device__ static __forceinline__ float scale(Item) { return 1.0f; }
    __device__ __forceinline__ float last_scale(int column) const {
        return code_scale<FP8>() * __ldg(static_cast<const float*>(scales) + column);
    }
};

struct Int8Row {
    using Raw = uint32_t;
    using Item = uint16_t;
    static constexpr uint32_t NOTHING = 0x80808080u;
    static constexpr bool GROUPED = true;
    static constexpr int ROW_BYTES = 32, SLOTS = 80;
    const uint8_t* weight;
    const void* scales;

    __device__ static __forceinline__ int column(int g, int i) { return 4 * g + i; }
    __device__ static __forceinline__ void pair(Raw a, Raw b, const Item (&)[4], uint32_t (&out)[4]) {
        unpack_bytes<INT8>(__byte_perm(a, b, 0x5140), out[0], out[1]);
        unpack_bytes<INT8>(__byte_perm(a, b, 0x7362), out[2], out[3]);
    }
    __device__ static __forceinline__ float scale(Item of) { return __half2float(__ushort_as_half(of)); }
    __device__ __forceinline__ float last_scale(int) const { return code_scale<INT8>(); }
};

// Four nibbles of one half of a word: every other column. Items: scale and 1024 + zero.
struct Int4Row {
    using Raw = uint16_t;
    using Item = uint32_t;
    static constexpr uint32_t NOTHING = 0;  // the lowest
    static constexpr bool GROUPED = true;
    static constexpr int ROW_BYTES = 16, SLOTS = 128;
    const uint8_t* weight;
    const void* scales;

    __device__ static __forceinline__ int column(int g, int i) { return 8 * (g >> 1) + 2 * i + (g & 1); }
    __device__ static __forceinline__ void pair(Raw a, Raw b, const Item (&of)[4], uint32_t (&out)[4]) {
        const uint32_t both = a | static_cast<uint32_t>(b) << 16;
#pragma unroll
        for (int i = 0; i < 4; ++i) out[i] = unpack_nibbles(both, i, __byte_perm(of[i], 0, 0x3232));
    }
    __device__ static __forceinline__ float scale(Item of) {
        return __half2float(__ushort_as_half(static_cast<unsigned short>(of & 0xffffu)));
    }
    __device__ __forceinline__ float last_scale(int) const { return code_scale<INT4>(); }
};

template <typename Rows>
struct Shared {
    uint8_t codes[WARPS][Rows::SLOTS][Rows::ROW_BYTES];
    typename Rows::Item scales[Rows::GROUPED ? WARPS : 1][MOST_GROUPS][COLUMNS];
    __half x[WARPS][Rows::SLOTS];
    uint8_t groups[WARPS][Rows::SLOTS / STEP];  // of a warp's, that a step is of
    float sums[WARPS][COLUMNS];
};

// A warp's place for rows, which it fills and empties in turn; positions count on, places are taken again.
template <typename Rows>
struct Queue {
    static constexpr int SLOTS = Rows::SLOTS, STEPS = SLOTS / STEP;
    Shared<Rows>& sh;
    const int warp, lane, g, t;
    int used = 0;  // rows that have been multiplied, a multiple of STEP
    float sums[2][4] = {};

    // The 16 rows from `used` on, which have come.
    __device__ __forceinline__ void multiply() {
        const int place = used / STEP % STEPS, first = place * STEP;
        typename Rows::Raw raw[4];
        uint32_t x[2];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            raw[i] = *reinterpret_cast<const typename Rows::Raw*>(&sh.codes[warp][first + 4 * i + t][g * sizeof(typename Rows::Raw)]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint32_t lo = __half_as_ushort(sh.x[warp][first + 8 * half + t]), hi = __half_as_ushort(sh.x[warp][first + 8 * half + 4 + t]);
            x[half] = g == 0 ? lo | hi << 16 : 0u;
        }
        typename Rows::Item items[4] = {};
        if constexpr (Rows::GROUPED) {
            const int group = sh.groups[warp][place];
#pragma unroll
            for (int i = 0; i < 4; ++i) items[i] = sh.scales[warp][group][Rows::column(g, i)];
        }
        uint32_t low[4], high[4];
        Rows::pair(raw[0], raw[1], items, low);
        Rows::pair(raw[2], raw[3], items, high);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            const Fragment a = {{low[2 * m], low[2 * m + 1], high[2 * m], high[2 * m + 1]}};
            if constexpr (Rows::GROUPED) {
                float own[4] = {};
                mma(own, a, x[0], x[1]);
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[m][i] = fmaf(own[i], Rows::scale(items[2 * m + i / 2]), sums[m][i]);
            } else {
                mma(sums[m], a, x[0], x[1]);
            }
        }
        used += STEP;
    }

    // Whole steps of those before `end`, which have come.
    __device__ __forceinline__ void multiply_until(int end) {
        __syncwarp();
        while (used + STEP <= end) multiply();
        __syncwarp();
    }
};

// At most 48 registers a thread: 16 warps of them stand beside those of wide_row.cu.
template <typename Rows>
__global__ void __launch_bounds__(640, 2)
sparse_row_kernel(const __half* h, const Rows weight, __half* y, int width, int ffn, int share) {
    extern __shared__ __align__(16) unsigned char dynamic[];
    Shared<Rows>& sh = *reinterpret_cast<Shared<Rows>*>(dynamic);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int first_column = blockIdx.x * COLUMNS, first = warp * share;
    const int rows = max(0, min(share, ffn - first));
    constexpr int ROW_BYTES = Rows::ROW_BYTES, SLOTS = Rows::SLOTS;
    let_next_start();
    if constexpr (Rows::GROUPED) {
        constexpr int LINE = COLUMNS * sizeof(typename Rows::Item), PIECES = LINE / 16;
        for (int i = lane; i < rows / GROUP_INPUTS * PIECES; i += 32) {
            const int group = i / PIECES, piece = i % PIECES;
            const auto* from = static_cast<const typename Rows::Item*>(weight.scales) + static_cast<int64_t>(first / GROUP_INPUTS + group) * width + first_column;
            __pipeline_memcpy_async(reinterpret_cast<uint8_t*>(sh.scales[warp][group]) + 16 * piece, reinterpret_cast<const uint8_t*>(from) + 16 * piece, 16);
        }
        __pipeline_commit();
    }
    wait_for_inputs();
    uint4 given[TIMES];
#pragma unroll
    for (int i = 0; i < TIMES; ++i) {
        const int at = i * LISTED + 8 * lane;
        given[i] = make_uint4(0, 0, 0, 0);
        if (at < rows) given[i] = __ldg(reinterpret_cast<const uint4*>(h + first + at));
    }

    Queue<Rows> queue = {sh, warp, lane, g, t};
    constexpr int64_t SCALE = ROW_BYTES == 16 ? 2 : 1;
    const uint8_t* const mine = weight.weight + first_column / SCALE;
    const int64_t row_bytes = width / SCALE;
    int end = 0, ends[TIMES];  // of the places given so far, a multiple of STEP at a group's end where there are groups
#pragma unroll
    for (int i = 0; i < TIMES; ++i) {
        const uint32_t words[4] = {given[i].x, given[i].y, given[i].z, given[i].w};
        uint32_t active = 0;  // a bit for each of the lane's rows; a sign alone is a zero
#pragma unroll
        for (int w = 0; w < 4; ++w)
            active |= ((words[w] & 0x7fffu) != 0 ? 1u : 0u) << (2 * w) | ((words[w] & 0x7fff0000u) != 0 ? 2u : 0u) << (2 * w);
        const int own = __popc(active);
        int before = own;  // of the 16 lanes that share a group
#pragma unroll
        for (int offset = 1; offset < 16; offset <<= 1) {
            const int other = __shfl_up_sync(FULL, before, offset);
            if ((lane & 15) >= offset) before += other;
        }
        const int low = __shfl_sync(FULL, before, 15), high = __shfl_sync(FULL, before, 31);
        const auto padded = [](int count) { return (count + STEP - 1) / STEP * STEP; };
        const int low_room = Rows::GROUPED ? padded(low) : low;
        int at = end + before - own + (lane < 16 ? 0 : low_room);
        const int listed = end + low_room + high;           // behind the last
        end = Rows::GROUPED || i == TIMES - 1 ? padded(listed) : listed;
        int pad_from = listed, pads = end - listed;          // places without a row
        const int between = Rows::GROUPED ? low_room - low : 0, begin = end - padded(high);
        // Room for them: what was asked for first comes first.
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
                const uint8_t* const from = mine + static_cast<int64_t>(first + i * LISTED + 8 * lane + j) * row_bytes;
#pragma unroll
                for (int piece = 0; piece < ROW_BYTES; piece += 16)
                    __pipeline_memcpy_async(&sh.codes[warp][slot][piece], from + piece, 16);
                sh.x[warp][slot] = __ushort_as_half(static_cast<unsigned short>(j & 1 ? word >> 16 : word & 0xffffu));
                active &= active - 1, ++at;
            }
            // Places without a row: nothing times nothing. Their codes count: sums are rounded by the largest exponent of their
            // factors, also of one that is multiplied by zero, and what lies there from before may be NaN.
            const auto clear = [&](int position) {
                if (position < queue.used || position >= limit) return;
                const int slot = position % SLOTS;
                sh.x[warp][slot] = __ushort_as_half(0);
                constexpr uint32_t NOTHING = Rows::NOTHING;
#pragma unroll
                for (int piece = 0; piece < ROW_BYTES; piece += 16) *reinterpret_cast<uint4*>(&sh.codes[warp][slot][piece]) = make_uint4(NOTHING, NOTHING, NOTHING, NOTHING);
            };
            if (lane < pads) clear(pad_from + lane);
            if (Rows::GROUPED) {
                if (lane < between) clear(begin - between + lane);
                const int steps = end / STEP, at_first = max(queue.used / STEP, (begin - low_room) / STEP);
                for (int step = at_first + lane; step < min(steps, limit / STEP); step += 32)
                    sh.groups[warp][step % (SLOTS / STEP)] = static_cast<uint8_t>(2 * i + (step * STEP >= begin ? 1 : 0));
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
            if (t == 0) sh.sums[warp][Rows::column(g, 2 * m + i)] = queue.sums[m][2 * i];
        }
    }
    __syncthreads();
    if (threadIdx.x >= COLUMNS) return;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += sh.sums[w][threadIdx.x];
    const int out = first_column + threadIdx.x;
    y[out] = __float2half_rn(sum * weight.last_scale(out));
}

template <typename Rows>
static int launch_rows(const __half* h, __half* y, const Rows& weight, int width, int ffn, void* stream) {
    const int share = (ffn + WARPS * GROUP_INPUTS - 1) / (WARPS * GROUP_INPUTS) * GROUP_INPUTS;
    if (share > MOST_SHARE || width % COLUMNS != 0 || ffn % 8 != 0) return static_cast<int>(cudaErrorInvalidValue);
    static bool raised[MAX_DEVICES] = {};
    const auto kernel = sparse_row_kernel<Rows>;
    if (!raised[this_device()]) {
        const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared<Rows>));
        if (error != cudaSuccess) return static_cast<int>(error);
        raised[this_device()] = true;
    }
    launch_with_split(kernel, dim3(width / COLUMNS), WARPS * 32, sizeof(Shared<Rows>), 100, stream, h, weight, y, width, ffn, share);
    return launch_result();
}

RWKV_API int rwkv_sparse_row_quant(
    const void* h, const void* codes, const void* scales, void* y, int format, int width, int ffn, void* stream) {
    const auto* const from = static_cast<const __half*>(h);
    auto* const to = static_cast<__half*>(y);
    const auto* const w = static_cast<const uint8_t*>(codes);
    switch (format) {
        case FP8: return launch_rows(from, to, Fp8Row{w, scales}, width, ffn, stream);
        case INT8: return launch_rows(from, to, Int8Row{w, scales}, width, ffn, stream);
        case INT4: return launch_rows(from, to, Int4Row{w, scales}, width, ffn, stream);
    }
    return static_cast<int>(cudaErrorInvalidValue);
}
