// Small kernels of cross_entropy for float32: correct as NONE, with one mistake for each other value of Fault.
// Logits have one stride between rows and one between classes. Losses, their cotangents and the gradient are contiguous.

enum Fault {
    NONE,
    TARGET_OF_IGNORED_ROWS_READ,
    BARRIER_MISSING,
    FIRST_WARP_ONLY,
    TAIL_OF_VECTORS_DROPPED,
    OFFSETS_IN_32_BITS,
    CLASSES_CONTIGUOUS_ASSUMED,
    GRADIENT_OF_IGNORED_ROWS,
    ROWS_PAST_32_CLASSES_UNWRITTEN
};

// The largest of a block's threads, or their sum, in each of them.
__device__ float over_block(float value, bool sum, long long fault) {
    __shared__ float of_warp[32];
    for (int by = 16; by; by /= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, value, by);
        value = sum ? value + other : max(value, other);
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
    if (fault != BARRIER_MISSING) __syncthreads();
    const int warps = fault == FIRST_WARP_ONLY && sum ? 1 : blockDim.x / 32;
    value = of_warp[0];
    for (int w = 1; w < warps; w++) value = sum ? value + of_warp[w] : max(value, of_warp[w]);
    return value;
}

struct Moments {
    float largest, total, distance;  // the sum of exp(x - largest), and of x - largest
};

__device__ Moments moments(const float* logits, long long classes, long long class_stride, long long fault) {
    float largest = -INFINITY, total = 0, distance = 0;
    for (long long c = threadIdx.x; c < classes; c += blockDim.x) largest = max(largest, logits[c * class_stride]);
    largest = over_block(largest, false, fault);
    const long long end = fault == TAIL_OF_VECTORS_DROPPED && classes > 4 ? classes / 4 * 4 : classes;
    const float reference = largest == -INFINITY ? 0 : largest;
    for (long long c = threadIdx.x; c < end; c += blockDim.x) {
        total += expf(logits[c * class_stride] - reference);
        distance += logits[c * class_stride] - reference;
    }
    return {largest, over_block(total, true, fault), over_block(distance, true, fault)};
}

__global__ void cross_entropy_forward_kernel(
    const float* logits, const long long* target_of, float* losses, long long classes, long long row_stride,
    long long class_stride, long long target_stride, long long ignore_index, double smoothing, long long fault) {
    // One block owns one row.
    if (fault == OFFSETS_IN_32_BITS) logits += int(blockIdx.x) * int(row_stride);
    else logits += blockIdx.x * row_stride;
    if (fault == CLASSES_CONTIGUOUS_ASSUMED) class_stride = 1;
    const Moments row = moments(logits, classes, class_stride, fault);
    if (threadIdx.x > 0) return;
    const long long target = target_of[blockIdx.x * target_stride];
    const bool counted = target != ignore_index;
    float expected = 0;
    if (counted || fault == TARGET_OF_IGNORED_ROWS_READ) expected = logits[target * class_stride] - row.largest;
    if (smoothing > 0)
        expected = float(1 - smoothing) * expected + float(smoothing) * (row.distance / float(classes));
    losses[blockIdx.x] = counted ? logf(row.total) - expected : 0;
}

__global__ void cross_entropy_backward_kernel(
    const float* of_rows, const float* logits, const long long* target_of, float* gradient, long long classes,
    long long row_stride, long long class_stride, long long target_stride, long long ignore_index, double smoothing,
    long long fault) {
    // One block owns one row.
    logits += blockIdx.x * row_stride;
    gradient += blockIdx.x * classes;
    const Moments row = moments(logits, classes, class_stride, fault);
    const long long target = target_of[blockIdx.x * target_stride];
    const bool counted = target != ignore_index || fault == GRADIENT_OF_IGNORED_ROWS;
    const long long end = fault == ROWS_PAST_32_CLASSES_UNWRITTEN ? min(classes, 32ll) : classes;
    for (long long c = threadIdx.x; c < end; c += blockDim.x) {
        float slope = expf(logits[c * class_stride] - row.largest) / row.total - float(smoothing) / float(classes);
        if (c == target) slope -= float(1 - smoothing);
        gradient[c] = counted ? slope * of_rows[blockIdx.x] : 0;
    }
}
