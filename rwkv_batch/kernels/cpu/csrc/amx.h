// AMX tiles of this CPU: whether Linux allows them, and their configuration.
#pragma once
#include <cstdint>

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AMX_TILE__) && defined(__AVX512F__) && defined(__linux__)
#define WITH_AMX 1
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#define WITH_AMX 0
#endif

#if WITH_AMX

inline bool amx_allowed() {
  static const bool allowed = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
  return allowed;
}

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t columns[16] = {};
  uint8_t rows[16] = {};
};

// Tiles 0..3: sums, 4..5: x, 6..7: weights.
inline void configure(int rows) {
  TileConfig config;
  for (int t = 0; t < 8; ++t) config.columns[t] = 64, config.rows[t] = uint8_t(t < 6 ? rows : 16);
  _tile_loadconfig(&config);
}

#else
inline bool amx_allowed() { return false; }
#endif
