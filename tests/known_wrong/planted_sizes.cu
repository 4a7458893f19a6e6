// Elementwise sums of float32, each wrong from a size on that no fixed list of sizes holds.

// Offsets in 16 bits wrap at 32768.
__global__ void sum_with_short_offsets(const float* x, const float* y, float* output, int n) {
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= n) return;
    short offset = (short)at;
    output[at] = offset < 0 ? 0.0f : x[offset] + y[offset];
}

// A path of its own for 777 elements leaves out the last one.
__global__ void sum_with_a_special_path(const float* x, const float* y, float* output, int n) {
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= n) return;
    output[at] = n == 777 && at == n - 1 ? x[at] : x[at] + y[at];
}

// Two tiles of 3500 elements at a time: of three, the last is added to nothing.
__global__ void sum_of_pairs_of_tiles(const float* x, const float* y, float* output, int n) {
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= n) return;
    int tiles = (n + 3499) / 3500, tile = at / 3500;
    output[at] = tiles == 3 && tile == 2 ? x[at] : x[at] + y[at];
}
