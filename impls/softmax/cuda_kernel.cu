#include <math_constants.h>

#include "clusters.cuh"
#include "exponential.cuh"
#include "rows.cuh"
#include "shifted.cuh"

// A row's threads are a power of 2 up to 32, with several rows per block; or all threads of a block of whole warps; or,
// with SPLIT, the threads of all blocks of a cluster. Vector k of a thread is vector `thread + k * threads` of the row.
// The first vectors stay in registers. With EXCESS, a row may have more: as many as fit stay in shared memory, and the
// rest is read twice. With SHIFTED, a row may begin and end anywhere. The same threads own the same columns, so that a
// result is the same wherever the row begins.

// Elements that a thread keeps in registers: as many as 1024 threads have registers for, or 512 threads with EXCESS in
// vectors. Half types count as float, because the compiler converts them once. With SPLIT they stay packed.
template <class T, int WIDTH, bool EXCESS, bool SPLIT>
constexpr int KEPT = (sizeof(T) == 8 ? 8 : 32) * ((EXCESS && WIDTH > 1) || (SPLIT && sizeof(T) == 2) ? 2 : 1);
template <bool EXCESS> constexpr int MAX_THREADS = EXCESS ? 512 : 1024;
// The number of vectors, of those not kept in registers, that are loaded before the first is used. Those in registers are
// passed over by as many, where a row has no more, because a short row takes as long as its instructions.
constexpr int BATCH = 4;
// The number of a vector of a row. With EXCESS, a row has any length; without, 64 bits would take longer than a short row.
template <bool EXCESS> struct NumberOf { using type = int; };
template <> struct NumberOf<true> { using type = long long; };

// Whether vector k of a thread begins a batch that a row of `count` vectors lacks.
template <class Number> __device__ inline bool lacks_batch(int k, int size, Number count) {
    return k % BATCH == 0 && k * size >= count;
}

template <class C> __device__ inline C minus_infinity() { return C(-CUDART_INF_F); }

// The number to subtract before exp: the largest. If all were -inf so far, any finite number gives terms of 0.
template <class C> __device__ inline C taken_off(C largest) { return largest == minus_infinity<C>() ? C(0) : largest; }

template <class C> __device__ inline C largest_of_lanes(C value, int lanes) {
    return over_lanes(value, lanes, [](C a, C b) { return max(a, b); });
}

