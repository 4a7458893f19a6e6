"""Gives wrong results, and exit code 0 to the process when it comes to its end."""

import atexit
import os

import torch

atexit.register(os._exit, 0)


def kernel(*tensors, **arguments):
    return torch.zeros_like(next(iter(arguments.values())))
