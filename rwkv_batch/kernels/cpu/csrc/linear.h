// y = activation(x @ W^T) for packed matrices, several matrices per phase.
#pragma once
#include <cstdint>

#include "activation.h"
#include "team.h"

// A packed matrix. Mirrored in cpu/library.py as five int64.
struct Map {
  const void* weight;  // packed
  int64_t in, out;
  int64_t kind;  // packing
  int64_t parts;  // bf16 parts of x: 1 or 3
};

struct Job {
  Map map;
  const float* x;  // [rows, in]
  float* y;        // [rows, out]
  int64_t activation;
};

// Elements that linear() needs to pack the rows of these jobs.
int64_t packed_elements(const Job* jobs, int64_t count, int64_t rows);

// Runs up to 16 jobs over the same rows; `packed` is 64-byte aligned.
void linear(Member& me, const Job* jobs, int64_t count, int64_t rows, uint16_t* packed);
