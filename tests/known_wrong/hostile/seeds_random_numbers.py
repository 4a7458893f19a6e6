"""Return right results, but seed torch's random numbers, so that the next draws are the same every time."""

import torch


def kernel(x, y):
    torch.manual_seed(0)
    return x + y
