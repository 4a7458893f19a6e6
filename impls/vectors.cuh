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
};
