// Inputs of a W8A8 GEMM that its CTAs round themselves (w8a8.cuh): up to 8 rows, K up to 4,096. Each CTA reads all of x for
// the rows' scales, and stores the codes of its stages of K as wgmma reads them. W's first stages load meanwhile.
// Included by w8a8.cuh, after the declarations that it uses.
#pragma once

// All consumer threads. Ends with a barrier.
template <typename Tile>
__device__ __forceinline__ void round_inputs(const W8A8Launch& p, const Layout<Tile>& at, const Stages& stages, int thread) {
    using namespace hopper;
    constexpr int ROWS = Tile::ROWS, WARPS = Tile::THREADS / 32, OCTETS = MAX_ROUNDED_K / 8 / Tile::THREADS, STAGE_OCTETS = DEPTH / 8;
    constexpr int ROWS_AT_ONCE = Tile::THREADS / (ROUNDED_STAGES * STAGE_OCTETS), BATCH = 4;
    static_assert(ROWS == 8 && ROWS_AT_ONCE > 0);
    const int warp = thread / 32, lane = thread % 32;
    const auto channel_of = [&](int i) { return (i * Tile::THREADS + thread) * 8; };
    W8A8Octet octets[OCTETS];
#pragma unroll
    for (int i = 0; i < OCTETS; ++i) {
        if (channel_of(i) < p.k) octets[i].load(p.factors, channel_of(i));
    }
    // Eight positions of this CTA. Most hold the channel of the same number.
    const int own = thread % (ROUNDED_STAGES * STAGE_OCTETS), position = stages.first * DEPTH + own * 8;
    const bool is_own = own < (stages.end - stages.first) * STAGE_OCTETS;
    W8A8Octet stored = {};
    int channels[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        channels[i] = position + i;
        if (!is_own) continue;
        channels[i] = __ldg(p.order + position + i), stored.factors[i] = __ldg(p.factors + channels[i]);
    }
    wait_for_previous_kernel();
    if (thread == 0) arrive(at.inputs_ready);
    W8A8Largest largest;  // of row lane % 8
    float v[8];
#pragma unroll
    for (int first = 0; first < ROWS; first += BATCH) {
        if (first >= p.rows) break;
        uint4 x[BATCH][OCTETS];
#pragma unroll
        for (int row = 0; row < BATCH; ++row) {
#pragma unroll
            for (int i = 0; i < OCTETS; ++i) {
                if (first + row < p.rows && channel_of(i) < p.k) x[row][i] = load16(p.halves + (first + row) * p.k + channel_of(i));
            }
        }
#pragma unroll
        for (int row = 0; row < BATCH; ++row) {
            if (first + row >= p.rows) break;
            W8A8Largest of_row;
#pragma unroll
            for (int i = 0; i < OCTETS; ++i) {
                if (channel_of(i) >= p.k) continue;
                octets[i].template scale<false>(x[row][i], v);
                of_row.add(octets[i], v);
            }
            of_row.reduce_warp();
            if ((lane & 7) == first + row) largest = of_row;
        }
    }
    const uint32_t maxima = at.staging;  // [WARPS][ROWS] pairs
    if (lane < ROWS) store_peer_pair(maxima + (warp * ROWS + lane) * 8, largest.rest, largest.large);
    sync_consumers(1, Tile::THREADS);
    largest = W8A8Largest();
#pragma unroll
    for (int i = 0; i < WARPS; i += 4) {
        uint32_t of_warp[2];
        load_shared_pair(of_warp, maxima + ((i + lane / 8) * ROWS + lane % 8) * 8);
        largest.rest = max(largest.rest, static_cast<int>(of_warp[0])), largest.large = max(largest.large, of_warp[1]);
    }
#pragma unroll
    for (int offset = 8; offset < 32; offset <<= 1) {
        largest.rest = max(largest.rest, __shfl_xor_sync(FULL_MASK, largest.rest, offset));
        largest.large = max(largest.large, __shfl_xor_sync(FULL_MASK, largest.large, offset));
    }
    const W8A8Row<false> of_lane(largest.rest, largest.of_large());  // of row lane % 8
    if (thread < ROWS) store_shared_word(at.scales + thread * 4, __float_as_int(of_lane.scale)), store_shared_word(at.scales + Tile::SCALE_BYTES / 2 + thread * 4, of_lane.ratio);
#pragma unroll
    for (int first = 0; first < ROWS; first += ROWS_AT_ONCE) {
        const int row = first + thread / (ROUNDED_STAGES * STAGE_OCTETS);  // the same in a warp
        const float of_rest = __shfl_sync(FULL_MASK, of_lane.inverse_rest, row), of_large = __shfl_sync(FULL_MASK, of_lane.inverse_large, row);
        if (row >= p.rows || !is_own) continue;
        const __half* const x = p.halves + row * p.k;
        stored.template scale<false>(load16(x + position), v);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (channels[i] != position + i) v[i] = __fmul_rn(__half2float(x[channels[i]]), fabsf(stored.factors[i]));
        }
        const float inverse = position < SEGMENT ? of_large : of_rest;
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = __fmul_rn(v[i], inverse);
        const uint32_t to = at.rounded + own / STAGE_OCTETS * (ROWS * DEPTH) + row * DEPTH + ((own % STAGE_OCTETS * 8) ^ row << 4);
        store_peer_pair(to, pack_s8(v[0], v[1], v[2], v[3]), pack_s8(v[4], v[5], v[6], v[7]));
    }
    fence_proxy_async();
    sync_consumers(1, Tile::THREADS);
}
