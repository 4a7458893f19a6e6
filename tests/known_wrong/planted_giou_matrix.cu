// A small kernel of giou_matrix for float32: correct as NONE, with one mistake for each other value of Fault.
enum Fault {
    NONE,
    STORE_UNMASKED,
    LAST_BLOCK_DROPPED,
    OFFSETS_IN_32_BITS,
    ROWS_AS_LONG_AS_COLUMNS,
    NAN_DROPPED,
    SIDES_NOT_CLAMPED,
    PLUS_ONE,
};

__device__ float larger(float a, float b) { return a > b || a != a ? a : b; }
__device__ float smaller(float a, float b) { return a < b || a != a ? a : b; }

__global__ void giou_matrix_kernel(const float* a, const float* b, float* scores, long long n, long long m,
                                   long long stride, bool enclosed, double eps, long long fault) {
    // One thread owns one pair.
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (fault == LAST_BLOCK_DROPPED && n * m > blockDim.x && blockIdx.x == gridDim.x - 1) return;
    if (i >= n * m && fault != STORE_UNMASKED) return;
    long long pair = i < n * m ? i : n * m - 1, row = pair / m, column = pair % m;
    a += fault == OFFSETS_IN_32_BITS ? (int)row * (int)stride : row * stride;
    b += column * 4;
    // Lengths of pixels that count from 0 to width - 1, as of the first detectors.
    float one = fault == PLUS_ONE ? 1.0f : 0.0f;
    float width = smaller(a[2], b[2]) - larger(a[0], b[0]) + one, height = smaller(a[3], b[3]) - larger(a[1], b[1]) + one;
    if (fault != SIDES_NOT_CLAMPED) width = larger(width, 0), height = larger(height, 0);
    if (fault == NAN_DROPPED) width = fmaxf(width, 0), height = fmaxf(height, 0);
    float intersection = width * height;
    float area = (a[2] - a[0] + one) * (a[3] - a[1] + one) + (b[2] - b[0] + one) * (b[3] - b[1] + one) - intersection;
    float hull = (larger(a[2], b[2]) - smaller(a[0], b[0]) + one) * (larger(a[3], b[3]) - smaller(a[1], b[1]) + one);
    float united = fault == NAN_DROPPED ? fmaxf(area, eps) : larger(area, eps);
    hull = fault == NAN_DROPPED ? fmaxf(hull, eps) : larger(hull, eps);
    float score = intersection / united - (enclosed ? (hull - united) / hull : 0.0f);
    scores[fault == ROWS_AS_LONG_AS_COLUMNS ? (row * n + column) % (n * m) : i] = score;
}
