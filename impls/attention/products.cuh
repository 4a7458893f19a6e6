// Products of a warp's 16 rows with a tile, both in shared memory: on tensor cores for half types and parts of floats, else
// by each thread.
#pragma once
#include "vectors.cuh"

// What tensor cores multiply: of a float three bfloat16, the first, plus the second / 128, plus the third / 128^2. So
// scaled, none of them underflows before the float does. Other types are left as they are.
template <class T> struct PartOf { using type = T; };
template <> struct PartOf<float> { using type = __nv_bfloat16; };
template <class T> using Part = typename PartOf<T>::type;
template <class T> constexpr int PARTS = sizeof(T) == 4 ? 3 : 1;
// The elements of a line: all first parts of a row, then all second and third ones, and some that spread the banks.
template <class T> __device__ constexpr int line_of(int width) { return PARTS<T> * width + 16 / int(sizeof(Part<T>)); }

// Stores an element, whose parts lie `apart`.
template <class T> __device__ void store(Part<T>* to, long long apart, Compute<T> x) {
    if constexpr (PARTS<T> == 3) {
        // The first part of a finite number is finite.
        const unsigned bits = __float_as_uint(x), rounded = (bits & 0x7fffffff) < 0x7f7f8000 ? bits + 0x8000 : bits;
        const float first = __uint_as_float(rounded & 0xffff0000), rest = (x - first) * 128;
        const __nv_bfloat16 second(rest);
        to[0] = __nv_bfloat16(first);
        to[apart] = second;
        to[2 * apart] = __nv_bfloat16((rest - float(second)) * 128);
    } else {
        *to = T(x);
    }
}

// The next multiple of 16, which tensor cores multiply at a time.
__device__ inline int round_up_16(int n) { return (n + 15) / 16 * 16; }

// The row and the column of a thread's element e of its part n of a warp's sums, as mma.sync has them.
__device__ inline int row_of(int e) { return int(threadIdx.x) % 32 / 4 + e / 2 * 8; }
__device__ inline int column_of(int n, int e) { return n * 8 + int(threadIdx.x) % 4 * 2 + e % 2; }

// Copies 16 bytes to shared memory, or zeros. Before they are read, the thread waits for its groups of copies but the last
// PENDING.
__device__ inline void copy_async(void* to, const void* from, bool zeros) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 ::"r"(unsigned(__cvta_generic_to_shared(to))), "l"(from), "r"(zeros ? 0 : 16) : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> __device__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Copies rows [0, count) of a matrix to lines of `line` elements, with zeros past its `rows` and `columns`, up to `width`:
// each of its PARTS, which lie `apart`.
template <int PARTS = 1, class E>
__device__ void load_tile(E* to, int line, int count, int width, const E* from, long long stride, long long rows,
                          long long columns, bool vectors, long long apart = 0) {
    constexpr int WIDTH = 16 / sizeof(E);
    if (vectors) {
        const int across = width / WIDTH;
        for (int i = threadIdx.x; i < count * across; i += blockDim.x) {
            const int row = i / across, column = i % across * WIDTH;
            const bool zeros = row >= rows || column >= columns;
            const E* const first = zeros ? from : from + row * stride + column;
#pragma unroll
            for (int p = 0; p < PARTS; p++) copy_async(to + row * line + p * width + column, first + p * apart, zeros);
        }
        return;
    }
    for (int i = threadIdx.x; i < count * width; i += blockDim.x) {
        const int row = i / width, column = i % width;
        to[row * line + column] = row < rows && column < columns ? from[row * stride + column] : E(0.0f);
    }
}

