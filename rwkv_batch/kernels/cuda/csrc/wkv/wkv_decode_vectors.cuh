// Decode: a warp computes a head's recurrence vectors from a token's activations.
#pragma once

#include "wkv.cuh"

enum Vec { VR, VDECAY, VKK, VKKA, VK, VV, VECS };

// One row's activations of a head, 2 channels per lane.
struct Inputs {
    __half2 r, w, k, v, a, gate, first;

    __device__ __forceinline__ void load(const WkvArgs& p, int64_t at) {
        const auto get = [&](const __half* x) { return *reinterpret_cast<const __half2*>(x + at); };
        r = get(p.r), w = get(p.w), k = get(p.k), v = get(p.v), a = get(p.a);
        gate = first = __floats2half2_rn(0.0f, 0.0f);
        if (p.v_first != nullptr) gate = get(p.v_gate), first = get(p.v_first);
    }
};

struct Scalars {
    float inv_square, bonus;
};

// a * b + c * d, with the same roundings in every kernel.
__device__ __forceinline__ float sum_of_products(float a, float b, float c, float d) { return fmaf(a, b, __fmul_rn(c, d)); }

// The vectors of a lane's two channels, and the head's scalars. Warp-wide.
struct PairVectors {
    StepVectors x, z;
    Scalars scalars;

    __device__ __forceinline__ PairVectors(const HeadParams& h, const Inputs& in, bool residual) {
        const float2 r = __half22float2(in.r), w = __half22float2(in.w), k = __half22float2(in.k), v = __half22float2(in.v);
        const float2 a = __half22float2(in.a), gate = __half22float2(in.gate), first = __half22float2(in.first);
        x = step_vectors(r.x, w.x, k.x, v.x, a.x, gate.x, first.x, residual, h.w0.x, h.a0.x, h.v0.x, h.k_k.x, h.k_a.x, h.r_k.x);
        z = step_vectors(r.y, w.y, k.y, v.y, a.y, gate.y, first.y, residual, h.w0.y, h.a0.y, h.v0.y, h.k_k.y, h.k_a.y, h.r_k.y);
        scalars = {inverse_square(warp_sum(sum_of_products(x.kk, x.kk, z.kk, z.kk))), warp_sum(__fadd_rn(x.bonus, z.bonus))};
    }
};

__device__ __forceinline__ void store_pair(float* to, float lo, float hi) { *reinterpret_cast<float2*>(to) = make_float2(lo, hi); }

// Stores the vectors in shared memory.
__device__ __forceinline__ Scalars prologue(
    const HeadParams& h, const Inputs& in, bool residual, float (&vectors)[VECS][HEAD_SIZE], int pair) {
    const PairVectors made(h, in, residual);
    const StepVectors &x = made.x, &z = made.z;
    store_pair(&vectors[VR][pair], x.r, z.r), store_pair(&vectors[VDECAY][pair], x.decay, z.decay);
    store_pair(&vectors[VKK][pair], x.kk, z.kk), store_pair(&vectors[VKKA][pair], x.kka, z.kka);
    store_pair(&vectors[VK][pair], x.k, z.k), store_pair(&vectors[VV][pair], x.v, z.v);
    return made.scalars;
}
