// Small kernels of the GIoU family: correct as <NONE>, with one mistake for each other value of Fault.
// The n boxes are rows of four float32, with one stride between rows and one between coordinates.

enum Fault {
    NONE,
    STORE_UNMASKED,
    LOAD_UNMASKED,
    OFFSETS_IN_32_BITS,
    CONTIGUOUS_ASSUMED,
    NAN_DROPPED,
    BARRIER_MISSING,
    IDLE_WARPS_UNWRITTEN,
    ATOMIC_SUM
};

struct Box {
    float x1, y1, x2, y2;
};

template <Fault FAULT> __device__ Box load_box(const float* boxes, long long row, long long stride, long long step) {
    long long at = row * stride;
    if (FAULT == OFFSETS_IN_32_BITS) at = (int)row * (int)stride;
    if (FAULT == CONTIGUOUS_ASSUMED) at = row * 4, step = 1;
    return {boxes[at], boxes[at + step], boxes[at + 2 * step], boxes[at + 3 * step]};
}

// fminf and fmaxf return the other operand if one is NaN.
template <Fault FAULT> __device__ float least(float a, float b) {
    if (FAULT == NAN_DROPPED) return fminf(a, b);
    return a < b || a != a ? a : b;
}
template <Fault FAULT> __device__ float greatest(float a, float b) {
    if (FAULT == NAN_DROPPED) return fmaxf(a, b);
    return a > b || a != a ? a : b;
}

template <Fault FAULT> __device__ float giou_of(Box a, Box b, float eps) {
    float width = greatest<FAULT>(least<FAULT>(a.x2, b.x2) - greatest<FAULT>(a.x1, b.x1), 0.0f);
    float height = greatest<FAULT>(least<FAULT>(a.y2, b.y2) - greatest<FAULT>(a.y1, b.y1), 0.0f);
    float intersection = width * height;
    float areas = (a.x2 - a.x1) * (a.y2 - a.y1) + (b.x2 - b.x1) * (b.y2 - b.y1);
    float hull_width = greatest<FAULT>(a.x2, b.x2) - least<FAULT>(a.x1, b.x1);
    float hull_height = greatest<FAULT>(a.y2, b.y2) - least<FAULT>(a.y1, b.y1);
    float united = greatest<FAULT>(areas - intersection, eps);
    float hull = greatest<FAULT>(hull_width * hull_height, eps);
    return intersection / united - (hull - united) / hull;
}

template <Fault FAULT>
__global__ void giou_forward_kernel(const float* boxes1, const float* boxes2, float* giou, long long n, long long stride1,
                                    long long step1, long long stride2, long long step2, double eps) {
    // One thread owns one pair.
    long long row = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (row >= n && FAULT != STORE_UNMASKED && FAULT != LOAD_UNMASKED) return;
    long long from = FAULT == STORE_UNMASKED && row >= n ? n - 1 : row;
    Box a = load_box<FAULT>(boxes1, from, stride1, step1);
    Box b = load_box<FAULT>(boxes2, from, stride2, step2);
    float score = giou_of<FAULT>(a, b, (float)eps);
    if (row < n || FAULT == STORE_UNMASKED) giou[row] = score;
}

struct Sides {
    float unite, width, height, hull_width, hull_height;
};

__device__ float lesser(float grad, float mine, float other) { return mine == other ? 0.5f * grad : mine > other ? 0.0f : grad; }
__device__ float greater(float grad, float mine, float other) { return mine == other ? 0.5f * grad : mine < other ? 0.0f : grad; }

__device__ void store_gradient(float* to, Box a, Box b, Sides g) {
    float by_width = g.unite * (a.y2 - a.y1), by_height = g.unite * (a.x2 - a.x1);
    to[0] = -by_width - greater(g.width, a.x1, b.x1) - lesser(g.hull_width, a.x1, b.x1);
    to[1] = -by_height - greater(g.height, a.y1, b.y1) - lesser(g.hull_height, a.y1, b.y1);
    to[2] = by_width + lesser(g.width, a.x2, b.x2) + greater(g.hull_width, a.x2, b.x2);
    to[3] = by_height + lesser(g.height, a.y2, b.y2) + greater(g.hull_height, a.y2, b.y2);
}

