#include "exponential.cuh"
#include "rows.cuh"
#include "shifted.cuh"

// The number of an int64 or an int32 tensor at a place.
__device__ inline long long index_at(const void* indices, bool wide, long long at) {
    return wide ? static_cast<const long long*>(indices)[at] : static_cast<const int*>(indices)[at];
}

// The largest of the threads of a row, in each of them. A row of several warps has a block of its own.
template <class C> __device__ C row_max(C value) {
    __shared__ C of_warps[16];
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) value = max(value, __shfl_xor_sync(~0u, value, lanes));
    if (blockDim.x <= 32) return value;
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
    __syncthreads();
    const int warp = threadIdx.x % 16;
    value = of_warps[warp < blockDim.x / 32 ? warp : 0];
#pragma unroll
    for (int lanes = 8; lanes; lanes /= 2) value = max(value, __shfl_xor_sync(~0u, value, lanes));
    return value;
}

// What is taken off a row whose maximum is known: any finite number makes terms 0 where there is only -inf.
template <class C> __device__ C taken_off(C largest) { return largest == C(-INFINITY) ? C(0) : largest; }

// The most rows of a block.
constexpr int MOST_TOGETHER = 4;

// Returns whether this block is the last to call this, in each of its threads. It may then read what all blocks have
// written. All threads of all blocks must call this once. With one block alone, the counter may be null.
__device__ inline bool is_last_block(int* counter) {
    __shared__ bool last;
    __syncthreads();
    if (gridDim.x == 1) return true;
    if (threadIdx.x == 0 && threadIdx.y == 0) {
        __threadfence();
        last = atomicAdd(counter, 1) == (int)gridDim.x - 1;
        if (last) *counter = 0;
    }
    __syncthreads();
    return last;
}

// Writes the sum of the losses of all rows, or their mean over rows that count and the reciprocal of their number. All
// threads of one block must call this; the order of additions depends only on its extents and the number of rows.
template <class T>
__device__ void reduce_losses(
    const Compute<T>* losses, const void* target_ptr, T* output, Compute<T>* scale, long long num_rows,
    long long target_stride, bool wide, long long ignore_index) {
    using C = Compute<T>;
    Sums<C> sums{0, 0};
#pragma unroll 4
    for (long long row = threadIdx.y * blockDim.x + threadIdx.x; row < num_rows; row += blockDim.x * blockDim.y) {
        // Read from the L2 cache, which has the results of other multiprocessors. This one's L1 may not.
        sums.first += __ldcg(&losses[row]);
        sums.second += scale && index_at(target_ptr, wide, row * target_stride) != ignore_index ? C(1) : C(0);
    }
    sums = sum_over_row(sums, 1);
    if (blockDim.y > 1) {
        __shared__ C of_warps[2][MOST_TOGETHER];
        if (threadIdx.x == 0) {
            of_warps[0][threadIdx.y] = sums.first;
            of_warps[1][threadIdx.y] = sums.second;
        }
        __syncthreads();
        sums = {0, 0};
        for (int warp = 0; warp < blockDim.y; warp++) {
            sums.first += of_warps[0][warp];
            sums.second += of_warps[1][warp];
        }
    }
    if (threadIdx.x > 0 || threadIdx.y > 0) return;
    if (scale) *scale = C(1) / sums.second;
    *output = T(scale ? sums.first / sums.second : sums.first);
}

// Vectors of a row that a thread loads before it uses the first.
constexpr int IN_FLIGHT = 4;

// Loads the vectors of a row that begin at `start + k * step`. With SHIFTED, the row may begin and end anywhere; columns
// that it does not have become `absent`, and all lanes of a warp must call it.
template <bool SHIFTED, class T, int WIDTH>
__device__ void load_columns(
    Vector<T, WIDTH> (&to)[IN_FLIGHT], const T* row, long long start, long long step, long long end, long long stride,
    float absent) {
    if constexpr (SHIFTED) {
        load_shifted(to, row, end, [&](int k) { return int((start + k * step) / WIDTH); }, absent);
    } else {
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++)
            if (start + k * step < end) to[k] = take<WIDTH>(row, start + k * step, stride);
    }
}

