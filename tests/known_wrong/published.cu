// The GIoU kernel of Accelerating AI/ML Model Training with Custom Operators (2024), rewritten with its mistakes.
// CLAMP corrects the worst of them, so that the next can be seen. pred and target hold packed float32 boxes. Row i of
// target is valid if its y2 is not 0.

// One thread owns one box of one sample. The kernel does not get the number of boxes.
__device__ long long own_row() { return blockIdx.x * (long long)blockDim.x + threadIdx.x; }

template <bool CLAMP> __device__ float giou_of(const float* a, const float* b) {
    const float eps = 1e-5f;
    float width = min(a[2], b[2]) - max(a[0], b[0]), height = min(a[3], b[3]) - max(a[1], b[1]);
    if (CLAMP) width = max(width, 0.0f), height = max(height, 0.0f);
    float intersection = width * height;
    float united = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - intersection;
    float hull = (max(a[2], b[2]) - min(a[0], b[0])) * (max(a[3], b[3]) - min(a[1], b[1]));
    return intersection / max(united, eps) - (hull - united) / max(hull, eps);
}

// The article's first version computes every row, and multiplies it by its validity.
template <bool CLAMP>
__global__ void giou_multiplied_kernel(const float* pred, const float* target, float* giou, bool* valid) {
    long long row = own_row();
    bool counts = target[4 * row + 3] != 0;
    valid[row] = counts;
    giou[row] = giou_of<CLAMP>(pred + 4 * row, target + 4 * row) * counts;
}

// The article's second version skips padding.
template <bool CLAMP>
__global__ void giou_skipping_kernel(const float* pred, const float* target, float* giou, bool* valid) {
    long long row = own_row();
    bool counts = target[4 * row + 3] != 0;
    valid[row] = counts;
    if (counts)
        giou[row] = giou_of<CLAMP>(pred + 4 * row, target + 4 * row);
    else
        giou[row] = 0;
}
