// A small kernel of topk for float32: correct as NONE, with one mistake for each other value of Fault.
enum Fault {
    NONE, STORE_UNMASKED, LAST_BLOCK_DROPPED, OFFSETS_IN_32_BITS, TIES_LEFT_OUT, NAN_NEVER_CHOSEN, SIGN_OF_NAN_COUNTS,
    BEST_BEGINS_AT_ZERO, THE_SAME_NAN_EVERY_TIME
};

// Whether place i comes before place j of a row: by the number, NaN above all of them, then by the place.
__device__ bool comes_before(const float* row, long long i, long long j, bool largest, long long fault) {
    const float a = row[i], b = row[j];
    if (fault == SIGN_OF_NAN_COUNTS && (a != a || b != b)) {
        const int p = __float_as_int(a), q = __float_as_int(b);
        const int key = p < 0 ? ~p ^ 0x80000000 : p, other = q < 0 ? ~q ^ 0x80000000 : q;
        if (key != other) return largest ? key > other : key < other;
    }
    if (a != a || b != b) return (a != a) == (b != b) ? i < j : (a != a) == largest;
    return a == b ? i < j : largest ? a > b : a < b;
}

__global__ void topk_kernel(const float* x, float* values, long long* indices, long long rows, long long n,
                            long long row_stride, long long k, bool largest, long long fault) {
    // One thread owns one row, and looks through it k times.
    const long long row = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (row >= rows && fault != STORE_UNMASKED) return;
    if (fault == LAST_BLOCK_DROPPED && rows > blockDim.x && blockIdx.x == gridDim.x - 1) return;
    const float* from = x + (fault == OFFSETS_IN_32_BITS ? (int)row * (int)row_stride : row * row_stride);
    for (long long place = 0, last = -1; place < k; place++) {
        long long best = -1;
        for (long long i = 0; i < n; i++) {
            if (fault == NAN_NEVER_CHOSEN && from[i] != from[i]) continue;
            if (fault == BEST_BEGINS_AT_ZERO && largest && best < 0 && from[i] <= 0) continue;
            if (fault == TIES_LEFT_OUT && last >= 0 && from[i] == from[last]) continue;
            const bool again = fault == THE_SAME_NAN_EVERY_TIME && from[i] != from[i];
            if (!again && last >= 0 && !comes_before(from, last, i, largest, fault)) continue;
            if (best < 0 || comes_before(from, i, best, largest, fault)) best = i;
        }
        values[row * k + place] = best < 0 ? 0.0f : from[best];
        indices[row * k + place] = best;
        if (best >= 0) last = best;
    }
}
