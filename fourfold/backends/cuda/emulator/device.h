// CUDA C++'s device functions and keywords for the host's C++ compiler. Functions at which threads meet take a hidden
// last argument, the place of the call, for fault reports.
#pragma once
// The C headers, for their names in the global namespace with C++'s overloads: exp(float) returns a float, as in CUDA.
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <limits>
#include <type_traits>
#include <utility>

#include <math_constants.h>
#include <vector_functions.h>

#include "runtime.h"

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __managed__
#undef __forceinline__
#undef __noinline__
#undef __launch_bounds__
#undef __grid_constant__
#undef __cluster_dims__
#undef __align__
#undef assert
#define __global__
#define __host__
#ifdef FOURFOLD_CHECKED
// The compiler does not instrument the read of a struct that is passed by value. Inlining removes the call.
#define __device__ __attribute__((always_inline))
#else
#define __device__
#endif
// thread_local is the only storage class that is static inside a function and may also follow `extern`.
#define __shared__ thread_local
#define __constant__ static
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define CUDA_ON_CPU 1

#define FOURFOLD_SITE ::fourfold::Site site = ::fourfold::call_site()
#define FOURFOLD_UNCHECKED __attribute__((no_sanitize("thread")))
// For functions that access the kernel's memory: inlined, their accesses are reported at a line of the kernel.
#define FOURFOLD_INLINE __attribute__((always_inline)) inline

#define threadIdx (::fourfold::here.thread)
#define blockIdx (::fourfold::here.block)
#define blockDim (::fourfold::here.block_dim)
#define gridDim (::fourfold::here.grid_dim)
constexpr int warpSize = 32;

