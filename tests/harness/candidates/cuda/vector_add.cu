// A whole program, as samples are: the kernel, its launcher, a check on the host, and main.
#include <cuda_runtime.h>
#include <stdio.h>
#include <stdlib.h>

#include <vector>

#define CHECK(call)                                                 \
    do {                                                            \
        cudaError_t status = (call);                                \
        if (status != cudaSuccess) {                                \
            printf("%s:%d %s\n", __FILE__, __LINE__, cudaGetErrorString(status)); \
            exit(1);                                                \
        }                                                           \
    } while (0)

static int blocks_for(int n, int threads) { return (n + threads - 1) / threads; }

__global__ void vector_add(const float* a, const float* b, float* c, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) c[i] = a[i] + b[i];
}

__global__ void no_bounds(const float* a, const float* b, float* c, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    c[i] = a[i] + b[i];  // FAULT
}

__global__ void in_fours(const float4* x, const float4* y, float4* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n / 4) {
        float4 u = x[i], v = __ldg(&y[i]);
        out[i] = make_float4(u.x + v.x, u.y + v.y, u.z + v.z, u.w + v.w);
    }
    const float *a = reinterpret_cast<const float*>(x), *b = reinterpret_cast<const float*>(y);
    int rest = n / 4 * 4 + i;
    if (i < 4 && rest < n) reinterpret_cast<float*>(out)[rest] = a[rest] + b[rest];
}

template <class T> void launch(const T* a, const T* b, T* c, int n) {
    vector_add<<<blocks_for(n, 256), 256>>>(a, b, c, n);
    CHECK(cudaGetLastError());
}

int main() {
    std::vector<float> host(1 << 20, 1.0f);
    float* a;
    CHECK(cudaMalloc(&a, host.size() * sizeof(float)));
    CHECK(cudaMemcpy(a, host.data(), host.size() * sizeof(float), cudaMemcpyHostToDevice));
    launch(a, a, a, int(host.size()));
    CHECK(cudaFree(a));
    return 0;
}
