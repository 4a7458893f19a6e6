#include "vectors.cuh"

constexpr int BLOCK = 64;  // boxes whose bits make a word
constexpr int ORDERED = 32, SHARES = 8;
constexpr int COMPARED = 256;  // scores that a block looks at together
constexpr int MOST_WALKERS = 1024;
using Word = unsigned long long;

// Whether a score comes before another: NaN is above all numbers, and of equal scores the lower place comes first.
template <class C> __device__ bool comes_before(C score, C other, bool lower) {
    const bool is_nan = score != score, other_is_nan = other != other;
    return score > other || (is_nan && !other_is_nan) || (lower && (score == other || (is_nan && other_is_nan)));
}

template <class T>
__global__ void __launch_bounds__(ORDERED * SHARES) nms_order_kernel(
    const T* __restrict__ boxes,        // [n, 4], strided
    const T* __restrict__ scores,       // [n], strided
    const void* __restrict__ idxs,      // [n], strided, of 4 or 8 bytes; or null
    long long* __restrict__ order,      // [n]
    Compute<T>* __restrict__ ranked,    // [n, 4]
    long long* __restrict__ classes,    // [n]; of no meaning without idxs
    long long n, long long box_stride, long long coordinate_stride, long long score_stride, long long idx_stride,
    bool wide) {
    // One block owns ORDERED boxes, a warp for each share of the boxes that may come before them. It writes them to
    // where their scores put them.
    using C = Compute<T>;
    __shared__ C others[COMPARED];
    __shared__ long long counts[SHARES][ORDERED];
    const int lane = threadIdx.x % ORDERED, share = threadIdx.x / ORDERED;
    const long long own = blockIdx.x * (long long)ORDERED + lane;
    const C score = own < n ? C(scores[own * score_stride]) : C(0);
    long long before = 0;
    for (long long first = 0; first < n; first += COMPARED) {
        const int count = min(n - first, (long long)COMPARED), lower = min(max(own - first, 0ll), (long long)COMPARED);
        for (int i = threadIdx.x; i < count; i += ORDERED * SHARES) others[i] = C(scores[(first + i) * score_stride]);
        __syncthreads();
        int found = 0;
#pragma unroll 8
        for (int i = share; i < count; i += SHARES) found += comes_before(others[i], score, i < lower);
        before += found;
        __syncthreads();
    }
    counts[share][lane] = before;
    __syncthreads();
    if (own >= n) return;
    long long rank = 0;
#pragma unroll
    for (int of = 0; of < SHARES; of++) rank += counts[of][lane];
    if (share < 4) ranked[rank * 4 + share] = C(boxes[own * box_stride + share * coordinate_stride]);
    if (share == 4) order[rank] = own;
    if (share == 5 && idxs)
        classes[rank] = wide ? static_cast<const long long*>(idxs)[own * idx_stride]
                             : static_cast<const int*>(idxs)[own * idx_stride];
}

template <class C> struct __align__(16) Ranked { C x1, y1, x2, y2; };

// Intersection over union above the threshold, without a division. A union that is NaN or not above 0 has no quotient
// above it.
template <class C>
__device__ bool suppresses(const Ranked<C>& a, C area_a, const Ranked<C>& b, C area_b, C threshold) {
    const C width = fmin(a.x2, b.x2) - fmax(a.x1, b.x1), height = fmin(a.y2, b.y2) - fmax(a.y1, b.y1);
    const C intersection = fmax(width, C(0)) * fmax(height, C(0));
    const C united = area_a + area_b - intersection;
    return united > C(0) && intersection > threshold * united;
}

template <class C> __device__ C area_of(const Ranked<C>& box) { return (box.x2 - box.x1) * (box.y2 - box.y1); }

