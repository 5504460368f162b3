// WKV with its prologue and epilogue for rows of one token: one block of 128 threads per (head, row).
//
// Memory bound: per (head, row) it reads and writes 64x64 of state (8 KiB each in fp16, 16 in fp32) and touches
// 9 x 128 bytes of activations. The state's loads are issued before anything else.
#include "wkv.cuh"

constexpr int THREADS = 128;

template <typename State>
__global__ void __launch_bounds__(THREADS, 7) wkv_decode_kernel(const WkvArgs p) {
    __shared__ __align__(16) float vectors[6][HEAD];
    __shared__ float y[HEAD];
    __shared__ float squares[2], bonus[2];
    const int head = blockIdx.x, row = blockIdx.y, tid = threadIdx.x;
    const int q = tid & 3, first_row = tid >> 2;
    const int64_t head_at = static_cast<int64_t>(head) * HEAD * HEAD;
    const State* in = static_cast<const State*>(p.state) + p.read_slots[row] * p.slot_stride + head_at;
    float s[2][16];
    load_keys(in + first_row * HEAD, q, s[0]);
    load_keys(in + (first_row + 32) * HEAD, q, s[1]);

    const int64_t base = (static_cast<int64_t>(row) * p.heads + head) * HEAD;
    if (tid < HEAD) {
        const int c = head * HEAD + tid;
        const int64_t at = base + tid;
        const bool residual = p.v_first != nullptr;
        const StepVectors x = step_vectors(
            __half2float(p.r[at]), __half2float(p.w[at]), __half2float(p.k[at]), __half2float(p.v[at]),
            __half2float(p.a[at]), residual ? __half2float(p.v_gate[at]) : 0.0f,
            residual ? __half2float(p.v_first[at]) : 0.0f, residual, p.w0[c], p.a0[c], residual ? p.v0[c] : 0.0f,
            p.k_k[c], p.k_a[c], p.r_k[c]);
        vectors[0][tid] = x.r, vectors[1][tid] = x.decay, vectors[2][tid] = x.kk;
        vectors[3][tid] = x.kka, vectors[4][tid] = x.k, vectors[5][tid] = x.v;
        const float sum = warp_sum(x.kk * x.kk), term = warp_sum(x.bonus);
        if ((tid & 31) == 0) squares[tid >> 5] = sum, bonus[tid >> 5] = term;
    }
    const int pair = (tid & 31) * 2;
    float2 gate, weight, bias;
    if (tid < 32) {
        gate = __half22float2(*reinterpret_cast<const __half2*>(p.g + base + pair));
        weight = *reinterpret_cast<const float2*>(p.ln_weight + head * HEAD + pair);
        bias = *reinterpret_cast<const float2*>(p.ln_bias + head * HEAD + pair);
    }
    __syncthreads();
    const TokenVectors t{vectors[0], vectors[1], vectors[2], vectors[3], vectors[4], vectors[5]};
    wkv_step<State, 2>(s, t, inverse_square(squares[0] + squares[1]), q, first_row, 32, y);
    State* out = static_cast<State*>(p.state) + p.write_slots[row] * p.slot_stride + head_at;
    store_keys(out + first_row * HEAD, q, s[0]);
    store_keys(out + (first_row + 32) * HEAD, q, s[1]);
    __syncthreads();
    if (tid < 32) {
        const float2 result = wkv_epilogue(
            make_float2(y[pair], y[pair + 1]), bonus[0] + bonus[1],
            make_float2(vectors[5][pair], vectors[5][pair + 1]), gate, weight, bias);
        *reinterpret_cast<__half2*>(p.y + base + pair) = __floats2half2_rn(result.x, result.y);
    }
}

RWKV_API int rwkv_wkv_decode(const WkvArgs* p, int state_bytes, void* stream) {
    const dim3 grid(p->heads, p->rows);
    const cudaStream_t s = static_cast<cudaStream_t>(stream);
    if (state_bytes == 2) {
        wkv_decode_kernel<__half><<<grid, THREADS, 0, s>>>(*p);
    } else {
        wkv_decode_kernel<float><<<grid, THREADS, 0, s>>>(*p);
    }
    return launch_result();
}
