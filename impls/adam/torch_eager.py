"""adam in torch operations: the baseline."""

import torch

from .arguments import check_adam


@torch.no_grad()
def adam(
    param: torch.Tensor,
    grad: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    step: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Take one step of Adam in place, with decoupled weight decay, as in AdamW::

        m = beta1 m + (1 - beta1) grad
        v = beta2 v + (1 - beta2) grad^2
        param = (1 - lr weight_decay) param - lr m / (1 - beta1^step) / (sqrt(v / (1 - beta2^step)) + eps)

    Args:
        param: any shape and strides; float16, bfloat16, float32 or float64. It is changed, and rounded once.
        grad: of the shape, dtype and device of param.
        m: float32, of the shape and device of param: the mean of grad. It is changed.
        v: float32, not below 0, of the shape and device of param: the mean of the squares of grad. It is changed.
        lr: 0 or above.
        beta1: from 0 to below 1.
        beta2: from 0 to below 1.
        eps: 0 or above, outside of the root.
        weight_decay: 0 or above. Without it, this is Adam.
        step: the number of this step, from 1.

    Returns:
        param, m and v, the same tensors.

    Half types are computed in float32, and float64 with the new m and v before they are rounded to float32. No tensor
    may overlap another. There is no gradient.

    Raises:
        TypeError: a tensor is none, a dtype is wrong, a number is none, or step is no integer.
        ValueError: shapes or devices differ, or a number is out of its range.

    Source: Loshchilov, Hutter, Decoupled Weight Decay Regularization, ICLR 2019, algorithm 2.
    """
    check_adam(param, grad, m, v, lr, beta1, beta2, eps, weight_decay, step)
    wide = torch.promote_types(param.dtype, torch.float32)
    new = grad.to(wide)
    mean = m.to(wide) * beta1 + new * (1 - beta1)
    square = v.to(wide) * beta2 + new * new * (1 - beta2)
    root = (square / (1 - beta2**step)).sqrt() + eps
    param.copy_(param.to(wide) * (1 - lr * weight_decay) - lr / (1 - beta1**step) * (mean / root))
    m.copy_(mean)
    v.copy_(square)
    return param, m, v
