"""What launches on every backend share."""

import functools

import torch


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a device; on the CPU 3, so that loops over tiles and reductions over blocks run."""
    if device.type == "cpu":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def l2_bytes(device: torch.device) -> int:
    """The L2 cache of a GPU."""
    return torch.cuda.get_device_properties(device).L2_cache_size


def resident(device: torch.device, per_multiprocessor: int) -> int:
    """How many blocks fill a device that holds so many a multiprocessor; on the CPU 3, so that their loops run too."""
    return 3 if device.type == "cpu" else per_multiprocessor * multiprocessors(device)


# Triton has both, for the inside of kernels too, at some microseconds a call.
def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of 2 that is not below n, which is positive."""
    return 1 << (n - 1).bit_length()


def first_probe(length: int, probes: int) -> int:
    """How far apart a search's first probes lie: a power of their number, itself one of 2, with which they span all."""
    return probes ** ((max(length - 1, 1).bit_length() - 1) // (probes.bit_length() - 1))
