// Small kernels of giou_loss and giou_loss_ragged for packed float32 boxes: correct as RIGHT, with one mistake for each
// other value of LossFault.
#include <cuda_fp16.h>

#include "planted.cu"

enum LossFault {
    RIGHT,
    FIRST_STRIP_ONLY,
    SUM_IN_HALF,
    VALID_BY_PRED,
    BISECTION_TO_THE_LEFT,
    PRED_TAKEN_AS_PACKED,
    BOXES_PAST_A_WARP,
    NEIGHBOURS_BOX,
    SHUFFLE_IN_A_BRANCH,
    SHUFFLE_OF_ACTIVE_LANES,
    ADDED_WITHOUT_ATOMICS,
    ADDED_ATOMICALLY,
    SLOT_UNWRITTEN
};

__device__ float loss_of(const float* pred, const float* target, long long pred_row, long long row, float eps) {
    return 1.0f - giou_of<NONE>(load_box<NONE>(pred, pred_row, 4, 1), load_box<NONE>(target, row, 4, 1), eps);
}

__global__ void padded_kernel(const float* pred, const float* target, float* sums, float* counts, long long n, double eps,
                              long long fault) {
    // One thread owns rows thread, thread + threads, ..., and stores the sum of their losses and the valid count.
    long long thread = blockIdx.x * (long long)blockDim.x + threadIdx.x, threads = gridDim.x * (long long)blockDim.x;
    float sum = 0.0f, count = 0.0f;
    for (long long row = thread; row < (fault == FIRST_STRIP_ONLY && n > threads ? threads : n); row += threads) {
        if (!((fault == VALID_BY_PRED ? pred : target)[4 * row + 3] > 0.0f)) continue;
        sum += loss_of(pred, target, row, row, (float)eps);
        count += 1.0f;
        if (fault == SUM_IN_HALF) sum = __half2float(__float2half(sum));
    }
    sums[thread] = sum;
    counts[thread] = count;
}

__global__ void ragged_rows_kernel(const float* pred, const float* target, const long long* offsets, float* losses,
                                   long long batch, long long total, long long max_boxes, double eps, long long fault) {
    // One thread owns one box of target, and finds its sample by bisection.
    long long row = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (row >= total) return;
    long long low = 0, high = batch;
    while (high - low > 1) {
        long long middle = (low + high) / 2;
        if (fault == BISECTION_TO_THE_LEFT ? offsets[middle] < row : offsets[middle] <= row) low = middle;
        else high = middle;
    }
    long long place = row - offsets[low];
    if (place >= max_boxes) place = max_boxes - 1;
    losses[row] = loss_of(pred, target, fault == PRED_TAKEN_AS_PACKED ? row : low * max_boxes + place, row, (float)eps);
}

__global__ void ragged_samples_kernel(const float* pred, const float* target, const long long* offsets, float* sums,
                                      long long batch, long long max_boxes, double eps, long long fault) {
    // One warp owns one sample, and stores the sum of its losses.
    long long sample = (blockIdx.x * (long long)blockDim.x + threadIdx.x) / 32;
    int lane = threadIdx.x % 32;
    if (sample >= batch) return;
    long long first = offsets[sample], end = offsets[sample + 1];
    if (fault == BOXES_PAST_A_WARP && end > first + 32) end = first + 32;
    if (fault == NEIGHBOURS_BOX && end > first && sample + 1 < batch) end += 1;
    float sum = 0.0f;
    for (long long row = first + lane; row < end; row += 32)
        sum += loss_of(pred, target, sample * max_boxes + (row - first) % max_boxes, row, (float)eps);
    if (fault == SHUFFLE_IN_A_BRANCH) {
        if (first + lane < end)
            for (int by = 16; by; by /= 2) sum += __shfl_down_sync(0xffffffffu, sum, by);
    } else if (fault == SHUFFLE_OF_ACTIVE_LANES) {
        if (first + lane < end)
            for (int by = 16; by; by /= 2) sum += __shfl_down_sync(__activemask(), sum, by);
    } else {
        for (int by = 16; by; by /= 2) sum += __shfl_down_sync(0xffffffffu, sum, by);
    }
    if (lane != 0) return;
    if (fault == ADDED_ATOMICALLY) atomicAdd(sums, sum);
    else if (fault == ADDED_WITHOUT_ATOMICS) sums[0] += sum;
    else if (fault != SLOT_UNWRITTEN || end > first) sums[sample] = sum;
}
