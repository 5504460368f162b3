// Linear layers on a CPU. Each output is one sum over the inputs in order. So a row's result does not depend on other
// rows or the thread count.
//
// fp32 panels       x and W fp32, fused multiply-add
// bf16 panels       W bf16 (exact), x fp32; W is widened in registers
// bf16 panels, AMX  W bf16; x as 1 (bf16 precision) or 3 (fp32 precision, 3 x 8 bits) bf16 parts
// int4 panels       W int4 with a scale per output and 128 inputs (int4.h); x as 8-bit integers
// W8A8 panels       W and x int8 in two segments, a scale per output and row (w8a8.h)
#include "linear.h"

#include <algorithm>
#include <cmath>

#include "amx.h"
#include "fp32.h"
#include "int4.h"
#include "simd.h"
#include "w8a8_products.h"

namespace {

constexpr int64_t PANEL = fp32::OUTPUTS;  // outputs per fp32, int4 or W8A8 panel
constexpr int64_t BF16_PANEL = fp32::BF16_OUTPUTS;  // outputs per bf16 panel: two AMX tiles of 16
constexpr int64_t STEP = fp32::STEP;  // inputs per AMX tile
constexpr int64_t TILE = fp32::TILE;  // elements per AMX tile, 1 KiB
constexpr int64_t CHUNK = 480;                      // rows at a time; a multiple of 32 and of 10
constexpr int MAX_GEMMS = 16;

// W8U8: W8A8 whose inputs are not negative.
enum Packing : int64_t { FP32 = 0, BF16 = 1, INT4 = 2, W8A8 = 3, W8U8 = 4 };

bool is_w8a8(const Gemm& gemm) { return gemm.w.packing == W8A8 || gemm.w.packing == W8U8; }

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

float activate(float x, int64_t activation) {
  switch (activation) {
    case TANH: return std::tanh(x);
    case SIGMOID: return 1.f / (1.f + std::exp(-x));
    case RELU_SQUARED: return x < 0 ? 0.f : x * x;  // NaN stays NaN
    default: return x;
  }
}

inline __attribute__((always_inline)) void finish_some(float* y, const float* from, int64_t width, int64_t activation) {
  if (activation == NONE) {
    std::memcpy(y, from, width * sizeof(float));
  } else if (activation == RELU_SQUARED) {  // the most frequent activation: its own loop vectorises
    for (int64_t i = 0; i < width; ++i) y[i] = activate(from[i], RELU_SQUARED);
  } else {
    for (int64_t i = 0; i < width; ++i) y[i] = activate(from[i], activation);
  }
}

// Activates and writes `width` outputs of one row. A whole panel's width is a constant, for the compiler.
void finish(float* y, const float* from, int64_t width, int64_t activation) {
  if (width == BF16_PANEL) {
    finish_some(y, from, BF16_PANEL, activation);
  } else {
    finish_some(y, from, width, activation);
  }
}

// Outputs of different rows are pages apart: without this, stores wait for each line.
void prefetch_outputs(const Gemm& gemm, int64_t first_row, int64_t rows, int64_t first, int64_t width) {
  const float* y = gemm.y + first_row * gemm.w.out + first;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t o = 0; o < width; o += 16) __builtin_prefetch(y + r * gemm.w.out + o, 1);
  }
}

// ---- vectors ---------------------------------------------------------------------------------

// fp32 and int4. Tiles have nearly equal sizes: a tile with few rows would be bound by latency.
void vector_panel(const Gemm& gemm, const uint16_t* packed, int64_t panel, int64_t first_row, int64_t rows) {
  float out[TILE_ROWS * PANEL];
  const int64_t first = panel * PANEL, width = std::min(PANEL, gemm.w.out - first), tiles = divide_up(rows, TILE_ROWS);
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t row = rows * t / tiles;
    const int n = int(rows * (t + 1) / tiles - row);
    float* y = gemm.y + (first_row + row) * gemm.w.out + first;
    prefetch_outputs(gemm, first_row + row, n, first, width);
    if (gemm.w.packing == INT4) {
      const int64_t groups = int4::groups(gemm.w.in);
      const auto* w = static_cast<const int8_t*>(gemm.w.data) + panel * groups * int4::GROUP_BYTES;
      int4::tile(n, packed + row * groups * int4::ROW_BYTES / 2, w, out, groups);
    } else {
      const float* x = gemm.x + (first_row + row) * gemm.w.in;
      fp32::panel(n, x, static_cast<const float*>(gemm.w.data) + first * gemm.w.in, out, gemm.w.in);
    }
    for (int r = 0; r < n; ++r) finish(y + r * gemm.w.out, out + r * PANEL, width, gemm.activation);
  }
}

