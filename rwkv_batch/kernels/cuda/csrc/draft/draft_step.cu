// A whole decode step of a small fp16 model in one launch: layers, head and the likeliest tokens, for up to 8 rows.
//
// A small model's step waits for launches: each layer has seven. Here one CTA per SM stays for the whole step. CTAs
// exchange activations through L2: a reader polls the words themselves until none is EMPTY, so a phase needs no fence.
// Weights do not depend on activations: before a CTA waits, it loads those of the phase into registers. They were
// prefetched into L2 two layers before. All phases of a layer share their code, so that it stays in the instruction
// cache.
//
// Phases of a layer: input projections (r, k, v and the first halves of the low-rank maps), WKV with the second halves
// (a CTA per row and head), output map, ffn.key, ffn.value. Every CTA holds the residual stream and makes all norms. A
// CTA computes tiles of 8 outputs of a map; each warp takes an eighth of the inputs.
#include "draft_step.cuh"
#include "../mma.cuh"

namespace {

constexpr int THREADS = 256, WARPS = 8, PAD = 8, AHEAD_LAYERS = 2;
constexpr int GROUP = 4;  // tiles whose weights a CTA holds
constexpr int READ = 0, WRITE = 1, TOKEN = 2;  // parts of the table
constexpr int PREFETCHED = 1024;  // bytes of a layer's vectors that one CTA prefetches
enum Phase { INPUTS, OUTPUT, KEY, VALUE };

// Left operands of N chunks of 32 inputs. a: this lane's row of a matrix for ldmatrix.
template <int N>
__device__ __forceinline__ void load_operand(Fragment (&chunks)[N], const __half* a) {
#pragma unroll
    for (int i = 0; i < N; ++i) chunks[i] = load_matrix<false>(a + 32 * i);
}

// Sums [8 rows, 8 outputs] of a @ w^T. Lane t gets row t / 4, outputs t % 4 * 2 and + 1; mma's rows 8 to 15 are unused.
template <int N>
__device__ __forceinline__ float2 multiply(const Fragment* chunks, const uint4 (&w)[N]) {
    float c[4][4] = {};
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const uint32_t(&k)[4] = chunks[i].x;  // of 8 inputs each
        mma(c[i % 2 * 2], Fragment{{k[0], k[1], k[1], k[1]}}, w[i].x, w[i].y);
        mma(c[i % 2 * 2 + 1], Fragment{{k[2], k[3], k[3], k[3]}}, w[i].z, w[i].w);
    }
    return make_float2((c[0][0] + c[1][0]) + (c[2][0] + c[3][0]), (c[0][1] + c[1][1]) + (c[2][1] + c[3][1]));
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

// CHUNKS: C / 256
template <int CHUNKS>
struct Step {
    static constexpr int C = 256 * CHUNKS, LD = C + PAD, HEADS = C / HEAD_SIZE, OPERAND = MAX_DRAFT_ROWS * LD;
    using Exchange = DraftExchange<C>;
    using Weights = DraftWeights<C>;

    struct Smem {
        Head head;
        float partials[GROUP][WARPS][MAX_DRAFT_ROWS][8];
        unsigned long long keys[WARPS][MAX_DRAFT_ROWS];
        int slots[2][MAX_DRAFT_ROWS];
        int tiles[4][2];  // of each phase: this CTA's first, and the one after its last
        alignas(16) __half operands[6 * OPERAND];  // of each mixed input, or of each quarter of ffn.value's inputs: [8][LD]
    };

    const DraftStepArgs& p;
    Smem& s;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, cta = blockIdx.x;
    const int matrix_row = (lane & 7) * LD + (lane >> 3) * 8;  // in an operand, for ldmatrix
    int layer = 0, first_set;
    __half* exchange;  // the layer's
    float x[CHUNKS][8];  // residual stream of row `warp`: channels 256 i + 8 lane to + 7

