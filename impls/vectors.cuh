// Helpers for kernels that move their data in 16-byte vectors.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// Half types are computed in float.
template <class T> struct ComputeOf { using type = float; };
template <> struct ComputeOf<double> { using type = double; };
template <class T> using Compute = typename ComputeOf<T>::type;

__device__ inline float2 unpacked(unsigned word, __nv_bfloat16) {
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
}
__device__ inline float2 unpacked(unsigned word, __half) {
    __half2 pair;
    memcpy(&pair, &word, sizeof pair);
    return __half22float2(pair);
}

// The same value, which the compiler computes here and once. It would else compute it where it is used, for each use. A
// pointer is one to global memory.
template <class T> __device__ inline T* computed_here(T* pointer) {
#ifdef CUDA_ON_CPU
    return pointer;
#else
    size_t address = __cvta_generic_to_global(pointer);
    asm("" : "+l"(address));
    return static_cast<T*>(__cvta_global_to_generic(address));
#endif
}
__device__ inline float computed_here(float number) {
#ifndef CUDA_ON_CPU
    asm("" : "+f"(number));
#endif
    return number;
}
__device__ inline double computed_here(double number) {
#ifndef CUDA_ON_CPU
    asm("" : "+d"(number));
#endif
    return number;
}

// Combines numbers in pairs, and the results in pairs, so that few operations wait for one another.
template <int COUNT, class C, class Combine> __device__ inline C in_pairs(const C (&numbers)[COUNT], Combine combine) {
    if constexpr (COUNT == 1) {
        return numbers[0];
    } else {
        C half[COUNT / 2];
#pragma unroll
        for (int j = 0; j < COUNT / 2; j++) half[j] = combine(numbers[2 * j], numbers[2 * j + 1]);
        return in_pairs(half, combine);
    }
}
template <int COUNT, class C> __device__ inline C sum_in_pairs(const C (&numbers)[COUNT]) {
    return in_pairs(numbers, [](C a, C b) { return a + b; });
}

// What one instruction moves, by its bytes.
template <int BYTES> struct WordOf { using type = uint4; };
template <> struct WordOf<8> { using type = uint2; };

// WIDTH neighbours that one instruction loads or stores: 16 bytes, or 8, if the data are aligned to them, else one element.
template <class T, int WIDTH> struct __align__(sizeof(T) * WIDTH) Vector {
    T at[WIDTH];
    using Word = typename WordOf<sizeof(T) * WIDTH>::type;

    // Loads a word, because the compiler may split an access to an array into elements and not merge them all again.
    __device__ static Vector load(const T* from) {
        Vector vector;
        if constexpr (WIDTH == 1) {
            vector.at[0] = *from;
        } else {
            const Word bits = *reinterpret_cast<const Word*>(from);
            memcpy(&vector, &bits, sizeof bits);
        }
        return vector;
    }
    __device__ void store(T* to) const {
        if constexpr (WIDTH == 1) *to = at[0];
        else *reinterpret_cast<Word*>(to) = bits();
    }
    // Stores to global memory only. The instruction is not split, and its data leave the cache first.
    __device__ void store_streaming(T* to) const {
        if constexpr (WIDTH == 1) *to = at[0];
        else __stcs(reinterpret_cast<Word*>(to), bits());
    }

    // Splits whole words by hand. The compiler would split them right after the load, and so wait for it.
    __device__ void unpack(Compute<T> (&to)[WIDTH]) const {
        if constexpr (sizeof(T) == 2 && WIDTH == 8) {
            const uint4 vector = bits();
            const unsigned words[] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float2 pair = unpacked(words[i], T());
                to[2 * i] = pair.x;
                to[2 * i + 1] = pair.y;
            }
        } else {
#pragma unroll
            for (int j = 0; j < WIDTH; j++) to[j] = Compute<T>(at[j]);
        }
    }

    __device__ Word bits() const {
        Word bits;
        memcpy(&bits, this, sizeof bits);
        return bits;
    }

    // Makes the compiler unpack a vector of half types again, instead of keeping numbers of twice as many registers.
    __device__ void forget_unpacked() {
#ifndef CUDA_ON_CPU
        if constexpr (sizeof(T) == 2 && WIDTH == 8) {
            uint4 vector = bits();
            asm("" : "+r"(vector.x), "+r"(vector.y), "+r"(vector.z), "+r"(vector.w));
            memcpy(this, &vector, sizeof vector);
        }
#endif
    }
};
