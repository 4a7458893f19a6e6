// Small kernels of nms for float32: correct as NONE, with one mistake for each other value of Fault.
enum Fault {
    NONE, AT_THE_THRESHOLD_TOO, A_PIXEL_MORE, BITS_OF_AN_INT, LAST_BLOCK_DROPPED, WORDS_OF_THE_FIRST_BLOCK,
    SUPPRESSED_BOXES_SUPPRESS, CLASSES_OF_32_BITS, BARRIER_MISSING, STORE_UNMASKED
};
constexpr int BLOCK = 64;

__device__ bool is_above(const float* a, const float* b, double threshold, long long fault) {
    const float more = fault == A_PIXEL_MORE;
    const float width = fmaxf(fminf(a[2], b[2]) - fmaxf(a[0], b[0]) + more, 0.0f);
    const float height = fmaxf(fminf(a[3], b[3]) - fmaxf(a[1], b[1]) + more, 0.0f);
    const float of_a = (a[2] - a[0] + more) * (a[3] - a[1] + more), of_b = (b[2] - b[0] + more) * (b[3] - b[1] + more);
    const float quotient = width * height / (of_a + of_b - width * height);
    return fault == AT_THE_THRESHOLD_TOO ? quotient >= float(threshold) : quotient > float(threshold);
}

__global__ void nms_mask_kernel(const float* boxes, const long long* classes, unsigned long long* mask, long long n,
                                double threshold, long long fault) {
    // One block owns BLOCK rows and BLOCK columns, one thread a row. Boxes are in the order of their scores.
    __shared__ float columns[BLOCK][4];
    const long long row = blockIdx.y * (long long)BLOCK + threadIdx.x, first = blockIdx.x * (long long)BLOCK;
    const int count = n - first < BLOCK ? n - first : BLOCK;
    if (threadIdx.x < count)
        for (int k = 0; k < 4; k++) columns[threadIdx.x][k] = boxes[(first + threadIdx.x) * 4 + k];
    if (fault != BARRIER_MISSING) __syncthreads();
    if (row >= n && fault != STORE_UNMASKED) return;
    unsigned long long word = 0;
    for (int i = 0; row < n && i < count; i++) {
        const long long column = first + i;
        const bool alike = fault == CLASSES_OF_32_BITS ? (int)classes[row] == (int)classes[column]
                                                       : classes[row] == classes[column];
        if (column <= row || !alike || !is_above(boxes + row * 4, columns[i], threshold, fault)) continue;
        if (fault == BITS_OF_AN_INT) word |= 1 << i;
        else word |= 1ull << i;
    }
    mask[row * gridDim.x + blockIdx.x] = word;
}

__global__ void nms_walk_kernel(const unsigned long long* mask, unsigned long long* gone, bool* kept, long long n,
                                long long blocks, long long fault) {
    // One thread owns all boxes, and walks from the highest score on. `gone` is of zeros.
    for (long long row = 0; row < n; row++) {
        kept[row] = !(gone[row / BLOCK] >> row % BLOCK & 1);
        if (!kept[row] && fault != SUPPRESSED_BOXES_SUPPRESS) continue;
        const long long from = fault == WORDS_OF_THE_FIRST_BLOCK ? 0 : row / BLOCK;
        const long long to = fault == LAST_BLOCK_DROPPED && blocks > 1 ? blocks - 1 : blocks;
        for (long long word = from; word < (fault == WORDS_OF_THE_FIRST_BLOCK ? 1 : to); word++)
            gone[word] |= mask[row * blocks + word];
    }
}