    __device__ bool has_row() const { return warp < p.rows; }
    __device__ __half* of_layer(int which) const { return p.exchange + (first_set + which + Exchange::SETS) % Exchange::SETS * Exchange::SIZE; }
    __device__ const float* vector(int which) const { return p.vectors + (layer * NUM_VECTORS + which) * C; }
    __device__ static int input_mix(int tile) {
        const int low = tile - 3 * C / 8;
        return low < 0 ? tile / (C / 8) : min(2 + low / (LOW_RANK / 8), 5);
    }

    // Prefetches into L2 what this CTA reads in a layer, and a part of the vectors. One warp.
    __device__ void prefetch(int ahead) const {
        const int64_t later = layer + ahead;
        if (later >= p.num_layers) return;
        const void* at = nullptr;
        int bytes = 0;
        if (lane < 4) {
            const int first = s.tiles[lane][0], count = s.tiles[lane][1] - first;
            const int base = lane == INPUTS ? 0 : lane == OUTPUT ? Weights::OUTPUT : lane == KEY ? Weights::KEY : Weights::VALUE;
            const int of_tile = lane == VALUE ? 4 : 1;
            at = p.weights + later * Weights::SIZE + (base + first * of_tile) * Weights::TILE, bytes = count * of_tile * 2 * Weights::TILE;
        } else if (lane < 6 && cta < p.rows * HEADS) {
            const int head = cta % HEADS;
            at = p.ups + (later * HEADS + head) * Weights::UPS, bytes = 2 * Weights::UPS;
            if (lane == 5) {
                at = p.wkv + later * p.wkv_layer + s.slots[READ][cta / HEADS] * p.wkv_slot + head * HEAD_SIZE * HEAD_SIZE;
                bytes = 2 * HEAD_SIZE * HEAD_SIZE;
            }
        } else if (lane == 6 && cta < p.rows) {
            at = p.shift + later * p.shift_layer + s.slots[READ][cta] * p.shift_slot, bytes = 4 * C;
        } else if (lane < 9 && lane > 6) {
            const int size = lane == 7 ? 4 * NUM_VECTORS * C : 2 * NUM_MIXES * C, begin = cta * PREFETCHED;
            const char* from = lane == 7 ? reinterpret_cast<const char*>(p.vectors) : reinterpret_cast<const char*>(p.mixes);
            at = from + later * size + begin, bytes = min(PREFETCHED, size - begin);
        }
        if (bytes > 0) prefetch_bytes(at, bytes);
    }

    // A map of the layer: waits for its inputs, and stores its outputs for the other CTAs.
    __device__ void project(int phase) {
        const bool is_value = phase == VALUE;
        const int begin = s.tiles[phase][0], last = s.tiles[phase][1];
        const int base = phase == INPUTS ? 0 : phase == OUTPUT ? Weights::OUTPUT : phase == KEY ? Weights::KEY : Weights::VALUE;
        const __half* weights = p.weights + static_cast<int64_t>(layer) * Weights::SIZE + base * Weights::TILE + warp * CHUNKS * 256 + lane * 8;
#pragma unroll 1
        for (int first = begin, next; first < last; first = next) {
            next = min(first + (is_value ? 1 : GROUP), last);
            const int count = is_value ? GROUP : next - first;  // of tiles; all quarters of one are multiplied at once
            const __half* from = weights + (is_value ? GROUP * first : first) * Weights::TILE;
            uint4 w[GROUP][CHUNKS];
#pragma unroll
            for (int i = 0; i < GROUP; ++i)
#pragma unroll
                for (int j = 0; j < CHUNKS; ++j)
                    if (i < count) w[i][j] = load_packed(from + i * Weights::TILE + j * 256);
            if (first == begin) {
                if (phase == INPUTS || phase == KEY) {
                    shift_mix(phase == INPUTS);
                } else {
                    gather(exchange + (is_value ? Exchange::HIDDEN : Exchange::Y), is_value);
                }
            }
            __syncthreads();
            float2 sum = make_float2(0.0f, 0.0f);
            Fragment operand[CHUNKS];
            int loaded = -1;
#pragma unroll
            for (int i = 0; i < GROUP; ++i) {
                if (i >= count) break;
                const int which = is_value ? i : phase == INPUTS ? input_mix(first + i) : 0;
                if (which != loaded) load_operand(operand, s.operands + which * OPERAND + warp * CHUNKS * 32 + matrix_row);
                loaded = which;
                const float2 one = multiply(operand, w[i]);
                sum = is_value ? make_float2(sum.x + one.x, sum.y + one.y) : one;
                if (!is_value || i == GROUP - 1) *reinterpret_cast<float2*>(&s.partials[is_value ? 0 : i][warp][lane / 4][lane % 4 * 2]) = sum;
            }
            __syncthreads();
            const int row = lane / 4, pair = lane % 4 * 2;
            if (warp < next - first && row < p.rows) store_outputs(phase, row, 8 * (first + warp) + pair, s.partials[warp][0][row] + pair);
            if (next < last) __syncthreads();
        }
    }