namespace fourfold {

// As a default argument, it gives the place of the call.
constexpr Site call_site(const char* file = __builtin_FILE(), unsigned line = __builtin_LINE()) { return {file, line}; }

// ---- a kernel in the launcher's form: a function of an array of pointers, and the types of its parameters

template <class T> const char* spelled() { return __PRETTY_FUNCTION__; }

template <auto Kernel> struct Call;
template <class... P, void (*Kernel)(P...)> struct Call<Kernel> {
    // An argument of up to 8 bytes is passed as it is, a larger one by its address.
    template <class T> FOURFOLD_UNCHECKED static T& argument(void* place) {
        if constexpr (sizeof(T) > 8) return **static_cast<T**>(place);
        else return *static_cast<T*>(place);
    }
    template <size_t... I> FOURFOLD_UNCHECKED static void apply(void** arguments, std::index_sequence<I...>) {
        Kernel(argument<std::remove_reference_t<P>>(arguments[I])...);
    }
    FOURFOLD_UNCHECKED static void invoke(void** arguments) { apply(arguments, std::index_sequence_for<P...>{}); }

    // Writes one line per parameter: its kind, the size of the value or the pointee, and its type's name.
    template <class T> static int describe(char* out, size_t room) {
        using Pointee = std::remove_pointer_t<T>;
        size_t size = 0;
        char kind = 's';
        if constexpr (std::is_pointer_v<T>) {
            kind = std::is_const_v<Pointee> ? 'p' : 'P';
            if constexpr (!std::is_void_v<Pointee>) size = sizeof(Pointee);
        } else {
            if constexpr (std::is_same_v<T, bool>) kind = 'b';
            else if constexpr (std::is_integral_v<T>) kind = 'i';
            else if constexpr (std::is_floating_point_v<T>) kind = 'f';
            size = sizeof(T);
        }
        return snprintf(out, room, "%c %zu %s\n", kind, size, spelled<T>());
    }
    static const char* signature() {
        static char text[512 * (sizeof...(P) + 1)];
        char* out = text;
        ((out += describe<P>(out, 512)), ...);
        return text;
    }
};
#define FOURFOLD_KERNEL(...) {::fourfold::Call<__VA_ARGS__>::invoke, ::fourfold::Call<__VA_ARGS__>::signature}

// ---- warp exchanges

// A value from a lane outside the mask is undefined on a GPU. Here all its bits are 1, a NaN in every float type.
template <class T> FOURFOLD_UNCHECKED T undefined_value() {
    T v;
    memset(static_cast<void*>(&v), 0xff, sizeof v);
    return v;
}

enum class Shuffle { index, up, down, exclusive_or };
template <class T> struct Lane {
    T value, result;
    int argument, width;
};
template <class T, Shuffle Kind> FOURFOLD_UNCHECKED void shuffle_lanes(void** slots, unsigned mask) {
    for (int lane = 0; lane < 32; lane++) {
        if (!(mask >> lane & 1)) continue;
        auto* mine = static_cast<Lane<T>*>(slots[lane]);
        int first = lane & ~(mine->width - 1), end = first + mine->width, from = lane;
        if (Kind == Shuffle::index) from = first | (mine->argument & (mine->width - 1));
        if (Kind == Shuffle::up && lane - mine->argument >= first) from = lane - mine->argument;
        if (Kind == Shuffle::down && lane + mine->argument < end) from = lane + mine->argument;
        if (Kind == Shuffle::exclusive_or && (lane ^ mine->argument) < end) from = lane ^ mine->argument;
        mine->result = mask >> from & 1 ? static_cast<Lane<T>*>(slots[from])->value : undefined_value<T>();
    }
}
// Scalars are passed by value and structs by reference, for the reason given at __device__.
template <class T> using Passed = std::conditional_t<std::is_scalar_v<T>, T, const T&>;

template <Shuffle Kind, class T> FOURFOLD_UNCHECKED T shuffle(unsigned mask, Passed<T> value, int argument, int width, Site site) {
    static_assert(std::is_trivially_copyable_v<T>);
    if (Kind == Shuffle::up || Kind == Shuffle::down) argument = argument < 0 || argument > 32 ? 32 : argument;
    Lane<T> lane{value, value, argument, width};
    exchange(mask, &lane, shuffle_lanes<T, Kind>, site);
    return lane.result;
}

template <class T, class F> FOURFOLD_UNCHECKED void reduce_lanes(void** slots, unsigned mask) {
    T total{};
    bool first = true;
    for (int lane = 0; lane < 32; lane++) {
        if (!(mask >> lane & 1)) continue;
        T value = static_cast<Lane<T>*>(slots[lane])->value;
        total = first ? value : F{}(total, value);
        first = false;
    }
    for (int lane = 0; lane < 32; lane++)
        if (mask >> lane & 1) static_cast<Lane<T>*>(slots[lane])->result = total;
}
template <class F, class T> FOURFOLD_UNCHECKED T reduce(unsigned mask, T value, Site site) {
    Lane<T> lane{value, value, 0, 32};
    exchange(mask, &lane, reduce_lanes<T, F>, site);
    return lane.result;
}
// Integer sums wrap, as on a GPU.
struct Add { template <class T> FOURFOLD_UNCHECKED T operator()(T a, T b) const { return T(std::make_unsigned_t<T>(a) + std::make_unsigned_t<T>(b)); } };
struct Min { template <class T> FOURFOLD_UNCHECKED T operator()(T a, T b) const { return b < a ? b : a; } };
struct Max { template <class T> FOURFOLD_UNCHECKED T operator()(T a, T b) const { return a < b ? b : a; } };
struct And { template <class T> FOURFOLD_UNCHECKED T operator()(T a, T b) const { return a & b; } };
struct Or { template <class T> FOURFOLD_UNCHECKED T operator()(T a, T b) const { return a | b; } };
struct Xor { template <class T> FOURFOLD_UNCHECKED T operator()(T a, T b) const { return a ^ b; } };

struct Match { template <class T> FOURFOLD_UNCHECKED static void lanes(void** slots, unsigned mask) {
    for (int i = 0; i < 32; i++) {
        if (!(mask >> i & 1)) continue;
        auto* mine = static_cast<Lane<T>*>(slots[i]);
        unsigned same = 0;
        for (int j = 0; j < 32; j++)
            if ((mask >> j & 1) && static_cast<Lane<T>*>(slots[j])->value == mine->value) same |= 1u << j;
        mine->argument = int(same);
    }
} };

// ---- atomics. Only one thread runs at a time, so read, compute and write is atomic.

template <class T, class F> FOURFOLD_UNCHECKED __attribute__((noinline)) T atomic_update(T* address, F change) {
    before_atomic(address, sizeof(T), __builtin_return_address(0));
    T old = *address;
    *address = change(old);
    return old;
}
template <class T> T wrapping_sum(T a, T b) {
    if constexpr (std::is_integral_v<T>) return Add{}(a, b);
    else return T(a + b);
}

}  // namespace fourfold

