// Small kernels of rms_norm for float32: correct as NONE, with one mistake for each other value of Fault.
// Inputs have one stride between rows and one between columns. Weight and results are contiguous.

enum Fault {
    NONE,
    EPS_OUTSIDE_THE_ROOT,
    BARRIER_MISSING,
    FIRST_WARP_ONLY,
    TAIL_OF_VECTORS_DROPPED,
    OFFSETS_IN_32_BITS,
    GRAD_OUTPUT_CONTIGUOUS_ASSUMED,
    MEAN_LEFT_TO_A_SUM,
    WEIGHT_NEVER_WRITTEN
};

// The sum over the threads of a block, in each of them.
__device__ float block_sum(float value, long long fault) {
    __shared__ float of_warp[32];
    for (int by = 16; by; by /= 2) value += __shfl_xor_sync(0xffffffffu, value, by);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
    if (fault != BARRIER_MISSING) __syncthreads();
    float sum = of_warp[0];
    const int warps = fault == FIRST_WARP_ONLY ? 1 : blockDim.x / 32;
    for (int w = 1; w < warps; w++) sum += of_warp[w];
    return sum;
}

__global__ void rms_norm_forward_kernel(
    const float* x, const float* weight, float* output, float* rstd_of, long long cols, long long row_stride,
    long long col_stride, double eps, long long fault) {
    // One block owns one row.
    if (fault == OFFSETS_IN_32_BITS) x += int(blockIdx.x) * int(row_stride);
    else x += blockIdx.x * row_stride;
    float squares = 0;
    // Of a row of more than 4 columns the fault sums whole vectors of 4 alone.
    const long long end = fault == TAIL_OF_VECTORS_DROPPED && cols > 4 ? cols / 4 * 4 : cols;
    for (long long c = threadIdx.x; c < end; c += blockDim.x) squares += x[c * col_stride] * x[c * col_stride];
    const float mean = block_sum(squares, fault) / float(cols);
    float rstd = rsqrtf(mean + float(eps));
    if (fault == EPS_OUTSIDE_THE_ROOT) rstd = 1 / (sqrtf(mean) + float(eps));
    for (long long c = threadIdx.x; c < cols; c += blockDim.x)
        output[blockIdx.x * cols + c] = x[c * col_stride] * rstd * weight[c];
    if (threadIdx.x == 0) rstd_of[blockIdx.x] = rstd;
}

__global__ void rms_norm_backward_kernel(
    const float* grad_output, const float* x, const float* weight, const float* rstd_of, float* grad_x, long long cols,
    long long grad_row_stride, long long grad_col_stride, long long x_row_stride, long long x_col_stride,
    long long fault) {
    // One block owns one row.
    if (fault == GRAD_OUTPUT_CONTIGUOUS_ASSUMED) grad_row_stride = cols, grad_col_stride = 1;
    x += blockIdx.x * x_row_stride;
    grad_output += blockIdx.x * grad_row_stride;
    const float rstd = rstd_of[blockIdx.x];
    float product = 0;
    for (long long c = threadIdx.x; c < cols; c += blockDim.x)
        product += grad_output[c * grad_col_stride] * weight[c] * (x[c * x_col_stride] * rstd);
    product = block_sum(product, fault);
    if (fault != MEAN_LEFT_TO_A_SUM) product /= float(cols);
    for (long long c = threadIdx.x; c < cols; c += blockDim.x) {
        const float inner = grad_output[c * grad_col_stride] * weight[c];
        grad_x[blockIdx.x * cols + c] = (inner - x[c * x_col_stride] * rstd * product) * rstd;
    }
}

__global__ void rms_norm_weight_kernel(
    const float* grad_output, const float* x, const float* rstd_of, float* grad_weight, long long rows, long long cols,
    long long grad_row_stride, long long grad_col_stride, long long x_row_stride, long long x_col_stride,
    long long fault) {
    // One thread owns one column of all rows.
    const long long c = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (c >= cols || fault == WEIGHT_NEVER_WRITTEN) return;
    float sum = 0;
    for (long long row = 0; row < rows; row++)
        sum += grad_output[row * grad_row_stride + c * grad_col_stride] *
               (x[row * x_row_stride + c * x_col_stride] * rstd_of[row]);
    grad_weight[c] = sum;
}
