// A template for every dtype, with cooperative groups.
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace cg = cooperative_groups;

template <typename T>
__global__ void __launch_bounds__(256) layer_norm_kernel(const T* __restrict__ inp, const T* __restrict__ weight, const T* __restrict__ bias, T* out, int N, int C, float eps) {
    cg::thread_block block = cg::this_thread_block();
    cg::thread_block_tile<32> warp = cg::tiled_partition<32>(block);
    int row = blockIdx.x * warp.meta_group_size() + warp.meta_group_rank();
    if (row >= N) return;
    const T* x = inp + (size_t)row * C;
    float sum = 0.0f, squares = 0.0f;
    for (int i = warp.thread_rank(); i < C; i += warp.size()) sum += static_cast<float>(x[i]);
    const float mean = cg::reduce(warp, sum, cg::plus<float>{}) / C;
    for (int i = warp.thread_rank(); i < C; i += warp.size()) {
        float d = static_cast<float>(x[i]) - mean;
        squares += d * d;
    }
    const float rstd = rsqrtf(cg::reduce(warp, squares, cg::plus<float>()) / C + eps);
    for (int i = warp.thread_rank(); i < C; i += warp.size()) {
        float n = (static_cast<float>(x[i]) - mean) * rstd;
        out[(size_t)row * C + i] = static_cast<T>(n * static_cast<float>(weight[i]) + static_cast<float>(bias[i]));
    }
}
