"""What launches on every backend share."""

import functools

import torch


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a device; on the CPU 3, so that loops over tiles and reductions over blocks run."""
    if device.type == "cpu":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count