    // Adds the warps' sums of two outputs of a row, applies the map's activation, and stores them.
    __device__ void store_outputs(int phase, int row, int output, const float* partials) {
        float2 y = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int k = 0; k < WARPS; ++k) {
            const float2 part = *reinterpret_cast<const float2*>(partials + k * 8 * MAX_DRAFT_ROWS);
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

    // Waits for values [rows][C], or [rows][4C], and makes operands of them.
    __device__ void gather(const __half* from, bool is_wide) {
        constexpr int AT_ONCE = 4;
        const int units = p.rows * (C / 8) * (is_wide ? 4 : 1);
#pragma unroll 1
        for (int first = threadIdx.x; first < units; first += AT_ONCE * THREADS) {
            const int count = (units - first + THREADS - 1) / THREADS;
            uint4 v[AT_ONCE];
            await_exchanged(v, from + 8 * first, 8 * THREADS, count);
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int unit = first + i * THREADS, part = unit / (C / 8), channel = (unit - part * (C / 8)) * 8;
                const int row = is_wide ? part >> 2 : part, operand = is_wide ? part & 3 : 0;
                if (i < count) store16(s.operands + operand * OPERAND + row * LD + channel, v[i]);
            }
        }
    }

    // Adds `delta` [C] to this warp's residual stream, once it is written.
    __device__ void add(const __half* delta) {
        uint4 v[CHUNKS];
        await_exchanged(v, delta + 8 * lane, 256);
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) {
            float d[8];
            unpack8(v[i], d);
#pragma unroll
            for (int j = 0; j < 8; ++j) x[i][j] += d[j];
        }
    }

    // The mean of this warp's residual stream, and one over its standard deviation.
    __device__ float2 moments() const {
        float sum = 0.0f, squares = 0.0f;
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i)
#pragma unroll
            for (int j = 0; j < 8; ++j) sum += x[i][j], squares += x[i][j] * x[i][j];
#pragma unroll
        for (int offset = 16; offset > 0; offset >>= 1) {
            sum += __shfl_xor_sync(FULL_MASK, sum, offset);
            squares += __shfl_xor_sync(FULL_MASK, squares, offset);
        }
        const float mean = sum * (1.0f / C);
        return make_float2(mean, rsqrtf(max(squares * (1.0f / C) - mean * mean, 0.0f) + NORM_EPS));
    }

    // Residual add, LayerNorm, token shift and this CTA's mixes of this warp's row.
    __device__ void shift_mix(bool is_time_mix) {
        if (warp == WARPS - 1 && is_time_mix) clear(), prefetch(AHEAD_LAYERS);
        if (!has_row()) return;
        const int first = is_time_mix ? input_mix(s.tiles[INPUTS][0]) : 0, last = is_time_mix ? input_mix(s.tiles[INPUTS][1] - 1) : 0;
        const float* norm = vector(is_time_mix ? LN1 : LN2) + 8 * lane;
        const __half* mix = p.mixes + (layer * NUM_MIXES + (is_time_mix ? first : CHANNEL_MIX)) * C + 8 * lane;
        __half* shift = p.shift + layer * p.shift_layer + (is_time_mix ? 0 : C) + 8 * lane;
        float weight[CHUNKS][8], bias[CHUNKS][8];
        uint4 before[CHUNKS], share[CHUNKS];
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) {
            load_fp32x8(norm + 256 * i, weight[i]), load_fp32x8(norm + C + 256 * i, bias[i]);
            before[i] = load16(shift + s.slots[READ][warp] * p.shift_slot + 256 * i);
            share[i] = load16(mix + 256 * i);
        }
        if (!is_time_mix || layer > 0) add((is_time_mix ? of_layer(layer - 1) + Exchange::FFN : exchange + Exchange::ATT) + warp * C);
        const float2 m = moments();
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i)
#pragma unroll
            for (int j = 0; j < 8; ++j) weight[i][j] = (x[i][j] - m.x) * m.y * weight[i][j] + bias[i][j];  // normalised
        __half* to = s.operands + first * OPERAND + warp * LD + 8 * lane;
