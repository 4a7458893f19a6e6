#include "vectors.cuh"

constexpr int BLOCK = 64;  // boxes whose bits make a word
constexpr int ORDERED = 32, SHARES = 8;
constexpr int WALKERS = 512;
using Word = unsigned long long;

// Whether a score comes before another: NaN is above all numbers, and of equal scores the lower place comes first.
template <class C> __device__ bool comes_before(C score, long long place, C other, long long other_place) {
    const bool alike = score == other || (score != score && other != other);
    return alike ? place < other_place : score > other || score != score;
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
    __shared__ long long counts[SHARES][ORDERED];
    const int lane = threadIdx.x % ORDERED, share = threadIdx.x / ORDERED;
    const long long own = blockIdx.x * (long long)ORDERED + lane;
    const C score = own < n ? C(scores[own * score_stride]) : C(0);
    long long before = 0;
#pragma unroll 4
    for (long long other = share; other < n; other += SHARES)
        before += comes_before(C(scores[other * score_stride]), other, score, own);
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
    Word* __restrict__ mask,                   // [blocks, n]
    long long n, long long blocks, double iou_threshold) {
    // One block owns the words of BLOCK columns for BLOCK rows, where no row lies past the columns; one thread a word.
    __shared__ Ranked<C> boxes[BLOCK];
    __shared__ C areas[BLOCK];
    __shared__ long long kinds[BLOCK];
    const long long row_block = blockIdx.x / blocks, column_block = blockIdx.x - row_block * blocks;
    if (row_block > column_block) return;
    const long long row = row_block * BLOCK + threadIdx.x, column = column_block * BLOCK + threadIdx.x;
    if (row < n) {
        boxes[threadIdx.x] = ranked[row];
        areas[threadIdx.x] = area_of(boxes[threadIdx.x]);
        kinds[threadIdx.x] = classes ? classes[row] : 0;
    }
    __syncthreads();
    if (column >= n) return;
    const Ranked<C> box = ranked[column];
    const C area = area_of(box), threshold = C(iou_threshold);
    const long long kind = classes ? classes[column] : 0;
    const int rows = row_block == column_block ? threadIdx.x : BLOCK;
    Word word = 0;
    for (int r = 0; r < rows; r++)
        if (kinds[r] == kind && suppresses(boxes[r], areas[r], box, area, threshold)) word |= Word(1) << r;
    mask[row_block * n + column] = word;
}

__global__ void __launch_bounds__(WALKERS) nms_walk_kernel(
    const Word* __restrict__ mask,         // [blocks, n]
    const long long* __restrict__ order,   // [n]
    Word* words,                           // [blocks]
    long long* __restrict__ kept,          // [n + 1]
    long long n, long long blocks) {
    // One block owns all boxes. It walks over BLOCK columns at a time, of which each thread looks at one, in the words
    // of its share of the rows before them.
    __shared__ unsigned suppressed[2];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int place = threadIdx.x % BLOCK, share = threadIdx.x / BLOCK;
    long long count = 0;
    if (threadIdx.x < 2) suppressed[threadIdx.x] = 0;
    __syncthreads();
    for (long long block = 0; block < blocks; block++) {
        const long long first = block * BLOCK, column = first + place;
        // Loaded early, for the first warp alone needs them, after all others.
        const long long low = first + lane, high = low + 32;
        Word of_low = 0, of_high = 0;
        if (warp == 0) {
            if (low < n) of_low = mask[block * n + low];
            if (high < n) of_high = mask[block * n + high];
        }
        bool hit = false;
        if (column < n)
#pragma unroll 8
            for (long long rows = share; rows < block; rows += WALKERS / BLOCK)
                hit |= (mask[rows * n + column] & words[rows]) != 0;
        const unsigned votes = __ballot_sync(~0u, hit);
        if (lane == 0 && votes) atomicOr(&suppressed[warp % 2], votes);
        __syncthreads();
        if (warp == 0) {
            const Word gone = suppressed[0] | Word(suppressed[1]) << 32;
            __syncwarp();  // before lanes write it again
            const Word left = ~gone & (n - first < BLOCK ? (Word(1) << (n - first)) - 1 : ~Word(0));
            // Each round decides at least one box more for good, from the highest score on.
            Word now = left, former;
            do {
                former = now;
                const unsigned below = __ballot_sync(~0u, (of_low & former) != 0);
                const unsigned above = __ballot_sync(~0u, (of_high & former) != 0);
                now = left & ~(below | Word(above) << 32);
            } while (now != former);
            if (now >> lane & 1) kept[count + __popcll(now & ((Word(1) << lane) - 1))] = order[low];
            if (now >> (lane + 32) & 1) kept[count + __popcll(now & ((Word(1) << (lane + 32)) - 1))] = order[high];
            count += __popcll(now);
            if (lane == 0) words[block] = now;
            if (lane < 2) suppressed[lane] = 0;
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) kept[n] = count;
}