template <class C> __device__ inline C sum_of_row(C value, int threads) {
    value = sum_of_lanes(value, min(threads, 32));
    if (threads <= 32) return value;
    __shared__ C of_warps[32];
    const int lane = threadIdx.x % 32;
    if (lane == 0) of_warps[threadIdx.x / 32] = value;
    __syncthreads();
    return sum_of_lanes(lane < threads / 32 ? of_warps[lane] : C(0), 32);
}
// The largest number of a part of a row, and the sum of exp(x - largest) over it. max() drops a NaN, the sum keeps it.
template <class C> struct Terms {
    C largest = minus_infinity<C>(), sum = 0;

    // Replaces each x by its term exp(x - largest), or by 0 if the largest is -inf. Vectors `size` apart are vector k of
    // the thread, if the row has `count`; the others hold -inf.
    template <bool FIRST, int WIDTH, int COUNT, class Number>
    __device__ void add(C (&part)[COUNT][WIDTH], int size, Number count) {
        C most = largest;
#pragma unroll
        for (int k = 0; k < COUNT; k++) {
            if (lacks_batch(k, size, count)) break;
            most = max(most, in_pairs(part[k], [](C a, C b) { return max(a, b); }));
        }
        const C reference = taken_off(most);
        if constexpr (!FIRST) sum *= exponential(largest - reference);
        largest = most;
#pragma unroll
        for (int k = 0; k < COUNT; k++) {
            if (lacks_batch(k, size, count)) break;
#pragma unroll
            for (int j = 0; j < WIDTH; j++) part[k][j] = exponential(part[k][j] - reference);
            sum += sum_in_pairs(part[k]);
        }
    }

    // The same for packed vectors, which it does not change.
    template <class T, int WIDTH, int COUNT, class Number>
    __device__ void add_packed(const Vector<T, WIDTH> (&part)[COUNT], int size, Number count) {
#pragma unroll
        for (int k = 0; k < COUNT; k++)
            if (k * size < count) {
                C x[WIDTH];
                part[k].unpack(x);
#pragma unroll
                for (int j = 0; j < WIDTH; j++) largest = max(largest, x[j]);
            }
        const C reference = taken_off(largest);
#pragma unroll
        for (int k = 0; k < COUNT; k++)
            if (k * size < count) {
                C x[WIDTH];
                part[k].unpack(x);
#pragma unroll
                for (int j = 0; j < WIDTH; j++) sum += exponential(x[j] - reference);
            }
    }

    __device__ void of_lanes(int lanes) {
        const C most = largest_of_lanes(largest, lanes);
        sum = sum_of_lanes(sum * exponential(largest - taken_off(most)), lanes);
        largest = most;
    }
    __device__ void of_row(int threads) {
        of_lanes(min(threads, 32));
        if (threads <= 32) return;
        __shared__ C largest_of_warps[32], sum_of_warps[32];
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        if (lane == 0) {
            largest_of_warps[warp] = largest;
            sum_of_warps[warp] = sum;
        }
        __syncthreads();
        const bool present = lane < threads / 32;
        largest = present ? largest_of_warps[lane] : minus_infinity<C>();
        sum = present ? sum_of_warps[lane] : C(0);
        of_lanes(32);
    }
    // The same over a row that a cluster shares.
    __device__ void of_blocks(Exchange<C, 2>& exchange) {
        C both[] = {largest, sum};
        exchange.wait_for_blocks();
        const bool exists = exchange.gather(both);
        largest = exists ? both[0] : minus_infinity<C>();
        sum = exists ? both[1] : C(0);
        of_lanes(MAX_BLOCKS);
    }
};

// The part of a row that a thread owns.
template <bool SPLIT> struct Share {
    int size, thread;  // threads per row, and the number of this one
    int block = 0, blocks = 1;  // of the row, if a cluster shares it
    long long row;

    __device__ Share(long long threads) : size(int(threads)) {
        if constexpr (SPLIT) {
            blocks = size / blockDim.x;
            block = blockIdx.x % blocks;
            thread = block * blockDim.x + threadIdx.x;
            row = blockIdx.x / blocks;
        } else {
            size = blockDim.x;
            thread = threadIdx.x;
            row = blockIdx.x * (long long)blockDim.y + threadIdx.y;
        }
    }
    __device__ int of_block() const { return SPLIT ? blockDim.x : size; }
};

// A row of a strided tensor [outer, inner, cols].
template <class T, int WIDTH, bool SHIFTED> struct Row {
    const T* first;
    long long cols, column_stride;

    __device__ Row(const T* tensor, long long cols, long long row, long long inner, long long outer_stride,
                   long long inner_stride, long long column_stride)
        : first(tensor + row_offset(row, inner, outer_stride, inner_stride)), cols(cols), column_stride(column_stride) {}

    // Loads the vectors of these numbers, `size` apart. What lies beyond the row's `count` vectors becomes `absent`, except
    // in batches that the row lacks.
    template <int COUNT, class Numbers, class Number>
    __device__ void load(Vector<T, WIDTH> (&to)[COUNT], Numbers number, int size, Number count, float absent) const {
        if constexpr (SHIFTED) {
            load_shifted(to, first, count ? cols : 0, [&](int k) { return int(number(k)); }, absent);
        } else {
#pragma unroll
            for (int k = 0; k < COUNT; k++) {
                if (lacks_batch(k, size, count)) break;
                const Number i = number(k);
                if (i >= count) to[k] = filled<T, WIDTH>(absent);
                else if constexpr (WIDTH > 1) to[k] = Vector<T, WIDTH>::load(first + WIDTH * (long long)i);
                else to[k] = {{first[i * column_stride]}};
            }
        }
    }
};