// ---- barriers, fences, warp intrinsics

inline void __syncthreads(FOURFOLD_SITE) { fourfold::barrier(site); }
inline int __syncthreads_count(int p, FOURFOLD_SITE) { return fourfold::barrier_vote(p, fourfold::Vote::count, site); }
inline int __syncthreads_and(int p, FOURFOLD_SITE) { return fourfold::barrier_vote(p, fourfold::Vote::all, site); }
inline int __syncthreads_or(int p, FOURFOLD_SITE) { return fourfold::barrier_vote(p, fourfold::Vote::any, site); }
inline void __syncwarp(unsigned mask = ~0u, FOURFOLD_SITE) { fourfold::sync_warp(mask, site); }
inline unsigned __activemask(FOURFOLD_SITE) { return fourfold::active_mask(site); }
inline void __threadfence_block() { fourfold::memory_fence(fourfold::Scope::block); }
inline void __threadfence() { fourfold::memory_fence(fourfold::Scope::device); }
inline void __threadfence_system() { fourfold::memory_fence(fourfold::Scope::device); }
inline void __nanosleep(unsigned) {}

template <class T> FOURFOLD_INLINE T __shfl_sync(unsigned mask, T v, int from, int width = 32, FOURFOLD_SITE) {
    return fourfold::shuffle<fourfold::Shuffle::index, T>(mask, v, from, width, site);
}
template <class T> FOURFOLD_INLINE T __shfl_up_sync(unsigned mask, T v, unsigned delta, int width = 32, FOURFOLD_SITE) {
    return fourfold::shuffle<fourfold::Shuffle::up, T>(mask, v, int(delta), width, site);
}
template <class T> FOURFOLD_INLINE T __shfl_down_sync(unsigned mask, T v, unsigned delta, int width = 32, FOURFOLD_SITE) {
    return fourfold::shuffle<fourfold::Shuffle::down, T>(mask, v, int(delta), width, site);
}
template <class T> FOURFOLD_INLINE T __shfl_xor_sync(unsigned mask, T v, int lanes, int width = 32, FOURFOLD_SITE) {
    return fourfold::shuffle<fourfold::Shuffle::exclusive_or, T>(mask, v, lanes, width, site);
}
template <class T> FOURFOLD_INLINE T __reduce_add_sync(unsigned mask, T v, FOURFOLD_SITE) { return fourfold::reduce<fourfold::Add>(mask, v, site); }
template <class T> FOURFOLD_INLINE T __reduce_min_sync(unsigned mask, T v, FOURFOLD_SITE) { return fourfold::reduce<fourfold::Min>(mask, v, site); }
template <class T> FOURFOLD_INLINE T __reduce_max_sync(unsigned mask, T v, FOURFOLD_SITE) { return fourfold::reduce<fourfold::Max>(mask, v, site); }
template <class T> FOURFOLD_INLINE T __reduce_and_sync(unsigned mask, T v, FOURFOLD_SITE) { return fourfold::reduce<fourfold::And>(mask, v, site); }
template <class T> FOURFOLD_INLINE T __reduce_or_sync(unsigned mask, T v, FOURFOLD_SITE) { return fourfold::reduce<fourfold::Or>(mask, v, site); }
template <class T> FOURFOLD_INLINE T __reduce_xor_sync(unsigned mask, T v, FOURFOLD_SITE) { return fourfold::reduce<fourfold::Xor>(mask, v, site); }
inline unsigned __ballot_sync(unsigned mask, int predicate, FOURFOLD_SITE) {
    return fourfold::reduce<fourfold::Or>(mask, predicate ? 1u << fourfold::here.lane : 0u, site);
}
inline int __any_sync(unsigned mask, int predicate, FOURFOLD_SITE) { return __ballot_sync(mask, predicate, site) != 0; }
inline int __all_sync(unsigned mask, int predicate, FOURFOLD_SITE) { return __ballot_sync(mask, !predicate, site) == 0; }
template <class T> unsigned __match_any_sync(unsigned mask, T v, FOURFOLD_SITE) {
    fourfold::Lane<T> lane{v, v, 0, 32};
    fourfold::exchange(mask, &lane, fourfold::Match::lanes<T>, site);
    return unsigned(lane.argument);
}

