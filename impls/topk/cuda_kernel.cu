#include "rows.cuh"

// Unsigned integers in whose falling order numbers are chosen: NaN is above all numbers, and -0 is 0.
template <int BYTES> struct KeyOf { using type = unsigned; using bits = unsigned; };
template <> struct KeyOf<2> { using type = unsigned; using bits = unsigned short; };
template <> struct KeyOf<8> { using type = unsigned long long; using bits = unsigned long long; };
template <class T> using Key = typename KeyOf<sizeof(T)>::type;

template <class T> __device__ Key<T> key_of(T x, bool largest) {
    typename KeyOf<sizeof(T)>::bits bits;
    memcpy(&bits, &x, sizeof x);
    const Key<T> sign = Key<T>(1) << (8 * sizeof(T) - 1), every = sign | (sign - 1);
    const Compute<T> number = Compute<T>(x);
    Key<T> key = bits & sign ? every - bits : bits | sign;
    if (number == Compute<T>(0)) key = sign;
    if (number != number) key = every;
    return largest ? key : every - key;
}

// What the threads of the block before this one have, and in `total` what all of them have.
template <class C> __device__ C count_before(C own, C& total) {
    __shared__ C parts[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    C sum = own;
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        const C below = __shfl_up_sync(~0u, sum, lanes);
        if (lane >= lanes) sum += below;
    }
    if (lane == 31) parts[warp] = sum;
    __syncthreads();
    total = C(0);
    C before = sum - own;
    for (int other = 0; other < blockDim.x / 32; other++) {
        if (other < warp) before += parts[other];
        total += parts[other];
    }
    __syncthreads();  // the next sum uses the same memory
    return before;
}

template <class T>
__global__ void topk_select_kernel(
    const T* __restrict__ x,         // [outer, inner, n], strided
    long long* __restrict__ chosen,  // [rows, k]
    long long n, long long inner, long long outer_stride, long long inner_stride, long long stride, long long k,
    bool largest) {
    // One block owns one row, and writes which places are chosen, in rising order. The key of the k-th is found eight
    // bits at a time, by how many keys begin like it and go on with each byte; each thread adds up a share of the bytes.
    __shared__ unsigned long long counts[256];
    __shared__ int next;
    __shared__ long long beyond;
    const T* const from = x + row_offset(blockIdx.x, inner, outer_stride, inner_stride);
    long long* const to = chosen + blockIdx.x * k;
    Key<T> limit = 0, known = 0;
    long long left = k, total;  // of the keys that begin like the limit
    for (int shift = 8 * sizeof(T) - 8; shift >= 0; shift -= 8) {
        for (int byte = threadIdx.x; byte < 256; byte += blockDim.x) counts[byte] = 0;
        __syncthreads();
        for (long long at = threadIdx.x; at < n; at += blockDim.x) {
            const Key<T> key = key_of(from[at * stride], largest);
            if ((key & known) == limit) atomicAdd(&counts[key >> shift & 255], 1ull);
        }
        __syncthreads();
        const int share = 256 / blockDim.x, last = 255 - share * threadIdx.x;
        long long own = 0;
        for (int byte = last; byte > last - share; byte--) own += counts[byte];
        long long above = count_before(own, total);
        for (int byte = last; byte > last - share; above += counts[byte--])
            if (above < left && left <= above + (long long)counts[byte]) {
                next = byte;
                beyond = above;
            }
        __syncthreads();
        limit |= Key<T>(next) << shift;
        left -= beyond;
        known |= Key<T>(255) << shift;
    }
    long long placed = 0, equal = 0;
    for (long long first = 0; first < n; first += blockDim.x) {
        const long long at = first + threadIdx.x;
        const Key<T> key = at < n ? key_of(from[at * stride], largest) : 0;
        const bool ties = at < n && key == limit;
        // Of the places whose key is that of the k-th, the first ones fill what is left.
        const long long earlier = equal + count_before<long long>(ties, total);
        const bool taken = (ties && earlier < left) || (at < n && key > limit);
        equal += total;
        const long long place = placed + count_before<long long>(taken, total);
        placed += total;
        if (taken) to[place] = at;
    }
}

template <class T>
__global__ void topk_order_kernel(
    const T* __restrict__ x,               // [outer, inner, n], strided
    const long long* __restrict__ chosen,  // [rows, count], or null: all n places of a row
    T* __restrict__ values,                // [rows, k]
    long long* __restrict__ indices,       // [rows, k]
    long long elements, long long count, long long inner, long long outer_stride, long long inner_stride,
    long long stride, long long k, bool largest) {
    // One thread owns one of the chosen places. Before it come those of larger keys in its row, and equal ones that were
    // chosen before.
    const long long element = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (element >= elements) return;
    const long long row = element / count, own = element - row * count;
    const T* const from = x + row_offset(row, inner, outer_stride, inner_stride);
    const auto place = [&](long long j) { return chosen ? chosen[row * count + j] : j; };
    const T value = from[place(own) * stride];
    const Key<T> key = key_of(value, largest);
    long long before = 0;
    for (long long j = 0; j < count; j++) {
        const Key<T> other = key_of(from[place(j) * stride], largest);
        before += other > key || (other == key && j < own);
    }
    if (before < k) {
        values[row * k + before] = value;
        indices[row * k + before] = place(own);
    }
}

template <class T>
__global__ void topk_backward_kernel(
    const T* __restrict__ grad_values,      // [rows, k]
    const long long* __restrict__ indices,  // [rows, k]
    T* __restrict__ grad_x,                 // [rows, n], of zeros
    long long elements, long long n, long long k) {
    // One thread owns one cotangent.
    const long long at = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (at < elements) grad_x[at / k * n + indices[at]] = grad_values[at];
}
