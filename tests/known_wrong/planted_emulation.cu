// Softmax by launches that no GPU takes: which axis the rows are on is up to the launch. One block a row.

extern __shared__ float row_of[];

__global__ void exponentials(const float* x, float* y, long long rows, long long cols) {
    long long row = blockIdx.x + (long long)blockIdx.y + blockIdx.z;
    int lane = threadIdx.x + threadIdx.y + threadIdx.z, lanes = blockDim.x * blockDim.y * blockDim.z;
    if (row >= rows) return;
    for (long long c = lane; c < cols; c += lanes) row_of[c] = x[row * cols + c];
    __syncthreads();
    float most = -INFINITY, total = 0;
    for (long long c = 0; c < cols; c++) most = fmaxf(most, row_of[c]);
    for (long long c = 0; c < cols; c++) total += expf(row_of[c] - most);
    for (long long c = lane; c < cols; c += lanes) y[row * cols + c] = expf(row_of[c] - most) / total;
}
