"""The operator of scaled_matmul, which Triton and CUDA C++ share except for the launches."""

from collections.abc import Callable
from typing import Any

import torch

from fourfold.backends.signature import signature_of

from .torch_eager import scaled_matmul as definition


def read_by_vectors(matrix: torch.Tensor) -> bool:
    """Return whether the terms of each row are adjacent, and begin at a multiple of 16 bytes."""
    return matrix.stride(1) == 1 and matrix.stride(0) % 16 == 0 and matrix.data_ptr() % 16 == 0


def _no_gradient(ctx: Any, grad_output: torch.Tensor) -> Any:
    raise NotImplementedError("scaled_matmul has no gradient: quantised numbers have none")


SIGNATURE = signature_of(definition)
SCALED_MATMUL = SIGNATURE.operator(
    lambda a, b, scale_a, scale_b, out_dtype: a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype),
    backward=_no_gradient,
    repeats=True,
)


def register(backend: str, launch: Callable[..., None]) -> Callable[..., Any]:
    """Register ``scaled_matmul_<backend>``; `launch` takes the inputs and the result, which is not empty."""

    def forward(
        a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out_dtype: torch.dtype
    ) -> torch.Tensor:
        output = torch.empty((a.shape[0], b.shape[0]), dtype=out_dtype, device=a.device)
        if output.numel():
            launch(a, b, scale_a, scale_b, output)
        return output

    return SIGNATURE.checked(SCALED_MATMUL.register(backend, forward))