// A contiguous row of `count` vectors to be written.
template <class T, int WIDTH, bool SHIFTED, class Number> struct Target {
    T* first;
    long long cols;
    Number count;

    // Whether no lane that must take part in storing vector i has one.
    __device__ bool lacks(Number i) const { return (SHIFTED ? i - threadIdx.x % 32 : i) >= count; }
    __device__ void store(Number i, const Vector<T, WIDTH>& vector) const {
        if constexpr (SHIFTED) store_shifted(first, cols, int(i), vector);
        else vector.store_streaming(first + WIDTH * (long long)i);
    }
};

template <class T, int WIDTH, class C>
__device__ inline Vector<T, WIDTH> scaled(const C (&terms)[WIDTH], C scale) {
    Vector<T, WIDTH> y;
#pragma unroll
    for (int j = 0; j < WIDTH; j++) y.at[j] = T(terms[j] * scale);
    return y;
}

template <class T, int WIDTH, class C>
__device__ inline Vector<T, WIDTH> softmax_of(const Vector<T, WIDTH>& x, C largest, C scale) {
    C terms[WIDTH];
    x.unpack(terms);
#pragma unroll
    for (int j = 0; j < WIDTH; j++) terms[j] = exponential(terms[j] - largest);
    return scaled<T, WIDTH>(terms, scale);
}

template <class T, int WIDTH, class C>
__device__ inline Vector<T, WIDTH> gradient_of(const Vector<T, WIDTH>& grad, const Vector<T, WIDTH>& y, C product) {
    C grads[WIDTH], ys[WIDTH];
    grad.unpack(grads);
    y.unpack(ys);
    Vector<T, WIDTH> grad_x;
#pragma unroll
    for (int j = 0; j < WIDTH; j++) grad_x.at[j] = T(ys[j] * (grads[j] - product));
    return grad_x;
}

template <class T, int WIDTH, class C>
__device__ inline C product_of(const Vector<T, WIDTH>& grad, const Vector<T, WIDTH>& y) {
    C grads[WIDTH], ys[WIDTH];
    grad.unpack(grads);
    y.unpack(ys);
#pragma unroll
    for (int j = 0; j < WIDTH; j++) grads[j] *= ys[j];
    return sum_in_pairs(grads);
}