#pragma unroll 1
        for (int which = first;; to += OPERAND) {
#pragma unroll
            for (int i = 0; i < CHUNKS; ++i) {
                float old[8], part[8], mixed[8];
                unpack8(before[i], old), unpack8(share[i], part);
#pragma unroll
                for (int j = 0; j < 8; ++j) mixed[j] = weight[i][j] + (old[j] - weight[i][j]) * part[j];
                store16(to + 256 * i, pack8(mixed));
            }
            if (++which > last) break;
            mix += C;
#pragma unroll
            for (int i = 0; i < CHUNKS; ++i) share[i] = load16(mix + 256 * i);
        }
        if (cta == warp % static_cast<int>(gridDim.x)) {
#pragma unroll
            for (int i = 0; i < CHUNKS; ++i) store16(shift + s.slots[WRITE][warp] * p.shift_slot + 256 * i, pack8(weight[i]));
        }
    }

    __device__ void wkv() {
#pragma unroll 1
        for (int item = cta; item < p.rows * HEADS; item += gridDim.x) wkv_head(item / HEADS, item % HEADS);
    }

    __device__ void wkv_head(int row, int head) {
        Head& h = s.head;
        const bool has_gate = layer > 0;
        const int channel = head * HEAD_SIZE + 2 * lane;
        const __half* ups = p.ups + (static_cast<int64_t>(layer) * HEADS + head) * Weights::UPS + warp * (Weights::UPS / WARPS) + lane * 8;
        uint4 up[3][2], g_up[4];
#pragma unroll
        for (int i = 0; i < 6; ++i) up[i / 2][i % 2] = load_packed(ups + 256 * i);
#pragma unroll
        for (int i = 0; i < 4; ++i) g_up[i] = load_packed(ups + 256 * (6 + i));
        const int value = warp * 8 + lane / 4, keys = lane % 4 * 4;  // this thread's part of the state: also keys + 16, 32, 48
        __half* states = p.wkv + layer * p.wkv_layer + head * HEAD_SIZE * HEAD_SIZE + value * HEAD_SIZE + keys;
        const __half* from = states + s.slots[READ][row] * p.wkv_slot;
        uint2 stored[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) stored[i] = *reinterpret_cast<const uint2*>(from + 16 * i);
        const auto pair = [&](int which) { return *reinterpret_cast<const float2*>(vector(which) + channel); };
        const float2 w0 = pair(W0), a0 = pair(A0), v0 = pair(V0), k_k = pair(K_K), k_a = pair(K_A);
        const float2 r_k = pair(R_K), norm_weight = pair(LN_X), norm_bias = pair(LN_X + 1);
        float2& kept = *reinterpret_cast<float2*>(p.v_first + row * C + channel);  // read where it was written
        const float2 v_first = has_gate ? kept : float2();

        const __half* inputs = exchange + row * Exchange::INPUTS;
        const int unit = threadIdx.x, part = unit >> 3;
        if (unit < 24 + (3 * LOW_RANK + GATE_RANK) / 8) {
            uint4 v[1];
            await_exchanged(v, inputs + (part < 3 ? part * C + head * HEAD_SIZE + (unit & 7) * 8 : 3 * C + (unit - 24) * 8), 0);
            store16(&h.rkv[0][0] + 8 * unit, v[0]);  // `low` follows `rkv`
        }
        __syncthreads();
        Fragment inner[10];  // all rows are this one
        load_operand(inner, h.low + (lane >> 3) * 8);
        const auto give = [&](int map, const float2& y) {
            if (lane < 4) *reinterpret_cast<float2*>(&h.up[map][warp * 8 + 2 * lane]) = y;  // this warp's 8 outputs
        };
#pragma unroll
        for (int i = 0; i < 3; ++i) give(i, multiply(inner + 2 * i, up[i]));
        give(3, multiply(inner + 6, g_up));
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
        if (lane % 4 == 0) h.y[value] = y;
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
            store_exchanged(exchange + Exchange::Y + row * C + channel, pack2(out0, out1));
        }
        __half* to = states + s.slots[WRITE][row] * p.wkv_slot;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            *reinterpret_cast<uint2*>(to + 16 * i) = make_uint2(pack2(state[i][0], state[i][1]), pack2(state[i][2], state[i][3]));
        if (p.rows * HEADS > static_cast<int>(gridDim.x)) __syncthreads();  // the next head overwrites this one
    }

    // The likeliest token of each row, once the last layer is done. Each warp has tiles of 8 tokens, whose weights it streams
    // in two halves.
    __device__ void choose(int64_t step, int half_of_keys) {
        constexpr int HALF = 4 * CHUNKS;
        const int warps = gridDim.x * WARPS, tiles = p.vocab / 8;
        int tile = cta * WARPS + warp;
        uint4 w[2][HALF];
        const auto load = [&](int half) {
            if (tile >= tiles) return;
            const __half* from = p.head + static_cast<int64_t>(tile) * Weights::TILE + half * HALF * 256 + lane * 8;
#pragma unroll
            for (int i = 0; i < HALF; ++i) w[half][i] = load_packed(from + i * 256);
        };
        load(0);
        if (has_row()) {
            add(of_layer(p.num_layers - 1) + Exchange::FFN + warp * C);
            const float2 m = moments();
#pragma unroll
            for (int i = 0; i < CHUNKS; ++i) {
                float weight[8], bias[8];
                load_fp32x8(p.out_weight + 256 * i + 8 * lane, weight), load_fp32x8(p.out_bias + 256 * i + 8 * lane, bias);
#pragma unroll
                for (int j = 0; j < 8; ++j) weight[j] = (x[i][j] - m.x) * m.y * weight[j] + bias[j];
                store16(s.operands + warp * LD + 256 * i + 8 * lane, pack8(weight));
            }
        }
        load(1);
        __syncthreads();
        unsigned long long best = 0;
#pragma unroll 1
        while (tile < tiles) {
            const int token = tile * 8 + lane % 4 * 2;
            tile += warps;
            float2 sums = make_float2(0.0f, 0.0f);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                Fragment operand[HALF];
                load_operand(operand, s.operands + matrix_row + half * HALF * 32);
                const float2 part = multiply(operand, w[half]);
                sums.x += part.x, sums.y += part.y;
                load(half);
            }
            const unsigned long long k0 = key_of(sums.x, token), k1 = key_of(sums.y, token + 1);
            best = max(best, max(k0, k1));
        }
        best = max_over_lanes(max_over_lanes(best, 1), 2);
        if (lane % 4 == 0) s.keys[warp][lane / 4] = best;
        __syncthreads();
        unsigned long long* keys = p.keys + half_of_keys * MAX_DRAFT_ROWS * gridDim.x;
        if (static_cast<int>(threadIdx.x) < p.rows) {
            best = 0;
            for (int i = 0; i < WARPS; ++i) best = max(best, s.keys[i][threadIdx.x]);
            store_key(keys + threadIdx.x * gridDim.x + cta, best);
        }
        if (cta != 0) return;
        if (has_row()) {
            best = 0;
            for (int other = lane; other < static_cast<int>(gridDim.x); other += 32) {
                unsigned long long key;
                do key = load_key(keys + warp * gridDim.x + other);
                while (key == EMPTY_KEY);
                best = max(best, key);
            }
            for (int offset = 16; offset > 0; offset >>= 1) best = max_over_lanes(best, offset);
            if (lane == 0) p.chosen[warp] = p.guesses[step * p.table_rows + warp] = 0x7fffffff - static_cast<int>(best & 0x7fffffff);
        }
        __syncthreads();  // after all keys have come, no CTA reads the counters any more
        if (threadIdx.x == 0) *p.step = step + 1, *p.launches = (*p.launches + 1) % (2 * Exchange::SETS);
    }

    // Makes the set of the next layer EMPTY. One warp, in a layer's first phase: every CTA has read what the layer before the
    // last one wrote, which was in this set, and none writes to it before all CTAs have come to the layer's end.
    __device__ void clear() const {
        const uint4 empty = make_uint4(EMPTY, EMPTY, EMPTY, EMPTY);
        __half* to = of_layer(layer + 1);
#pragma unroll 1
        for (int i = cta * 32 + lane; i < Exchange::SIZE / 8; i += gridDim.x * 32) store16(to + 8 * i, empty);
        __threadfence();
    }

    __device__ void run() {
        const int launch = *p.launches;
        const int64_t step = *p.step, *line = p.table + 3 * step * p.table_rows;
        first_set = launch * (p.num_layers % Exchange::SETS) % Exchange::SETS;
        if (threadIdx.x < 8) {
            const int phase = threadIdx.x / 2, side = threadIdx.x % 2;
            const int tiles = phase == INPUTS ? Weights::OUTPUT : phase == KEY ? C / 2 : C / 8;
            s.tiles[phase][side] = tiles * (cta + side) / static_cast<int>(gridDim.x);
        } else if (warp == 1 && lane < 2 * p.rows) {
            s.slots[lane % 2][lane / 2] = static_cast<int>(line[lane % 2 * p.table_rows + lane / 2]);
        }
        if (has_row()) {
            const int64_t given = line[TOKEN * p.table_rows + warp], token = given < 0 ? p.chosen[warp] : given;
#pragma unroll
            for (int i = 0; i < CHUNKS; ++i) unpack8(load16(p.embedding + token * C + 256 * i + 8 * lane), x[i]);
        }
        __syncthreads();
        if (warp < AHEAD_LAYERS) prefetch(warp);
        const int keys = MAX_DRAFT_ROWS * gridDim.x, own_key = cta * THREADS + threadIdx.x;
        if (own_key < keys) p.keys[(1 - launch % 2) * keys + own_key] = EMPTY_KEY;
#pragma unroll 1
        for (; layer < p.num_layers; ++layer) {
            exchange = of_layer(layer);
#pragma unroll 1
            for (int phase = INPUTS; phase <= VALUE; ++phase) {
                project(phase);
                if (phase == INPUTS) wkv();
            }
        }
        choose(step, launch % 2);
    }
};

template <int CHUNKS>
__global__ void __launch_bounds__(THREADS, 1) draft_step_kernel(const __grid_constant__ DraftStepArgs p) {
    extern __shared__ __align__(16) unsigned char dynamic[];
    Step<CHUNKS> step{p, *reinterpret_cast<typename Step<CHUNKS>::Smem*>(dynamic)};
    step.run();
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
    if (min(DraftWeights<256 * CHUNKS>::OUTPUT, 128 * CHUNKS) < device_info().num_sms) return cudaErrorInvalidValue;
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
