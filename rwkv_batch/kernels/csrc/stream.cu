// y = act(x @ W^T) for up to 16 rows, several maps in one launch, W of halves or of 8 or 4 bits (quant.cuh): streams W once.
//
// A map: W [n, k] (n a multiple of 32; k of 64 halves, 128 8-bit or 256 4-bit codes), scales fp8 [n] fp32, int8
// [k / 128][n] fp16, int4 [k / 128][n] pairs of fp16 (scale, 1024 + zero); x [rows, k] fp16, y [rows, ld_y] fp16 or fp32.
// Maps of halves and of one other format may share a launch.
//
// A warp takes a group of 16 or 32 rows of W and a share of k: `warps_k` of a block's 8 warps share a group. Every lane has
// a ring of its own in shared memory: it copies (cp.async) what it will multiply itself, so nothing is waited for but its
// own copies; only the scales of a chunk are read by the whole warp. Codes become halves in registers; products on the
// tensor cores (m16n8k16, fp32 sums), x read in the order in which the codes lie. Sums of a group of 128 inputs are scaled
// as they are added up; fp8's scales come at the end.
//
// A block takes less than half of a processor's shared memory and a third of its registers. So the next such kernel of a
// step has its blocks up, and their rings filled, before this one has ended: memory is never idle between two kernels.
//
// Bytes: W and its scales once; x from L1 or L2.
#include "activation.h"
#include "fragments.cuh"
#include "quant.cuh"

constexpr int WARPS = 8;
constexpr int RED_PAD = 4;
constexpr int MAX_MAPS = 8;

struct StreamMap {
    const uint8_t* weight;
    const void* scales;
    const __half* x;
    void* y;
    int n, k, ld_y;
    int activation;
    int float_out;
    int format;
    int warps_k, first_unit;  // filled in by the launcher
};

struct StreamArgs {
    StreamMap maps[MAX_MAPS];  // those of halves first
    int count;
    int rows;
    int units, heavy;    // filled in by the launcher: blocks' worth of work; those that take twice the time of others
    int shared_percent;  // see launch_with_split
    int padding;         // bytes of shared memory
    int places, variant;
    int prefetch;        // chunks of a warp that are brought into the L2 cache while inputs are waited for
};

__device__ __forceinline__ float activate(float v, int activation) {
    if (activation == TANH) return tanh_exp(v);
    if (activation == SIGMOID) return sigmoidf(v);
    if (activation == RELU_SQUARED) {
        v = fmaxf(v, 0.0f);
        return v * v;
    }
    return v;
}

__device__ __forceinline__ void copy16(uint32_t to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy4(uint32_t to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
// 128 bytes.
__device__ __forceinline__ void into_l2(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }
__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

__device__ __forceinline__ uint4 shared16(uint32_t at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
    return v;
}
__device__ __forceinline__ uint32_t shared4(uint32_t at) {
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
    return v;
}
__device__ __forceinline__ uint32_t shared2(uint32_t at) {
    uint16_t v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at) : "memory");
    return v;
}
__device__ __forceinline__ uint32_t word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// Inputs of a lane's 16 bytes, of a quad's (a part), of a chunk: HEIGHT tiles of 16 rows and PARTS.
template <Format FORMAT, int HEIGHT, int PARTS>
struct Chunk {
    static constexpr int ROWS = 16 * HEIGHT;
    static constexpr int LANE = FORMAT == HALF ? 8 : FORMAT == INT4 ? 32 : 16, PIECE = 4 * LANE, INPUTS = PARTS * PIECE;
    static constexpr bool GROUPED = FORMAT == INT8 || FORMAT == INT4;
    static constexpr int GROUPS = GROUPED ? INPUTS / GROUP_INPUTS : 1;
    static constexpr int SCALE_ITEM = FORMAT == INT4 ? 4 : 2, SCALE_WORDS = GROUPED ? GROUPS * ROWS * SCALE_ITEM / 4 : 0;
    static constexpr int CODE_BYTES = 32 * 2 * HEIGHT * PARTS * 16, BYTES = CODE_BYTES + SCALE_WORDS * 4;

    static __device__ __forceinline__ int64_t bytes_of(int inputs) {
        return FORMAT == HALF ? 2ll * inputs : FORMAT == INT4 ? inputs / 2 : inputs;
    }

