// A whole decode step of a small fp16 model in one launch: layers, head and the likeliest tokens, for up to 8 rows.
//
// A small model's step waits for launches: each layer has seven. Here one CTA per SM stays for the whole step. CTAs
// exchange activations through L2: a reader polls the words themselves until none is EMPTY, so a phase needs no fence.
// Weights and states do not depend on activations: bulk copies bring them into a ring in shared memory, a layer ahead,
// so that polls do not wait behind loads. All phases of a layer share their code, so that it stays in the instruction
// cache.
//
// Phases of a layer: input projections (r, k, v and the first halves of the low-rank maps), WKV with the second halves
// (a CTA per row and head), output map, ffn.key, ffn.value. A CTA computes tiles of 8 outputs of a map. Each of its warps
// has an eighth of the channels: it polls them, holds their residual stream in registers, and multiplies them.
#include "draft_step.cuh"
#include "../hopper.cuh"
#include "../mma.cuh"

namespace {

constexpr int THREADS = 256, WARPS = 8;
constexpr int GROUP = 4;  // tiles that a CTA multiplies at once
constexpr int MAX_CTAS = 132;  // of a Hopper GPU
constexpr int READ = 0, WRITE = 1, TOKEN = 2;  // parts of the table
constexpr int PARTIAL_ROW = 12;  // floats from a row of partial sums to the next one: without bank conflicts
enum Phase { INPUTS, OUTPUT, KEY, VALUE };

// Sums of 8 outputs of a tile, and of 8 of another one, over N chunks of 32 inputs of 8 rows. Lane t gets of output t / 4
// the rows t % 4 * 2 and + 1: x and y of the first tile, z and w of the second.
template <int N>
__device__ __forceinline__ float4 multiply(const uint4 (&rows)[N], const uint4 (&tile)[N], const uint4 (&other)[N]) {
    float c[4][4] = {};
#pragma unroll
    for (int i = 0; i < N; ++i) {
        mma(c[i % 2 * 2], Fragment{{tile[i].x, other[i].x, tile[i].y, other[i].y}}, rows[i].x, rows[i].y);
        mma(c[i % 2 * 2 + 1], Fragment{{tile[i].z, other[i].z, tile[i].w, other[i].w}}, rows[i].z, rows[i].w);
    }
    const auto sum = [&](int i) { return (c[0][i] + c[1][i]) + (c[2][i] + c[3][i]); };
    return make_float4(sum(0), sum(1), sum(2), sum(3));
}

// Larger for larger logits, and for the lower of tokens with equal ones. Never EMPTY_KEY.
__device__ __forceinline__ unsigned long long key_of(float logit, int token) {
    const uint32_t bits = __float_as_uint(logit);
    const uint32_t order = bits >> 31 ? ~bits : bits | 0x80000000u;
    return static_cast<unsigned long long>(order) << 32 | (0x7fffffffu - token);
}
__device__ __forceinline__ unsigned long long max_over_lanes(unsigned long long key, int offset) {
    const uint32_t high = __shfl_xor_sync(FULL_MASK, static_cast<uint32_t>(key >> 32), offset);
    const uint32_t low = __shfl_xor_sync(FULL_MASK, static_cast<uint32_t>(key), offset);
    const unsigned long long other = static_cast<unsigned long long>(high) << 32 | low;
    return key > other ? key : other;
}

struct Head {  // shared memory of the WKV phase
    alignas(16) __half rkv[3][HEAD_SIZE];
    __half low[3 * LOW_RANK + GATE_RANK];
    float up[4][HEAD_SIZE];  // outputs of the low-rank maps: v_gate, w, a, g
    float vectors[WARPS][6][HEAD_SIZE];  // of each warp: decay, k, -kk, kk * a, r, v
    float y[HEAD_SIZE];
};

struct Source {  // of a stage of the ring
    const char* at;  // in layer 0
    uint32_t layer_bytes, bytes;  // from one layer to the next; of the stage
};

struct Copy {  // into a stage; none if it has no bytes
    int number = 0;
    uint32_t bytes = 0;
    const char* from = nullptr;
};

// CHUNKS: C / 256
template <int CHUNKS>
struct Step {
    using Exchange = DraftExchange<256 * CHUNKS>;
    using Weights = DraftWeights<256 * CHUNKS>;
    static constexpr int C = 256 * CHUNKS, HEADS = C / HEAD_SIZE, TILE_BYTES = 2 * Weights::TILE;
    static constexpr int UPS_STAGES = 4, UPS_BYTES = 2 * Weights::UPS / UPS_STAGES, STATE_BYTES = 2 * HEAD_SIZE * HEAD_SIZE;
    static constexpr int STAGE_BYTES = TILE_BYTES > UPS_BYTES ? TILE_BYTES : UPS_BYTES, STAGES = (204 << 10) / STAGE_BYTES;

