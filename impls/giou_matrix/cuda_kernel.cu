#include "giou/boxes.cuh"

// Of a tile's columns each lane of a warp has several, WARP apart. The warps take its rows in turn.
constexpr int COLUMNS = 4, WARP = 32, WARPS = BLOCK / WARP;

// The place of the block's tile, and of the thread in it.
struct Tile {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    long long across, down, first_row, first_column;

    __device__ explicit Tile(long long m, int rows) {
        const long long tiles = (m + COLUMNS * WARP - 1) / (COLUMNS * WARP);
        down = blockIdx.x / tiles;
        across = blockIdx.x - down * tiles;
        first_row = down * rows + warp;
        first_column = across * COLUMNS * WARP + lane;
    }
};

// The boxes of a thread's columns; those past the end are 0.
template <class C, class T>
__device__ void load_columns(Box<C> (&boxes)[COLUMNS], const Box<T>* from, long long first, long long m) {
#pragma unroll
    for (int k = 0; k < COLUMNS; k++)
        boxes[k] = first + k * WARP < m ? converted<C>(from[first + k * WARP]) : Box<C>{};
}

template <class T, bool ENCLOSED>
__global__ void __launch_bounds__(BLOCK) giou_matrix_forward_kernel(
    const Box<T>* __restrict__ boxes_a,  // [n]
    const Box<T>* __restrict__ boxes_b,  // [m]
    T* __restrict__ scores,              // [n, m]
    long long n, long long m, double eps, int rows) {
    // One block owns a tile of `rows` rows and COLUMNS * WARP columns.
    using C = Compute<T>;
    const Tile tile(m, rows);
    Box<C> b[COLUMNS];
    load_columns(b, boxes_b, tile.first_column, m);
    const long long end = min(n, (tile.down + 1) * rows);
    for (long long row = tile.first_row; row < end; row += WARPS) {
        const Box<C> a = converted<C>(boxes_a[row]);
#pragma unroll
        for (int k = 0; k < COLUMNS; k++) {
            const long long column = tile.first_column + k * WARP;
            if (column < m) scores[row * m + column] = T(giou_of<ENCLOSED>(a, b[k], C(eps)));
        }
    }
}

// For rows that would leave many lanes of a tile without a column.
template <class T, bool ENCLOSED>
__global__ void __launch_bounds__(BLOCK) giou_matrix_pairs_kernel(
    const Box<T>* __restrict__ boxes_a,  // [n]
    const Box<T>* __restrict__ boxes_b,  // [m]
    T* __restrict__ scores,              // [n, m]
    long long n, long long m, long long reciprocal, long long down, long long across, double eps) {
    // One thread owns scores that are as far apart as the grid has threads: `down` rows and `across` columns. It loads
    // the boxes of COLUMNS of them together, unless it owns only one.
    using C = Compute<T>;
    const long long apart = gridDim.x * (long long)BLOCK;
    long long at = blockIdx.x * (long long)BLOCK + threadIdx.x;
    auto [row, column] = divided(at, m, reciprocal);
    const auto store = [=](long long at, const Box<T>& a, const Box<T>& b) {
        scores[at] = T(giou_of<ENCLOSED>(converted<C>(a), converted<C>(b), C(eps)));
    };
    if (row < n && down >= n) return store(at, boxes_a[row], boxes_b[column]);
    while (row < n) {
        Box<T> a[COLUMNS] = {}, b[COLUMNS] = {};
#pragma unroll
        for (int k = 0; k < COLUMNS; k++) {
            if (row < n) {
                a[k] = boxes_a[row];
                b[k] = boxes_b[column];
            }
            const bool next = column + across >= m;
            row += down + next;
            column += across - (next ? m : 0);
        }
#pragma unroll
        for (int k = 0; k < COLUMNS; k++, at += apart)
            if (at < n * m) store(at, a[k], b[k]);
    }
}

template <class C> __device__ void add(C& sum, const C& more) { sum += more; }
template <class C> __device__ void add(Box<C>& sum, const Box<C>& more) {
    sum = {sum.x1 + more.x1, sum.y1 + more.y1, sum.x2 + more.x2, sum.y2 + more.y2};
}