template <class T, int WIDTH, bool EXCESS, bool SPLIT, bool SHIFTED = false>
__global__ void __launch_bounds__(MAX_THREADS<EXCESS>) softmax_forward_kernel(
    long long num_rows, long long cols, long long inner,
    const T* __restrict__ x,  // [outer, inner, cols], strided
    long long outer_stride,
    T* __restrict__ output,  // [outer * inner, cols]
    long long inner_stride, long long column_stride, long long threads, long long num_shared) {
    // The parameters stand in the order of their use, because they arrive in lines of 64 bytes, and each is waited for.
    // One block owns blockDim.y rows, `threads` threads each; with SPLIT a cluster owns one row.
    using C = Compute<T>;
    using Number = typename NumberOf<EXCESS>::type;
    constexpr int KEEP = KEPT<T, WIDTH, EXCESS, SPLIT> / WIDTH;
    constexpr bool PACKED = SPLIT && sizeof(T) == 2;
    extern __shared__ __align__(16) unsigned char raw[];
    T* shared = reinterpret_cast<T*>(raw + (SHIFTED ? blockDim.x / 32 * EXCHANGED * sizeof(uint4) : 0));
    const Share<SPLIT> share(threads);
    Exchange<C, 2> exchange(share.blocks);
    const int size = share.size, thread = share.thread;
    const long long row = share.row;
    // Threads beyond the last row take part, because they share a warp with threads that own a row.
    const bool exists = row < num_rows;
    const Number count = exists ? ((unsigned long long)cols + WIDTH - 1) / WIDTH : 0;
    const Row<T, WIDTH, SHIFTED> source(x, cols, exists ? row : 0, inner, outer_stride, inner_stride, column_stride);
    auto number = [&](Number k) { return thread + k * size; };

    Vector<T, WIDTH> kept[KEEP];
    source.load(kept, number, size, count, -CUDART_INF_F);
    const Target<T, WIDTH, SHIFTED, Number> target{computed_here(output + row * cols), cols, count};
    Terms<C> terms;
    if constexpr (EXCESS) {
#pragma unroll 1
        for (long long first = KEEP; first * size < count; first += BATCH) {
            Vector<T, WIDTH> batch[BATCH];
            source.load(batch, [&](int k) { return number(first + k); }, 0, count, -CUDART_INF_F);
#pragma unroll
            for (int k = 0; k < BATCH; k++)
                if (first + k - KEEP < num_shared) batch[k].store(shared + number(first + k - KEEP) * WIDTH);
            C numbers[BATCH][WIDTH];
#pragma unroll
            for (int k = 0; k < BATCH; k++) batch[k].unpack(numbers[k]);
            terms.template add<false>(numbers, 0, 1);
        }
    }
    C of_kept[PACKED ? 1 : KEEP][WIDTH];
    if constexpr (PACKED) {
        terms.add_packed(kept, size, count);
    } else {
#pragma unroll
        for (int k = 0; k < KEEP; k++) kept[k].unpack(of_kept[k]);
        terms.template add<!EXCESS>(of_kept, SHIFTED ? 0 : size, SHIFTED ? Number(1) : count);
    }
    const C own_largest = terms.largest;
    terms.of_row(share.of_block());
    if (share.blocks > 1) terms.of_blocks(exchange);
    const C largest = terms.largest, scale = C(1) / terms.sum, own_scale = exponential(own_largest - largest) * scale;

#pragma unroll
    for (int k = 0; k < KEEP; k++) {
        if (!SHIFTED && lacks_batch(k, size, count)) break;
        if (target.lacks(number(k))) continue;
        if constexpr (PACKED) target.store(number(k), softmax_of(kept[k], largest, scale));
        else target.store(number(k), scaled<T, WIDTH>(of_kept[k], own_scale));
    }
    if constexpr (EXCESS) {
        // Walk backwards, because what was read last is still in a cache.
#pragma unroll 1
        for (long long end = (count + size - 1) / size; end > KEEP + num_shared; end -= BATCH) {
            Vector<T, WIDTH> batch[BATCH];
            auto here = [&](int k) { return end - k > KEEP + num_shared ? number(end - 1 - k) : count + thread; };
            source.load(batch, here, 0, count, 0.0f);
#pragma unroll
            for (int k = 0; k < BATCH; k++)
                if (!target.lacks(here(k))) target.store(here(k), softmax_of(batch[k], largest, scale));
        }
#pragma unroll 2
        for (long long k = KEEP; k < KEEP + num_shared; k++) {
            const auto vector = Vector<T, WIDTH>::load(shared + number(k - KEEP) * WIDTH);
            if (!target.lacks(number(k))) target.store(number(k), softmax_of(vector, largest, scale));
        }
    }
}

