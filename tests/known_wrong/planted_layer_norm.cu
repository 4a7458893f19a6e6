// Small kernels of layer_norm for float32: correct as NONE, with one mistake for each other value of Fault.
// Inputs have one stride between rows and one between columns. Weight, bias and results are contiguous.
#include <cuda_fp16.h>

enum Fault {
    NONE,
    SQUARE_OF_MEAN,
    VARIANCE_OF_SAMPLE,
    EPS_OUTSIDE_THE_ROOT,
    EPS_TYPED_IN,
    COUNTS_TAKEN_AS_EQUAL,
    EMPTY_PARTS_MERGED,
    BARRIER_MISSING,
    FIRST_WARP_ONLY,
    STRIDE_DROPPED_IN_SECOND_PASS,
    WEIGHT_OF_FIRST_COLUMNS,
    ROW_OF_FIXED_LENGTH,
    MEAN_OF_GRADIENT_LEFT_OUT,
    GRAD_OUTPUT_CONTIGUOUS_ASSUMED,
    LAST_BLOCK_OF_ROWS_DROPPED,
    FIRST_BLOCK_OF_ROWS_ONLY,
    ADDED_WITHOUT_ATOMICS,
    ADDED_ATOMICALLY,
    OFFSETS_IN_32_BITS
};

// The moments of a part of a row: the number of columns, their mean, and the sum of squared deviations from it.
struct Moments {
    float count, mean, squares;
};

__device__ Moments merged(Moments a, Moments b, long long fault) {
    float count = a.count + b.count;
    // An empty part has mean 0. Its squared distance from a huge mean overflows, and times the weight 0 gives NaN.
    if (fault != EMPTY_PARTS_MERGED && (a.count == 0.0f || b.count == 0.0f)) return a.count == 0.0f ? b : a;
    if (count == 0.0f) return a;
    float share = fault == COUNTS_TAKEN_AS_EQUAL ? 0.5f : b.count / count, apart = b.mean - a.mean;
    return {count, a.mean + apart * share, a.squares + b.squares + apart * apart * a.count * share};
}

// Merge the moments of a block's threads; every thread gets the result.
__device__ Moments merged_over_block(Moments m, Moments* of_warp, long long fault) {
    int warps = fault == FIRST_WARP_ONLY ? 1 : blockDim.x / 32;
    for (int by = 16; by; by /= 2) {
        Moments other = {__shfl_down_sync(0xffffffffu, m.count, by), __shfl_down_sync(0xffffffffu, m.mean, by),
                         __shfl_down_sync(0xffffffffu, m.squares, by)};
        m = merged(m, other, fault);
    }
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = m;
    if (fault != BARRIER_MISSING) __syncthreads();
    m = of_warp[0];
    for (int w = 1; w < warps; w++) m = merged(m, of_warp[w], fault);
    return m;
}

__device__ float sum_over_block(float value, float* of_warp) {
    for (int by = 16; by; by /= 2) value += __shfl_down_sync(0xffffffffu, value, by);
    __syncthreads();
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
    __syncthreads();
    value = 0.0f;
    for (int w = 0; w < blockDim.x / 32; w++) value += of_warp[w];
    return value;
}