    struct Smem {
        alignas(128) char ring[STAGES][STAGE_BYTES];  // a layer's tiles, ups and states in the order of their use, at last the head's
        union {
            Head head;
            float partials[GROUP][WARPS][MAX_DRAFT_ROWS * PARTIAL_ROW];
            uint4 operands[8][CHUNKS][32];  // of the head: each warp's channels
        };
        alignas(16) float2 moments[MAX_DRAFT_ROWS][WARPS];
        unsigned long long arrived[STAGES];  // mbarriers
        unsigned long long keys[WARPS][MAX_DRAFT_ROWS];
        Source sources[THREADS];
        int slots[2][MAX_DRAFT_ROWS];
        int tiles[4][2];  // of each phase: this CTA's first, and the one after its last
    };

    const DraftStepArgs& p;
    Smem& s;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, cta = blockIdx.x, num_ctas = gridDim.x;
    const int row = lane >> 2, quad = lane & 3, channel = 32 * CHUNKS * warp + 8 * quad;  // this lane's: also channel + 32, ...
    int layer = 0, first_set;
    int layer_stages, all_stages;  // of a layer; of all layers and the head
    int taken = 0, freed = 0, filled = 0;  // stages that this warp has read, that all have read, that are copied or being copied
    __half* exchange;  // the layer's
    float x[CHUNKS][8];  // residual stream

    __device__ bool has_row() const { return row < p.rows; }
    __device__ __half* of_layer(int which) const { return p.exchange + (first_set + which + Exchange::SETS) % Exchange::SETS * Exchange::SIZE; }
    __device__ const float* vector(int which) const { return p.vectors + (layer * NUM_VECTORS + which) * C; }
    __device__ static int input_mix(int tile) {
        const int low = tile - 3 * C / 8;
        return low < 0 ? tile / (C / 8) : min(2 + low / (LOW_RANK / 8), 5);
    }

    // Tiles of a phase before a CTA's first. Of 132 CTAs each has input projections of one mix, and the maps of few tiles leave
    // the first CTAs to WKV.
    __device__ int tiles_before(int phase, int cta) const {
        if (phase == KEY) return C / 2 * cta / num_ctas;
        if (phase == INPUTS) {
            const int of_map = num_ctas * 8 / 33, maps = 3 * of_map;  // CTAs of each of r, k and v
            if (maps == 0) return Weights::OUTPUT * cta / num_ctas;
            return cta < maps ? C / 8 * cta / of_map : 3 * C / 8 + (Weights::OUTPUT - 3 * C / 8) * (cta - maps) / (num_ctas - maps);
        }
        return max(0, C / 8 - (C / 8 + num_ctas - 1) / num_ctas * (num_ctas - cta));
    }

    // Sets the source of the stage `index` of a layer, and returns how many stages a layer has.
    __device__ int set_source(int index, const int64_t* line) {
        const auto count = [&](int phase) { return s.tiles[phase][1] - s.tiles[phase][0]; };
        constexpr int OF_HEAD = UPS_STAGES + 1;
        const int heads = OF_HEAD * max(0, (p.rows * HEADS - cta + num_ctas - 1) / num_ctas);
        Source& source = s.sources[index];
        int i = index - count(INPUTS), tile = s.tiles[INPUTS][0] + index;
        if (i >= heads) {
            i -= heads, tile = Weights::OUTPUT + s.tiles[OUTPUT][0] + i;
            if (i >= count(OUTPUT)) i -= count(OUTPUT), tile = Weights::KEY + s.tiles[KEY][0] + i;
            if (tile >= Weights::KEY + s.tiles[KEY][1]) tile = Weights::VALUE + GROUP * s.tiles[VALUE][0] + i - count(KEY);
        }
        source = {reinterpret_cast<const char*>(p.weights + tile * Weights::TILE), 2 * Weights::SIZE, TILE_BYTES};
        if (i >= 0 && index - count(INPUTS) < heads) {
            const int item = cta + i / OF_HEAD * num_ctas, head = item % HEADS, part = i % OF_HEAD;
            const __half* states = p.wkv + line[READ * p.table_rows + item / HEADS] * p.wkv_slot;
            source = {reinterpret_cast<const char*>(p.ups + head * Weights::UPS) + part * UPS_BYTES, 2 * HEADS * Weights::UPS, UPS_BYTES};
            if (part == UPS_STAGES) source = {reinterpret_cast<const char*>(states) + head * STATE_BYTES, static_cast<uint32_t>(2 * p.wkv_layer), STATE_BYTES};
        }
        return count(INPUTS) + heads + count(OUTPUT) + count(KEY) + GROUP * count(VALUE);
    }

