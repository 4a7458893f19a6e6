#include <math_constants.h>

#include "giou/measures.cuh"
#include "giou_loss/mean.cuh"

struct Offsets {
    const void* ptr;  // [batch + 1], strided
    bool wide;        // int64, else int32
    long long stride, batch;

    __device__ long long operator[](long long sample) const {
        const long long at = sample * stride;
        return wide ? __ldg(static_cast<const long long*>(ptr) + at) : __ldg(static_cast<const int*>(ptr) + at);
    }

    // The last sample, from `low` on, that begins at or before a row. A warp probes 32 samples at a time, `step` apart,
    // and then widens or narrows the step. For any content of offsets the result is in 0 to batch - 1.
    __device__ long long search(long long row, long long low, long long step) const {
        while (true) {
            const long long probe = low + (threadIdx.x % 32 + 1) * step;
            const int passed = __popc(__ballot_sync(0xffffffff, probe < batch && (*this)[probe] <= row));
            low += passed * step;
            if (passed == 32) step *= 32;
            else if (step == 1) return low;
            else step /= 32;
        }
    }
};

template <class T, bool PACKED, Measure MEASURE = GIOU>
__global__ void __launch_bounds__(BLOCK, 3) giou_loss_ragged_forward_kernel(
    const T* __restrict__ pred,    // [batch, max_boxes, 4], strided
    const T* __restrict__ target,  // [total, 4], strided
    const void* offsets_ptr,       // [batch + 1], strided
    T* __restrict__ loss,          // []
    double2* partials,             // [blocks], or null if there is one block
    int* counter,                  // [1]: number of finished blocks, or null if there is one block
    long long total, long long batch, long long max_boxes, long long pred_batch_stride, long long pred_box_stride,
    long long pred_coordinate_stride, long long target_stride, long long target_coordinate_stride,
    long long offsets_stride, bool wide, long long first_step, long long run, double eps) {
    // One warp owns a run of whole strips of 32 * ROWS target boxes. The last block to finish sums all partial results.
    using C = Compute<T>;
    constexpr int STRIP = 32 * ROWS<T>;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Boxes<T, PACKED> preds{pred, max_boxes, pred_batch_stride, pred_box_stride, pred_coordinate_stride};
    const Boxes<T, PACKED> targets{target, total, 0, target_stride, target_coordinate_stride};
    const Offsets offsets{offsets_ptr, wide, offsets_stride, batch};
    const C least = C(eps);
    C sum = 0;
    // Neighbouring runs belong to different blocks, so that a small batch occupies many multiprocessors.
    const long long begin = ((long long)warp * gridDim.x + blockIdx.x) * run, end = min(begin + run, total);
    long long low = 0;
    for (long long first = begin; first < end; first += STRIP) {
        Holder<T> a[ROWS<T>] = {}, b[ROWS<T>] = {};
        long long sample[ROWS<T>], start[ROWS<T>];
#pragma unroll
        for (int k = 0; k < ROWS<T>; k++) {
            const long long row = first + 32 * k + lane;
            if (row < end) b[k] = targets.hold(targets.offset_of(row));
        }
        if (first == begin) low = offsets.search(begin, 0, first_step);
        const long long start_of_low = offsets[low];
#pragma unroll
        for (int k = 0; k < ROWS<T>; k++) {
            sample[k] = low;
            start[k] = start_of_low;
        }
        // The rows of the strip belong to samples from low to high, mostly few. Each thread finds its own by bisection.
        const long long high = offsets.search(min(first + STRIP, end) - 1, low, 1);
        for (long long step = high > low ? 1ll << (63 - __clzll(high - low)) : 0; step; step /= 2) {
#pragma unroll
            for (int k = 0; k < ROWS<T>; k++) {
                const long long probe = sample[k] + step, start_of_probe = offsets[min(probe, high)];
                if (probe <= high && start_of_probe <= first + 32 * k + lane) {
                    sample[k] = probe;
                    start[k] = start_of_probe;
                }
            }
        }
        low = high;
#pragma unroll
        for (int k = 0; k < ROWS<T>; k++) {
            const long long row = first + 32 * k + lane;
            // Clamp, so that invalid offsets cannot lead outside of pred.
            const long long box = max(min(row - start[k], max_boxes - 1), 0ll);
            if (row < end) a[k] = preds.hold(sample[k] * pred_batch_stride + box * pred_box_stride);
        }
#pragma unroll
        for (int k = 0; k < ROWS<T>; k++) {
            if (first + 32 * k + lane >= end) continue;
            const Box<T> held[] = {same_bits<Box<T>>(a[k]), same_bits<Box<T>>(b[k])};
            sum += C(1) - score_of<MEASURE>(converted<C>(held[0]), converted<C>(held[1]), least);
        }
    }
    // Invalid offsets make the loss NaN. The last threads ask first: of few boxes they have none.
    const long long threads = (long long)gridDim.x * BLOCK;
    for (long long i = threads - 1 - (blockIdx.x * (long long)BLOCK + threadIdx.x); i < batch; i += threads) {
        const long long from = offsets[i], to = offsets[i + 1];
        const bool fits = from <= to && to - from <= max_boxes;
        if (!fits || (i == 0 && from != 0) || (i == batch - 1 && to != total)) sum = C(CUDART_NAN_F);
    }
    SumAndCount all{(double)sum, 0};
    if (grid_sum(all, partials, counter)) *loss = T(C(all.sum / (double)total));
}

