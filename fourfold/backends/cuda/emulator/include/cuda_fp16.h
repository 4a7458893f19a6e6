// NVIDIA's header, plus the functions that it offers on the device only. They are templates, so a function that some
// version of the header does offer to the host takes precedence.
#pragma once
// NVIDIA declares its host functions `static __attribute__((unused))`. For why to inline them see device.h.
#define unused always_inline
#include_next <cuda_fp16.h>
#undef unused

namespace fourfold {
template <class T> struct HalfType;  // for each 16-bit type: its pair type, and its conversions to and from float
template <> struct HalfType<__half> {
    using Pair = __half2;
    static float up(__half v) { return __half2float(v); }
    static __half down(float v) { return __float2half(v); }
    static Pair pair(__half a, __half b) { return __halves2half2(a, b); }
};
template <class T> struct HalfPair;
template <> struct HalfPair<__half2> { using Half = __half; };

template <class T, class F> T via_float(T a, F f) { return HalfType<T>::down(f(HalfType<T>::up(a))); }
template <class P, class F, class H = typename HalfPair<P>::Half> P each(P a, F f) { return HalfType<H>::pair(f(a.x), f(a.y)); }
}  // namespace fourfold

template <class T, class = typename fourfold::HalfType<T>::Pair> FOURFOLD_INLINE T __hfma(T a, T b, T c) {
    using H = fourfold::HalfType<T>;
    return H::down(std::fma(H::up(a), H::up(b), H::up(c)));
}
template <class P, class T = typename fourfold::HalfPair<P>::Half> FOURFOLD_INLINE P __hfma2(P a, P b, P c) {
    return fourfold::HalfType<T>::pair(__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y));
}
#define FOURFOLD_HALF_FUNCTION(name, expression)                                                   \
    template <class T, class = typename fourfold::HalfType<T>::Pair> FOURFOLD_INLINE T h##name(T a) { \
        return fourfold::via_float(a, [](float x) -> float { return expression; });                \
    }                                                                                              \
    template <class P, class T = typename fourfold::HalfPair<P>::Half> FOURFOLD_INLINE P h2##name(P a) { \
        return fourfold::each(a, [](T x) { return h##name(x); });                                  \
    }
FOURFOLD_HALF_FUNCTION(exp, std::exp(x))
FOURFOLD_HALF_FUNCTION(exp2, std::exp2(x))
FOURFOLD_HALF_FUNCTION(exp10, std::pow(10.0f, x))
FOURFOLD_HALF_FUNCTION(log, std::log(x))
FOURFOLD_HALF_FUNCTION(log2, std::log2(x))
FOURFOLD_HALF_FUNCTION(log10, std::log10(x))
FOURFOLD_HALF_FUNCTION(sin, std::sin(x))
FOURFOLD_HALF_FUNCTION(cos, std::cos(x))
FOURFOLD_HALF_FUNCTION(tanh, std::tanh(x))
FOURFOLD_HALF_FUNCTION(sqrt, std::sqrt(x))
FOURFOLD_HALF_FUNCTION(rsqrt, 1.0f / std::sqrt(x))
FOURFOLD_HALF_FUNCTION(rcp, 1.0f / x)
FOURFOLD_HALF_FUNCTION(floor, std::floor(x))
FOURFOLD_HALF_FUNCTION(ceil, std::ceil(x))
FOURFOLD_HALF_FUNCTION(rint, std::nearbyint(x))
FOURFOLD_HALF_FUNCTION(trunc, std::trunc(x))

FOURFOLD_INLINE __half atomicAdd(__half* address, __half v) {
    return fourfold::atomic_update(address, [v](__half old) { return __float2half(__half2float(old) + __half2float(v)); });
}
FOURFOLD_INLINE __half2 atomicAdd(__half2* address, __half2 v) {
    return fourfold::atomic_update(address, [v](__half2 old) {
        return __halves2half2(__float2half(__half2float(old.x) + __half2float(v.x)), __float2half(__half2float(old.y) + __half2float(v.y)));
    });
}