    // The copy of a stage; none after the last one.
    __device__ Copy copy_of(int number) const {
        if (number >= all_stages) return {};
        const int of_layer = number / layer_stages, index = number - of_layer * layer_stages;
        if (of_layer < p.num_layers) {
            const Source& source = s.sources[index];
            return {number, source.bytes, source.at + static_cast<int64_t>(of_layer) * source.layer_bytes};
        }
        const int tile = cta + (number - p.num_layers * layer_stages) * num_ctas;
        return {number, TILE_BYTES, reinterpret_cast<const char*>(p.head) + static_cast<int64_t>(tile) * TILE_BYTES};
    }

    // This warp's copy of the next up to 8 into stages that all warps have read. Made before a wait and started after it: a copy
    // delays the polls of its SM.
    __device__ Copy next_copy() {
        const int number = filled + warp;
        filled = min(filled + WARPS, freed + STAGES);
        return lane == 0 && number < freed + STAGES ? copy_of(number) : Copy{};
    }

    __device__ void start(const Copy& copy) {
        if (copy.bytes == 0) return;
        const uint32_t barrier = hopper::smem_address(&s.arrived[copy.number % STAGES]);
        hopper::mbarrier_expect_tx(barrier, copy.bytes);
        hopper::bulk_load(hopper::smem_address(s.ring[copy.number % STAGES]), copy.from, copy.bytes, barrier);
    }

    __device__ const char* await_stage(int number) {
        hopper::mbarrier_wait(hopper::smem_address(&s.arrived[number % STAGES]), number / STAGES & 1);
        return s.ring[number % STAGES];
    }

    // A map of the layer: waits for its inputs, and stores its outputs for the other CTAs.
    __device__ void project(int phase) {
        const bool is_value = phase == VALUE, has_norm = phase == INPUTS || phase == KEY;
        const int begin = s.tiles[phase][0], last = s.tiles[phase][1];
        float2 m;
        if (phase == OUTPUT && warp == WARPS - 1) clear();
#pragma unroll 1
        for (int first = begin, next; first < last; first = next) {
            const int mix = phase == INPUTS ? input_mix(first) : CHANNEL_MIX;
            next = min(first + (is_value ? 1 : GROUP), last);
            while (phase == INPUTS && input_mix(next - 1) != mix) --next;
            const int count = is_value ? GROUP : next - first;  // of tiles; all quarters of one are multiplied at once
            uint4 w[GROUP][CHUNKS], operands[GROUP][CHUNKS];
#pragma unroll
            for (int i = 0; i < GROUP; ++i) {
                if (i >= count) break;
                const char* from = await_stage(taken + i) + 512 * CHUNKS * warp + 16 * lane;
#pragma unroll
                for (int j = 0; j < CHUNKS; ++j) w[i][j] = load16(from + 512 * j);
            }
            taken += count;
            const Copy copy = next_copy();
            if (has_norm) {
                float scale[CHUNKS][8], bias[CHUNKS][8];
                load_shift(mix, scale, bias);
                if (first == begin && (phase == KEY || layer > 0)) add(phase == KEY ? exchange + Exchange::ATT : of_layer(layer - 1) + Exchange::FFN);
                if (first == begin) m = moments();
#pragma unroll
                for (int j = 0; j < CHUNKS; ++j) operands[0][j] = normalise(j, m, scale, bias);
            } else if (first == begin) {
                await_row(operands, exchange + (is_value ? Exchange::HIDDEN + 4 * row * C : Exchange::Y + row * C), is_value ? GROUP : 1);
            }
            start(copy);
            float4 sums[2];
            if (is_value) {
                sums[0] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
                for (int i = 0; i < GROUP; ++i) {
                    const float4 one = multiply(operands[i], w[i], w[i]);
                    sums[0].x += one.x, sums[0].y += one.y;
                }
            } else {
                sums[0] = multiply(operands[0], w[0], w[1]), sums[1] = multiply(operands[0], w[2], w[3]);
            }
            if (2 * quad < p.rows) {
#pragma unroll
                for (int i = 0; i < GROUP; ++i) {
                    if (i >= next - first) break;
                    float* to = s.partials[i][warp] + 2 * quad * PARTIAL_ROW + row;
                    to[0] = i % 2 ? sums[i / 2].z : sums[i / 2].x, to[PARTIAL_ROW] = i % 2 ? sums[i / 2].w : sums[i / 2].y;
                }
            }
            __syncthreads();
            freed = taken;
            if (warp < next - first && has_row()) store_outputs(phase, 8 * (first + warp) + 2 * quad, s.partials[warp][0] + row * PARTIAL_ROW + 2 * quad);
            if (has_norm && first == begin && has_row() && cta == num_ctas - 1 - row % num_ctas) store_shift(phase == INPUTS, m);
            __syncthreads();
        }
    }

