"""Kills the process that has started it."""

import os
import signal
import time

import torch


def kernel(*tensors, **arguments):
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(5)
    return torch.zeros_like(next(iter(arguments.values())))
