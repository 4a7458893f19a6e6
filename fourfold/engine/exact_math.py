"""Settings under which torch's own products are as exact as those of a kernel must be."""

import contextlib
from collections.abc import Iterator

import torch

# What lets cuBLAS sum the parts of a split product of half types in the half type, and cuDNN's convolutions round
# their float32 factors to 10 bits.
INEXACT = (
    (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
    (torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    (torch.backends.cudnn, "allow_tf32"),
)


def compute_exactly() -> None:
    """From here on torch computes its own products exactly."""
    for owner, name in INEXACT:
        setattr(owner, name, False)


@contextlib.contextmanager
def computing_exactly() -> Iterator[None]:
    """Within it, torch computes its own products exactly; afterwards as before."""
    before = [(owner, name, getattr(owner, name)) for owner, name in INEXACT]
    try:
        compute_exactly()
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