    // Adds the warps' sums of two outputs of a row, applies the map's activation, and stores them.
    __device__ void store_outputs(int phase, int output, const float* partials) {
        float2 y = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int k = 0; k < WARPS; ++k) {
            const float2 part = *reinterpret_cast<const float2*>(partials + k * MAX_DRAFT_ROWS * PARTIAL_ROW);
            y.x += part.x, y.y += part.y;
        }
        int at = phase == OUTPUT ? Exchange::ATT : Exchange::FFN, width = C;
        if (phase == INPUTS) {
            at = 0, width = Exchange::INPUTS;
            const int mix = input_mix(output / 8);
            if (mix == 3) y = make_float2(tanh_exp(y.x), tanh_exp(y.y));
            if (mix == 5) y = make_float2(sigmoidf(y.x), sigmoidf(y.y));
        } else if (phase == KEY) {
            at = Exchange::HIDDEN, width = 4 * C;
            y = make_float2(max(y.x, 0.0f), max(y.y, 0.0f));
            y = make_float2(min(y.x * y.x, 65504.0f), min(y.y * y.y, 65504.0f));
        }
        store_exchanged(exchange + at + row * width + output, pack2(y.x, y.y));
    }

    // Waits for this lane's channels at row[i * C], i below `count`.
    template <int N>
    __device__ void await_row(uint4 (&v)[N][CHUNKS], const __half* from, int count) const {
        if (!has_row()) count = 0;
#pragma unroll
        for (int i = 0; i < N; ++i)
#pragma unroll
            for (int j = 0; j < CHUNKS; ++j) {
                v[i][j] = make_uint4(0, 0, 0, 0);
                if (i < count) v[i][j] = load_exchanged(from + channel + i * C + 32 * j);
            }
        bool written;
        do {
            written = true;
#pragma unroll
            for (int i = 0; i < N; ++i)
#pragma unroll
                for (int j = 0; j < CHUNKS; ++j)
                    if (!is_written(v[i][j])) v[i][j] = load_exchanged(from + channel + i * C + 32 * j), written = false;
        } while (!written);
        __syncwarp();
    }

    // Adds `delta` [rows, C] to the residual stream, once it is written.
    __device__ void add(const __half* delta) {
        uint4 v[1][CHUNKS];
        await_row(v, delta + row * C, 1);
#pragma unroll
        for (int j = 0; j < CHUNKS; ++j) {
            float d[8];
            unpack8(v[0][j], d);
#pragma unroll
            for (int k = 0; k < 8; ++k) x[j][k] += d[k];
        }
    }

    // One over the standard deviation of this row's residual stream, and minus the mean times that. All threads.
    __device__ float2 moments() {
        float sum = 0.0f, squares = 0.0f;
#pragma unroll
        for (int j = 0; j < CHUNKS; ++j)
#pragma unroll
            for (int k = 0; k < 8; ++k) sum += x[j][k], squares += x[j][k] * x[j][k];
#pragma unroll
        for (int offset = 1; offset < 4; offset *= 2) {
            sum += __shfl_xor_sync(FULL_MASK, sum, offset);
            squares += __shfl_xor_sync(FULL_MASK, squares, offset);
        }
        if (quad == 0) s.moments[row][warp] = make_float2(sum, squares);
        __syncthreads();
        sum = squares = 0.0f;
#pragma unroll
        for (int k = 0; k < WARPS; k += 2) {
            const float4 two = *reinterpret_cast<const float4*>(&s.moments[row][k]);
            sum += two.x + two.z, squares += two.y + two.w;
        }
        const float mean = sum * (1.0f / C), factor = rsqrtf(max(squares * (1.0f / C) - mean * mean, 0.0f) + NORM_EPS);
        return make_float2(factor, -mean * factor);
    }

    __device__ uint4 normalise(int j, float2 m, const float (&scale)[CHUNKS][8], const float (&bias)[CHUNKS][8]) const {
        float y[8];
#pragma unroll
        for (int k = 0; k < 8; ++k) y[k] = (x[j][k] * m.x + m.y) * scale[j][k] + bias[j][k];
        return pack8(y);
    }
    __device__ void load_norm(const float* weights, const float* biases, float (&scale)[CHUNKS][8], float (&bias)[CHUNKS][8]) const {
#pragma unroll
        for (int j = 0; j < CHUNKS; ++j) load_fp32x8(weights + channel + 32 * j, scale[j]), load_fp32x8(biases + channel + 32 * j, bias[j]);
    }
    __device__ __half* shifts(bool is_time_mix, int side) const {
        return p.shift + layer * p.shift_layer + s.slots[side][has_row() ? row : 0] * p.shift_slot + (is_time_mix ? 0 : C) + channel;
    }

