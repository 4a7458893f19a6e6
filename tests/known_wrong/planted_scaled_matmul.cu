// A small kernel of scaled_matmul for float32: correct as NONE, with one mistake for each other value of Fault.
enum Fault {
    NONE, STORE_UNMASKED, OFFSETS_IN_32_BITS, TAIL_OF_TERMS_DROPPED, SCALES_BY_LAUNCH_COORDINATES,
    EACH_HALF_BEGINS_AT_THE_FIRST_SCALE, BLOCKS_OF_EQUAL_WIDTH, E5M2_MISREAD, LAST_BLOCK_DROPPED
};

constexpr int BLOCK = 128;

// A number of 4 bits of exponent and 3 of mantissa, or of 5 and 2.
__device__ float decoded(unsigned bits, long long fault) {
    const int width = fault == E5M2_MISREAD ? 2 : 3, bias = fault == E5M2_MISREAD ? 15 : 7;
    const int exponent = (bits & 0x7f) >> width, mantissa = bits & ((1 << width) - 1);
    if ((bits & 0x7f) == 0x7f) return __int_as_float(0x7fc00000);
    const float size = exponent ? ldexpf(float((1 << width) + mantissa), exponent - bias - width)
                                : ldexpf(float(mantissa), 1 - bias - width);
    return bits & 0x80 ? -size : size;
}

__global__ void scaled_matmul_kernel(const unsigned char* a, const unsigned char* b, const float* scale_a,
                                     const float* scale_b, float* c, long long m, long long n, long long k,
                                     long long a_row_stride, long long a_column_stride, long long b_row_stride,
                                     long long b_column_stride, long long fault) {
    // One thread owns one element of the result.
    const long long at = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (at >= m * n && fault != STORE_UNMASKED) return;
    if (fault == LAST_BLOCK_DROPPED && gridDim.x > 1 && blockIdx.x == gridDim.x - 1) return;
    const long long row = at / n, column = at % n, blocks = (k + BLOCK - 1) / BLOCK;
    const long long of_columns = (n + BLOCK - 1) / BLOCK;
    const unsigned char* left =
        a + (fault == OFFSETS_IN_32_BITS ? (int)row * (int)a_row_stride : row * a_row_stride);
    long long of_row = row, of_column = column / BLOCK;
    if (fault == SCALES_BY_LAUNCH_COORDINATES) of_row = blockIdx.x % m;
    if (fault == BLOCKS_OF_EQUAL_WIDTH) of_column = column / ((n + of_columns - 1) / of_columns);
    if (fault == TAIL_OF_TERMS_DROPPED && k > BLOCK) k = k / BLOCK * BLOCK;
    float total = 0;
    for (long long p = 0; p * BLOCK < k; p++) {
        float sum = 0;
        for (long long q = p * BLOCK; q < k && q < (p + 1) * BLOCK; q++)
            sum += decoded(left[q * a_column_stride], fault) *
                   decoded(b[column * b_row_stride + q * b_column_stride], fault);
        const long long of_terms = fault == EACH_HALF_BEGINS_AT_THE_FIRST_SCALE ? p % ((blocks + 1) / 2) : p;
        total += sum * (scale_a[of_row * blocks + of_terms] * scale_b[of_column * blocks + of_terms]);
    }
    c[at] = total;
}
