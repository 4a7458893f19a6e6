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

// The number of a key.
template <class T> __device__ T number_of(Key<T> key, bool largest) {
    const Key<T> sign = Key<T>(1) << (8 * sizeof(T) - 1), every = sign | (sign - 1);
    if (!largest) key = every - key;
    const typename KeyOf<sizeof(T)>::bits bits = key & sign ? key ^ sign : every - key;
    T number;
    memcpy(&number, &bits, sizeof number);
    return number;
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

// Calls `with` with each number of a row and its place, by whichever thread. Between the ends of a row without gaps,
// 16 bytes are loaded at a time.
template <class T, class With>
__device__ void each_of_row(const T* from, long long n, long long stride, const With& with) {
    constexpr int WIDTH = IN_16_BYTES<T>;
    const long long to_16_bytes = (WIDTH - reinterpret_cast<size_t>(from) / sizeof(T) % WIDTH) % WIDTH;
    const long long head = stride == 1 ? min(n, to_16_bytes) : n;
    const long long whole = (n - head) / WIDTH;
#pragma unroll 4
    for (long long vector = threadIdx.x; vector < whole; vector += blockDim.x) {
        const long long first = head + vector * WIDTH;
        Compute<T> xs[WIDTH];
        Vector<T, WIDTH>::load(from + first).unpack(xs);
#pragma unroll
        for (int j = 0; j < WIDTH; j++) with(xs[j], first + j);
    }
    for (long long end = threadIdx.x; end < n - whole * WIDTH; end += blockDim.x) {
        const long long at = end < head ? end : end + whole * WIDTH;
        with(Compute<T>(from[at * stride]), at);
    }
}

// Calls `take` with the place in the result, in rising order, the place in the row and the key of each of the k chosen.
// The key of the k-th is found eight bits at a time, by how many keys begin like it and go on with each byte; each
// thread adds up a share of the bytes.
template <class T, class Take>
__device__ void select_exactly(
    const T* from, long long n, long long stride, long long k, bool largest, const Take& take) {
    __shared__ unsigned long long counts[256];
    __shared__ int next;
    __shared__ long long beyond;
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
        const int share = max(256 / (int)blockDim.x, 1), last = 255 - share * (int)threadIdx.x;
        const int lowest = max(last - share + 1, 0);
        long long own = 0;
        for (int byte = last; byte >= lowest; byte--) own += counts[byte];
        long long above = count_before(own, total);
        for (int byte = last; byte >= lowest; above += counts[byte--])
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
        if (taken) take(place, at, key);
    }
}