    // Scale and bias of LayerNorm and token shift together: both are linear.
    __device__ void load_shift(int mix, float (&scale)[CHUNKS][8], float (&bias)[CHUNKS][8]) const {
        const bool is_time_mix = mix != CHANNEL_MIX;
        const __half *before = shifts(is_time_mix, READ), *shares = p.mixes + (layer * NUM_MIXES + mix) * C + channel;
        load_norm(vector(is_time_mix ? LN1 : LN2), vector(is_time_mix ? LN1 + 1 : LN2 + 1), scale, bias);
#pragma unroll
        for (int j = 0; j < CHUNKS; ++j) {
            float old[8], share[8];
            unpack8(load16(before + 32 * j), old), unpack8(load16(shares + 32 * j), share);
#pragma unroll
            for (int k = 0; k < 8; ++k) scale[j][k] *= 1.0f - share[k], bias[j][k] += (old[k] - bias[j][k]) * share[k];
        }
    }
    __device__ void store_shift(bool is_time_mix, float2 m) const {
        float scale[CHUNKS][8], bias[CHUNKS][8];
        load_norm(vector(is_time_mix ? LN1 : LN2), vector(is_time_mix ? LN1 + 1 : LN2 + 1), scale, bias);
#pragma unroll
        for (int j = 0; j < CHUNKS; ++j) store16(shifts(is_time_mix, WRITE) + 32 * j, normalise(j, m, scale, bias));
    }

    __device__ void wkv() {
#pragma unroll 1
        for (int item = cta; item < p.rows * HEADS; item += num_ctas) wkv_head(item / HEADS, item % HEADS);
    }

    // Second half of a low-rank map: this warp's 8 outputs.
    template <int N>
    __device__ void multiply_low(int map, const uint4 (&weights)[N]) {
        uint4 inner[N];  // all rows are this one
#pragma unroll
        for (int i = 0; i < N; ++i) inner[i] = load16(s.head.low + LOW_RANK * map + 32 * i + 8 * quad);
        const float y = multiply(inner, weights, weights).x;
        if (quad == 0) s.head.up[map][warp * 8 + row] = y;
    }

