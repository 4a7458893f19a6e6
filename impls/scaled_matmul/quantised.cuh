#pragma once
#include <cuda_fp16.h>

// The types of quantised numbers.
constexpr int E4M3 = 0, E5M2 = 1, INT8 = 2, EITHER_FLOAT8 = 3;

// Two numbers, the low bytes of a word, as two of float16, which holds them all.
template <int TYPE> __device__ inline unsigned decoded(unsigned two) {
    // The bits of a float8_e5m2 number are the upper ones of a float16.
    const unsigned spread = (two & 0xffu) << 8 | (two & 0xff00u) << 16;
    if constexpr (TYPE == E5M2) return spread;
    unsigned pair;
    if constexpr (TYPE == INT8) {
        // With 128 added, a number is the lower bits of a float16 from 1024 on, which are 1 apart.
        const unsigned bits = spread >> 8 ^ 0x64806480u;
        __half2 numbers;
        memcpy(&numbers, &bits, sizeof numbers);
        numbers = __hsub2(numbers, __half2half2(__half(1152.0f)));
        memcpy(&pair, &numbers, sizeof pair);
        return pair;
    }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"((unsigned short)two));
#else
    // As the upper bits of a float16 a number is 2^-8 of itself, as its exponent is biased by 7 and not by 15.
    const unsigned magnitude = (spread & 0x7f007f00u) >> 1;
    const unsigned bits = magnitude | (spread & 0x80008000u);
    __half2 numbers;
    memcpy(&numbers, &bits, sizeof numbers);
    numbers = __hmul2(numbers, __half2half2(__half(256.0f)));
    memcpy(&pair, &numbers, sizeof pair);
    // float16 takes the bits of NaN, 0x3f80, for a number.
    const unsigned nan = (magnitude + 0x00800080u) & 0x40004000u;
    pair |= (nan << 1) - (nan >> 5);
#endif
    return pair;
}
