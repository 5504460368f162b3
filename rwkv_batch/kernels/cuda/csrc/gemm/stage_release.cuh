// Frees a stage of the ring once all lanes of a warp have read it.
#pragma once

#include "../hopper.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
namespace hopper {

// After wgmma_wait. barrier: the stage's empty mbarrier; warps arrive on it.
__device__ __forceinline__ void release_stage(uint32_t barrier, int lane) {
    __syncwarp();
    if (lane == 0) arrive(barrier);
}

// After ordinary loads. `loaded`: bits of every loaded value, or of a result of it.
// Neither nvcc nor the SM orders a load before a later arrive, so the next TMA write could overtake the load. The
// arrive's address therefore depends on the loaded bits. One load serves all lanes of a warp. Requires gridDim.y == 1.
__device__ __forceinline__ void release_stage_after_loads(uint32_t barrier, int lane, uint32_t loaded) {
    release_stage(barrier + (loaded & blockIdx.y), lane);
}

}  // namespace hopper
#endif