    __device__ void wkv_head(int of_row, int head) {
        Head& h = s.head;
        const bool has_gate = layer > 0;
        const int own = head * HEAD_SIZE + 2 * lane;
        const char* ups = await_stage(taken + warp / 2) + warp % 2 * (UPS_BYTES / 2) + 16 * lane;
        uint4 up[3][2], g_up[4];
#pragma unroll
        for (int i = 0; i < 6; ++i) up[i / 2][i % 2] = load16(ups + 512 * i);
#pragma unroll
        for (int i = 0; i < 4; ++i) g_up[i] = load16(ups + 512 * (6 + i));
        const int value = warp * 8 + row, keys = quad * 4;  // this thread's part of the state: also keys + 16, 32, 48
        const __half* from = reinterpret_cast<const __half*>(await_stage(taken + UPS_STAGES)) + value * HEAD_SIZE + keys;
        uint2 stored[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) stored[i] = *reinterpret_cast<const uint2*>(from + 16 * i);
        taken += UPS_STAGES + 1;
        const Copy copy = next_copy();
        const auto pair = [&](int which) { return *reinterpret_cast<const float2*>(vector(which) + own); };
        const float2 w0 = pair(W0), a0 = pair(A0), v0 = pair(V0), k_k = pair(K_K), k_a = pair(K_A);
        const float2 r_k = pair(R_K), norm_weight = pair(LN_X), norm_bias = pair(LN_X + 1);
        float2& kept = *reinterpret_cast<float2*>(p.v_first + of_row * C + own);  // read where it was written
        const float2 v_first = has_gate ? kept : float2();

        const __half* inputs = exchange + of_row * Exchange::INPUTS;
        const int unit = threadIdx.x, part = unit >> 3;
        if (unit < 24 + (3 * LOW_RANK + GATE_RANK) / 8) {
            const __half* at = inputs + (part < 3 ? part * C + head * HEAD_SIZE + (unit & 7) * 8 : 3 * C + (unit - 24) * 8);
            uint4 v;
            do v = load_exchanged(at);
            while (!is_written(v));
            store16(&h.rkv[0][0] + 8 * unit, v);  // `low` follows `rkv`
        }
        __syncthreads();
        freed = taken;
        start(copy);
#pragma unroll
        for (int i = 0; i < 3; ++i) multiply_low(i, up[i]);
        multiply_low(3, g_up);
        __syncthreads();

        // Every warp makes the head's vectors: a lane has two channels.
        const auto two = [&](const void* values) { return __half22float2(*reinterpret_cast<const __half2*>(values)); };
        const auto mapped = [&](int which) { return *reinterpret_cast<const float2*>(&h.up[which][2 * lane]); };
        const float2 r = two(&h.rkv[0][2 * lane]), k_raw = two(&h.rkv[1][2 * lane]), v_gate = mapped(0), w = mapped(1), a_raw = mapped(2);
        float2 v = two(&h.rkv[2][2 * lane]);
        const float2 a = {sigmoidf(a0.x + a_raw.x), sigmoidf(a0.y + a_raw.y)};
        if (has_gate) {
            v.x += (v_first.x - v.x) * sigmoidf(v0.x + v_gate.x);
            v.y += (v_first.y - v.y) * sigmoidf(v0.y + v_gate.y);
        } else {
            kept = v;
        }
        float2 kk = {k_raw.x * k_k.x, k_raw.y * k_k.y};
        const float2 k = {k_raw.x * (1.0f + (a.x - 1.0f) * k_a.x), k_raw.y * (1.0f + (a.y - 1.0f) * k_a.y)};
        float squares = kk.x * kk.x + kk.y * kk.y, bonus = r.x * k.x * r_k.x + r.y * k.y * r_k.y;
#pragma unroll
        for (int offset = 16; offset > 0; offset >>= 1) {
            squares += __shfl_xor_sync(FULL_MASK, squares, offset);
            bonus += __shfl_xor_sync(FULL_MASK, bonus, offset);
        }
        const float scale = rsqrtf(max(squares, 1e-24f));
        kk.x *= scale, kk.y *= scale;
        float(&vectors)[6][HEAD_SIZE] = h.vectors[warp];
        const auto keep = [&](int i, float x0, float x1) { *reinterpret_cast<float2*>(&vectors[i][2 * lane]) = make_float2(x0, x1); };
        keep(0, __expf(DECAY_SCALE * sigmoidf(w0.x + w.x)), __expf(DECAY_SCALE * sigmoidf(w0.y + w.y)));
        keep(1, k.x, k.y), keep(2, -kk.x, -kk.y), keep(3, kk.x * a.x, kk.y * a.y), keep(4, r.x, r.y), keep(5, v.x, v.y);
        __syncwarp();

        float state[4][4], sa = 0.0f, y = 0.0f;
        const auto four = [&](int which, int i) { return *reinterpret_cast<const float4*>(&vectors[which][keys + 16 * i]); };
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            unpack2(stored[i].x, state[i][0], state[i][1]), unpack2(stored[i].y, state[i][2], state[i][3]);
            const float4 a = four(2, i);
            sa += state[i][0] * a.x + state[i][1] * a.y + state[i][2] * a.z + state[i][3] * a.w;
        }
        sa += __shfl_xor_sync(FULL_MASK, sa, 1);
        sa += __shfl_xor_sync(FULL_MASK, sa, 2);
        const float own_v = vectors[5][value];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float4 decay = four(0, i), new_k = four(1, i), b = four(3, i), receptance = four(4, i);
            state[i][0] = state[i][0] * decay.x + sa * b.x + own_v * new_k.x, y += state[i][0] * receptance.x;
            state[i][1] = state[i][1] * decay.y + sa * b.y + own_v * new_k.y, y += state[i][1] * receptance.y;
            state[i][2] = state[i][2] * decay.z + sa * b.z + own_v * new_k.z, y += state[i][2] * receptance.z;
            state[i][3] = state[i][3] * decay.w + sa * b.w + own_v * new_k.w, y += state[i][3] * receptance.w;
        }
        y += __shfl_xor_sync(FULL_MASK, y, 1);
        y += __shfl_xor_sync(FULL_MASK, y, 2);
        if (quad == 0) h.y[value] = y;
        __syncthreads();
        if (warp == 0) {
            const float y0 = h.y[2 * lane], y1 = h.y[2 * lane + 1];
            float sum = y0 + y1, sum_squares = y0 * y0 + y1 * y1;
#pragma unroll
            for (int offset = 16; offset > 0; offset >>= 1) {
                sum += __shfl_xor_sync(FULL_MASK, sum, offset);
                sum_squares += __shfl_xor_sync(FULL_MASK, sum_squares, offset);
            }
            const float mean = sum / HEAD_SIZE, factor = rsqrtf(max(sum_squares / HEAD_SIZE - mean * mean, 0.0f) + GROUP_NORM_EPS);
            const float2 gate = mapped(3);
            const float out0 = ((y0 - mean) * factor * norm_weight.x + norm_bias.x + bonus * v.x) * gate.x;
            const float out1 = ((y1 - mean) * factor * norm_weight.y + norm_bias.y + bonus * v.y) * gate.y;
            store_exchanged(exchange + Exchange::Y + of_row * C + own, pack2(out0, out1));
        }
        __half* to = p.wkv + layer * p.wkv_layer + s.slots[WRITE][of_row] * p.wkv_slot + (head * HEAD_SIZE + value) * HEAD_SIZE + keys;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            *reinterpret_cast<uint2*>(to + 16 * i) = make_uint2(pack2(state[i][0], state[i][1]), pack2(state[i][2], state[i][3]));
        __syncthreads();  // the next phase overwrites this memory
    }

    // The likeliest token of each row, once the last layer is done. Each warp has tiles of 8 tokens.
    __device__ void choose(int64_t step) {
        while (filled < freed + STAGES) start(next_copy());
        float scale[CHUNKS][8], bias[CHUNKS][8];
        load_norm(p.out_weight, p.out_bias, scale, bias);
        add(of_layer(p.num_layers - 1) + Exchange::FFN);
        const float2 m = moments();
#pragma unroll
        for (int j = 0; j < CHUNKS; ++j) s.operands[warp][j][lane] = normalise(j, m, scale, bias);
        __syncthreads();
        uint4 operands[8][CHUNKS];
#pragma unroll
        for (int i = 0; i < 8 * CHUNKS; ++i) operands[i / CHUNKS][i % CHUNKS] = s.operands[i / CHUNKS][i % CHUNKS][lane];
        unsigned long long best[2] = {};
#pragma unroll 1
        for (int number = taken; number < all_stages; ++number) {
            if (number % STAGES % WARPS != warp) continue;  // a stage has one warp: another one's wait could see the phase before
            const char* from = await_stage(number) + 16 * lane;
            float2 sums = make_float2(0.0f, 0.0f);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                uint4 w[CHUNKS];
#pragma unroll
                for (int j = 0; j < CHUNKS; ++j) w[j] = load16(from + 512 * (CHUNKS * i + j));
                const float4 part = multiply(operands[i], w, w);
                sums.x += part.x, sums.y += part.y;
            }
            __syncwarp();
            if (lane == 0) start(copy_of(number + STAGES));
            const int token = (cta + (number - taken) * num_ctas) * 8 + row;
            best[0] = max(best[0], key_of(sums.x, token)), best[1] = max(best[1], key_of(sums.y, token));
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            best[i] = max_over_lanes(max_over_lanes(max_over_lanes(best[i], 4), 8), 16);
            if (lane < 4) s.keys[warp][2 * lane + i] = best[i];
        }
        __syncthreads();
        if (static_cast<int>(threadIdx.x) < p.rows) {
            best[0] = 0;
            for (int i = 0; i < WARPS; ++i) best[0] = max(best[0], s.keys[i][threadIdx.x]);
            store_key(p.keys + threadIdx.x * num_ctas + cta, best[0]);
        }
        if (cta != 0) return;
        if (warp < p.rows) {
            best[0] = 0;
            for (int other = lane; other < num_ctas; other += 32) {
                unsigned long long* at = p.keys + warp * num_ctas + other;
                unsigned long long key;
                do key = load_key(at);
                while (key == EMPTY_KEY);
                best[0] = max(best[0], key);
                store_key(at, EMPTY_KEY);  // for the next launch
            }
            for (int offset = 16; offset > 0; offset >>= 1) best[0] = max_over_lanes(best[0], offset);
            if (lane == 0) p.chosen[warp] = p.guesses[step * p.table_rows + warp] = 0x7fffffff - static_cast<int>(best[0] & 0x7fffffff);
        }
        __syncthreads();  // after all keys have come, no CTA reads the counters any more
        if (threadIdx.x == 0) *p.step = step + 1, *p.launches = (*p.launches + 1) % Exchange::SETS;
    }

    // Makes the set of the next layer EMPTY. One warp, in the output map's phase: every CTA has read what the layer before the
    // last one wrote, which was in this set, and none writes to it before all CTAs have come to the layer's end.
    __device__ void clear() const {
        const uint4 empty = make_uint4(EMPTY, EMPTY, EMPTY, EMPTY);
        __half* to = of_layer(layer + 1);
#pragma unroll 1
        for (int i = cta * 32 + lane; i < Exchange::SIZE / 8; i += num_ctas * 32) store16(to + 8 * i, empty);
        __threadfence();
    }

    // Prefetches this CTA's share of `bytes` into L2.
    __device__ void prefetch(const void* from, int64_t bytes) const {
        const int share = static_cast<int>(bytes / 16 + num_ctas - 1) / num_ctas * 16;
        const int64_t begin = static_cast<int64_t>(cta) * share;
        if (begin < bytes) prefetch_bytes(static_cast<const char*>(from) + begin, static_cast<uint32_t>(min(static_cast<int64_t>(share), bytes - begin)));
    }

    __device__ void run() {
        const int64_t step = *p.step, *line = p.table + 3 * step * p.table_rows;
        first_set = *p.launches * (p.num_layers % Exchange::SETS) % Exchange::SETS;
        if (threadIdx.x < 8) {
            s.tiles[threadIdx.x / 2][threadIdx.x % 2] = tiles_before(threadIdx.x / 2, cta + threadIdx.x % 2);
        } else if (warp == 1 && lane < 2 * p.rows) {
            s.slots[lane % 2][lane / 2] = static_cast<int>(line[lane % 2 * p.table_rows + lane / 2]);
        } else if (warp == 2 && lane < STAGES) {
            hopper::mbarrier_init(hopper::smem_address(&s.arrived[lane]), 1);
            hopper::fence_mbarrier_init();
        } else if (warp == 3 && lane == 0) {
            prefetch(p.vectors, 4ll * p.num_layers * NUM_VECTORS * C), prefetch(p.mixes, 2ll * p.num_layers * NUM_MIXES * C);
        }
        __syncthreads();
        layer_stages = set_source(threadIdx.x, line);
        all_stages = p.num_layers * layer_stages + (p.vocab / 8 - cta + num_ctas - 1) / num_ctas;
        const int64_t given = has_row() ? line[TOKEN * p.table_rows + row] : 0, token = given < 0 ? p.chosen[row] : given;
#pragma unroll
        for (int j = 0; j < CHUNKS; ++j) unpack8(load16(p.embedding + token * C + channel + 32 * j), x[j]);
        __syncthreads();
        while (filled < freed + STAGES) start(next_copy());
        for (int i = cta * WARPS + warp; lane == 0 && i < p.rows * p.num_layers; i += num_ctas * WARPS)
            prefetch_bytes(p.shift + s.slots[READ][i % p.rows] * p.shift_slot + i / p.rows * p.shift_layer, 4 * C);
#pragma unroll 1
        for (; layer < p.num_layers; ++layer) {
            exchange = of_layer(layer);
#pragma unroll 1
            for (int phase = INPUTS; phase <= VALUE; ++phase) {
                project(phase);
                if (phase == INPUTS) wkv();
            }
        }
        choose(step);
    }
};