template <class C>
__global__ void __launch_bounds__(BLOCK) nms_mask_kernel(
    const Ranked<C>* __restrict__ ranked,      // [n]
    const long long* __restrict__ classes,     // [n], or null
    Word* __restrict__ mask,                   // [blocks, n]. Bit r of [c, i]: rank i suppresses rank BLOCK c + r.
    long long n, long long blocks, double iou_threshold) {
    // One block owns the words of BLOCK rows for BLOCK columns, where no row lies past the columns; one thread a word.
    __shared__ Ranked<C> boxes[BLOCK];
    __shared__ C areas[BLOCK];
    __shared__ long long kinds[BLOCK];
    const long long row_block = blockIdx.x / blocks, column_block = blockIdx.x - row_block * blocks;
    if (row_block > column_block) return;
    const long long row = row_block * BLOCK + threadIdx.x, column = column_block * BLOCK + threadIdx.x;
    if (column < n) {
        boxes[threadIdx.x] = ranked[column];
        areas[threadIdx.x] = area_of(boxes[threadIdx.x]);
        kinds[threadIdx.x] = classes ? classes[column] : 0;
    }
    __syncthreads();
    if (row >= n) return;
    const Ranked<C> box = ranked[row];
    const C area = area_of(box), threshold = C(iou_threshold);
    const long long kind = classes ? classes[row] : 0;
    const int first = row_block == column_block ? threadIdx.x + 1 : 0;
    const int columns = min(n - column_block * BLOCK, (long long)BLOCK);
    Word word = 0;
    for (int c = first; c < columns; c++)
        if (kinds[c] == kind && suppresses(box, area, boxes[c], areas[c], threshold)) word |= Word(1) << c;
    mask[column_block * n + row] = word;
}

// The bits that any lane of a warp has.
__device__ Word bits_of_any(Word word) {
    const unsigned low = __reduce_or_sync(~0u, unsigned(word)), high = __reduce_or_sync(~0u, unsigned(word >> 32));
    return low | Word(high) << 32;
}

// The words of a block's rows for the columns of another, two a lane.
struct Pair {
    Word low, high;

    __device__ Pair(const Word* __restrict__ mask, long long columns, long long row, long long n)
        : low(row < n ? mask[columns * n + row] : 0), high(row + 32 < n ? mask[columns * n + row + 32] : 0) {}

    __device__ Word suppressed_by(Word rows, int lane) const {
        return bits_of_any((rows >> lane & 1 ? low : 0) | (rows >> (lane + 32) & 1 ? high : 0));
    }
};

__global__ void __launch_bounds__(MOST_WALKERS) nms_walk_kernel(
    const Word* __restrict__ mask,         // [blocks, n]
    const long long* __restrict__ order,   // [n]
    Word* words,                           // [blocks]. Bit r of [c]: a kept box suppresses that of rank BLOCK c + r.
    long long* __restrict__ kept,          // [n + 1]
    long long n, long long blocks) {
    // One block owns all boxes, and walks over BLOCK rows at a time: its first warp finds those that are kept, and all
    // warps take turns at the columns that these suppress.
    __shared__ Word found;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const Word before_low = (Word(1) << lane) - 1, before_high = (Word(1) << (lane + 32)) - 1;
    long long count = 0;
    Pair own(mask, 0, lane, n);
    for (long long block = 0; block < blocks; block++) {
        const long long first = block * BLOCK, low = first + lane, high = low + 32, next = block + 1 + warp;
        // Loaded before it is known which rows are kept.
        const Pair ahead(mask, min(next, blocks - 1), low, n);
        if (warp == 0) {
            const Pair following(mask, block + 1, low + BLOCK, n);
            const Word within = n - first < BLOCK ? (Word(1) << (n - first)) - 1 : ~Word(0);
            const Word left = block ? within & ~words[block] : within;
            // Each round decides at least one box more for good, from the highest score on.
            Word now = left, former;
            do {
                former = now;
                now = left & ~own.suppressed_by(former, lane);
            } while (now != former);
            if (lane == 0) found = now;
            own = following;
        }
        __syncthreads();
        const Word now = found;
        auto suppress = [&](long long columns, const Pair& of_rows) {
            const Word suppressed = of_rows.suppressed_by(now, lane);
            if (lane == 0) words[columns] = block ? words[columns] | suppressed : suppressed;
        };
        if (next < blocks) suppress(next, ahead);
#pragma unroll 4
        for (long long columns = next + warps; columns < blocks; columns += warps)
            suppress(columns, Pair(mask, columns, low, n));
        if (warp == warps - 1) {  // with the fewest columns
            if (now >> lane & 1) kept[count + __popcll(now & before_low)] = order[low];
            if (now >> (lane + 32) & 1) kept[count + __popcll(now & before_high)] = order[high];
        }
        count += __popcll(now);
        __syncthreads();
    }
    if (threadIdx.x == 0) kept[n] = count;
}
