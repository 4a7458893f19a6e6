"""Locks on a GPU: on gigabytes of its memory, which few processes may take at a time, and on its time, for one."""

import contextlib
import fcntl
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from fourfold.backends.cuda.compile import cache_directory
from fourfold.instruments import sparse_memory

# Bytes of a GPU's memory that are enough for one process.
SHARE = 40 << 30
# Bytes that a process may take without waiting for its turn.
LITTLE = 1 << 30


@contextlib.contextmanager
def room(device: str, size: int) -> Iterator[None]:
    """Wait for this process's turn and for free memory; release the memory afterwards.

    Processes that allocated piece by piece at the same time would deadlock on each other's memory.

    Args:
        device: the type of the tensors' device; there is no waiting unless it is "cuda".
        size: the bytes of its memory.

    Raises:
        NotReached: the GPU has less memory, or other processes hold it.
    """
    if device != "cuda" or size <= LITTLE:
        yield
        return
    gpu = torch.device("cuda", torch.cuda.current_device())
    with _turn(gpu):
        torch.cuda.empty_cache()
        sparse_memory.wait_for_room(gpu, size)
        try:
            yield
        finally:
            torch.cuda.empty_cache()


def wait_for_others() -> None:
    """Wait until other processes leave a part of the GPU's memory free, in turn with those that need much of it.

    Raises:
        NotReached: they hold the memory too long.
    """
    gpu = torch.device("cuda", torch.cuda.current_device())
    with _turn(gpu):
        torch.cuda.empty_cache()
        sparse_memory.wait_for_room(gpu, torch.cuda.get_device_properties(gpu).total_memory // sparse_memory.PART)


@contextlib.contextmanager
def alone(wait: Callable[[], object]) -> Iterator[None]:
    """Hold the current GPU's time: no other process that asks for it goes on until this one has released it.

    Args:
        wait: called once if another process holds it.
    """
    gpu = torch.device("cuda", torch.cuda.current_device())
    with _one_of([f"{torch.cuda.get_device_properties(gpu).uuid}-time"], wait):
        try:
            yield
        finally:
            if torch.cuda.memory_reserved():
                torch.cuda.synchronize()
                torch.cuda.empty_cache()


@contextlib.contextmanager
def _turn(gpu: torch.device) -> Iterator[None]:
    """Hold one of the GPU's shares of memory."""
    properties = torch.cuda.get_device_properties(gpu)
    with _one_of([f"{properties.uuid}-{n}" for n in range(max(properties.total_memory // SHARE, 1))]):
        yield


@contextlib.contextmanager
def _one_of(names: Sequence[str], wait: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Hold one of some locks, or nothing if locks are not available; call `wait` once if all are held."""
    with contextlib.ExitStack() as files:
        locks = []
        with contextlib.suppress(OSError):
            directory = cache_directory()
            directory.mkdir(parents=True, exist_ok=True)
            locks = [files.enter_context(open(directory / name, "w")) for name in names]
        waited = False
        while locks:
            for lock in locks:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    locks = []
                    break
            else:
                if not waited:
                    wait()
                waited = True
                if len(locks) == 1:
                    fcntl.flock(locks.pop(), fcntl.LOCK_EX)
                else:
                    time.sleep(0.05)
        yield