template <int CHUNKS>
__global__ void __launch_bounds__(THREADS, 1) draft_step_kernel(const __grid_constant__ DraftStepArgs p) {
    extern __shared__ __align__(16) unsigned char dynamic[];
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
    Step<CHUNKS> step{p, *reinterpret_cast<typename Step<CHUNKS>::Smem*>(dynamic)};
    step.run();
#endif
}

// Launches CTAs that wait for each other: the driver starts them only if all fit.
template <typename Kernel>
inline void launch_cooperative(Kernel kernel, int grid, int threads, size_t smem_bytes, void* stream, const DraftStepArgs& args) {
    cudaLaunchAttribute attribute = {};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(grid);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = smem_bytes;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &attribute, config.numAttrs = 1;
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
    cudaLaunchKernelEx(&config, kernel, args);
}

template <int CHUNKS>
int launch_step(const DraftStepArgs& args, void* stream) {
    // Every CTA must have tiles of the input projections and of ffn.key, in whose phases it updates the residual stream.
    if (min(MAX_CTAS, 128 * CHUNKS) < device_info().num_sms) return cudaErrorInvalidValue;
    const size_t bytes = sizeof(typename Step<CHUNKS>::Smem);
    if (bytes > static_cast<size_t>(device_info().smem_bytes)) return cudaErrorInvalidValue;
    const cudaError_t error = cudaFuncSetAttribute(
        draft_step_kernel<CHUNKS>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
    if (error != cudaSuccess) return error;
    launch_cooperative(draft_step_kernel<CHUNKS>, device_info().num_sms, THREADS, bytes, stream, args);
    return launch_result();
}

}  // namespace

RWKV_API int rwkv_draft_step(const DraftStepArgs* args, void* stream) {
    if (args->rows < 1 || args->rows > MAX_DRAFT_ROWS) return cudaErrorInvalidValue;
    switch (args->width) {
        case 256: return launch_step<1>(*args, stream);  // of tests
        case 768: return launch_step<3>(*args, stream);
        case 1024: return launch_step<4>(*args, stream);
        default: return cudaErrorInvalidValue;
    }
}