// With REDUCED, the last block to finish reduces the losses.
template <class T, int WIDTH, bool SHIFTED = false, bool REDUCED = false>
__global__ void __launch_bounds__(128, sizeof(T) == 2 ? 8 : 1) cross_entropy_forward_kernel(
    long long num_rows, bool wide,
    const void* __restrict__ target_ptr,  // [rows], strided
    long long target_stride, long long ignore_index,
    const T* __restrict__ logits,  // [rows, classes], strided
    long long row_stride, long long classes, long long class_stride,
    T* __restrict__ output,               // [rows] if losses is null, or a scalar if REDUCED, or null
    Compute<T>* losses,                   // [rows], or null
    Compute<T>* __restrict__ statistics,  // [2, rows]: maxima, and reciprocal sums of exponentials
    double target_share, double class_share,  // 1 - label_smoothing, and label_smoothing / classes
    Compute<T>* __restrict__ scale,           // [1], or null unless the mean is wanted and REDUCED
    int* counter) {                           // [1]: number of finished blocks, or null unless several are REDUCED
    // The parameters are in the order of their use, because a kernel waits for them in lines of 64 bytes.
    // One block owns blockDim.y consecutive rows, one thread every blockDim.x-th vector of one of them.
    using C = Compute<T>;
    const long long row = blockIdx.x * (long long)blockDim.y + threadIdx.y;
    const bool here = row < num_rows;  // others count as ignored rows, whose logits are not read
    const long long target = here ? index_at(target_ptr, wide, row * target_stride) : ignore_index;
    const bool counted = target != ignore_index, valid = counted && target >= 0 && target < classes;
    logits += row * row_stride;
    const C expected = threadIdx.x == 0 && valid ? C(logits[target * class_stride]) : C(NAN);
    const long long step = blockDim.x * WIDTH, end = counted ? classes : 0;
    const bool smoothed = class_share > 0;
    C largest = C(-INFINITY), total = 0, distance = 0, seen = 0;
    const int together = SHIFTED ? threadIdx.x % 32 * WIDTH : 0;  // a warp goes on until all of its lanes are done
    for (long long start = threadIdx.x * WIDTH; start - together < end; start += IN_FLIGHT * step) {
        Vector<T, WIDTH> xs[IN_FLIGHT];
        C most = largest;
        load_columns<SHIFTED>(xs, logits, start, step, end, class_stride, -INFINITY);
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++)
            if (start + k * step < end)
#pragma unroll
                for (int j = 0; j < WIDTH; j++) most = max(most, C(xs[k].at[j]));
        const C reference = taken_off(most);
        total *= exponential(largest - reference);
        // Sum distances from the maximum, not logits, whose mean would lose the digits of a large offset.
        if (smoothed && largest != C(-INFINITY)) distance -= (reference - largest) * seen;
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++) {
            const long long left = end - (start + k * step);
            if (left <= 0) continue;
#pragma unroll
            for (int j = 0; j < WIDTH; j++) {
                const C apart = C(xs[k].at[j]) - reference;
                total += exponential(apart);
                if (smoothed && (!SHIFTED || j < left)) distance += apart;
            }
            seen += SHIFTED && left < WIDTH ? int(left) : WIDTH;
        }
        largest = most;
    }
    const C most = row_max(largest), reference = taken_off(most);
    if (largest != C(-INFINITY)) distance -= (reference - largest) * seen;
    else if (seen > 0) distance -= reference * seen;
    const Sums<C> sums = sum_over_row(Sums<C>{total * exponential(largest - reference), distance}, 0);
    if (threadIdx.x == 0 && here) {
        C loss = 0;
        if (counted) {
            C apart = expected - most;
            if (smoothed) apart = C(target_share) * apart + C(class_share) * sums.second;
            loss = log(sums.first) - apart;
        }
        if (losses) losses[row] = loss;
        else output[row] = T(loss);
        statistics[row] = most;
        statistics[num_rows + row] = C(1) / sums.first;
    }
    if constexpr (REDUCED) {
        if (!is_last_block(counter)) return;
        reduce_losses(losses, target_ptr, output, scale, num_rows, target_stride, wide, ignore_index);
    }
}

template <class T>
__global__ void __launch_bounds__(512) cross_entropy_reduce_kernel(
    const Compute<T>* __restrict__ losses,  // [rows]
    const void* __restrict__ target_ptr,    // [rows], strided
    T* __restrict__ output,                 // a scalar
    Compute<T>* __restrict__ scale,         // [1], or null where the sum is wanted
    long long num_rows, long long target_stride, bool wide, long long ignore_index) {
    // One block owns all rows, one thread every blockDim.x-th of them.
    reduce_losses(losses, target_ptr, output, scale, num_rows, target_stride, wide, ignore_index);
}

template <class T, int WIDTH, bool SHIFTED = false>
__global__ void __launch_bounds__(256) cross_entropy_backward_kernel(
    long long num_rows, long long pieces, long long reciprocal_pieces, bool wide,
    const void* __restrict__ target_ptr,  // [rows], strided
    long long target_stride, long long ignore_index,
    const T* __restrict__ logits,  // [rows, classes], strided
    long long row_stride, long long classes, long long class_stride,
    const Compute<T>* __restrict__ statistics,  // [2, rows]
    const T* __restrict__ grad_output,          // [rows], strided, or a scalar with stride 0
    long long grad_stride,
    const Compute<T>* __restrict__ scale,  // [1], or null
    T* __restrict__ grad_logits,           // [rows, classes]
    double target_share, double class_share) {  // as forward
    // One block owns IN_FLIGHT * blockDim.x vectors of each of blockDim.y consecutive rows, one thread IN_FLIGHT of one.
    using C = Compute<T>;
    const auto [tile, piece] = divided(blockIdx.x, pieces, reciprocal_pieces);
    const long long row = tile * blockDim.y + threadIdx.y;
    if (row >= num_rows) return;
    const long long step = blockDim.x * WIDTH, start = piece * (IN_FLIGHT * step) + threadIdx.x * WIDTH;
    const long long target = index_at(target_ptr, wide, row * target_stride);
    const bool counted = target != ignore_index;
    logits += row * row_stride;
    Vector<T, WIDTH> xs[IN_FLIGHT];
    load_columns<SHIFTED>(xs, logits, start, step, counted ? classes : 0, class_stride, 0);
    const C largest = statistics[row], reciprocal = statistics[num_rows + row];
    const C grad = C(grad_output[row * grad_stride]) * (scale ? *scale : C(1));
    const C share = C(class_share), at_target = C(target_share);
#pragma unroll
    for (int k = 0; k < IN_FLIGHT; k++) {
        const long long column = start + k * step;
        if (column - (SHIFTED ? threadIdx.x % 32 * WIDTH : 0) >= classes) continue;
#pragma unroll
        for (int j = 0; j < WIDTH; j++) {
            C slope = 0;
            if (counted) {
                slope = exponential(C(xs[k].at[j]) - largest) * reciprocal - share;
                slope = (column + j == target ? slope - at_target : slope) * grad;
            }
            xs[k].at[j] = T(slope);
        }
        if constexpr (SHIFTED) store_shifted(grad_logits + row * classes, classes, int(column / WIDTH), xs[k]);
        else xs[k].store_streaming(grad_logits + row * classes + column);
    }
}
