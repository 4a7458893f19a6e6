// A small kernel of sigmoid_focal_loss for float32: correct as NONE, with one mistake for each other value of Fault.
enum Fault { NONE, STORE_UNMASKED, LAST_BLOCK_DROPPED, OFFSETS_IN_32_BITS, CLAMPED_AT_FLT_MIN, LOG_OF_1_LESS_P, HARD_TARGETS };

__device__ float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

__global__ void sigmoid_focal_loss_kernel(const float* logits, const float* targets, float* losses, long long n,
                                          long long stride, double alpha, double gamma, long long fault) {
    // One thread owns one element.
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (fault == LAST_BLOCK_DROPPED && n > blockDim.x && blockIdx.x == gridDim.x - 1) return;
    if (i >= n && fault != STORE_UNMASKED) return;
    long long from = i < n ? i : n - 1;
    long long at = fault == OFFSETS_IN_32_BITS ? (int)from * (int)stride : from * stride;
    float x = logits[at], t = targets[from];
    if (fault == HARD_TARGETS) t = t > 0.5f;
    float p = 1 / (1 + expf(-x)), rest = 1 / (1 + expf(x));
    // Of log(p) and log(1 - p), with 0 taken for the smallest normal number, as the CUDA kernel of mmcv has them.
    float of_one = fault == CLAMPED_AT_FLT_MIN ? -logf(fmaxf(p, 1.17549435e-38f)) : softplus(-x);
    float of_zero = fault == CLAMPED_AT_FLT_MIN ? -logf(fmaxf(1 - p, 1.17549435e-38f)) : softplus(x);
    if (fault == LOG_OF_1_LESS_P) of_zero = -logf(1 - p);
    float entropy = (t > 0 ? t * of_one : 0) + (t < 1 ? (1 - t) * of_zero : 0);
    float weight = alpha >= 0 ? (float)alpha * t + (1 - (float)alpha) * (1 - t) : 1.0f;
    losses[i] = weight * powf(t * rest + (1 - t) * p, (float)gamma) * entropy;
}
