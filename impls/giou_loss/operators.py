"""The operators of the padded losses, which Triton and CUDA C++ share except for the launches."""

from collections.abc import Callable
from typing import Any

import torch

from fourfold.backends.signature import signature_of

# The length of the header of `saved`, in int32 words. The header is the number of valid rows, in 64 bits. After it
# comes one bit per row, lowest first, which is set if the row is valid.
SAVED_HEADER = 2


def num_saved(num_rows: Any) -> Any:
    """Return the length of `saved` for `num_rows` rows."""
    return SAVED_HEADER + (num_rows + 31) // 32


def _fake(pred: torch.Tensor, target: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    saved = num_saved(pred.shape[0] * pred.shape[1])
    return pred.new_empty(()), torch.empty(saved, dtype=torch.int32, device=pred.device)


def register_loss(
    definition: Callable[..., torch.Tensor], backend: str, *launches: Callable[..., Any]
) -> Callable[..., torch.Tensor]:
    """Register the operators of a loss on a backend; return the function that checks arguments and calls them."""
    signature = signature_of(definition)
    operator = signature.operator(
        _fake, "(Tensor loss, Tensor saved)", saves=("pred", "target", "saved", "eps"), repeats=True, public=0
    ).register(backend, *launches)
    return signature.checked(operator)
