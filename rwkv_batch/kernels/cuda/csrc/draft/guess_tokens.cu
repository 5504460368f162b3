// Tokens of drafts that the host does not know yet.
//
// Made for: speculative decoding, up to a few hundred tokens. Bound: the launch.
#include "../common.cuh"

namespace {

constexpr int THREADS = 256, LANES = 32;
constexpr int ZERO_SLOT = 0, DUMMY_SLOT = 1;
constexpr int64_t CHOSEN = -1;  // the token that the step before chose

// to[places[i]] = from[sources[i]]
__global__ void __launch_bounds__(THREADS) place_tokens_kernel(
    int64_t* to, const int64_t* places, const int64_t* from, const int64_t* sources, int count) {
    allow_next_kernel();
    wait_for_previous_kernel();
    for (int i = threadIdx.x; i < count; i += THREADS) to[places[i]] = from[sources[i]];
}

struct GuessTableArgs {
    const int64_t* rows;  // [num_rows, row_length]: enum Number, then the drafted tokens
    const int64_t* last;  // [request slots]: the token after the known ones
    const int64_t* after;  // [n]: the tokens after each drafted one, row by row
    int64_t* table;  // [num_steps, 3, table_rows]: slots to read, slots to write, tokens
    int num_rows, row_length, padded_rows, num_steps, table_rows, num_slots;
};
enum Number { RING, POSITION, NUM_GUESSES, REQUEST_SLOT, FIRST, COUNT, NUM_NUMBERS };

// Fills in a draft model's steps after the accepted guesses of each row. Rows up to padded_rows are padding. A row first
// reads the token after the accepted ones, or the last accepted one if the model has not read it.
__global__ void __launch_bounds__(THREADS) fill_guess_table_kernel(const __grid_constant__ GuessTableArgs p) {
    allow_next_kernel();
    wait_for_previous_kernel();
    for (int row = threadIdx.x % LANES; row < p.padded_rows; row += LANES) {
        const bool is_padding = row >= p.num_rows;
        const int64_t* given = p.rows + row * p.row_length;
        const auto sampled = [&](int64_t i) { return i == 0 ? p.last[given[REQUEST_SLOT]] : p.after[given[FIRST] + i - 1]; };
        int64_t accepted = 0, read = 0;
        if (!is_padding) {
            while (accepted < given[COUNT] && sampled(accepted) == given[NUM_NUMBERS + accepted]) ++accepted;
            read = min(accepted, given[NUM_GUESSES] - 1);
        }
        for (int step = threadIdx.x / LANES; step < p.num_steps; step += THREADS / LANES) {
            int64_t* to = p.table + static_cast<int64_t>(step) * 3 * p.table_rows + row;
            int64_t values[3] = {ZERO_SLOT, DUMMY_SLOT, 0};
            if (!is_padding) {
                const int64_t position = given[POSITION] + read + step;
                values[0] = given[RING] + position % p.num_slots, values[1] = given[RING] + (position + 1) % p.num_slots;
                values[2] = step == 0 ? sampled(read) : step == 1 && accepted > read ? sampled(accepted) : CHOSEN;
            }
            for (int i = 0; i < 3; ++i) to[i * p.table_rows] = values[i];
        }
    }
}

}  // namespace

RWKV_API int rwkv_place_tokens(void* to, const void* places, const void* from, const void* sources, int count, void* stream) {
    const auto read = [](const void* p) { return static_cast<const int64_t*>(p); };
    launch(place_tokens_kernel, 1, THREADS, stream, static_cast<int64_t*>(to), read(places), read(from), read(sources), count);
    return launch_result();
}

RWKV_API int rwkv_fill_guess_table(const GuessTableArgs* args, void* stream) {
    launch(fill_guess_table_kernel, 1, THREADS, stream, *args);
    return launch_result();
}
