// Softmax as it is first written in CUDA C++: of one block a row, right and in three wrong ways.
__device__ float block_max(float* partial, float v) {
    int tid = threadIdx.x;
    partial[tid] = v;
    __syncthreads();
    for (int s = blockDim.x / 2; s > 0; s /= 2) {
        if (tid < s) partial[tid] = fmaxf(partial[tid], partial[tid + s]);
        __syncthreads();
    }
    v = partial[0];
    __syncthreads();
    return v;
}

__device__ float block_sum(float* partial, float v) {
    int tid = threadIdx.x;
    partial[tid] = v;
    __syncthreads();
    for (int s = blockDim.x / 2; s > 0; s /= 2) {
        if (tid < s) partial[tid] += partial[tid + s];
        __syncthreads();
    }
    return partial[0];
}

__global__ void softmax_kernel(const float* __restrict__ x, float* __restrict__ y, int rows, int cols) {
    extern __shared__ float partial[];
    const float* in = x + (size_t)blockIdx.x * cols;
    float* out = y + (size_t)blockIdx.x * cols;
    float m = -INFINITY, sum = 0.0f;
    for (int i = threadIdx.x; i < cols; i += blockDim.x) m = fmaxf(m, in[i]);
    m = block_max(partial, m);
    for (int i = threadIdx.x; i < cols; i += blockDim.x) sum += expf(in[i] - m);
    sum = block_sum(partial, sum);
    for (int i = threadIdx.x; i < cols; i += blockDim.x) out[i] = expf(in[i] - m) / sum;
}

__global__ void no_maximum(const float* x, float* y, int rows, int cols) {
    extern __shared__ float partial[];
    const float* in = x + (size_t)blockIdx.x * cols;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < cols; i += blockDim.x) sum += expf(in[i]);
    sum = block_sum(partial, sum);
    for (int i = threadIdx.x; i < cols; i += blockDim.x) y[(size_t)blockIdx.x * cols + i] = expf(in[i]) / sum;
}

__global__ void no_barrier(const float* x, float* y, int rows, int cols) {
    extern __shared__ float partial[];
    const float* in = x + (size_t)blockIdx.x * cols;
    float m = -INFINITY, sum = 0.0f;
    for (int i = threadIdx.x; i < cols; i += blockDim.x) m = fmaxf(m, in[i]);
    partial[threadIdx.x] = m;  // FAULT
    for (int s = blockDim.x / 2; s > 0; s /= 2) {
        if (threadIdx.x < s) partial[threadIdx.x] = fmaxf(partial[threadIdx.x], partial[threadIdx.x + s]);  // FAULT
        __syncthreads();
    }
    m = partial[0];
    __syncthreads();
    for (int i = threadIdx.x; i < cols; i += blockDim.x) sum += expf(in[i] - m);
    sum = block_sum(partial, sum);
    for (int i = threadIdx.x; i < cols; i += blockDim.x) y[(size_t)blockIdx.x * cols + i] = expf(in[i] - m) / sum;
}

__global__ void wrong_index(const float* x, float* y, int rows, int cols) {
    extern __shared__ float partial[];
    const float* in = x + blockIdx.x * rows;
    float m = -INFINITY, sum = 0.0f;
    for (int i = threadIdx.x; i < cols; i += blockDim.x) m = fmaxf(m, in[i]);  // FAULT
    m = block_max(partial, m);
    for (int i = threadIdx.x; i < cols; i += blockDim.x) sum += expf(in[i] - m);
    sum = block_sum(partial, sum);
    for (int i = threadIdx.x; i < cols; i += blockDim.x) y[blockIdx.x * cols + i] = expf(in[i] - m) / sum;
}
