// A small kernel of cumsum for float32: correct as NONE, with one mistake for each other value of Fault.
enum Fault { NONE, STORE_UNMASKED, OFFSETS_IN_32_BITS, CARRY_LOST, LAST_COLUMN_DROPPED, WARPS_NOT_ADDED, OWN_WARP_ADDED };

__global__ void cumsum_kernel(const float* x, const long long* offsets, float* output, long long n,
                              long long row_stride, bool exclusive, bool reverse, long long fault) {
    // One block owns a segment of a row, one tile after another, a thread an element of each.
    __shared__ float parts[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const long long begin = offsets[blockIdx.y], length = offsets[blockIdx.y + 1] - begin;
    const long long row = fault == OFFSETS_IN_32_BITS ? (int)blockIdx.x * (int)row_stride : blockIdx.x * row_stride;
    float carry = 0;
    for (long long first = 0; first < length; first += blockDim.x) {
        const long long place = first + threadIdx.x, column = begin + (reverse ? length - 1 - place : place);
        const float term = place < length ? x[row + column] : 0;
        float sum = term;
        for (int lanes = 1; lanes < 32; lanes *= 2) {
            const float below = __shfl_up_sync(~0u, sum, lanes);
            if (lane >= lanes) sum += below;
        }
        if (lane == 31) parts[warp] = sum;
        __syncthreads();
        float before = __shfl_up_sync(~0u, sum, 1), total = 0;
        if (lane == 0) before = 0;
        for (int other = 0; other < blockDim.x / 32; other++) {
            if (other < warp + (fault == OWN_WARP_ADDED) && fault != WARPS_NOT_ADDED) before += parts[other];
            total += parts[other];
        }
        __syncthreads();
        if ((place < length || fault == STORE_UNMASKED) && (place < n - 1 || fault != LAST_COLUMN_DROPPED))
            output[blockIdx.x * n + column] = carry + (exclusive ? before : before + term);
        if (fault != CARRY_LOST) carry += total;
    }
}
