"""Helpers for the launches of every backend: device properties and integer arithmetic."""

import functools

import torch


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """The number of streaming multiprocessors: 3 on the CPU, so that loops over tiles and block reductions run."""
    if device.type == "cpu":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def l2_bytes(device: torch.device) -> int:
    """The size of a GPU's L2 cache in bytes."""
    return torch.cuda.get_device_properties(device).L2_cache_size


def resident(device: torch.device, per_multiprocessor: int) -> int:
    """The number of blocks that fill a device, given how many fit on a multiprocessor: 3 on the CPU, as above."""
    return 3 if device.type == "cpu" else per_multiprocessor * multiprocessors(device)


# Triton has cdiv and next_power_of_2 too, but each call of them on the host takes some microseconds.
def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of 2 that is at least n. n must be positive."""
    return 1 << (n - 1).bit_length()


def first_probe(length: int, probes: int) -> int:
    """The distance between the first probes of a search through `length` elements.

    It is the least power of `probes`, itself a power of 2, with which that many probes span the whole length.
    """
    return probes ** ((max(length - 1, 1).bit_length() - 1) // (probes.bit_length() - 1))