// The sum over a warp of coordinate lane / 8. Lanes share the work: half of them go on with two of the coordinates.
template <class C> __device__ C sum_over_lanes(const Box<C>& mine, int lane) {
    const bool last = lane & 16, vertical = lane & 8;
    const C x = (last ? mine.x2 : mine.x1) + __shfl_xor_sync(~0u, last ? mine.x1 : mine.x2, 16);
    const C y = (last ? mine.y2 : mine.y1) + __shfl_xor_sync(~0u, last ? mine.y1 : mine.y2, 16);
    C sum = (vertical ? y : x) + __shfl_xor_sync(~0u, vertical ? x : y, 8);
#pragma unroll
    for (int lanes = 4; lanes; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    return sum;
}

// The sum of the same lane of all warps, in the first warp.
template <class V> __device__ V sum_over_warps(V value) {
    __shared__ V parts[WARPS][WARP];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    parts[warp][lane] = value;
    __syncthreads();
    if (warp == 0)
        for (int k = 1; k < WARPS; k++) add(value, parts[k][lane]);
    __syncthreads();
    return value;
}

template <class T, bool ENCLOSED>
__global__ void __launch_bounds__(BLOCK) giou_matrix_backward_kernel(
    const T* __restrict__ grad_output,       // [n, m], strided
    const Box<T>* __restrict__ boxes_a,      // [n]
    const Box<T>* __restrict__ boxes_b,      // [m]
    Compute<T>* __restrict__ sums_a,         // [tiles across, n, 4], or null
    Box<Compute<T>>* __restrict__ sums_b,    // [tiles down, m], or null
    long long n, long long m, long long row_stride, long long column_stride, double eps, int rows) {
    // One block owns a tile of `rows` rows and COLUMNS * WARP columns.
    using C = Compute<T>;
    const Tile tile(m, rows);
    Box<C> b[COLUMNS], of_columns[COLUMNS] = {};
    load_columns(b, boxes_b, tile.first_column, m);
    const long long end = min(n, (tile.down + 1) * rows);
    for (long long row = tile.first_row; row < end; row += WARPS) {
        const Box<C> a = converted<C>(boxes_a[row]);
        Box<C> of_row = {};
#pragma unroll
        for (int k = 0; k < COLUMNS; k++) {
            const long long column = tile.first_column + k * WARP;
            if (column >= m) continue;
            const C grad = C(grad_output[row * row_stride + column * column_stride]);
            const AreaGradients<C, ENCLOSED> gradients(grad, a, b[k], C(eps));
            if (sums_a) add(of_row, gradients.of_box(a, b[k]));
            if (sums_b) add(of_columns[k], gradients.of_box(b[k], a));
        }
        if (!sums_a) continue;
        const C sum = sum_over_lanes(of_row, tile.lane);
        if (tile.lane % 8 == 0) sums_a[(tile.across * n + row) * 4 + tile.lane / 8] = sum;
    }
    if (!sums_b) return;
    for (int k = 0; k < COLUMNS; k++) {
        const Box<C> sum = sum_over_warps(of_columns[k]);
        const long long column = tile.first_column + k * WARP;
        if (tile.warp == 0 && column < m) sums_b[tile.down * m + column] = sum;
    }
}

template <class C, class T>
__global__ void __launch_bounds__(BLOCK) giou_matrix_reduce_kernel(
    const C* __restrict__ sums,  // [count, n]
    T* __restrict__ gradient,    // [n]
    long long count, long long n) {
    // One block owns WARP elements of the gradient, one warp every WARPS-th of their sums.
    const long long at = blockIdx.x * (long long)WARP + threadIdx.x % WARP;
    C sum = 0;
    if (at < n)
#pragma unroll 4
        for (long long k = threadIdx.x / WARP; k < count; k += WARPS) sum += sums[k * n + at];
    sum = sum_over_warps(sum);
    if (threadIdx.x < WARP && at < n) gradient[at] = T(sum);
}