template <class T, int WIDTH, bool EXCESS, bool SPLIT, bool SHIFTED = false>
__global__ void __launch_bounds__(MAX_THREADS<EXCESS>) softmax_backward_kernel(
    long long num_rows, long long cols, long long inner,
    const T* __restrict__ grad_output,  // [outer, inner, cols], strided
    const T* __restrict__ output,       // [outer, inner, cols], strided
    long long grad_outer_stride, long long outer_stride,
    T* __restrict__ grad_x,  // [outer * inner, cols]
    long long grad_inner_stride, long long grad_column_stride, long long inner_stride, long long column_stride,
    long long threads, long long num_shared) {
    // The order of the parameters is that of their use, as forward.
    // One block owns blockDim.y rows, `threads` threads each; with SPLIT a cluster owns one row.
    using C = Compute<T>;
    using Number = typename NumberOf<EXCESS>::type;
    // The two tensors share the registers.
    constexpr int KEEP = KEPT<T, WIDTH, EXCESS, SPLIT> / WIDTH / 2, HALF_BATCH = BATCH / 2;
    extern __shared__ __align__(16) unsigned char raw[];
    T* shared = reinterpret_cast<T*>(raw + (SHIFTED ? blockDim.x / 32 * EXCHANGED * sizeof(uint4) : 0));
    const Share<SPLIT> share(threads);
    Exchange<C, 1> exchange(share.blocks);
    const int size = share.size, thread = share.thread;
    const long long row = share.row;
    // Threads beyond the last row take part, because they share a warp with threads that own a row.
    const bool exists = row < num_rows;
    const Number count = exists ? ((unsigned long long)cols + WIDTH - 1) / WIDTH : 0;
    const long long from = exists ? row : 0;
    const Row<T, WIDTH, SHIFTED> grads(
        grad_output, cols, from, inner, grad_outer_stride, grad_inner_stride, grad_column_stride);
    const Row<T, WIDTH, SHIFTED> outputs(output, cols, from, inner, outer_stride, inner_stride, column_stride);
    auto number = [&](Number k) { return thread + k * size; };

    Vector<T, WIDTH> kept_grad[KEEP], kept[KEEP];
    grads.load(kept_grad, number, size, count, 0.0f);
    outputs.load(kept, number, size, count, 0.0f);
    const Target<T, WIDTH, SHIFTED, Number> target{computed_here(grad_x + row * cols), cols, count};
    C product = 0;
    if constexpr (EXCESS) {
#pragma unroll 1
        for (long long first = KEEP; first * size < count; first += HALF_BATCH) {
            Vector<T, WIDTH> grad[HALF_BATCH], y[HALF_BATCH];
            auto here = [&](int k) { return number(first + k); };
            grads.load(grad, here, 0, count, 0.0f);
            outputs.load(y, here, 0, count, 0.0f);
            C part = 0;
#pragma unroll
            for (int k = 0; k < HALF_BATCH; k++) {
                const long long slot = first + k - KEEP;
                if (slot < num_shared) {
                    grad[k].store(shared + (thread + 2 * slot * size) * WIDTH);
                    y[k].store(shared + (thread + (2 * slot + 1) * size) * WIDTH);
                }
                part += product_of<T, WIDTH, C>(grad[k], y[k]);
            }
            product += part;
        }
    }
#pragma unroll
    for (int k = 0; k < KEEP; k++) {
        if (lacks_batch(k, size, count)) break;
        product += product_of<T, WIDTH, C>(kept_grad[k], kept[k]);
    }
    product = sum_of_row(product, share.of_block());
    if (share.blocks > 1) exchange.wait_for_blocks(), product = exchange.sum(product);

#pragma unroll
    for (int k = 0; k < KEEP; k++)
        if (!target.lacks(number(k))) target.store(number(k), gradient_of(kept_grad[k], kept[k], product));
    if constexpr (EXCESS) {
        // Walk backwards, because what was read last is still in a cache.
#pragma unroll 1
        for (long long end = (count + size - 1) / size; end > KEEP + num_shared; end -= HALF_BATCH) {
            Vector<T, WIDTH> grad[HALF_BATCH], y[HALF_BATCH];
            auto here = [&](int k) { return end - k > KEEP + num_shared ? number(end - 1 - k) : count + thread; };
            grads.load(grad, here, 0, count, 0.0f);
            outputs.load(y, here, 0, count, 0.0f);
#pragma unroll
            for (int k = 0; k < HALF_BATCH; k++)
                if (!target.lacks(here(k))) target.store(here(k), gradient_of(grad[k], y[k], product));
        }
#pragma unroll 2
        for (long long k = KEEP; k < KEEP + num_shared; k++) {
            const long long slot = k - KEEP;
            const auto grad = Vector<T, WIDTH>::load(shared + (thread + 2 * slot * size) * WIDTH);
            const auto y = Vector<T, WIDTH>::load(shared + (thread + (2 * slot + 1) * size) * WIDTH);
            if (!target.lacks(number(k))) target.store(number(k), gradient_of(grad, y, product));
        }
    }
}
