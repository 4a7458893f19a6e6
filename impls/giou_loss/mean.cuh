// The mean of the losses: one launch sums the terms of all its blocks.
#pragma once

// In double for every dtype: a warp exchanges few values, and a count up to 2^53 is exact.
struct SumAndCount { double sum, count; };

// The sum over a block of BLOCK threads, in its first one. All threads of the block must call this.
__device__ inline SumAndCount block_sum(SumAndCount mine) {
    constexpr int WARPS = BLOCK / 32;
    __shared__ SumAndCount of_warp[WARPS];
    const int lane = threadIdx.x % 32;
    auto over_lanes = [&](int lanes) {
#pragma unroll
        for (int by = lanes / 2; by; by /= 2) {
            mine.sum += __shfl_down_sync(0xffffffff, mine.sum, by);
            mine.count += __shfl_down_sync(0xffffffff, mine.count, by);
        }
    };
    over_lanes(32);
    if (lane == 0) of_warp[threadIdx.x / 32] = mine;
    __syncthreads();
    if (threadIdx.x < 32) {
        mine = of_warp[lane % WARPS];
        over_lanes(WARPS);
    }
    return mine;
}

// Returns true in the first thread of the last block to call this, with the sum over all blocks in `mine`, else false.
// The order of addition depends only on the grid. All threads of all blocks must call this once.
__device__ inline bool grid_sum(SumAndCount& mine, double2* partials, int* counter) {
    __shared__ bool last;
    mine = block_sum(mine);
    if (gridDim.x == 1) return threadIdx.x == 0;
    if (threadIdx.x == 0) {
        partials[blockIdx.x] = {mine.sum, mine.count};
        __threadfence();
        last = atomicAdd(counter, 1) == (int)gridDim.x - 1;
    }
    __syncthreads();
    if (!last) return false;
    mine = {0, 0};
    for (int block = threadIdx.x; block < (int)gridDim.x; block += blockDim.x) {
        // Read from the L2 cache, which has the results of other multiprocessors. This one's L1 may not.
        const double2 partial = __ldcg(&partials[block]);
        mine.sum += partial.x;
        mine.count += partial.y;
    }
    mine = block_sum(mine);
    if (threadIdx.x == 0) *counter = 0;
    return threadIdx.x == 0;
}
