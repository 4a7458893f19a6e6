"""The operators of giou, and how its kernels see boxes: the same on Triton and CUDA C++ except for the launches."""

import torch

from fourfold.backends.operators import Operator

GIOU = Operator(
    schema="giou(Tensor boxes1, Tensor boxes2, float eps) -> Tensor scores",
    fake=lambda boxes1, boxes2, eps: boxes1.new_empty(boxes1.shape[:-1]),
    saves=("boxes1", "boxes2", "eps"),
    repeats=True,
)


def as_rows(*tensors: torch.Tensor, trailing: int) -> list[torch.Tensor]:
    """Reshape the tensors to exactly two axes before the last `trailing` ones, as views if possible."""
    leading = tensors[0].ndim - trailing
    if leading == 2:
        return list(tensors)
    if leading == 1:
        return [t.unsqueeze(0) for t in tensors]
    return [t.reshape(1, -1, *t.shape[leading:]) for t in tensors]
