"""Settings that make torch's own products as exact as a kernel's must be."""

import contextlib
from collections.abc import Iterator

import torch

# These let cuBLAS sum the parts of a split half-precision product in half precision, and let cuDNN's convolutions round
# their float32 factors to 10 bits.
INEXACT = (
    (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
    (torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    (torch.backends.cudnn, "allow_tf32"),
)


def compute_exactly() -> None:
    """Disable inexact products in torch for the rest of the process."""
    for owner, name in INEXACT:
        setattr(owner, name, False)


@contextlib.contextmanager
def computing_exactly() -> Iterator[None]:
    """Disable inexact products in torch inside the block, and restore the settings afterwards."""
    originals = [(owner, name, getattr(owner, name)) for owner, name in INEXACT]
    try:
        compute_exactly()
        yield
    finally:
        for owner, name, value in originals:
            setattr(owner, name, value)
