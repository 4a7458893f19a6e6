// What kernels share that move their data in vectors of 16 bytes.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// Half types are computed in float.
template <class T> struct ComputeOf { using type = float; };
template <> struct ComputeOf<double> { using type = double; };
template <class T> using Compute = typename ComputeOf<T>::type;

// WIDTH neighbours that one instruction loads or stores: 16 bytes where data are aligned to that, else one element.
template <class T, int WIDTH> struct __align__(sizeof(T) * WIDTH) Vector {
    T at[WIDTH];

    // As uint4: the compiler takes some accesses to arrays apart into their elements.
    __device__ static Vector load(const T* from) {
        Vector vector;
        if constexpr (WIDTH == 1) {
            vector.at[0] = *from;
        } else {
            const uint4 bits = *reinterpret_cast<const uint4*>(from);
            memcpy(&vector, &bits, sizeof bits);
        }
        return vector;
    }
    __device__ void store(T* to) const {
        if constexpr (WIDTH == 1) {
            *to = at[0];
        } else {
            uint4 bits;
            memcpy(&bits, this, sizeof bits);
            *reinterpret_cast<uint4*>(to) = bits;
        }
    }
};
