"""Argument checks of adam, the same for every backend."""

from typing import Any

import torch

from fourfold.backends.arguments import check_floating, check_not_negative, check_same


def check_adam(
    param: Any, grad: Any, m: Any, v: Any, lr: Any, beta1: Any, beta2: Any, eps: Any, weight_decay: Any, step: Any
) -> None:
    """Check four tensors of one shape and device, m and v in float32, and the numbers of a step.

    Raises:
        TypeError: a tensor is none, a dtype is wrong, a number is none, or step is no integer.
        ValueError: shapes or devices differ, or a number is out of its range.
    """
    check_floating("param", param)
    check_same("grad", grad, "param", param)
    for name, state in (("m", m), ("v", v)):
        if not isinstance(state, torch.Tensor) or state.dtype != torch.float32:
            given = state.dtype if isinstance(state, torch.Tensor) else type(state).__name__
            raise TypeError(f"{name} must be a float32 tensor, not {given}")
        if state.device != param.device:
            raise ValueError(f"{name} must be on the device of param, {param.device}, not on {state.device}")
        if state.shape != param.shape:
            raise ValueError(f"{name} must have the shape of param, {list(param.shape)}, not {list(state.shape)}")
    numbers = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
    for name, number in numbers.items():
        check_not_negative(name, number)
    for name in ("beta1", "beta2"):
        if not numbers[name] < 1:
            raise ValueError(f"{name} must be below 1, not {numbers[name]}")
    if isinstance(step, bool) or not isinstance(step, int | torch.SymInt):
        raise TypeError(f"step must be an integer, not {type(step).__name__}")
    if step < 1:
        raise ValueError(f"step must be at least 1, not {step}: the first step is 1")