// ---- atomics. The second parameter is std::common_type_t<T>, so that T is deduced from the pointer alone.

#define FOURFOLD_ATOMIC(name, expression)                                                      \
    template <class T> FOURFOLD_INLINE T name(T* address, std::common_type_t<T> v) {           \
        return fourfold::atomic_update(address, [v](T old) { return T(expression); });         \
    }
FOURFOLD_ATOMIC(atomicAdd, fourfold::wrapping_sum<T>(old, v))
FOURFOLD_ATOMIC(atomicSub, old - v)
FOURFOLD_ATOMIC(atomicMin, v < old ? v : old)
FOURFOLD_ATOMIC(atomicMax, old < v ? v : old)
FOURFOLD_ATOMIC(atomicAnd, old & v)
FOURFOLD_ATOMIC(atomicOr, old | v)
FOURFOLD_ATOMIC(atomicXor, old ^ v)
FOURFOLD_ATOMIC(atomicExch, v)
FOURFOLD_ATOMIC(atomicInc, old >= v ? 0 : old + 1)
FOURFOLD_ATOMIC(atomicDec, old == 0 || old > v ? v : old - 1)
template <class T> FOURFOLD_INLINE T atomicCAS(T* address, std::common_type_t<T> expected, std::common_type_t<T> v) {
    return fourfold::atomic_update(address, [=](T old) { return old == expected ? T(v) : old; });
}

// ---- cached loads and stores, which are plain ones here

template <class T> FOURFOLD_INLINE T __ldg(const T* p) { return *p; }
template <class T> FOURFOLD_INLINE T __ldca(const T* p) { return *p; }
template <class T> FOURFOLD_INLINE T __ldcg(const T* p) { return *p; }
template <class T> FOURFOLD_INLINE T __ldcs(const T* p) { return *p; }
template <class T> FOURFOLD_INLINE T __ldlu(const T* p) { return *p; }
template <class T> FOURFOLD_INLINE T __ldcv(const T* p) { return *p; }
template <class T> FOURFOLD_INLINE void __stwb(T* p, std::common_type_t<T> v) { *p = v; }
template <class T> FOURFOLD_INLINE void __stcg(T* p, std::common_type_t<T> v) { *p = v; }
template <class T> FOURFOLD_INLINE void __stcs(T* p, std::common_type_t<T> v) { *p = v; }
template <class T> FOURFOLD_INLINE void __stwt(T* p, std::common_type_t<T> v) { *p = v; }

// ---- arithmetic. CUDA's min and max return the other operand if one is NaN, unlike std::min and std::max.

