// How a warp gives back a place of a ring that bulk copies fill again, once all its lanes have done with it.
#pragma once

#include "hopper.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
namespace hopper {

// Products have read it, and have been waited for. barrier: whose arrivals are the warps'.
__device__ __forceinline__ void release_place(uint32_t barrier, int lane) {
    __syncwarp();
    if (lane == 0) arrive(barrier);
}

// Loads have read it too; `loaded`: of each that the lane has made some bits, or some of what was made of it. Neither the compiler
// nor the processor waits for a load before an arrival that comes behind it: the next copy may be there first, and the load
// gets what that one brings. So the arrival's address is made of what was loaded; a warp's load comes for all its lanes at
// once. For grids of one row of blocks.
__device__ __forceinline__ void release_loaded_place(uint32_t barrier, int lane, uint32_t loaded) {
    release_place(barrier + (loaded & blockIdx.y), lane);
}

}  // namespace hopper
#endif