    // The chunk of a group of rows into a stage of the warp's ring.
    static __device__ __forceinline__ void fetch(const StreamMap& m, int row0, int k0, uint32_t stage, int lane) {
        const int64_t pitch = bytes_of(m.k);
        const uint8_t* from = m.weight + (row0 + lane / 4) * pitch + bytes_of(k0) + 16 * (lane & 3);
#pragma unroll
        for (int row = 0; row < 2 * HEIGHT; ++row) {
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
                copy16(stage + (row * PARTS + part) * 512 + lane * 16, from + row * 8 * pitch + part * 64);
        }
        if constexpr (GROUPED) {
            constexpr int OF_GROUP = SCALE_WORDS / GROUPS;
#pragma unroll
            for (int i = 0; i < SCALE_WORDS; i += 32) {
                const int at = i + lane, group = at / OF_GROUP;
                if (at >= SCALE_WORDS) break;
                const int64_t first = static_cast<int64_t>(k0 / GROUP_INPUTS + group) * m.n + row0;
                copy4(stage + CODE_BYTES + at * 4, static_cast<const uint8_t*>(m.scales) + first * SCALE_ITEM + at % OF_GROUP * 4);
            }
        }
    }

    // The chunk into the L2 cache.
    static __device__ __forceinline__ void prefetch(const StreamMap& m, int row0, int k0, int lane) {
        if (lane < ROWS) into_l2(m.weight + (row0 + lane) * bytes_of(m.k) + bytes_of(k0));
    }

    static __device__ __forceinline__ uint32_t scale(uint32_t stage, int group, int row) {
        const uint32_t at = stage + CODE_BYTES + (group * ROWS + row) * SCALE_ITEM;
        return FORMAT == INT4 ? shared4(at) : shared2(at);
    }
};

// The stage's chunk against TILES * 8 rows of x; x: of this lane, row 0. Chains: sums that do not wait for each other.
template <Format FORMAT, int TILES, int HEIGHT, int PARTS>
__device__ __forceinline__ void multiply(
    float (&sums)[HEIGHT][TILES][4], uint32_t stage, const __half* x, int k, int rows, int lane) {
    using C = Chunk<FORMAT, HEIGHT, PARTS>;
    constexpr int QUADS = C::LANE / 8, STEPS = FORMAT == HALF ? 2 : FORMAT == INT4 ? 8 : 4, CHAINS = HEIGHT * TILES == 1 ? 2 : 1;
    const int g = lane / 4;
#pragma unroll
    for (int group = 0; group < C::GROUPS; ++group) {
        float own[CHAINS][HEIGHT][TILES][4] = {};
        uint32_t scales[HEIGHT][2] = {};
        if constexpr (C::GROUPED) {
#pragma unroll
            for (int tile = 0; tile < HEIGHT; ++tile) {
                scales[tile][0] = C::scale(stage, group, tile * 16 + g);
                scales[tile][1] = C::scale(stage, group, tile * 16 + 8 + g);
            }
        }
        constexpr int OF_GROUP = PARTS / C::GROUPS;
#pragma unroll
        for (int part = group * OF_GROUP; part < (group + 1) * OF_GROUP; ++part) {
            uint4 b[TILES][QUADS], w[HEIGHT][2];
#pragma unroll
            for (int n = 0; n < TILES; ++n) {
#pragma unroll
                for (int q = 0; q < QUADS; ++q) {
                    b[n][q] = make_uint4(0, 0, 0, 0);
                    if (n * 8 + g < rows)
                        b[n][q] = __ldg(reinterpret_cast<const uint4*>(x + static_cast<int64_t>(n * 8 + g) * k + part * C::PIECE) + q);
                }
            }
#pragma unroll
            for (int tile = 0; tile < HEIGHT; ++tile) {
#pragma unroll
                for (int up = 0; up < 2; ++up)
                    w[tile][up] = shared16(stage + ((tile * 2 + up) * PARTS + part) * 512 + lane * 16);
            }
            uint32_t pairs[HEIGHT][2][4];  // of a word of eight codes
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                Fragment a[HEIGHT];
#pragma unroll
                for (int tile = 0; tile < HEIGHT; ++tile) {
#pragma unroll
                    for (int up = 0; up < 2; ++up) {
                        const uint4& codes = w[tile][up];
                        if constexpr (FORMAT == HALF) {
                            a[tile].x[up] = word(codes, 2 * step), a[tile].x[up + 2] = word(codes, 2 * step + 1);
                        } else if constexpr (FORMAT == INT4) {
                            if (step % 2 == 0) {
                                unpack_word(word(codes, step / 2), __byte_perm(scales[tile][up], 0, 0x3232), pairs[tile][up]);
                            }
                            a[tile].x[up] = pairs[tile][up][step % 2 * 2], a[tile].x[up + 2] = pairs[tile][up][step % 2 * 2 + 1];
                        } else {
                            unpack_bytes<FORMAT>(word(codes, step), a[tile].x[up], a[tile].x[up + 2]);
                        }
                    }
                }
#pragma unroll
                for (int n = 0; n < TILES; ++n) {
                    const uint4& quad = b[n][step * QUADS / STEPS];
                    constexpr int PAIRS = STEPS / QUADS;  // of words of x, in a quad
                    const uint32_t b0 = word(quad, step % PAIRS * 2), b1 = word(quad, step % PAIRS * 2 + 1);
#pragma unroll
                    for (int tile = 0; tile < HEIGHT; ++tile) mma(own[step % CHAINS][tile][n], a[tile], b0, b1);
                }
            }
        }
#pragma unroll
        for (int tile = 0; tile < HEIGHT; ++tile) {
#pragma unroll
            for (int n = 0; n < TILES; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float sum = own[0][tile][n][i];
                    if constexpr (CHAINS == 2) sum += own[1][tile][n][i];
                    if constexpr (C::GROUPED) {
                        const auto bits = static_cast<unsigned short>(scales[tile][i / 2] & 0xffffu);
                        sums[tile][n][i] = fmaf(sum, __half2float(__ushort_as_half(bits)), sums[tile][n][i]);
                    } else {
                        sums[tile][n][i] += sum;
                    }
                }
            }
        }
    }
}

