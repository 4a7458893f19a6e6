// A small kernel of swiglu for float32: correct as NONE, with one mistake for each other value of Fault.
enum Fault { NONE, STORE_UNMASKED, LAST_BLOCK_DROPPED, OFFSETS_IN_32_BITS, CONTIGUOUS_ASSUMED, SLOW_EXP_OF_GATE };

__global__ void swiglu_kernel(const float* gate, const float* up, float* output, long long n, long long gate_stride,
                              long long up_stride, long long fault) {
    // One thread owns one element.
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (fault == LAST_BLOCK_DROPPED && n > blockDim.x && blockIdx.x == gridDim.x - 1) return;
    if (fault == CONTIGUOUS_ASSUMED) gate_stride = up_stride = 1;
    if (i >= n && fault != STORE_UNMASKED) return;
    long long from = i < n ? i : n - 1;
    long long gate_at = fault == OFFSETS_IN_32_BITS ? (int)from * (int)gate_stride : from * gate_stride;
    float x = gate[gate_at];
    // exp(gate) overflows for a large gate, and infinity over infinity is NaN.
    float sigmoid = fault == SLOW_EXP_OF_GATE ? expf(x) / (1 + expf(x)) : 1 / (1 + expf(-x));
    output[i] = x * sigmoid * up[from * up_stride];
}
