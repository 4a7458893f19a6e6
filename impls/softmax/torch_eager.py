"""softmax in torch operations: the baseline, which also defines the results for special values."""

import torch

from fourfold.backends.signature import MASKED, signature, tensor

from ..giou.torch_eager import in_compute_dtype


# The difference of two huge numbers overflows, and then nothing is known of a row.
@signature(x=tensor("... cols", kind=("normal", "whole", "constant", "offset", "spread", "tiny", MASKED)))
def softmax(x: torch.Tensor) -> torch.Tensor:
    """Return exp(x) / sum(exp(x)) over the last axis, computed after subtracting the row's maximum from x.

    Args:
        x: ``[..., cols]``; float16, bfloat16, float32 or float64, any strides, any number of rows and columns.

    Returns:
        ``[..., cols]`` of the same dtype, in [0, 1]. Half types are computed in float32. A row is NaN throughout if it
        holds NaN or +inf, or nothing but -inf. An entry of -inf beside finite ones gives 0. The gradient is
        ``y (g - sum(g y))``, computed from the output y.

    Raises:
        TypeError: x is not a floating-point tensor.
        ValueError: x has no axis.

    Source: Bridle, Probabilistic interpretation of feedforward classification network outputs, Neurocomputing 1990.
    """
    # Else torch on a GPU would round the products of gradient and output to half types before it sums them.
    return torch.softmax(in_compute_dtype(x), dim=-1).to(x.dtype)
