// ReLU and its square. NaN stays NaN, unlike with fmaxf: an invalid row must reach its logits.
#pragma once

__device__ __forceinline__ float relu(float v) { return v < 0.0f ? 0.0f : v; }
__device__ __forceinline__ float relu_square(float v) { return relu(v) * relu(v); }