// Where a warp stands: a block's worth of work, a map, a group of rows of it and a chunk of k. Blocks take every
// gridDim.x-th; those that began with a heavy one (of halves, beside codes) leave out their second.
struct Place {
    static constexpr int NOTHING = 1 << 30;
    int number, unit, map, row0, k0;

    template <Format SMALL, int HEIGHT, int PARTS>
    __device__ __forceinline__ void enter(const StreamArgs& args, int to, int warp) {
        number = to;
        row0 = NOTHING;
        const int grid = gridDim.x, left_out = number < grid ? 0 : args.heavy;
        if (is_end(args) || (left_out > 0 && number < grid + left_out)) return;
        unit = number - left_out;
        while (map + 1 < args.count && unit >= args.maps[map + 1].first_unit) ++map;
        const StreamMap& m = args.maps[map];
        row0 = ((unit - m.first_unit) * (WARPS / m.warps_k) + warp / m.warps_k) * 16 * HEIGHT;
        k0 = warp % m.warps_k * (m.format == HALF ? Chunk<HALF, HEIGHT, PARTS>::INPUTS : Chunk<SMALL, HEIGHT, PARTS>::INPUTS);
    }
    __device__ __forceinline__ bool is_end(const StreamArgs& args) const { return number >= args.units + args.heavy; }
    __device__ __forceinline__ bool has_work(const StreamArgs& args) const {
        return row0 < args.maps[map].n && k0 < args.maps[map].k;
    }
    // The next chunk of the group; whether there is none is has_work's to say.
    template <Format SMALL, int HEIGHT, int PARTS>
    __device__ __forceinline__ void go_on(const StreamArgs& args) {
        const StreamMap& m = args.maps[map];
        k0 += m.warps_k * (m.format == HALF ? Chunk<HALF, HEIGHT, PARTS>::INPUTS : Chunk<SMALL, HEIGHT, PARTS>::INPUTS);
    }
};

