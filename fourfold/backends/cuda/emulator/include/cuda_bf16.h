// NVIDIA's header, completed for the host in the same way as cuda_fp16.h.
#pragma once
#include <cuda_fp16.h>
// NVIDIA declares its host functions `static __attribute__((unused))`. For why to inline them see device.h.
#define unused always_inline
#include_next <cuda_bf16.h>
#undef unused

namespace fourfold {
template <> struct HalfType<__nv_bfloat16> {
    using Pair = __nv_bfloat162;
    static float up(__nv_bfloat16 v) { return __bfloat162float(v); }
    static __nv_bfloat16 down(float v) { return __float2bfloat16(v); }
    static Pair pair(__nv_bfloat16 a, __nv_bfloat16 b) { return __halves2bfloat162(a, b); }
};
template <> struct HalfPair<__nv_bfloat162> { using Half = __nv_bfloat16; };
}  // namespace fourfold

FOURFOLD_INLINE __nv_bfloat16 atomicAdd(__nv_bfloat16* address, __nv_bfloat16 v) {
    return fourfold::atomic_update(address, [v](__nv_bfloat16 old) { return __float2bfloat16(__bfloat162float(old) + __bfloat162float(v)); });
}
FOURFOLD_INLINE __nv_bfloat162 atomicAdd(__nv_bfloat162* address, __nv_bfloat162 v) {
    return fourfold::atomic_update(address, [v](__nv_bfloat162 old) {
        return __halves2bfloat162(__float2bfloat16(__bfloat162float(old.x) + __bfloat162float(v.x)), __float2bfloat16(__bfloat162float(old.y) + __bfloat162float(v.y)));
    });
}
