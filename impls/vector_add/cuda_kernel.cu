#include "elementwise.cuh"

struct added {
    template <class C> __device__ C operator()(C x, C y) const { return x + y; }
};
