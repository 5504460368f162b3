// y = activation(x @ W^T) for packed matrices, several matrices per phase.
#pragma once
#include <cstdint>

#include "activation.h"
#include "team.h"

// A matrix as rwkv_pack_* wrote it. Mirrored in cpu/library.py as five int64.
struct PackedMatrix {
  const void* data;
  int64_t in, out;
  int64_t packing;  // Packing in linear.cpp
  int64_t parts;    // numbers that each x is split into: bf16 1 or 3, W8A8 1 or 2
};

// One matrix over the rows of a call.
struct Gemm {
  PackedMatrix w;
  const float* x;  // [rows, in]
  float* y;        // [rows, out]
  int64_t activation;
};

// Elements that linear() needs to pack the rows of these GEMMs.
int64_t packed_elements(const Gemm* gemms, int64_t count, int64_t rows);

// Runs up to 16 GEMMs over the same rows; `packed` is 64-byte aligned.
void linear(Member& me, const Gemm* gemms, int64_t count, int64_t rows, uint16_t* packed);