template <Format SMALL, int TILES, int HEIGHT, int PARTS, int STAGES>
__global__ void __launch_bounds__(WARPS * 32, TILES == 1 ? 3 : 2) stream_kernel(const __grid_constant__ StreamArgs args) {
    using Small = Chunk<SMALL, HEIGHT, PARTS>;
    constexpr int ROWS = Small::ROWS, STAGE_BYTES = Small::BYTES;
    extern __shared__ __align__(16) unsigned char dynamic[];
    __shared__ float partial[WARPS][TILES * 8][ROWS + RED_PAD];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const uint32_t ring = shared_address(dynamic) + warp * STAGES * STAGE_BYTES;

    Place ahead = {0, 0, 0, 0, 0};
    ahead.enter<SMALL, HEIGHT, PARTS>(args, blockIdx.x, warp);
    const auto find_work = [&](Place& place) {
        while (!place.is_end(args) && !place.has_work(args)) place.enter<SMALL, HEIGHT, PARTS>(args, place.number + gridDim.x, warp);
    };
    const auto fetch = [&](int stage) {
        find_work(ahead);
        if (!ahead.is_end(args)) {
            const StreamMap& m = args.maps[ahead.map];
            const uint32_t to = ring + stage * STAGE_BYTES;
            if (SMALL == HALF || m.format == HALF) {
                Chunk<HALF, HEIGHT, PARTS>::fetch(m, ahead.row0, ahead.k0, to, lane);
            } else {
                Small::fetch(m, ahead.row0, ahead.k0, to, lane);
            }
            ahead.go_on<SMALL, HEIGHT, PARTS>(args);
        }
        end_copies();
    };
#pragma unroll 1
    for (int stage = 0; stage < STAGES - 1; ++stage) fetch(stage);
    let_next_start();
    Place later = ahead;
#pragma unroll 1
    for (int i = 0; i < args.prefetch; ++i) {
        find_work(later);
        if (later.is_end(args)) break;
        const StreamMap& m = args.maps[later.map];
        if (SMALL == HALF || m.format == HALF) {
            Chunk<HALF, HEIGHT, PARTS>::prefetch(m, later.row0, later.k0, lane);
        } else {
            Small::prefetch(m, later.row0, later.k0, lane);
        }
        later.go_on<SMALL, HEIGHT, PARTS>(args);
    }
    wait_for_inputs();

    int stage = 0;
    Place at = {0, 0, 0, 0, 0};
    for (int number = blockIdx.x; number < args.units + args.heavy; number += gridDim.x) {
        at.enter<SMALL, HEIGHT, PARTS>(args, number, warp);
        if (at.row0 == Place::NOTHING) continue;  // for the whole block
        const StreamMap& m = args.maps[at.map];
        float sums[HEIGHT][TILES][4] = {};
        for (; at.has_work(args); at.go_on<SMALL, HEIGHT, PARTS>(args)) {
            wait_copies<STAGES - 2>();
            __syncwarp();  // the scales, of other lanes; and all have read the stage that is filled now
            fetch(stage == 0 ? STAGES - 1 : stage - 1);
            const uint32_t from = ring + stage * STAGE_BYTES;
            if (SMALL == HALF || m.format == HALF) {
                multiply<HALF, TILES, HEIGHT, PARTS>(sums, from, m.x + at.k0 + Chunk<HALF, HEIGHT, PARTS>::LANE * t, m.k, args.rows, lane);
            } else {
                multiply<SMALL, TILES, HEIGHT, PARTS>(sums, from, m.x + at.k0 + Small::LANE * t, m.k, args.rows, lane);
            }
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
#pragma unroll
        for (int tile = 0; tile < HEIGHT; ++tile) {
#pragma unroll
            for (int n = 0; n < TILES; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    partial[warp][n * 8 + 2 * t + (i & 1)][tile * 16 + g + (i >> 1) * 8] = sums[tile][n][i];
            }
        }
        __syncthreads();
        const int outputs = WARPS / m.warps_k * ROWS, first_row = (at.unit - m.first_unit) * outputs;
        for (int i = threadIdx.x; i < outputs * args.rows; i += WARPS * 32) {
            const int row = i / outputs, out = i % outputs;
            if (first_row + out >= m.n) continue;
            float sum = 0.0f;
            for (int j = 0; j < m.warps_k; ++j) sum += partial[out / ROWS * m.warps_k + j][row][out % ROWS];
            if (SMALL != HALF && m.format != HALF) {
                sum *= code_scale<SMALL>();
                if constexpr (SMALL == FP8) sum *= __ldg(static_cast<const float*>(m.scales) + first_row + out);
            }
            sum = activate(sum, m.activation);
            const int64_t place = static_cast<int64_t>(row) * m.ld_y + first_row + out;
            if (m.float_out) {
                static_cast<float*>(m.y)[place] = sum;
            } else {
                static_cast<__half*>(m.y)[place] = __float2half_rn(sum);
            }
        }
        __syncthreads();
    }
}

template <Format SMALL, int HEIGHT, int PARTS>
static int inputs_of(int format) { return format == HALF ? Chunk<HALF, HEIGHT, PARTS>::INPUTS : Chunk<SMALL, HEIGHT, PARTS>::INPUTS; }

template <Format SMALL, int TILES, int HEIGHT, int PARTS, int STAGES>
static int launch_shape(StreamArgs args, void* stream) {
    constexpr int RING = WARPS * STAGES * Chunk<SMALL, HEIGHT, PARTS>::BYTES;
    const Machine& machine = this_machine();
    args.units = args.heavy = 0;
    for (int i = 0; i < args.count; ++i) {
        StreamMap& m = args.maps[i];
        m.warps_k = WARPS;
        while (m.warps_k > 1 && m.warps_k * inputs_of<SMALL, HEIGHT, PARTS>(m.format) > m.k) m.warps_k /= 2;
        const int outputs = 16 * HEIGHT * WARPS / m.warps_k;
        m.first_unit = args.units;
        args.units += (m.n + outputs - 1) / outputs;
        if (SMALL != HALF && m.format == HALF) args.heavy = args.units;
    }
    const int grid = min(args.units, args.places * machine.processors);
    if (args.heavy > grid || args.units <= grid) args.heavy = 0;
    const auto kernel = stream_kernel<SMALL, TILES, HEIGHT, PARTS, STAGES>;
    const int shared = RING + args.padding;
    static int raised[MAX_DEVICES] = {};
    if (raised[this_device()] < shared) {
        const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
        if (error != cudaSuccess) return static_cast<int>(error);
        raised[this_device()] = shared;
    }
    launch_with_split(kernel, dim3(grid), WARPS * 32, shared, args.shared_percent, stream, args);
    return launch_result();
}

// Low groups of rows where every warp still has whole chunks and few rows of x are read again for each.
template <Format SMALL>
static int launch_format(const StreamArgs& args, void* stream) {
    const auto deep = [&](auto of) {
        bool fits = args.rows <= 8;
        for (int i = 0; i < args.count; ++i) fits = fits && args.maps[i].k % of(args.maps[i].format) == 0;
        return fits;
    };
    const bool low = deep(inputs_of<SMALL, 1, 2>), lower = deep(inputs_of<SMALL, 1, 4>);
    if (args.variant == 0 && lower) return launch_shape<SMALL, 1, 1, 4, 3>(args, stream);
    if (args.variant <= 1 && low) return launch_shape<SMALL, 1, 1, 2, 5>(args, stream);
    if (args.variant == 2 && low) return launch_shape<SMALL, 1, 1, 2, 3>(args, stream);
    const bool roomy = this_machine().shared_bytes > 128 << 10;
    if (args.rows <= 8) return roomy ? launch_shape<SMALL, 1, 2, 2, 3>(args, stream) : launch_shape<SMALL, 1, 2, 2, 2>(args, stream);
    return roomy ? launch_shape<SMALL, 2, 2, 2, 3>(args, stream) : launch_shape<SMALL, 2, 2, 2, 2>(args, stream);
}

// Maps of halves come first; all others are of one format.
RWKV_API int rwkv_stream(const StreamArgs* args, void* stream) {
    switch (args->maps[args->count - 1].format) {
        case FP8: return launch_format<FP8>(*args, stream);
        case INT8: return launch_format<INT8>(*args, stream);
        case INT4: return launch_format<INT4>(*args, stream);
        case HALF: return launch_format<HALF>(*args, stream);
    }
    return static_cast<int>(cudaErrorInvalidValue);
}
