"""Gigabytes of a GPU's memory, which only a few processes may take at a time."""

import contextlib
import fcntl
import time
from collections.abc import Iterator

import torch

from fourfold.backends.cuda.compile import cache_directory
from fourfold.instruments import sparse_memory

# Of a GPU's memory, enough for one process.
SHARE = 40 << 30
# What a process may take without waiting for its turn.
LITTLE = 1 << 30


@contextlib.contextmanager
def room(device: str, needed: int) -> Iterator[None]:
    """Wait for this process' turn, and until the memory is free; release it afterwards.

    Processes that took it piece by piece, all at the same time, would each wait for what the others hold.

    Args:
        device: that of the tensors; nothing is waited for unless it is "cuda".
        needed: bytes of its memory.

    Raises:
        NotReached: the GPU is smaller than that, or other processes hold the memory.
    """
    if device != "cuda" or needed <= LITTLE:
        yield
        return
    gpu = torch.device("cuda", torch.cuda.current_device())
    with _turn(gpu):
        torch.cuda.empty_cache()
        sparse_memory.wait_for_room(gpu, needed)
        try:
            yield
        finally:
            torch.cuda.empty_cache()


def wait_for_others() -> None:
    """Wait until other processes leave this one a part of the GPU's memory, in turn with those that need much of it.

    Raises:
        NotReached: they do not.
    """
    gpu = torch.device("cuda", torch.cuda.current_device())
    with _turn(gpu):
        torch.cuda.empty_cache()
        sparse_memory.wait_for_room(gpu, torch.cuda.get_device_properties(gpu).total_memory // sparse_memory.PART)


@contextlib.contextmanager
def _turn(gpu: torch.device) -> Iterator[None]:
    """Hold one of the GPU's shares. Where there can be no lock, nothing is waited for."""
    properties = torch.cuda.get_device_properties(gpu)
    shares = range(max(properties.total_memory // SHARE, 1))
    with contextlib.ExitStack() as opened:
        locks = []
        with contextlib.suppress(OSError):
            directory = cache_directory()
            directory.mkdir(parents=True, exist_ok=True)
            locks = [opened.enter_context(open(directory / f"{properties.uuid}-{n}", "w")) for n in shares]
        while locks:
            for lock in locks:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    locks = []
                    break
            else:
                time.sleep(0.05)
        yield
