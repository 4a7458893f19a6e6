"""Kernels of this folder as Python functions: softmax, and one with a gradient."""

import torch

import fourfold

softmax = fourfold.cuda_kernel(
    "softmax.cu",
    "softmax_kernel",
    grid=lambda x: x.numel() // x.shape[-1] if x.numel() else 0,
    block=64,
    shared_bytes=64 * 4,
    arguments=lambda x, out: (x, out, x.numel() // max(x.shape[-1], 1), x.shape[-1]),
)
layer_norm = fourfold.cuda_kernel(
    "layer_norm.cu",
    "layer_norm_kernel",
    grid=lambda x: -(-x.shape[0] // 2),
    block=64,
    arguments=lambda x, weight, bias, out, eps=1e-5: (x, weight, bias, out, *x.shape, eps),
)
matmul = fourfold.cuda_kernel(
    "matmul.cu",
    "matmul_kernel",
    grid=lambda out: (-(-out.shape[1] // 16), -(-out.shape[0] // 16)),
    block=(16, 16),
    output=lambda a, b: a.new_empty(a.shape[0], b.shape[1]),
    arguments=lambda a, b, out: (a, b, out, *out.shape, a.shape[1]),
)
add = fourfold.cuda_kernel(
    "vector_add.cu",
    "vector_add",
    grid=lambda x: -(-x.numel() // 256),
    block=256,
    arguments=lambda x, y, out: (x, y, out, x.numel()),
)


class Sum(torch.autograd.Function):
    """x + y, both gradients being the cotangent: a kernel adds 0 to it, so that backward launches one, too."""

    @staticmethod
    def forward(ctx, x, y):
        return add(x, y)

    @staticmethod
    def backward(ctx, grad_output):
        return (add(grad_output, torch.zeros_like(grad_output)),) * 2
