#include "rows.cuh"

template <class T, int WIDTH>
__global__ void embedding_forward_kernel(
    const T* __restrict__ table,    // [vocab, dim], strided
    const void* __restrict__ ids,   // [num_ids], of 64 bits if they are wide, else of 32
    T* __restrict__ output,         // [num_ids, dim]
    long long num_ids, long long vocab, long long dim, long long row_stride, long long column_stride, bool wide) {
    // One row of threads owns every (gridDim.x * blockDim.y)-th id, one thread every blockDim.x-th vector of its row.
    const T unknown(__int_as_float(0x7fffffff));  // NaN
    const long long step = gridDim.x * (long long)blockDim.y;
    for (long long at = blockIdx.x * (long long)blockDim.y + threadIdx.y; at < num_ids; at += step) {
        const long long row = wide ? ((const long long*)ids)[at] : ((const int*)ids)[at];
        const bool known = row >= 0 && row < vocab;
#pragma unroll 4
        for (long long column = threadIdx.x * WIDTH; column < dim; column += blockDim.x * WIDTH) {
            Vector<T, WIDTH> vector;
            if (known) vector = take<WIDTH>(table + row * row_stride, column, column_stride);
            else
#pragma unroll
                for (int j = 0; j < WIDTH; j++) vector.at[j] = unknown;
            vector.store(output + at * dim + column);
        }
    }
}

// The most ids of a row whose places are written down.
constexpr int FEW = 32;

__global__ void embedding_places_kernel(
    const void* __restrict__ ids,  // [num_ids], of 64 bits if they are wide, else of 32
    int* __restrict__ counts,      // [vocab + 1], of zeros: the ids of each row, and rows of more than FEW
    int* __restrict__ places,      // [vocab, FEW]
    int* __restrict__ many,        // [num_ids / (FEW + 1)]: rows of more than FEW ids
    int num_ids, long long vocab, long long padding_idx, bool wide) {
    // One thread owns one id, and writes its place.
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= num_ids) return;
    const long long row = wide ? ((const long long*)ids)[at] : ((const int*)ids)[at];
    if (row < 0 || row >= vocab || row == padding_idx) return;
    const int number = atomicAdd(&counts[row], 1);
    if (number < FEW) places[row * FEW + number] = at;
    if (number == FEW) many[atomicAdd(&counts[vocab], 1)] = int(row);
}

constexpr int SUM_WARPS = 8, SEARCHED = 512;

// Adds up, in each lane of a warp, WIDTH columns of the cotangents of ids whose numbers in the order are from first to
// before end. The sums of TOGETHER ones are added up, so that errors grow less than those of a single sum.
template <class T, int WIDTH, class C, class Place>
__device__ void add_up(
    C (&sums)[WIDTH], const T* from, const Place* order, long long first, long long end, long long dim) {
    constexpr int TOGETHER = 8;
    const int lane = threadIdx.x % 32;
    for (; first < end; first += 32) {
        const int count = int(min(end - first, 32ll));
        const long long mine = order[first + min(lane, count - 1)];
        for (int next = 0; next < count; next += TOGETHER) {
            Vector<T, WIDTH> terms[TOGETHER];
            C parts[WIDTH] = {};
#pragma unroll
            for (int k = 0; k < TOGETHER; k++) terms[k] = Vector<T, WIDTH>::load(from + __shfl_sync(~0u, mine, next + k) * dim);
#pragma unroll
            for (int k = 0; k < TOGETHER; k++) {
                C numbers[WIDTH];
                terms[k].unpack(numbers);
#pragma unroll
                for (int j = 0; j < WIDTH; j++) parts[j] += next + k < count ? numbers[j] : C(0);
            }
#pragma unroll
            for (int j = 0; j < WIDTH; j++) sums[j] += parts[j];
        }
    }
}

template <class T, int WIDTH, class C> __device__ void store(T* to, const C (&sums)[WIDTH]) {
    Vector<T, WIDTH> rounded;
#pragma unroll
    for (int j = 0; j < WIDTH; j++) rounded.at[j] = T(sums[j]);
    rounded.store(to);
}

// Adds up the cotangents of a row's ids among at most SEARCHED ones from `first` on.
template <class T, int WIDTH, class C>
__device__ void add_found(
    C (&sums)[WIDTH], const T* from, const void* ids, bool wide, long long row, int first, int end, long long dim) {
    constexpr int LOADED = SEARCHED / 32;
    __shared__ int places_of_warps[SUM_WARPS][SEARCHED];
    int* const places = places_of_warps[threadIdx.x / 32];
    const int lane = threadIdx.x % 32;
    bool found[LOADED];
#pragma unroll
    for (int i = 0; i < LOADED; i++) {
        const int at = first + i * 32 + lane;
        found[i] = at < end && (wide ? ((const long long*)ids)[at] : ((const int*)ids)[at]) == row;
    }
    int count = 0;
#pragma unroll
    for (int i = 0; i < LOADED; i++) {
        const unsigned lanes = __ballot_sync(~0u, found[i]);
        if (found[i]) places[count + __popc(lanes & ((1u << lane) - 1))] = first + i * 32 + lane;
        count += __popc(lanes);
    }
    __syncwarp();
    add_up<T, WIDTH>(sums, from, places, 0, count, dim);
    __syncwarp();
}

