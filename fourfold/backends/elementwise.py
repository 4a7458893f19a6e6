"""Operators of elementwise operations on two tensors, whatever launches their kernels."""

from collections.abc import Callable
from typing import Any

import torch

from fourfold.backends.operators import empty_gradients
from fourfold.backends.signature import signature_of
from fourfold.backends.strides import walk


def register_binary(
    definition: Callable[..., torch.Tensor],
    backend: str,
    flat: Callable[..., None],
    strided: Callable[..., None],
    gradients: Callable[..., None] | None = None,
) -> Callable[..., Any]:
    """Register ``<operation>_<backend>`` with its gradients; return the function that checks arguments and calls it.

    Args:
        definition: the operation in torch, with a signature of two tensors of one shape.
        backend: part of the operators' names.
        flat: ``(a, b, output)`` launches the forward kernel. All tensors have the same strides, and no gaps.
        strided: ``(a, b, output, n, middle, inner, *strides)`` launches it for any strides of a and b: see
            `fourfold.backends.strides.walk`.
        gradients: ``(grad_output, a, b, grad_a, grad_b, needs_a, needs_b)`` launches the backward kernel, which writes
            the needed gradients. All tensors are contiguous. Unless given, both gradients are the cotangent.

    Nothing is launched without elements.
    """
    signature = signature_of(definition)

    def forward(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        output = torch.empty_like(a)
        n = output.numel()
        if n == 0:
            return output
        if a.stride() == b.stride() == output.stride():
            flat(a, b, output)
            return output
        (a, b), (_, middle, inner), strides = walk(output, a, b)
        strided(a, b, output, n, middle, inner, *strides)
        return output

    def backward(grad_output: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *needs: bool) -> tuple:
        results = empty_gradients((a, b), needs)
        if grad_output.numel():
            gradients(grad_output.contiguous(), a.contiguous(), b.contiguous(), *results, *needs)  # type: ignore[misc]
        return results

    def fake(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(a)

    if gradients is None:
        operator = signature.operator(fake, backward=lambda ctx, grad: (grad, grad), repeats=True)
        return signature.checked(operator.register(backend, forward))
    operator = signature.operator(fake, saves=signature.names, repeats=True)
    return signature.checked(operator.register(backend, forward, backward))
