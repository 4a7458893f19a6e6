"""The launches of kernels that are made of elementwise.cuh, and elementwise operations on two tensors."""

import pathlib
from collections.abc import Callable
from typing import Any

import torch

from fourfold.backends.cuda.launch import CudaKernel
from fourfold.backends.elementwise import register_binary
from fourfold.backends.launch import FEW_ELEMENTS, cdiv

# Threads of a block, and vectors of each argument that a thread has.
BLOCK, VECTORS = 256, 2
WIDTHS = {True: "{W}", False: "1"}  # elements of a vector, by whether it has 16 bytes
# The type of an element's number, by whether 32 bits suffice for it.
INDICES = {True: "unsigned", False: "long long"}


def aligned(*tensors: torch.Tensor) -> bool:
    """Return whether all tensors begin at multiples of 16 bytes."""
    return all(tensor.data_ptr() % 16 == 0 for tensor in tensors)


def whole(*tensors: torch.Tensor) -> bool:
    """Return whether a thread takes whole vectors of tensors: they begin so, and have more than few elements."""
    return tensors[0].numel() > FEW_ELEMENTS[tensors[0].device.type] and aligned(*tensors)


def blocks(*tensors: torch.Tensor, vectors: int = VECTORS) -> tuple[int, int]:
    """Return the blocks for tensors of one size, and the vectors of each tensor that a thread has: one of few."""
    x = tensors[0]
    width = 16 // x.element_size() if whole(*tensors) else 1
    owned = 1 if x.numel() <= FEW_ELEMENTS[x.device.type] * width else vectors
    return cdiv(x.numel(), BLOCK * width * owned), owned


def instances(module: str, kernel: str, struct: str, vectors: int, options: dict[bool, str]) -> dict[Any, CudaKernel]:
    """Return the instances of a kernel of elementwise.cuh around a struct, by dtype and option.

    Args:
        module: the path of a Python module. The `.cu` file beside it has the struct.
        kernel: the kernel's name.
        struct: the struct's name.
        vectors: the vectors of each tensor that a thread has.
        options: the kernel's third template argument, by its key.
    """
    source = pathlib.Path(module).with_suffix(".cu")
    return CudaKernel.instances(source, f"{kernel}<{struct}, {{T}}, {{}}, {vectors}>", options)


def forward_launches(
    module: str, struct: str, vectors: int
) -> tuple[Callable[..., None], Callable[..., None], tuple[CudaKernel, ...]]:
    """Return the launches that `register_binary` takes, for tensors that lie alike and for any strides; the kernels."""
    flat_kernels = instances(module, "binary_kernel", struct, vectors, WIDTHS)
    strided_kernels = instances(module, "binary_strided_kernel", struct, vectors, INDICES)

    def flat(*tensors: torch.Tensor) -> None:
        x, (grid, owned) = tensors[0], blocks(*tensors, vectors=vectors)
        flat_kernels[x.dtype, whole(*tensors)].launch(grid, BLOCK, x.numel(), owned, *tensors)

    def strided(a: torch.Tensor, b: torch.Tensor, output: torch.Tensor, n: int, *sizes: int) -> None:
        grid = cdiv(n, BLOCK * vectors)
        strided_kernels[a.dtype, n < 2**32].launch(grid, BLOCK, a, b, output, n, *sizes)

    return flat, strided, (*flat_kernels.values(), *strided_kernels.values())


def additive(
    definition: Callable[..., torch.Tensor], module: str, forward: str, vectors: int = VECTORS
) -> tuple[Callable[..., torch.Tensor], tuple[CudaKernel, ...]]:
    """Return an operation as `elementwise` does, whose gradients are both the cotangent, as for a sum."""
    flat, strided, kernels = forward_launches(module, forward, vectors)
    return register_binary(definition, "cuda", flat, strided), kernels


def elementwise(
    definition: Callable[..., torch.Tensor], module: str, forward: str, backward: str, vectors: int = VECTORS
) -> tuple[Callable[..., torch.Tensor], tuple[CudaKernel, ...]]:
    """Return an elementwise operation on two tensors in CUDA C++, with checked arguments, and its kernels.

    Args:
        definition: the operation in torch, with a signature.
        module: the path of a Python module. The `.cu` file beside it includes elementwise.cuh.
        forward: a struct of the `.cu` file, whose `operator()` takes two elements.
        backward: one whose `operator()` takes the cotangent's element, both inputs', and references to both gradients'.
        vectors: the vectors of each tensor that a thread has.
    """
    backward_kernels = instances(module, "binary_gradients_kernel", backward, vectors, WIDTHS)

    def gradients(*given: Any) -> None:
        *tensors, needs_a, needs_b = given
        x, (grid, owned) = tensors[0], blocks(*tensors, vectors=vectors)
        numbers = x.numel(), owned, needs_a, needs_b
        backward_kernels[x.dtype, whole(*tensors)].launch(grid, BLOCK, *numbers, *tensors)

    flat, strided, kernels = forward_launches(module, forward, vectors)
    return register_binary(definition, "cuda", flat, strided, gradients), (*kernels, *backward_kernels.values())