__device__ inline void load_matrices(unsigned (&words)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(unsigned(__cvta_generic_to_shared(row)))
                 : "memory");
}
__device__ inline void load_matrices_transposed(unsigned (&words)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(unsigned(__cvta_generic_to_shared(row)))
                 : "memory");
}
__device__ inline void multiply(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, __half) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ inline void multiply(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, __nv_bfloat16) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// A warp's sums [16, COLUMNS], spread over its lanes as mma.sync has them.
template <class T, int COLUMNS> struct Sums {
    using C = Compute<T>;
    C at[COLUMNS / 8][4] = {};

    __device__ void scale(const C (&factors)[2]) {
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) at[n][e] *= factors[e / 2];
    }

    // Adds a b^T if TRANSPOSED, else a b, in the first `columns` columns, a multiple of 16. a is [16, terms], in lines of
    // a_line elements; b is [columns, terms] or [terms, columns]. There is a multiple of 16 terms.
    template <bool TRANSPOSED, class E>
    __device__ void add(const E* a, int a_line, const E* b, int b_line, int terms, int columns = COLUMNS) {
        if constexpr (sizeof(E) == 2 && PARTS<T> == 3) {
            // Products are summed by their scale. Those below 2^-25 of the whole are left out. The sums of each call begin at
            // 0, because tensor cores round towards it.
            constexpr int GROUP = COLUMNS / 8 < 4 ? COLUMNS / 8 : 4;
            const int lane = threadIdx.x % 32, row = lane % 16, half = lane / 16 * 8;
            const int of_b = TRANSPOSED ? (lane / 16 * 8 + lane % 8) * b_line + lane / 8 % 2 * 8 : row * b_line + half;
            const int a_width = (a_line - 8) / 3, b_width = (b_line - 8) / 3;
#pragma unroll
            for (int first = 0; first < COLUMNS / 8; first += GROUP) {
                if (first * 8 >= columns) break;
                float parts[3][GROUP][4] = {};
#pragma unroll 1
                for (int term = 0; term < terms; term += 16) {
                    unsigned x[3][4];
#pragma unroll
                    for (int i = 0; i < 3; i++) load_matrices(x[i], a + row * a_line + i * a_width + term + half);
#pragma unroll
                    for (int n = 0; n < GROUP; n += 2) {
                        if ((first + n) * 8 >= columns) break;
                        unsigned y[3][4];
#pragma unroll
                        for (int j = 0; j < 3; j++) {
                            const E* const from = b + of_b + j * b_width;
                            if constexpr (TRANSPOSED) load_matrices(y[j], from + (first + n) * 8 * b_line + term);
                            else load_matrices_transposed(y[j], from + term * b_line + (first + n) * 8);
                        }
#pragma unroll
                        for (int i = 0; i < 3; i++)
#pragma unroll
                            for (int j = 2 - i; j >= 0; j--) {
                                multiply(parts[i + j][n], x[i], y[j][0], y[j][1], E());
                                multiply(parts[i + j][n + 1], x[i], y[j][2], y[j][3], E());
                            }
                    }
                }
#pragma unroll
                for (int n = 0; n < GROUP; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        const float small = (parts[1][n][e] + parts[2][n][e] / 128) / 128;
                        // Infinities have no rest.
                        at[first + n][e] += parts[0][n][e] + (small == small ? small : 0);
                    }
            }
        } else if constexpr (sizeof(E) == 2) {
            const int lane = threadIdx.x % 32, row = lane % 16, half = lane / 16 * 8;
            const int of_b = TRANSPOSED ? (lane / 16 * 8 + lane % 8) * b_line + lane / 8 % 2 * 8 : row * b_line + half;
#pragma unroll 2
            for (int term = 0; term < terms; term += 16) {
                unsigned x[4];
                load_matrices(x, a + row * a_line + term + half);
#pragma unroll
                for (int n = 0; n < COLUMNS / 8; n += 2) {
                    if (n * 8 >= columns) break;
                    unsigned y[4];
                    if constexpr (TRANSPOSED) load_matrices(y, b + of_b + n * 8 * b_line + term);
                    else load_matrices_transposed(y, b + of_b + term * b_line + n * 8);
                    multiply(at[n], x, y[0], y[1], T());
                    multiply(at[n + 1], x, y[2], y[3], T());
                }
            }
        } else {
            for (int term = 0; term < terms; term++) {
                const C x[2] = {a[row_of(0) * a_line + term], a[row_of(2) * a_line + term]};
#pragma unroll
                for (int n = 0; n < COLUMNS / 8; n++) {
                    if (n * 8 >= columns) break;
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const int column = column_of(n, e);
                        const C y = TRANSPOSED ? b[column * b_line + term] : b[term * b_line + column];
                        at[n][e] += x[0] * y;
                        at[n][e + 2] += x[1] * y;
                    }
                }
            }
        }
    }
};
