// A tiled matmul, right and without the barrier that keeps a tile until all have read it.
#define TILE 16

__global__ void matmul_kernel(const float* A, const float* B, float* C, int M, int N, int K) {
    __shared__ float As[TILE][TILE], Bs[TILE][TILE];
    int row = blockIdx.y * TILE + threadIdx.y, col = blockIdx.x * TILE + threadIdx.x;
    float sum = 0.0f;
    for (int start = 0; start < K; start += TILE) {
        int i = start + threadIdx.x, j = start + threadIdx.y;
        As[threadIdx.y][threadIdx.x] = row < M && i < K ? A[row * K + i] : 0.0f;
        Bs[threadIdx.y][threadIdx.x] = col < N && j < K ? B[j * N + col] : 0.0f;
        __syncthreads();
        for (int t = 0; t < TILE; t++) sum += As[threadIdx.y][t] * Bs[t][threadIdx.x];
        __syncthreads();
    }
    if (row < M && col < N) C[row * N + col] = sum;
}

__global__ void no_barrier(const float* A, const float* B, float* C, int M, int N, int K) {
    __shared__ float As[TILE][TILE], Bs[TILE][TILE];
    int row = blockIdx.y * TILE + threadIdx.y, col = blockIdx.x * TILE + threadIdx.x;
    float sum = 0.0f;
    for (int start = 0; start < K; start += TILE) {
        int i = start + threadIdx.x, j = start + threadIdx.y;
        As[threadIdx.y][threadIdx.x] = row < M && i < K ? A[row * K + i] : 0.0f;  // FAULT
        Bs[threadIdx.y][threadIdx.x] = col < N && j < K ? B[j * N + col] : 0.0f;  // FAULT
        __syncthreads();
        for (int t = 0; t < TILE; t++) sum += As[threadIdx.y][t] * Bs[t][threadIdx.x];  // FAULT
    }
    if (row < M && col < N) C[row * N + col] = sum;
}
