// Copies of threads (cp.async), two rows ahead of the one that is summed: of rows [rows, blockDim.x * BYTES / 4].
enum Fault { NONE, NO_COMMIT, NO_WAIT, WAIT_FOR_OLDER, WAIT_AFTER_BARRIER, NO_BARRIER, OVERWRITE, READ_PAST_THE_END };

__device__ inline unsigned address(const void* p) { return unsigned(__cvta_generic_to_shared(p)); }
template <int BYTES> __device__ inline void copy(void* to, const void* from, int bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                 ::"r"(address(to)), "l"(from), "n"(BYTES), "r"(bytes) : "memory");
}
template <int PENDING> __device__ inline void wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

template <int BYTES> __global__ void sum_ahead(const float* x, float* sums, int rows, int fault) {
    constexpr int WIDTH = BYTES / 4, MOST = 64 * WIDTH;
    __shared__ __align__(16) float tile[3][MOST];
    const int first = threadIdx.x * WIDTH, columns = blockDim.x * WIDTH, stages = fault == OVERWRITE ? 2 : 3;
    // There are zeros past the last row.
    auto fetch = [&](int row) {
        const bool there = row < rows || fault == READ_PAST_THE_END;
        copy<BYTES>(&tile[row % stages][first], x + row * columns + first, there ? BYTES : 0);
        if (fault != NO_COMMIT) asm volatile("cp.async.commit_group;" ::: "memory");
    };
    float sum[WIDTH] = {};
    fetch(0);
    fetch(1);
    for (int row = 0; row < rows + 1; row++) {
        if (fault == WAIT_AFTER_BARRIER) __syncthreads();
        if (fault == WAIT_FOR_OLDER) wait<2>();
        else if (fault != NO_WAIT) wait<1>();
        if (fault != NO_BARRIER && fault != WAIT_AFTER_BARRIER) __syncthreads();
        fetch(row + 2);
        // Some of these a neighbour has copied.
        for (int e = 0; e < WIDTH; e++) sum[e] += tile[row % stages][(first + e + 1) % columns];
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    for (int e = 0; e < WIDTH; e++) sums[first + e] = sum[e];
}