template <class A, class B, class = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>>> auto max(A a, B b) {
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<T>) return std::fmax(T(a), T(b));
    else return T(a) < T(b) ? T(b) : T(a);
}
template <class A, class B, class = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>>> auto min(A a, B b) {
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<T>) return std::fmin(T(a), T(b));
    else return T(b) < T(a) ? T(b) : T(a);
}
inline float rsqrtf(float x) { return float(1.0 / std::sqrt(double(x))); }
inline float rsqrt(float x) { return rsqrtf(x); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
inline float rcbrtf(float x) { return 1.0f / std::cbrt(x); }
inline float normcdff(float x) { return 0.5f * std::erfc(-x * 0.70710678118654752f); }
inline double normcdf(double x) { return 0.5 * std::erfc(-x * 0.70710678118654752); }
inline float sinpif(float x) { return float(std::sin(3.14159265358979324 * double(x))); }
inline float cospif(float x) { return float(std::cos(3.14159265358979324 * double(x))); }
#ifndef _GNU_SOURCE
inline float exp10f(float x) { return std::pow(10.0f, x); }
#endif
inline float __expf(float x) { return std::exp(x); }
inline float __exp10f(float x) { return std::pow(10.0f, x); }
inline float __logf(float x) { return std::log(x); }
inline float __log2f(float x) { return std::log2(x); }
inline float __log10f(float x) { return std::log10(x); }
inline float __powf(float x, float y) { return std::pow(x, y); }
inline float __sinf(float x) { return std::sin(x); }
inline float __cosf(float x) { return std::cos(x); }
inline float __tanf(float x) { return std::tan(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __frsqrt_rn(float a) { return rsqrtf(a); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __drcp_rn(double a) { return 1.0 / a; }
inline double __dsqrt_rn(double a) { return std::sqrt(a); }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
    unsigned reversed = 0;
    for (int i = 0; i < 32; i++) reversed |= (x >> i & 1) << (31 - i);
    return reversed;
}
inline int __mulhi(int a, int b) { return int((long long)a * b >> 32); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((unsigned long long)a * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) { return (unsigned long long)((unsigned __int128)a * b >> 64); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    unsigned long long bytes = (unsigned long long)b << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) result |= unsigned(bytes >> ((selector >> (4 * i) & 7) * 8) & 0xff) << (8 * i);
    return result;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) { return unsigned(((unsigned long long)high << 32 | low) << (by & 31) >> 32); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) { return unsigned(((unsigned long long)high << 32 | low) >> (by & 31)); }

namespace fourfold {
template <class To, class From> To bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
// As on a GPU, conversions to an integer saturate and turn NaN into 0 (32 bits) or the least value (64 bits).
template <class To, class From> To saturated(From x) {
    if (x != x) return sizeof(To) == 8 ? std::numeric_limits<To>::min() : To(0);
    if (x >= From(std::numeric_limits<To>::max())) return std::numeric_limits<To>::max();
    if (x <= From(std::numeric_limits<To>::min())) return std::numeric_limits<To>::min();
    return To(x);
}
}  // namespace fourfold
inline int __float_as_int(float x) { return fourfold::bits<int>(x); }
inline unsigned __float_as_uint(float x) { return fourfold::bits<unsigned>(x); }
inline float __int_as_float(int x) { return fourfold::bits<float>(x); }
inline float __uint_as_float(unsigned x) { return fourfold::bits<float>(x); }
inline long long __double_as_longlong(double x) { return fourfold::bits<long long>(x); }
inline double __longlong_as_double(long long x) { return fourfold::bits<double>(x); }
inline int __float2int_rn(float x) { return fourfold::saturated<int>(std::nearbyint(x)); }
inline int __float2int_rz(float x) { return fourfold::saturated<int>(std::trunc(x)); }
inline int __float2int_rd(float x) { return fourfold::saturated<int>(std::floor(x)); }
inline int __float2int_ru(float x) { return fourfold::saturated<int>(std::ceil(x)); }
inline unsigned __float2uint_rn(float x) { return fourfold::saturated<unsigned>(std::nearbyint(x)); }
inline unsigned __float2uint_rz(float x) { return fourfold::saturated<unsigned>(std::trunc(x)); }
inline float __int2float_rn(int x) { return float(x); }
inline float __uint2float_rn(unsigned x) { return float(x); }
inline float __ll2float_rn(long long x) { return float(x); }
inline float __double2float_rn(double x) { return float(x); }

#define assert(condition) \
    ((condition) ? void() : ::fourfold::fail(::fourfold::FAILED_ASSERTION, {__FILE__, __LINE__}, nullptr, "assertion failed: %s", #condition))
inline void __trap(FOURFOLD_SITE) { fourfold::fail(fourfold::FAILED_ASSERTION, site, nullptr, "__trap()"); }