void bf16_panel(const Gemm& gemm, int64_t panel, int64_t first_row, int64_t rows) {
  float sums[CHUNK * BF16_PANEL];
  const int64_t in = gemm.w.in, out = gemm.w.out, first = panel * BF16_PANEL, width = std::min(BF16_PANEL, out - first);
  const auto* w = static_cast<const uint16_t*>(gemm.w.data) + panel * BF16_PANEL * divide_up(in, STEP) * STEP;
  fp32::bf16_panel(rows, gemm.x + first_row * in, w, sums, in, [&](int64_t row, int64_t size) {
    const int64_t next = row + size;
    prefetch_outputs(gemm, first_row + next, std::min<int64_t>(TILE_ROWS, rows - next), first, width);
    for (int64_t r = row; r < next; ++r) {
      finish(gemm.y + (first_row + r) * out + first, sums + r * BF16_PANEL, width, gemm.activation);
    }
  });
}

// ---- AMX -------------------------------------------------------------------------------------

#if WITH_AMX

// Splits 16 inputs of a row into `parts` bf16 rows: x = part 0 + part 1 + part 2.
void split16(const float* x, uint16_t* to, int64_t parts) {
  __m512 rest = _mm512_loadu_ps(x);
  for (int64_t p = 0; p < parts; ++p) {
    __m512i bits = _mm512_castps_si512(rest);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 nan = _mm512_cmp_ps_mask(rest, rest, _CMP_UNORD_Q);
    up = _mm512_mask_or_epi32(up, nan, bits, _mm512_set1_epi32(0x400000));
    __m512i kept = _mm512_and_si512(up, _mm512_set1_epi32(int(0xffff0000)));
    _mm256_storeu_si256((__m256i*)(to + p * STEP), _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16)));
    rest = _mm512_sub_ps(rest, _mm512_castsi512_ps(kept));
  }
}

// Packs rows first .. first+n-1 of x (at most 16 / parts) as one row tile: [steps][16][STEP] bf16, zero-padded.
void pack_rows(const Gemm& gemm, int64_t first, int64_t n, uint16_t* to) {
  const int64_t steps = divide_up(gemm.w.in, STEP);
  for (int64_t s = 0; s < steps; ++s, to += TILE) {
    const int64_t width = std::min(STEP, gemm.w.in - s * STEP);
    for (int64_t r = 0; r < n; ++r) {
      const float* x = gemm.x + (first + r) * gemm.w.in + s * STEP;
      float padded[STEP];
      if (width < STEP) {
        std::memset(padded, 0, sizeof padded);
        std::memcpy(padded, x, width * sizeof(float));
        x = padded;
      }
      split16(x, to + r * gemm.w.parts * STEP, gemm.w.parts);
      split16(x + 16, to + r * gemm.w.parts * STEP + 16, gemm.w.parts);
    }
    std::memset(to + n * gemm.w.parts * STEP, 0, (16 - n * gemm.w.parts) * STEP * 2);
  }
}

