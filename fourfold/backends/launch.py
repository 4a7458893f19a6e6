"""Helpers for the launches of every backend: device properties and integer arithmetic."""

import functools
import sys

import torch

from fourfold.operations.blame import ImpossibleGrid

# The limits of every GPU so far: blocks of a grid and threads of a block along x, y and z, threads of a block, and
# bytes of dynamic shared memory.
MAX_GRID = ((1 << 31) - 1, 65_535, 65_535)
MAX_BLOCK = (1024, 1024, 64)
MAX_BLOCK_THREADS = 1024
MAX_SHARED_BYTES = 232_448


class ImpossibleLaunch(ValueError):
    """A launch that every GPU refuses: a block or shared memory past a limit, or a tensor without data.

    On a GPU, Triton and the driver raise an error, too. A candidate counts it as a refusal, on the CPU as on a GPU.
    """


def check_grid(name: str, grid: tuple[int, ...]) -> None:
    """Check the extents of a grid of up to three axes, for the kernel `name`.

    Raises:
        ImpossibleGrid: there are more than 2^31 - 1 blocks along x, or more than 65,535 along y or z.
    """
    for axis, blocks, most in zip("xyz", grid, MAX_GRID):
        if blocks > most:
            raise ImpossibleGrid(
                f"{name}: a grid of {grid} has {blocks:,} blocks along {axis}; a GPU takes at most {most:,}"
            )


def explain_launch(error: BaseException) -> BaseException:
    """Return the error to report for an exception of a call.

    Where Triton's launch on a GPU failed, the driver says "invalid argument" of a grid that it does not take.
    """
    if "triton" in sys.modules:
        from fourfold.compat.triton_internals import failed_launch

        try:
            if launch := failed_launch(error):
                check_grid(*launch)
        except ImpossibleGrid as impossible:
            return impossible.with_traceback(error.__traceback__)
    return error


def check_block(name: str, block: tuple[int, int, int]) -> None:
    """Check the extents of a block, for the kernel `name`.

    Raises:
        ImpossibleLaunch: an extent is below 1 or too large, or there are more than 1024 threads in all.
    """
    threads = block[0] * block[1] * block[2]
    if min(block) < 1 or threads > MAX_BLOCK_THREADS:
        raise ImpossibleLaunch(
            f"{name}: a block of {block} has {threads:,} threads; 1 to {MAX_BLOCK_THREADS} are possible"
        )
    for axis, extent, most in zip("xyz", block, MAX_BLOCK):
        if extent > most:
            raise ImpossibleLaunch(
                f"{name}: a block of {block} has {extent} threads along {axis}; a GPU takes at most {most}"
            )


def check_shared_bytes(name: str, shared_bytes: int) -> None:
    """Check the dynamic shared memory of a launch, for the kernel `name`.

    Raises:
        ImpossibleLaunch: it is negative, or more than any GPU has.
    """
    if not 0 <= shared_bytes <= MAX_SHARED_BYTES:
        raise ImpossibleLaunch(
            f"{name}: {shared_bytes:,} bytes of dynamic shared memory; a block has at most {MAX_SHARED_BYTES:,}"
        )


# The most elements for each of which a GPU has a thread at once. Kernels then take one element a thread, or a few, so
# that every multiprocessor has work. On the CPU few cases are that small, so that tests reach whole vectors, too.
FEW_ELEMENTS = {"cuda": 1 << 18, "cpu": 64}


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Return whether a device is a GPU of compute capability 9.0, which kernels with wgmma and TMA require."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def is_hopper_or_emulated(device: torch.device) -> bool:
    """Return whether kernels for Hopper run on a device, either natively or emulated on the CPU."""
    return device.type == "cpu" or is_hopper(device)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of streaming multiprocessors: 3 on the CPU, so that loops over tiles and blocks run."""
    if device.type == "cpu":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def has_clusters(device: torch.device) -> bool:
    """Return whether the blocks of a cluster may share a row: on GPUs of compute capability 9.0 or later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def available_shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory available to a block beside the kernel's own, which may be 2 KiB."""
    if device.type == "cpu":
        return 225 * 1024
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin - 2048


@functools.cache
def l2_bytes(device: torch.device) -> int:
    """Return the size of a GPU's L2 cache in bytes."""
    return torch.cuda.get_device_properties(device).L2_cache_size


def resident(device: torch.device, per_multiprocessor: int) -> int:
    """Return the number of blocks that fill a device, given the number per multiprocessor: 3 on the CPU, as above."""
    return 3 if device.type == "cpu" else per_multiprocessor * multiprocessors(device)


# Triton has cdiv and next_power_of_2 too, but each call of them on the host takes some microseconds.
def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def reciprocal(size: int) -> int:
    """Return what a kernel multiplies a row by to divide it by `size`, which must be positive.

    The product, divided by 2^63, is the quotient or one less (as in Granlund, Montgomery 1994).
    """
    return (2**63 - 1) // size


def next_power_of_2(n: int) -> int:
    """Return the least power of 2 that is at least n. n must be positive."""
    return 1 << (n - 1).bit_length()


def first_probe(length: int, probes: int) -> int:
    """Return the distance between the first probes of a search through `length` elements.

    It is the least power of `probes`, itself a power of 2, with which that many probes span the whole length.
    """
    return probes ** ((max(length - 1, 1).bit_length() - 1) // (probes.bit_length() - 1))
