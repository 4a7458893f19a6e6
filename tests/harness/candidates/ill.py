"""Candidates that never return from a call, in runs with the plugin `time_limits`."""

import ctypes
import os
import signal
import threading
from pathlib import Path

import time_limits
import torch

from fourfold.backends.cuda.launch import CudaKernel

LONG = 1000  # seconds: past every time limit
SOURCE = Path(__file__).with_suffix(".cu")


def crash(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if x.numel() > 1:
        ctypes.string_at(0)
    return x + y


def leave(x: torch.Tensor) -> None:
    os._exit(0)


def loop(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-5) -> None:
    time_limits.interrupt()
    while True:
        pass


def hang(boxes1: torch.Tensor, boxes2: torch.Tensor, eps: float = 1e-5) -> None:
    """Ignore signals and hold Python's lock, like a kernel that spins on the CPU."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    time_limits.end()
    ctypes.PyDLL(None).sleep(LONG)


def wait_for_itself(a: torch.Tensor, b: torch.Tensor, activation: str = "none", negative_slope: float = 0.01) -> None:
    lock = threading.Lock()
    time_limits.interrupt()
    with lock, lock:
        pass


def spin(pred: torch.Tensor, target: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    result = pred.new_zeros(1)
    if pred.is_cuda:
        time_limits.end()
    CudaKernel(SOURCE, "spin").launch(1, 32, pred.new_ones(2), result)
    return result.sum() + pred.sum()


def write_far_away(pred: torch.Tensor, target: torch.Tensor, offsets: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    result = pred.new_zeros(1)
    CudaKernel(SOURCE, "write_far_away").launch(1, 1, result)
    return result.sum() + pred.sum()
