// Entry of the products of up to 256 rows (wide.cuh): makes the tensor maps, and launches what the caller has planned.
#include "wide.cuh"

struct WideMap {
    const void* weight;  // [n, k] fp16, or [k, n] if transposed
    const void* x;       // [rows, k] fp16
    void* y;             // [rows, n] fp16
    int n, k;
    int activation;
};

struct WideArgs {
    WideMap maps[MAX_WIDE_MAPS];
    int count;
    int rows;
    int transposed;  // of all maps alike
    int tile_rows, splits;
    void* partial;   // see WideLaunch
    void* counters;
};

using EncodeTiled = CUresult (*)(
    CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
    const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The driver's function, found at run time: nothing is linked against libcuda.
static EncodeTiled encode_tiled() {
    static const EncodeTiled found = [] {
        void* function = nullptr;
        cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
#else
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &result);
#endif
        return result == cudaDriverEntryPointSuccess ? reinterpret_cast<EncodeTiled>(function) : nullptr;
    }();
    return found;
}

// Boxes of [box_planes][box_rows][64] out of `planes` matrices [rows][pitch] that lie 64 columns apart, `columns` wide.
static bool describe(
    CUtensorMap* map, const void* matrix, int rows, int columns, int pitch, int planes, int box_rows, int box_planes) {
    const cuuint64_t size[3] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows), static_cast<cuuint64_t>(planes)};
    const cuuint64_t strides[2] = {static_cast<cuuint64_t>(pitch) * 2, 128};
    const cuuint32_t box[3] = {64, static_cast<cuuint32_t>(box_rows), static_cast<cuuint32_t>(box_planes)}, step[3] = {1, 1, 1};
    return encode_tiled()(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 3, const_cast<void*>(matrix), size, strides, box, step,
                          CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                          CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// A matrix [rows, k] in boxes of [box_rows][64].
static bool describe_rows(CUtensorMap* map, const void* matrix, int rows, int k, int box_rows) {
    return describe(map, matrix, rows, k, k, 1, box_rows, 1);
}

// A transposed matrix [k, n] as n / 64 columns of it, in boxes of [OUTPUTS / 64][64][64].
static bool describe_transposed(CUtensorMap* map, const void* matrix, int k, int n) {
    return describe(map, matrix, k, 64, n, n / 64, 64, OUTPUTS / 64);
}

template <int ROWS>
static int launch_rows(const WideArgs& args, const WideLaunch& p, void* stream) {
    switch (args.splits) {
        case 1: return args.transposed ? launch_wide<ROWS, 1, true>(p, stream) : launch_wide<ROWS, 1, false>(p, stream);
        case 2: return args.transposed ? launch_wide<ROWS, 2, true>(p, stream) : launch_wide<ROWS, 2, false>(p, stream);
        case 4: return args.transposed ? launch_wide<ROWS, 4, true>(p, stream) : launch_wide<ROWS, 4, false>(p, stream);
    }
    return static_cast<int>(cudaErrorInvalidValue);
}

RWKV_API int rwkv_wide(const WideArgs* args, void* stream) {
    if (encode_tiled() == nullptr) return static_cast<int>(cudaErrorNotSupported);
    WideLaunch p;
    int tiles = 0;
    for (int i = 0; i < args->count; ++i) {
        const WideMap& m = args->maps[i];
        const bool done = args->transposed ? describe_transposed(&p.weights[i], m.weight, m.k, m.n)
                                       : describe_rows(&p.weights[i], m.weight, m.n, m.k, OUTPUTS);
        if (!done || !describe_rows(&p.inputs[i], m.x, args->rows, m.k, args->tile_rows)) {
            return static_cast<int>(cudaErrorInvalidValue);
        }
        p.y[i] = static_cast<__half*>(m.y);
        p.n[i] = m.n, p.k[i] = m.k, p.activation[i] = m.activation;
        p.first_tile[i] = tiles;
        tiles += (m.n + OUTPUTS - 1) / OUTPUTS;
    }
    p.first_tile[args->count] = tiles;
    p.count = args->count, p.rows = args->rows;
    p.partial = static_cast<float4*>(args->partial), p.counters = static_cast<int*>(args->counters);
    switch (args->tile_rows) {
        case 32: return launch_rows<32>(*args, p, stream);
        case 64: return launch_rows<64>(*args, p, stream);
        case 96: return launch_rows<96>(*args, p, stream);
        case 128: return launch_rows<128>(*args, p, stream);
        case 160: return launch_rows<160>(*args, p, stream);
        case 192: return launch_rows<192>(*args, p, stream);
        case 224: return launch_rows<224>(*args, p, stream);
        case 256: return launch_rows<256>(*args, p, stream);
    }
    return static_cast<int>(cudaErrorInvalidValue);
}
