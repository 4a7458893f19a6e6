// A small kernel of vector_add for float32: correct as NONE, with one mistake for each other value of Fault.
#include <cuda_fp16.h>

enum Fault {
    NONE,
    STORE_UNMASKED,
    TAIL_OF_VECTORS_DROPPED,
    VECTOR_PAST_THE_END,
    VECTORS_MISALIGNED,
    GRID_LIMITED,
    CONTIGUOUS_ASSUMED,
    HALF_INSIDE,
    WRITTEN_INTO_X,
    OFFSETS_IN_32_BITS
};

__device__ bool aligned(const void* pointer) { return (unsigned long long)pointer % sizeof(float4) == 0; }

__device__ float sum(float x, float y, long long fault) {
    if (fault == HALF_INSIDE) return __half2float(__float2half(x)) + __half2float(__float2half(y));
    return x + y;
}

__global__ void vector_add_kernel(const float* x, const float* y, float* output, long long n, long long x_stride,
                                  long long y_stride, long long fault) {
    // One thread owns every step-th element, or every step-th vector of four if the tensors allow vector accesses.
    long long thread = blockIdx.x * (long long)blockDim.x + threadIdx.x, step = gridDim.x * (long long)blockDim.x;
    if (fault == GRID_LIMITED) step = n;
    if (fault == CONTIGUOUS_ASSUMED) x_stride = y_stride = 1;
    long long done = 0;
    bool whole = aligned(x) && aligned(y) && aligned(output);
    if (x_stride == 1 && y_stride == 1 && (whole || fault == VECTORS_MISALIGNED)) {
        long long vectors = fault == VECTOR_PAST_THE_END ? (n + 3) / 4 : n / 4;
        for (long long v = thread; v < vectors; v += step) {
            float4 a = reinterpret_cast<const float4*>(x)[v], b = reinterpret_cast<const float4*>(y)[v];
            reinterpret_cast<float4*>(output)[v] = {sum(a.x, b.x, fault), sum(a.y, b.y, fault), sum(a.z, b.z, fault),
                                                    sum(a.w, b.w, fault)};
        }
        done = fault == TAIL_OF_VECTORS_DROPPED ? n : 4 * vectors;
    }
    long long end = fault == STORE_UNMASKED ? step * ((n + step - 1) / step) : n;
    for (long long i = done + thread; i < end; i += step) {
        long long from = i < n ? i : n - 1;
        float* to = fault == WRITTEN_INTO_X ? const_cast<float*>(x) : output;
        long long x_at = fault == OFFSETS_IN_32_BITS ? (int)from * (int)x_stride : from * x_stride;
        to[i] = sum(x[x_at], y[from * y_stride], fault);
    }
}
