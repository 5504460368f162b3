// max(v, 0) and its square. A NaN stays one, which fmaxf would make 0: what is wrong with a row has to reach its logits.
#pragma once

__device__ __forceinline__ float relu(float v) { return v < 0.0f ? 0.0f : v; }
__device__ __forceinline__ float relu_square(float v) { return relu(v) * relu(v); }