__global__ void layer_norm_forward_kernel(const float* x, const float* weight, const float* bias, float* y, float* means,
                                          float* deviations, long long cols, long long row_stride, long long col_stride,
                                          double eps_, long long fault) {
    // One block owns one row. One thread owns columns threadIdx.x, threadIdx.x + blockDim.x, ...
    __shared__ Moments of_warp[32];
    __shared__ float kept[512];
    long long row = blockIdx.x;
    const float* from = x + (fault == OFFSETS_IN_32_BITS ? (int)row * (int)row_stride : row * row_stride);
    Moments own = {0.0f, 0.0f, 0.0f};
    for (long long col = threadIdx.x; col < cols; col += blockDim.x) {
        float value = from[col * col_stride];
        if (fault == ROW_OF_FIXED_LENGTH) kept[col] = value;
        if (fault == SQUARE_OF_MEAN) {
            own = {own.count + 1.0f, own.mean + value, own.squares + value * value};
        } else {
            float apart = value - own.mean;
            own.count += 1.0f;
            own.mean += apart / own.count;
            own.squares += apart * (value - own.mean);
        }
    }
    if (fault == SQUARE_OF_MEAN && own.count > 0.0f) {
        own.mean /= own.count;
        own.squares -= own.count * own.mean * own.mean;
    }
    Moments all = merged_over_block(own, of_warp, fault);
    float variance = all.squares / (fault == VARIANCE_OF_SAMPLE && cols > 1 ? cols - 1 : cols);
    float eps = fault == EPS_TYPED_IN ? 1e-5f : (float)eps_;
    float deviation = fault == EPS_OUTSIDE_THE_ROOT ? sqrtf(variance) + eps : sqrtf(variance + eps);
    if (fault == STRIDE_DROPPED_IN_SECOND_PASS) col_stride = 1;
    for (long long col = threadIdx.x; col < cols; col += blockDim.x) {
        long long of = fault == WEIGHT_OF_FIRST_COLUMNS ? col % blockDim.x : col;
        y[row * cols + col] = (from[col * col_stride] - all.mean) / deviation * weight[of] + bias[col];
    }
    if (threadIdx.x == 0) means[row] = all.mean, deviations[row] = deviation;
}

__global__ void layer_norm_backward_kernel(const float* grad_output, const float* x, const float* weight,
                                           const float* means, const float* deviations, float* grad_x, long long cols,
                                           long long grad_row_stride, long long grad_col_stride, long long row_stride,
                                           long long col_stride, long long fault) {
    // One block owns one row.
    __shared__ float of_warp[32];
    long long row = blockIdx.x;
    if (fault == GRAD_OUTPUT_CONTIGUOUS_ASSUMED) grad_row_stride = cols, grad_col_stride = 1;
    const float *grad = grad_output + row * grad_row_stride, *from = x + row * row_stride;
    float mean = means[row], deviation = deviations[row], sum = 0.0f, product = 0.0f;
    for (long long col = threadIdx.x; col < cols; col += blockDim.x) {
        float inner = grad[col * grad_col_stride] * weight[col];
        sum += inner;
        product += inner * ((from[col * col_stride] - mean) / deviation);
    }
    sum = sum_over_block(sum, of_warp) / cols;
    product = sum_over_block(product, of_warp) / cols;
    if (fault == MEAN_OF_GRADIENT_LEFT_OUT) sum = 0.0f;
    for (long long col = threadIdx.x; col < cols; col += blockDim.x) {
        float normal = (from[col * col_stride] - mean) / deviation;
        grad_x[row * cols + col] = (grad[col * grad_col_stride] * weight[col] - sum - normal * product) / deviation;
    }
}

__global__ void layer_norm_parameters_kernel(const float* grad_output, const float* x, const float* means,
                                             const float* deviations, float* grad_weight, float* grad_bias, long long rows,
                                             long long cols, long long rows_of_block, long long grad_row_stride,
                                             long long grad_col_stride, long long row_stride, long long col_stride,
                                             long long fault) {
    // One block owns blockDim.x columns and rows_of_block rows. gridDim.y is 1 except for some faults.
    long long col = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (col >= cols) return;
    long long first = blockIdx.y * rows_of_block, end = first + rows_of_block < rows ? first + rows_of_block : rows;
    if (fault == FIRST_BLOCK_OF_ROWS_ONLY && end > 64) end = 64;
    if (fault == LAST_BLOCK_OF_ROWS_DROPPED && rows > 64) end = rows / 64 * 64;
    float of_weight = 0.0f, of_bias = 0.0f;
    for (long long row = first; row < end; row++) {
        float grad = grad_output[row * grad_row_stride + col * grad_col_stride];
        of_weight += grad * ((x[row * row_stride + col * col_stride] - means[row]) / deviations[row]);
        of_bias += grad;
    }
    if (fault == ADDED_ATOMICALLY) {
        atomicAdd(grad_weight + col, of_weight);
        atomicAdd(grad_bias + col, of_bias);
    } else if (fault == ADDED_WITHOUT_ATOMICS) {
        grad_weight[col] += of_weight;
        grad_bias[col] += of_bias;
    } else {
        grad_weight[col] = of_weight;
        grad_bias[col] = of_bias;
    }
}
