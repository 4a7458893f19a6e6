// The exponential of a difference from a maximum: a number of at most 0, or NaN.
#pragma once

// Its error is at most 2 + 1.17 |x| ulp, no more than the running error of x itself. It is __expf without the
// instructions for subnormal results, which are 0 here.
__device__ inline float exponential(float x) {
#ifdef CUDA_ON_CPU
    return __expf(x);
#else
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * 1.4426950408889634f));
    return power;
#endif
}
__device__ inline double exponential(double x) { return exp(x); }
