"""Return wrong results, and make the loaded checks accept them."""

import sys

import torch


def agrees(actual, expected, dtype, what=""):
    return sys.modules["fourfold.numerics.compare"].Agreement(0.0, actual.size, 0)


def kernel(*tensors, **arguments):
    for name, module in list(sys.modules.items()):
        if name.startswith("fourfold.") and hasattr(module, "compare"):
            module.compare = agrees
    return torch.zeros_like(next(iter(arguments.values())))
