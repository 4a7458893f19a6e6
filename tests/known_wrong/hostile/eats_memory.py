"""Allocate memory until there is none."""

import torch


def kernel(*tensors, **arguments):
    held = []
    while True:
        held.append(torch.empty(1 << 28, dtype=torch.uint8))