template <Fault FAULT>
__global__ void giou_backward_kernel(const float* grad_output, const float* boxes1, const float* boxes2, float* grad_boxes1,
                                     float* grad_boxes2, long long n, long long grad_stride, long long stride1,
                                     long long step1, long long stride2, long long step2, double eps_) {
    // One thread owns one pair.
    long long row = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (row >= n) return;
    float eps = (float)eps_, grad = grad_output[FAULT == CONTIGUOUS_ASSUMED ? row : row * grad_stride];
    Box a = load_box<NONE>(boxes1, row, stride1, step1), b = load_box<NONE>(boxes2, row, stride2, step2);
    float width = least<NONE>(a.x2, b.x2) - greatest<NONE>(a.x1, b.x1);
    float height = least<NONE>(a.y2, b.y2) - greatest<NONE>(a.y1, b.y1);
    float intersection = greatest<NONE>(width, 0.0f) * greatest<NONE>(height, 0.0f);
    float raw_union = (a.x2 - a.x1) * (a.y2 - a.y1) + (b.x2 - b.x1) * (b.y2 - b.y1) - intersection;
    float hull_width = greatest<NONE>(a.x2, b.x2) - least<NONE>(a.x1, b.x1);
    float hull_height = greatest<NONE>(a.y2, b.y2) - least<NONE>(a.y1, b.y1);
    float raw_hull = hull_width * hull_height;
    float united = greatest<NONE>(raw_union, eps), hull = greatest<NONE>(raw_hull, eps);
    float unite = raw_union >= eps ? grad / hull - grad * (intersection / united) / united : 0.0f;
    float enclose = raw_hull >= eps ? grad * ((hull - united) / hull) / hull - grad / hull : 0.0f;
    float intersect = grad / united - unite;
    Sides sides = {unite, width >= 0.0f ? intersect * greatest<NONE>(height, 0.0f) : 0.0f,
                   height >= 0.0f ? intersect * greatest<NONE>(width, 0.0f) : 0.0f, enclose * hull_height,
                   enclose * hull_width};
    store_gradient(grad_boxes1 + 4 * row, a, b, sides);
    store_gradient(grad_boxes2 + 4 * row, b, a, sides);
}

template <Fault FAULT>
__global__ void giou_loss_forward_kernel(const float* pred, const float* target, float* total, long long n, double eps) {
    // One block owns strips blockIdx.x, blockIdx.x + gridDim.x, ... of blockDim.x rows, and stores one partial sum.
    __shared__ float of_warp[32];
    float sum = 0.0f;
    long long strip = (long long)gridDim.x * blockDim.x, first = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    for (long long row = first; row < n; row += strip) {
        Box b = load_box<NONE>(target, row, 4, 1);
        if (b.y2 > 0.0f) sum += 1.0f - giou_of<NONE>(load_box<NONE>(pred, row, 4, 1), b, (float)eps);
    }
    bool idle = __all_sync(0xffffffffu, first >= n);
    for (int by = 16; by; by /= 2) sum += __shfl_down_sync(0xffffffffu, sum, by);
    int warp = threadIdx.x / 32, warps = blockDim.x / 32;
    if (threadIdx.x % 32 == 0 && !(FAULT == IDLE_WARPS_UNWRITTEN && idle)) of_warp[warp] = sum;
    if (FAULT != BARRIER_MISSING) __syncthreads();
    if (threadIdx.x == 0) {
        float all = 0.0f;
        for (int w = 0; w < warps; w++) all += of_warp[w];
        if (FAULT == ATOMIC_SUM) atomicAdd(total, all);
        else total[blockIdx.x] = all;
    }
}
