// The mean that the losses give, of terms from all blocks of a launch in one.
#pragma once

// In double whatever the terms are: a warp's exchanges are few, and a count up to 2^53 is exact.
struct SumAndCount { double sum, count; };

// The whole block's, in its first thread. All of the block's threads must come here.
__device__ inline SumAndCount block_sum(SumAndCount mine) {
    __shared__ SumAndCount of_warp[32];
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    auto over_warp = [&] {
#pragma unroll
        for (int by = 16; by; by /= 2) {
            mine.sum += __shfl_down_sync(0xffffffff, mine.sum, by);
            mine.count += __shfl_down_sync(0xffffffff, mine.count, by);
        }
    };
    over_warp();
    if (lane == 0) of_warp[threadIdx.x / 32] = mine;
    __syncthreads();
    if (threadIdx.x < 32) {
        mine = lane < warps ? of_warp[lane] : SumAndCount{0, 0};
        over_warp();
    }
    return mine;
}

// Gives true in the first thread of the last block to come here, with the sum of what all brought; in no other thread.
// The order of addition depends on nothing but the grid. All threads of all blocks must come here, once.
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
        // From the L2 cache, where the other multiprocessors' are: this one's own L1 knows nothing of them.
        const double2 partial = __ldcg(&partials[block]);
        mine.sum += partial.x;
        mine.count += partial.y;
    }
    mine = block_sum(mine);
    if (threadIdx.x == 0) *counter = 0;
    return threadIdx.x == 0;
}
