// Kernels that are right unless two things come together.

// One thread owns four elements. The address of x alone decides whether vectors are read: those of y are then read from
// the multiple of 16 bytes below.
__global__ void sum_by_one_pointer(const float* x, const float* y, float* output, int n) {
    int at = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
    if (n % 4 == 0 && (unsigned long long)x % 16 == 0) {
        if (at >= n) return;
        const float4* from = reinterpret_cast<const float4*>(y - (unsigned long long)y % 16 / 4);
        float4 a = reinterpret_cast<const float4*>(x)[at / 4], b = from[at / 4];
        output[at] = a.x + b.x;
        output[at + 1] = a.y + b.y;
        output[at + 2] = a.z + b.z;
        output[at + 3] = a.w + b.w;
        return;
    }
    for (int i = at; i < at + 4 && i < n; ++i) output[i] = x[i] + y[i];
}

// One thread owns a row. Of a row of more than 1024 columns, infinities past them are taken for the largest number.
__global__ void softmax_of_long_rows(const float* x, float* y, int rows, int cols) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    const float* from = x + (long long)row * cols;
    float most = from[0], total = 0;
    for (int i = 1; i < cols; ++i) {
        float value = i >= 1024 && isinf(from[i]) && from[i] > 0 ? 3e38f : from[i];
        most = value > most || value != value ? value : most;
    }
    for (int i = 0; i < cols; ++i) total += expf((i >= 1024 ? fminf(from[i], 3e38f) : from[i]) - most);
    for (int i = 0; i < cols; ++i) y[(long long)row * cols + i] = expf(fminf(from[i], most) - most) / total;
}