template <class T, int WIDTH>
__global__ void __launch_bounds__(32 * SUM_WARPS) embedding_few_backward_kernel(
    const T* __restrict__ grad_output,  // [ids, dim]
    const void* __restrict__ ids,       // [ids], at most SEARCHED, of 64 bits if they are wide, else of 32
    T* __restrict__ grad_table,         // [vocab, dim]
    int num_ids, long long vocab, long long dim, long long padding_idx, bool wide) {
    // One warp owns 32 vectors of a row of the table, and searches all ids for this row.
    const long long row = blockIdx.x * (long long)SUM_WARPS + threadIdx.x / 32;
    const long long column = (blockIdx.y * 32ll + threadIdx.x % 32) * WIDTH;
    if (row >= vocab) return;
    Compute<T> sums[WIDTH] = {};
    const T* const from = grad_output + (column < dim ? column : 0);
    if (row != padding_idx) add_found<T, WIDTH>(sums, from, ids, wide, row, 0, num_ids, dim);
    if (column < dim) store(grad_table + row * dim + column, sums);
}

// The sum of the same lane of all warps, in the first warp.
template <int WIDTH, class C> __device__ void sum_over_warps(C (&sums)[WIDTH]) {
    __shared__ C of_warps[SUM_WARPS][WIDTH][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int j = 0; j < WIDTH; j++) of_warps[warp][j][lane] = sums[j];
    __syncthreads();
    if (warp == 0)
        for (int i = 1; i < SUM_WARPS; i++)
#pragma unroll
            for (int j = 0; j < WIDTH; j++) sums[j] += of_warps[i][j][lane];
    __syncthreads();
}

template <class T, int WIDTH>
__global__ void __launch_bounds__(32 * SUM_WARPS) embedding_backward_kernel(
    const T* __restrict__ grad_output,  // [num_ids, dim]
    const void* __restrict__ ids,       // [num_ids], of 64 bits if they are wide, else of 32
    const int* __restrict__ counts,     // [vocab + 1]
    const int* __restrict__ places,     // [vocab, FEW]
    const int* __restrict__ many,       // [most]
    int* __restrict__ ready,            // [gridDim.y, most], of zeros
    Compute<T>* __restrict__ parts,     // [most, num_parts, dim]
    T* __restrict__ grad_table,         // [vocab, dim]
    int num_ids, long long vocab, long long dim, int most, int num_parts, int part, int searched, int sharers,
    bool wide) {
    // One warp owns 32 vectors of a row of at most FEW ids. The blocks of the first `sharers` share the other rows: each
    // takes parts of `part` ids in turn, of which its warps search equal shares. The last one to finish adds them up.
    __shared__ int sorted[SUM_WARPS][FEW];
    __shared__ bool last;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const long long column = (blockIdx.y * 32ll + lane) * WIDTH;
    const T* const from = grad_output + (column < dim ? column : 0);
    if (blockIdx.x >= sharers) {
        const long long row = (blockIdx.x - sharers) * (long long)SUM_WARPS + warp;
        const int count = row < vocab ? counts[row] : FEW + 1;
        if (count > FEW) return;
        const int place = lane < count ? places[row * FEW + lane] : 0;
        int rank = 0;
        for (int i = 0; i < count; i++) rank += __shfl_sync(~0u, place, i) < place;
        if (lane < count) sorted[warp][rank] = place;
        __syncwarp();
        Compute<T> sums[WIDTH] = {};
        add_up<T, WIDTH>(sums, from, sorted[warp], 0, count, dim);
        if (column < dim) store(grad_table + row * dim + column, sums);
        return;
    }
    for (int share = blockIdx.x; share < counts[vocab] * num_parts; share += sharers) {
        const int number = share / num_parts, begin = (share - number * num_parts) * part, own = part / SUM_WARPS;
        const int end = min(begin + (warp + 1) * own, num_ids);
        const long long row = many[number];
        Compute<T> sums[WIDTH] = {};
        for (int first = begin + warp * own; first < end; first += searched)
            add_found<T, WIDTH>(sums, from, ids, wide, row, first, min(first + searched, end), dim);
        sum_over_warps(sums);
        if (warp == 0 && column < dim)
#pragma unroll
            for (int j = 0; j < WIDTH; j++) parts[share * dim + column + j] = sums[j];
        __syncthreads();
        if (threadIdx.x == 0) {
            __threadfence();
            last = atomicAdd(&ready[blockIdx.y * most + number], 1) == num_parts - 1;
        }
        __syncthreads();
        if (!last) continue;
#pragma unroll
        for (int j = 0; j < WIDTH; j++) sums[j] = 0;
        if (column < dim)
            for (long long i = number * (long long)num_parts + warp; i < (number + 1ll) * num_parts; i += SUM_WARPS)
#pragma unroll
                for (int j = 0; j < WIDTH; j++) sums[j] += __ldcg(&parts[i * dim + column + j]);  // from the L2 cache
        sum_over_warps(sums);
        if (warp == 0 && column < dim) store(grad_table + row * dim + column, sums);
    }
}
