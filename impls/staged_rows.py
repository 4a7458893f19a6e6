"""Rows that the copy engine brings to shared memory, for CUDA C++ with staged.cuh whose threads sum over rows."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from fourfold.backends.cuda.launch import Argument, CudaKernel
from fourfold.backends.launch import available_shared_memory, cdiv, has_clusters, multiprocessors

WARP = 32
# Threads of a block, and of a multiprocessor where blocks do not wait for each other: at most.
MOST_THREADS = 512
RESIDENT = 256
# Rows that a block has room for, by device: at most. The CPU has few, so that few rows suffice to use each again.
MOST_STAGES = {"cuda": 16, "cpu": 2}
# Blocks of a cluster that shares a row.
CLUSTERS = (2, 4, 8)
# Bytes of shared memory that each block takes beside its rows.
RESERVED_BYTES = 1024


class Staging(NamedTuple):
    """How rows are brought to shared memory.

    Attributes:
        threads: threads of a block.
        blocks: blocks that share a row, as a cluster if there are several.
        resident: blocks of a multiprocessor.
        stages: rows that a block has room for.
        shared_bytes: shared memory of a block.
    """

    threads: int
    blocks: int
    resident: int
    stages: int
    shared_bytes: int

    def groups(self, kernel: CudaKernel, device: torch.device, num_rows: int) -> int:
        """Return the number of blocks or clusters to launch: at most as many as the device holds at once."""
        if self.blocks == 1:
            return min(num_rows, multiprocessors(device) * self.resident)
        return min(num_rows, kernel.resident_clusters(device, self.threads, self.blocks, self.shared_bytes))

    def launch(self, kernel: CudaKernel, groups: int, arguments: Sequence[Argument]) -> None:
        """Launch `groups` blocks or clusters of a kernel. Its last parameter is the number of stages."""
        cluster = self.blocks if self.blocks > 1 else None
        kernel.launch(
            groups * self.blocks,
            self.threads,
            *arguments,
            self.stages,
            shared_bytes=self.shared_bytes,
            cluster=cluster,
        )


def staging(cols: int, itemsize: int, tensors: int, device: torch.device, each: int) -> Staging | None:
    """Choose how to bring rows to shared memory; None if a device has no copy engine or no room for two of them.

    Args:
        cols: columns of a row, in whole vectors of 16 bytes.
        itemsize: bytes of a number.
        tensors: the number of tensors that are read.
        device: the device. On the CPU the copies are emulated, and a block holds a row.
        each: vectors of a row that a thread computes, at most.
    """
    clusters, memory = has_clusters(device), available_shared_memory(device)
    vectors, two_rows = cols * itemsize // 16, 2 * 16 * tensors
    # Room for two rows is needed, and threads for one.
    most = min(each * MOST_THREADS, (memory - RESERVED_BYTES) // two_rows)
    blocks = next((blocks for blocks in (1, *CLUSTERS) if vectors <= most * blocks), None)
    if blocks is None or not (clusters or (device.type == "cpu" and blocks == 1)):
        return None
    if blocks > 1 and itemsize == 2:
        blocks = CLUSTERS[-1]  # several blocks of a multiprocessor compute in turn
    part = cdiv(vectors, blocks)
    threads = cdiv(part, each * WARP) * WARP
    resident = max((RESIDENT if blocks == 1 else MOST_THREADS) // threads, 1)  # few, because each has sums of its own
    stage = part * 16 * tensors
    stages = min((memory // resident - RESERVED_BYTES) // stage, MOST_STAGES[device.type])
    return Staging(threads, blocks, resident, stages, stages * stage) if stages > 1 else None
