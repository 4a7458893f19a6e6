#include "giou/measures.cuh"
#include "giou_loss/mean.cuh"

constexpr int SAVED_HEADER = 2;

template <class T, bool PACKED, Measure MEASURE = GIOU>
__global__ void __launch_bounds__(BLOCK, 4) giou_loss_forward_kernel(
    const T* __restrict__ pred,    // [batch, max_boxes, 4], strided
    const T* __restrict__ target,  // [batch, max_boxes, 4], strided
    T* __restrict__ loss,          // []
    unsigned* __restrict__ saved,  // [2 + ceil(batch * max_boxes / 32)]: number of valid rows, then one bit per row
    double2* partials,             // [blocks], or null if there is one block
    int* counter,                  // [1]: number of finished blocks, or null if there is one block
    long long num_rows, long long max_boxes, long long pred_batch_stride, long long pred_box_stride,
    long long pred_coordinate_stride, long long target_batch_stride, long long target_box_stride,
    long long target_coordinate_stride, double eps) {
    // One warp owns every num_warps-th strip of 32 * ROWS rows. The last block to finish sums all partial results.
    using C = Compute<T>;
    constexpr int STRIP = 32 * ROWS<T>;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Boxes<T, PACKED> preds{pred, max_boxes, pred_batch_stride, pred_box_stride, pred_coordinate_stride};
    const Boxes<T, PACKED> targets{target, max_boxes, target_batch_stride, target_box_stride, target_coordinate_stride};
    const C least = C(eps);
    C sum = 0;
    int count = 0;
    // Neighbouring strips belong to different blocks, so that a small batch occupies many multiprocessors.
    const long long warps = (long long)gridDim.x * (BLOCK / 32);
    for (long long strip = (long long)warp * gridDim.x + blockIdx.x; strip * STRIP < num_rows; strip += warps) {
        const long long first = strip * STRIP + lane;
        Box<T> a[ROWS<T>] = {}, b[ROWS<T>] = {};
#pragma unroll
        for (int k = 0; k < ROWS<T>; k++) {
            if (first + 32 * k < num_rows) b[k] = targets[first + 32 * k];
        }
        bool valid[ROWS<T>];
        unsigned word = 0;
#pragma unroll
        for (int k = 0; k < ROWS<T>; k++) {
            valid[k] = C(b[k].y2) > C(0);
            if (valid[k]) a[k] = preds[first + 32 * k];
            const unsigned bits = __ballot_sync(0xffffffff, valid[k]);
            if (lane == k) word = bits;
        }
        if (lane < ROWS<T> && first - lane + 32 * lane < num_rows) saved[SAVED_HEADER + strip * ROWS<T> + lane] = word;
#pragma unroll
        for (int k = 0; k < ROWS<T>; k++) {
            if (valid[k]) sum += C(1) - score_of<MEASURE>(converted<C>(a[k]), converted<C>(b[k]), least);
            count += valid[k];
        }
    }
    SumAndCount all{(double)sum, (double)count};
    if (grid_sum(all, partials, counter)) {
        *loss = T(C(all.sum / max(all.count, 1.0)));
        *reinterpret_cast<long long*>(saved) = (long long)all.count;
    }
}

template <class T, bool PACKED, Measure MEASURE = GIOU>
__global__ void __launch_bounds__(BLOCK, 3) giou_loss_backward_kernel(
    long long num_rows, int owned,
    const T* __restrict__ grad_output,   // []
    const T* __restrict__ pred,          // [batch, max_boxes, 4], strided
    const T* __restrict__ target,        // [batch, max_boxes, 4], strided
    const unsigned* __restrict__ saved,  // [2 + ceil(batch * max_boxes / 32)]
    Box<T>* __restrict__ grad_pred,      // [batch, max_boxes], or null if not needed
    Box<T>* __restrict__ grad_target,    // [batch, max_boxes], or null if not needed
    long long max_boxes, long long pred_batch_stride, long long pred_box_stride, long long pred_coordinate_stride,
    long long target_batch_stride, long long target_box_stride, long long target_coordinate_stride, double eps) {
    // One block owns owned * BLOCK consecutive rows. It reads only the valid rows and writes the gradient of all.
    using C = Compute<T>;
    const Boxes<T, PACKED> preds{pred, max_boxes, pred_batch_stride, pred_box_stride, pred_coordinate_stride};
    const Boxes<T, PACKED> targets{target, max_boxes, target_batch_stride, target_box_stride, target_coordinate_stride};
    const long long first = blockIdx.x * (long long)(owned * BLOCK) + threadIdx.x;
    bool valid[PAIRS<T>];
    Box<T> raw1[PAIRS<T>] = {}, raw2[PAIRS<T>] = {};
#pragma unroll
    for (int k = 0; k < PAIRS<T>; k++) {
        const long long row = first + k * BLOCK;
        valid[k] = k < owned && row < num_rows && (saved[SAVED_HEADER + (row >> 5)] >> (row & 31) & 1);
        if (valid[k]) {
            raw1[k] = preds[row];
            raw2[k] = targets[row];
        }
    }
    const long long count = *reinterpret_cast<const long long*>(saved);
    const C grad = -C(*grad_output) / C(max(count, 1ll));
#pragma unroll
    for (int k = 0; k < PAIRS<T>; k++) {
        const long long row = first + k * BLOCK;
        if (k >= owned || row >= num_rows) break;
        Box<C> of_pred = {}, of_target = {};
        if (valid[k]) {
            const Box<C> a = converted<C>(raw1[k]), b = converted<C>(raw2[k]);
            const PairGradients<C, MEASURE> gradients(grad, a, b, C(eps));
            of_pred = gradients.of_first();
            of_target = gradients.of_second();
        }
        if (grad_pred) grad_pred[row] = converted<T>(of_pred);
        if (grad_target) grad_target[row] = converted<T>(of_target);
    }
}