// Rows of whole vectors of 16 bytes, and k at most 16.
template <class T>
__global__ void __launch_bounds__(32) topk_warp_kernel(
    const T* __restrict__ x,          // [outer, inner, n], the numbers of a row adjacent
    T* __restrict__ values,           // [rows, k]
    long long* __restrict__ indices,  // [rows, k]
    long long n, long long inner, long long outer_stride, long long inner_stride, long long k, bool largest) {
    // One warp owns one row. Each lane finds the first number of each of its GROUPS of vectors, and the first of these.
    // Whatever comes before the k-th of the lanes' numbers is among the k wanted or few others: the groups that begin
    // with such a number are read again, and what is found there is put in order.
    // It loads TOGETHER vectors before it uses the first.
    constexpr int WIDTH = IN_16_BYTES<T>, TOGETHER = 16, GROUPS = sizeof(T) == 4 ? 32 : 16, MOST = 128;
    __shared__ unsigned groups[MOST], places[MOST];
    __shared__ Key<T> keys[MOST];
    using C = Compute<T>;
    const T* const from = x + row_offset(blockIdx.x, inner, outer_stride, inner_stride);
    const int lane = threadIdx.x, vectors = n / WIDTH, apart = 32 * GROUPS;
    const unsigned lanes_before = (1u << lane) - 1;
    const C sign = largest ? C(1) : C(-1);
    C firsts[GROUPS];
    bool nan = false;
#pragma unroll
    for (int group = 0; group < GROUPS; group++) firsts[group] = C(-INFINITY);
    for (int begin = 0; begin < vectors; begin += apart)
#pragma unroll
        for (int part = 0; part < GROUPS; part += TOGETHER) {
            if (begin + 32 * part >= vectors) break;
#pragma unroll
            for (int group = part; group < part + TOGETHER; group++) {
                const int vector = begin + 32 * group + lane;
                if (vector >= vectors) continue;
                C numbers[WIDTH];
                Vector<T, WIDTH>::load(from + vector * WIDTH).unpack(numbers);
#pragma unroll
                for (int j = 0; j < WIDTH; j++) {
                    nan |= numbers[j] != numbers[j];
                    firsts[group] = fmax(firsts[group], sign * numbers[j]);
                }
            }
        }
    C first = firsts[0];
#pragma unroll
    for (int group = 1; group < GROUPS; group++) first = fmax(first, firsts[group]);
    int before = 0;
#pragma unroll
    for (int other = 0; other < 32; other++) {
        const C others = __shfl_sync(~0u, first, other);
        before += others > first || (others == first && other < lane);
    }
    const C least = __shfl_sync(~0u, first, __ffs(__ballot_sync(~0u, before == k - 1)) - 1);

    int found = 0;
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        if (32 * group >= vectors) break;
        // NaN comes first of all. A lane that has one reads all of its groups.
        const bool again = nan || firsts[group] >= least;
        const unsigned lanes = __ballot_sync(~0u, again);
        const int place = found + __popc(lanes & lanes_before);
        if (again && place < MOST) groups[place] = lane + 32 * group;
        found += __popc(lanes);
    }
    __syncthreads();
    int count = 0;
    for (int begin = 0; found <= MOST && begin < vectors; begin += apart)
        for (int start = 0; start < found * WIDTH; start += 32) {
            const int element = start + lane;
            const int at = element < found * WIDTH ? (begin + int(groups[element / WIDTH])) * WIDTH + element % WIDTH : n;
            const T number = at < n ? from[at] : T(0.0f);
            const bool taken = at < n && !(sign * C(number) < least);
            const unsigned lanes = __ballot_sync(~0u, taken);
            const int place = count + __popc(lanes & lanes_before);
            if (taken && place < MOST) {
                keys[place] = key_of(number, largest);
                places[place] = at;
            }
            count += __popc(lanes);
        }
    __syncthreads();
    if (found > MOST || count > MOST) {
        select_exactly(from, n, 1, k, largest, [&](long long place, long long at, Key<T> key) {
            keys[place] = key;
            places[place] = at;
        });
        count = k;
        __syncthreads();
    }
    for (int own = lane; own < count; own += 32) {
        int place = 0;
        for (int other = 0; other < count; other++)
            place += keys[other] > keys[own] || (keys[other] == keys[own] && places[other] < places[own]);
        if (place >= k) continue;
        values[blockIdx.x * k + place] = from[places[own]];
        indices[blockIdx.x * k + place] = places[own];
    }
}

template <class T>
__global__ void topk_few_kernel(
    const T* __restrict__ x,         // [outer, inner, n], strided; n < 2^32
    T* __restrict__ values,          // [rows, k]; at most 512, and at least as many threads
    long long* __restrict__ indices, // [rows, k]
    long long n, long long inner, long long outer_stride, long long inner_stride, long long stride, long long k,
    bool largest) {
    // One block owns one row. Each thread finds the first of the numbers that fall to it. Whatever comes before the k-th
    // of these is among the k wanted or few others: they are collected and put in order.
    constexpr int MOST = 1024;
    __shared__ Key<T> keys[MOST];
    __shared__ unsigned places[MOST];
    __shared__ int found;
    using C = Compute<T>;
    const T* const from = x + row_offset(blockIdx.x, inner, outer_stride, inner_stride);
    const C sign = largest ? C(1) : C(-1);
    C first = C(-INFINITY);
    each_of_row(from, n, stride, [&](C number, long long) { first = fmax(first, sign * number); });
    const Key<T> own = key_of(T(sign * first), largest), none = key_of(T(sign * C(-INFINITY)), largest);
    Key<T> limit = 0;
    for (int bit = 8 * sizeof(T) - 1, reached = 0; bit >= 0 && reached != k; bit--) {
        const Key<T> higher = limit | Key<T>(1) << bit;
        const int count = __syncthreads_count(own >= higher);
        if (count >= k) {
            limit = higher;
            reached = count;
        }
    }
    // Threads without a number, or with NaN alone, reach no limit above this.
    if (limit <= none) limit = 0;
    if (threadIdx.x == 0) found = 0;
    __syncthreads();
    const C least = limit ? sign * C(number_of<T>(limit, largest)) : C(-INFINITY);
    each_of_row(from, n, stride, [&](C number, long long at) {
        if (sign * number < least) return;
        const int place = atomicAdd(&found, 1);
        if (place >= MOST) return;
        keys[place] = key_of(T(number), largest);
        places[place] = at;
    });
    __syncthreads();
    int count = found;
    if (count > MOST) {
        select_exactly(from, n, stride, k, largest, [&](long long place, long long at, Key<T> key) {
            keys[place] = key;
            places[place] = at;
        });
        count = k;
    }
    int padded = 2;
    while (padded < count) padded *= 2;
    for (int place = count + threadIdx.x; place < padded; place += blockDim.x) {
        keys[place] = 0;
        places[place] = ~0u;
    }
    __syncthreads();
    // A bitonic sort. Of gaps up to 32 the pairs of a warp are its own 64 neighbours.
    for (int run = 2; run <= padded; run *= 2)
        for (int gap = run / 2; gap; gap /= 2) {
            for (int pair = threadIdx.x; pair < padded / 2; pair += blockDim.x) {
                const int low = 2 * pair - (pair & (gap - 1)), high = low + gap;
                const Key<T> one = keys[low], other = keys[high];
                const unsigned here = places[low], there = places[high];
                const bool in_order = one > other || (one == other && here < there);
                if (in_order == bool(low & run)) {
                    keys[low] = other;
                    keys[high] = one;
                    places[low] = there;
                    places[high] = here;
                }
            }
            if (gap > 32 || (gap == 1 && run > 32)) __syncthreads();
            else __syncwarp();
        }
    __syncthreads();
    for (long long place = threadIdx.x; place < k; place += blockDim.x) {
        const long long at = places[place];
        values[blockIdx.x * k + place] = from[at * stride];
        indices[blockIdx.x * k + place] = at;
    }
}

