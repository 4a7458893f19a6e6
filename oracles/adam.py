"""adam: the reference."""

from typing import Any

import numpy as np

# A NumPy array, or anything that follows NumPy's array protocols.
Array = Any


def forward(
    param: Array,
    grad: Array,
    m: Array,
    v: Array,
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    step: int = 1,
) -> tuple[Array, Array, Array]:
    """Return one step of Adam whose weight decay is decoupled, as in AdamW: the new param, m and v, all of one shape.

    Kernels may take the parameters in the arithmetic of the arrays, and so round ``1 - beta2``, too.

    Source: Loshchilov, Hutter, Decoupled Weight Decay Regularization, ICLR 2019, algorithm 2.
    """
    beta1, beta2 = (beta * np.ones_like(v) for beta in (beta1, beta2))
    m = beta1 * m + (1 - beta1) * grad
    v = beta2 * v + (1 - beta2) * (grad * grad)
    corrected = m / (1 - beta1**step), np.sqrt(v / (1 - beta2**step))
    return param * (1 - lr * weight_decay) - lr * (corrected[0] / (corrected[1] + eps)), m, v