// One panel of 32 outputs times two row tiles.
void amx_two(const uint16_t* a0, const uint16_t* a1, const uint16_t* w, int64_t steps, float* out) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t s = 0; s < steps; ++s, a0 += TILE, a1 += TILE, w += 2 * TILE) {
    _tile_loadd(6, w, 64);
    _tile_loadd(4, a0, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, a1, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_loadd(7, w + TILE, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, out, 128);
  _tile_stored(1, out + 16, 128);
  _tile_stored(2, out + 512, 128);
  _tile_stored(3, out + 528, 128);
}

void amx_one(const uint16_t* a, const uint16_t* w, int64_t steps, float* out) {
  _tile_zero(0);
  _tile_zero(1);
  for (int64_t s = 0; s < steps; ++s, a += TILE, w += 2 * TILE) {
    _tile_loadd(4, a, 64);
    _tile_loadd(6, w, 64);
    _tile_loadd(7, w + TILE, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
  }
  _tile_stored(0, out, 128);
  _tile_stored(1, out + 16, 128);
}

// Adds the parts of each row of a [16][32] tile into y.
void finish_tile(const Gemm& gemm, float* tile, int64_t row, int64_t n, int64_t first) {
  const int64_t width = std::min(BF16_PANEL, gemm.w.out - first);
  for (int64_t r = 0; r < n; ++r) {
    float* sum = tile + r * gemm.w.parts * 32;
    if (gemm.w.parts == 3) {
      for (int i = 0; i < 32; ++i) sum[i] += sum[i + 32] + sum[i + 64];
    }
    finish(gemm.y + (row + r) * gemm.w.out + first, sum, width, gemm.activation);
  }
}

void amx_panel(const Gemm& gemm, const uint16_t* packed, int64_t panel, int64_t first_row, int64_t rows) {
  alignas(64) float out[2 * 16 * 32];
  const int64_t steps = divide_up(gemm.w.in, STEP), per_tile = 16 / gemm.w.parts, tile_size = steps * TILE;
  const auto* w = static_cast<const uint16_t*>(gemm.w.data) + panel * 2 * tile_size;
  configure(int(std::min(per_tile, rows) * gemm.w.parts));
  for (int64_t done = 0; done < rows; done += 2 * per_tile, packed += 2 * tile_size) {
    const int64_t left = rows - done, first = panel * BF16_PANEL;
    if (left > per_tile) {
      amx_two(packed, packed + tile_size, w, steps, out);
      finish_tile(gemm, out + 512, first_row + done + per_tile, std::min(per_tile, left - per_tile), first);
    } else {
      amx_one(packed, w, steps, out);
    }
    finish_tile(gemm, out, first_row + done, std::min(per_tile, left), first);
  }
}

#endif

// ---- W8A8 ------------------------------------------------------------------------------------

template <bool UNSIGNED, int PARTS>
void w8a8_panel(const Gemm& gemm, const uint16_t* packed, int64_t panel, int64_t first_row, int64_t rows) {
  const w8a8::Shape shape(gemm.w.in);
  const auto* matrix = static_cast<const int8_t*>(gemm.w.data) + shape.head_bytes();
  const w8a8::Operands operands{shape, matrix + panel * shape.panel_bytes(), reinterpret_cast<const char*>(packed)};
  const int64_t out = gemm.w.out, width = std::min(PANEL, out - panel * PANEL);
  float* y = gemm.y + first_row * out + panel * PANEL;
  const bool squares = gemm.activation == RELU_SQUARED, in_registers = width == PANEL && (squares || gemm.activation == NONE);
  w8a8::multiply<UNSIGNED, PARTS>(operands, rows * PARTS, [&](int64_t row, const vf sums[2]) {
    float* to = y + row * out;
    if (in_registers) {
      for (int v = 0; v < 2; ++v) store(to + v * LANES, squares ? sums[v] < 0 ? vf{} : sums[v] * sums[v] : sums[v]);
      return;
    }
    float one[PANEL];
    store(one, sums[0]), store(one + LANES, sums[1]);
    finish(to, one, width, gemm.activation);
  });
}

void w8a8_panel(const Gemm& gemm, const uint16_t* packed, int64_t panel, int64_t first_row, int64_t rows) {
  const bool is_unsigned = gemm.w.packing == W8U8;
  const auto run = gemm.w.parts == 1 ? (is_unsigned ? w8a8_panel<true, 1> : w8a8_panel<false, 1>)
                                     : (is_unsigned ? w8a8_panel<true, 2> : w8a8_panel<false, 2>);
  run(gemm, packed, panel, first_row, rows);
}

// Rows at a time, at most CHUNK. With AVX2 the inputs of bf16 products stay in L2: each panel reads them again.
int64_t chunk_rows(const Gemm* gemms, int64_t count) {
  if (LANES != 8) return CHUNK;
  int64_t in = 1;
  for (int64_t j = 0; j < count; ++j)
    if (gemms[j].w.packing == BF16) in = std::max(in, gemms[j].w.in);
  return std::clamp(3 * (int64_t(1) << 17) / in / 60 * 60, int64_t(60), CHUNK);
}

int64_t row_tiles(const Gemm& gemm, int64_t rows) { return divide_up(rows, 16 / gemm.w.parts); }

bool uses_amx(const Gemm& gemm) { return gemm.w.packing == BF16 && amx_allowed(); }

bool is_packed(const Gemm& gemm) { return gemm.w.packing == INT4 || is_w8a8(gemm) || uses_amx(gemm); }

// Work items of packing `rows` rows, and elements per item.
int64_t pieces(const Gemm& gemm, int64_t rows) { return uses_amx(gemm) ? row_tiles(gemm, rows) : rows; }
int64_t piece_size(const Gemm& gemm) {
  if (is_w8a8(gemm)) return gemm.w.parts * w8a8::Shape(gemm.w.in).row_bytes() / int64_t(sizeof(uint16_t));
  if (gemm.w.packing == INT4) return int4::groups(gemm.w.in) * int4::ROW_BYTES / int64_t(sizeof(uint16_t));
  return divide_up(gemm.w.in, STEP) * TILE;
}

// Offsets of each GEMM's tiles and panels among those of all GEMMs.
struct Plan {
  int64_t pack_end[MAX_GEMMS], panel_end[MAX_GEMMS], offset[MAX_GEMMS], packs = 0, panels = 0, size = 0;

  Plan(const Gemm* gemms, int64_t count, int64_t rows) {
    for (int64_t j = 0; j < count; ++j) {
      offset[j] = size;
      if (is_packed(gemms[j])) {
        packs += pieces(gemms[j], rows);
        size += divide_up(pieces(gemms[j], rows) * piece_size(gemms[j]), 32) * 32;  // keep 64-byte alignment
      }
      pack_end[j] = packs;
      panels += divide_up(gemms[j].w.out, gemms[j].w.packing == BF16 ? BF16_PANEL : PANEL);
      panel_end[j] = panels;
    }
  }
};

// Runs all GEMMs for rows first .. first+rows-1, at most CHUNK.
void run_chunk(Member& me, const Gemm* gemms, int64_t count, int64_t first, int64_t rows, uint16_t* packed) {
  const Plan plan(gemms, count, rows);
  if (plan.packs) {
    me.run_items(plan.packs, [&](int64_t t) {
      const int64_t j = std::upper_bound(plan.pack_end, plan.pack_end + count, t) - plan.pack_end;
      const int64_t piece = t - (j ? plan.pack_end[j - 1] : 0);
      uint16_t* to = packed + plan.offset[j] + piece * piece_size(gemms[j]);
      const PackedMatrix& w = gemms[j].w;
      const float* row = gemms[j].x + (first + piece) * w.in;
      switch (w.packing) {
        case INT4: int4::pack_row(row, w.in, to); return;
        case W8A8: w8a8::pack_row<false>(row, w.data, w8a8::Shape(w.in), w.parts, to); return;
        case W8U8: w8a8::pack_row<true>(row, w.data, w8a8::Shape(w.in), w.parts, to); return;
      }
#if WITH_AMX
      const int64_t per_tile = 16 / gemms[j].w.parts;
      pack_rows(gemms[j], first + piece * per_tile, std::min(per_tile, rows - piece * per_tile), to);
#endif
    });
  }
  me.run_items(plan.panels, [&](int64_t p) {
    const int64_t j = std::upper_bound(plan.panel_end, plan.panel_end + count, p) - plan.panel_end;
    const int64_t panel = p - (j ? plan.panel_end[j - 1] : 0);
#if WITH_AMX
    if (uses_amx(gemms[j])) {
      amx_panel(gemms[j], packed + plan.offset[j], panel, first, rows);
      return;
    }
#endif
    switch (gemms[j].w.packing) {
      case BF16: bf16_panel(gemms[j], panel, first, rows); return;
      case W8A8:
      case W8U8: w8a8_panel(gemms[j], packed + plan.offset[j], panel, first, rows); return;
      default: vector_panel(gemms[j], packed + plan.offset[j], panel, first, rows);
    }
  });
#if WITH_AMX
  if (plan.packs) _tile_release();
#endif
}

}  // namespace

int64_t packed_elements(const Gemm* gemms, int64_t count, int64_t rows) {
  return Plan(gemms, count, std::min(rows, CHUNK)).size;
}

void linear(Member& me, const Gemm* gemms, int64_t count, int64_t rows, uint16_t* packed) {
  const int64_t chunk = chunk_rows(gemms, count);
  for (int64_t first = 0; first < rows; first += chunk) {
    run_chunk(me, gemms, count, first, std::min(chunk, rows - first), packed);
  }
}

// Returns 1 if bf16 matrices use AMX on this CPU.
EXPORT int64_t rwkv_has_amx() { return amx_allowed(); }

// Returns the size of a packed matrix in bytes.
EXPORT int64_t rwkv_packed_bytes(int64_t in, int64_t out, int64_t packing) {
  if (packing == FP32) return divide_up(out, PANEL) * PANEL * in * 4;
  if (packing == INT4) return divide_up(out, PANEL) * int4::groups(in) * int4::GROUP_BYTES;
  if (packing == W8A8 || packing == W8U8) return w8a8::Shape(in).bytes(out);
  return divide_up(out, BF16_PANEL) * BF16_PANEL * divide_up(in, STEP) * STEP * 2;
}

// weight(o, i) = weight[o * stride_out + i * stride_in]; `packed` is zeroed.
EXPORT void rwkv_pack_fp32(const float* weight, int64_t stride_out, int64_t stride_in, int64_t in, int64_t out,
                           float* packed, int64_t threads) {
#pragma omp parallel for num_threads(int(threads)) schedule(static)
  for (int64_t panel = 0; panel < divide_up(out, PANEL); ++panel) {
    float* to = packed + panel * PANEL * in;
    const int64_t width = std::min(PANEL, out - panel * PANEL);
    for (int64_t o = 0; o < width; ++o) {
      const float* from = weight + (panel * PANEL + o) * stride_out;
      for (int64_t k = 0; k < in; ++k) to[k * PANEL + o] = from[k * stride_in];
    }
  }
}

EXPORT void rwkv_pack_bf16(const uint16_t* weight, int64_t stride_out, int64_t stride_in, int64_t in, int64_t out,
                           uint16_t* packed, int64_t threads) {
  const int64_t padded = divide_up(in, STEP) * STEP;
#pragma omp parallel for num_threads(int(threads)) schedule(static)
  for (int64_t panel = 0; panel < divide_up(out, BF16_PANEL); ++panel) {
    uint16_t* to = packed + panel * BF16_PANEL * padded;
    const int64_t width = std::min(BF16_PANEL, out - panel * BF16_PANEL);
    for (int64_t o = 0; o < width; ++o) {
      const uint16_t* from = weight + (panel * BF16_PANEL + o) * stride_out;
      uint16_t* column = to + o / 16 * TILE + o % 16 * 2;
      for (int64_t k = 0; k < in; ++k) {
        column[k / STEP * 2 * TILE + k % STEP / 2 * 32 + k % 2] = from[k * stride_in];
      }
    }
  }
}

// codes [out, in], zeros and scales [out, groups] contiguous. `packed` is zeroed.
EXPORT void rwkv_pack_int4(const int8_t* codes, const int8_t* zeros, const float* scales, int64_t in, int64_t out,
                           int8_t* packed, int64_t threads) {
  const int64_t groups = int4::groups(in), size = groups * int4::GROUP_BYTES;
#pragma omp parallel for num_threads(int(threads)) schedule(static)
  for (int64_t panel = 0; panel < divide_up(out, PANEL); ++panel) {
    for (int64_t o = 0; o < std::min(PANEL, out - panel * PANEL); ++o) {
      const int64_t output = panel * PANEL + o;
      int4::pack_output(codes + output * in, zeros + output * groups, scales + output * groups, in, o, packed + panel * size);
    }
  }
}

// codes [out, in] (columns permuted), scales and ratios [out], factors and positions [in]; `packed` is zeroed.
EXPORT void rwkv_pack_w8a8(const int8_t* codes, const float* scales, const int32_t* ratios, const float* factors,
                           const int32_t* positions, int64_t in, int64_t out, int8_t* packed, int64_t threads) {
  const w8a8::Shape shape(in);
  std::memcpy(packed, factors, in * sizeof(float));
  std::memcpy(packed + w8a8::padded(in) * sizeof(float), positions, in * sizeof(int32_t));
#pragma omp parallel for num_threads(int(threads)) schedule(static)
  for (int64_t panel = 0; panel < divide_up(out, PANEL); ++panel) {
    int8_t* to = packed + shape.head_bytes() + panel * shape.panel_bytes();
    for (int64_t o = panel * PANEL; o < std::min(out, (panel + 1) * PANEL); ++o) {
      w8a8::pack_output(codes + o * in, scales[o], ratios[o], shape, o % PANEL, to);
    }
  }
}