template <class T>
__global__ void topk_select_kernel(
    const T* __restrict__ x,         // [outer, inner, n], strided
    long long* __restrict__ chosen,  // [rows, k]
    long long n, long long inner, long long outer_stride, long long inner_stride, long long stride, long long k,
    bool largest) {
    // One block owns one row, and writes which places are chosen, in rising order.
    long long* const to = chosen + blockIdx.x * k;
    select_exactly(
        x + row_offset(blockIdx.x, inner, outer_stride, inner_stride), n, stride, k, largest,
        [&](long long place, long long at, Key<T>) { to[place] = at; });
}

template <class T>
__global__ void topk_order_kernel(
    const T* __restrict__ x,               // [outer, inner, n], strided
    const long long* __restrict__ chosen,  // [rows, k]
    T* __restrict__ values,                // [rows, k]
    long long* __restrict__ indices,       // [rows, k]
    long long elements, long long inner, long long outer_stride, long long inner_stride, long long stride, long long k,
    bool largest) {
    // One thread owns one of the chosen places. Before it come those of larger keys in its row, and equal ones that were
    // chosen before.
    const long long element = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (element >= elements) return;
    const long long row = element / k, own = element - row * k;
    const T* const from = x + row_offset(row, inner, outer_stride, inner_stride);
    const T value = from[chosen[element] * stride];
    const Key<T> key = key_of(value, largest);
    long long before = 0;
    for (long long j = 0; j < k; j++) {
        const Key<T> other = key_of(from[chosen[row * k + j] * stride], largest);
        before += other > key || (other == key && j < own);
    }
    values[row * k + before] = value;
    indices[row * k + before] = chosen[element];
}

template <class T>
__global__ void topk_backward_kernel(
    const T* __restrict__ grad_values,      // [rows, k]
    const long long* __restrict__ indices,  // [rows, k]
    T* __restrict__ grad_x,                 // [rows, n], at a multiple of 16 bytes
    long long elements, long long n, long long k, long long n_reciprocal, long long k_reciprocal, long long width) {
    // One block owns `width` numbers of grad_x: it writes zeros, and then the cotangents whose places lie there.
    constexpr int WIDTH = IN_16_BYTES<T>;
    const long long begin = blockIdx.x * width, end = min(begin + width, elements);
    const long long last = (divided(end - 1, n, n_reciprocal).quotient + 1) * k;
    long long slot = divided(begin, n, n_reciprocal).quotient * k + threadIdx.x, at = -1;
    T grad(0.0f);
    const auto load = [&] {
        if (slot >= last) return;
        at = divided(slot, k, k_reciprocal).quotient * n + indices[slot];
        grad = grad_values[slot];
    };
    load();  // before the zeros are written, so that both are waited for at once
    for (long long i = begin + threadIdx.x * WIDTH; i < end; i += blockDim.x * WIDTH) {
        if (i + WIDTH <= end) Vector<T, WIDTH>{}.store(grad_x + i);
        else
            for (long long j = i; j < end; j++) grad_x[j] = T(0.0f);
    }
    __syncthreads();
    for (; slot < last; slot += blockDim.x, load())
        if (at >= begin && at < end) grad_x[at] = grad;
}