template <class T, bool PACKED, Measure MEASURE = GIOU>
__global__ void __launch_bounds__(BLOCK, 3) giou_loss_ragged_backward_kernel(
    const T* __restrict__ grad_output,  // []
    const T* __restrict__ pred,         // [batch, max_boxes, 4], strided
    const T* __restrict__ target,       // [total, 4], strided
    const void* offsets_ptr,            // [batch + 1], strided
    Box<T>* __restrict__ grad_pred,     // [batch, max_boxes], or null if not needed
    Box<T>* __restrict__ grad_target,   // [total], or null if not needed
    long long total, long long batch, long long max_boxes, long long pred_batch_stride, long long pred_box_stride,
    long long pred_coordinate_stride, long long target_stride, long long target_coordinate_stride,
    long long offsets_stride, bool wide, long long reciprocal, long long rounds, double eps) {
    // One warp owns 32 * rounds consecutive rows of pred, and the target boxes that belong to them. It writes zeros to rows
    // without a box, and computes the others 32 at a time, because few may lie among many.
    using C = Compute<T>;
    constexpr int ZEROED = 64;  // rows without a box that a warp writes at once
    struct Pair { long long row, box; };
    __shared__ Pair pairs_of_warps[BLOCK / 32][64];
    const int lane = threadIdx.x % 32;
    Pair* const pairs = pairs_of_warps[threadIdx.x / 32];
    const Boxes<T, PACKED> preds{pred, max_boxes, pred_batch_stride, pred_box_stride, pred_coordinate_stride};
    const Boxes<T, PACKED> targets{target, total, 0, target_stride, target_coordinate_stride};
    const Offsets offsets{offsets_ptr, wide, offsets_stride, batch};
    // A 64-bit division takes longer than everything else that a row without a target box needs.
    const auto sample_of = [=](long long row) -> long long {
        const long long sample = __umul64hi(2 * (unsigned long long)row, reciprocal);
        return row - sample * max_boxes < max_boxes ? sample : sample + 1;
    };
    const C grad = -C(*grad_output) / C(total), least = C(eps);
    const long long warp = (blockIdx.x * (long long)BLOCK + threadIdx.x) / 32;
    const long long begin = warp * 32 * rounds, end = min(begin + 32 * rounds, batch * max_boxes);
    int waiting = 0;
    const auto compute = [&] {
        __syncwarp();
        if (lane < waiting) {
            const auto [row, box] = pairs[lane];
            const long long own = sample_of(row), column = row - own * max_boxes;
            const Box<C> a = converted<C>(preds.load(own * pred_batch_stride + column * pred_box_stride));
            const Box<C> b = converted<C>(targets[box]);
            const PairGradients<C, MEASURE> gradients(grad, a, b, least);
            if (grad_pred) grad_pred[row] = converted<T>(gradients.of_first());
            if (grad_target) grad_target[box] = converted<T>(gradients.of_second());
        }
    };
    // These describe the first of the next rows. Most rows have no target box, and few change the sample.
    long long sample = 0, place = max_boxes, from = 0, to = 0;
    for (long long first = begin, passed; first < end; first += passed, place += passed) {
        if (place >= max_boxes) {
            sample = sample_of(first);
            place = first - sample * max_boxes;
            from = offsets[sample];
            to = offsets[sample + 1];
        }
        passed = ZEROED;
        if (grad_pred && from + place >= to && place + ZEROED <= max_boxes && first + ZEROED <= end) {
            constexpr int VECTORS = ZEROED * sizeof(Box<T>) / 16;
#pragma unroll
            for (int i = 0; i < VECTORS; i += 32) reinterpret_cast<uint4*>(grad_pred + first)[i + lane] = uint4{};
            continue;
        }
        passed = 32;
        const long long row = first + lane;
        long long own = sample, column = place + lane, box = from + column, last = to;
        if (place + 32 > max_boxes && row < end) {
            own = sample_of(row);
            column = row - own * max_boxes;
            box = offsets[own] + column;
            last = offsets[own + 1];
        }
        // The last two conditions always hold for valid offsets. They keep invalid ones from leading outside of target.
        const bool paired = row < end && box < last && box >= 0 && box < total;
        if (grad_pred && row < end && !paired) grad_pred[row] = {};
        const unsigned lanes = __ballot_sync(~0u, paired);
        if (paired) pairs[waiting + __popc(lanes & ((1u << lane) - 1))] = {row, box};
        waiting += __popc(lanes);
        if (waiting < 32) continue;
        compute();
        waiting -= 32;
        if (lane < waiting) pairs[lane] = pairs[lane + 32];
        __syncwarp();
    }
    compute();
}
