// A small kernel of add_rms_norm for float32: correct as NONE, with one mistake for each other value of Fault.
// Inputs have one stride between rows and one between columns. Weight and results are contiguous.

enum Fault {
    NONE,
    VARIANCE_OF_X,
    ROW_STRIDE_OF_X,
    SUM_NEVER_STORED_PAST_A_BLOCK,
    BARRIER_MISSING,
    TAIL_OF_VECTORS_DROPPED,
    OFFSETS_IN_32_BITS
};

__global__ void add_rms_norm_kernel(
    const float* x, const float* residual, const float* weight, float* y, float* sums, long long num_rows,
    long long cols, long long x_row_stride, long long x_col_stride, long long residual_row_stride,
    long long residual_col_stride, double eps, long long fault) {
    // One block owns one row.
    __shared__ float of_warp[32];
    const long long row = blockIdx.x;
    if (fault == ROW_STRIDE_OF_X) residual_row_stride = x_row_stride;
    if (fault == OFFSETS_IN_32_BITS) x += int(row) * int(x_row_stride);
    else x += row * x_row_stride;
    residual += row * residual_row_stride;
    float squares = 0;
    // Of a row of more than 4 columns the fault sums whole vectors of 4 alone.
    const long long end = fault == TAIL_OF_VECTORS_DROPPED && cols > 4 ? cols / 4 * 4 : cols;
    for (long long c = threadIdx.x; c < end; c += blockDim.x) {
        const float of_x = x[c * x_col_stride], sum = of_x + residual[c * residual_col_stride];
        squares += fault == VARIANCE_OF_X ? of_x * of_x : sum * sum;
    }
    for (int by = 16; by; by /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, by);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = squares;
    if (fault != BARRIER_MISSING) __syncthreads();
    float total = 0;
    for (int w = 0; w < blockDim.x / 32; w++) total += of_warp[w];
    const float rstd = rsqrtf(total / float(cols) + float(eps));
    for (long long c = threadIdx.x; c < cols; c += blockDim.x) {
        const float sum = x[c * x_col_stride] + residual[c * residual_col_stride];
        y[row * cols + c] = sum * rstd * weight[c];
        if (fault != SUM_NEVER_STORED_PAST_A_BLOCK || c < blockDim.x) sums[row * cols + c] = sum;
    }
}
