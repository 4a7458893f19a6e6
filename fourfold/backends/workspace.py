"""Counters with which a launch finds its last block. A counter is 0 before each launch, and the launch resets it."""

import functools
import threading

import torch

from fourfold.backends import known_calls, launch_records
from fourfold.compat import torch_internals

_COUNTERS = 1 << 14  # per device; one for each stream, and one for each call captured in a CUDA graph
_slabs: dict[int, torch.Tensor] = {}
_used: dict[int, int] = {}
_stream_counters: dict[tuple[int, int], torch.Tensor] = {}
# Threads on streams of their own must not take the same counter.
_taking = threading.Lock()


def counter(device: torch.device) -> torch.Tensor:
    """Return an int32 counter ``[1]`` that is 0 when the launch begins. No concurrent launch shares it.

    The launches of a stream run one after another, so each stream keeps one counter. A captured call may be replayed on
    any stream beside any other, so it gets its own permanent counter. On the CPU each call makes a new counter.
    """
    if device.type == "cpu":
        return torch.zeros(1, dtype=torch.int32)
    workspace = _gpu_workspace(device)
    if (recorder := known_calls.recorder()) is not None:
        recorder.provide(workspace, functools.partial(_gpu_workspace, device))
    if (record := launch_records.current) is not None:
        record.describe(workspace, "counter")  # where it lies depends on the calls before this one
    return workspace


def _gpu_workspace(device: torch.device) -> torch.Tensor:
    index = device.index
    if torch.cuda.is_current_stream_capturing():
        slot = _next(index)
        # If no counter is left, or none exists yet, the graph clears a counter itself. That costs one graph node.
        return slot if slot is not None else torch.zeros(1, dtype=torch.int32, device=device)
    stream = torch_internals.current_stream(index)
    workspace = _stream_counters.get((index, stream))
    if workspace is None:
        if index not in _slabs:
            _slabs[index] = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)
            _used[index] = 0
            torch.cuda.synchronize(index)  # other streams must not run ahead of the zeros
        slot = _next(index)
        if slot is None:
            return torch.zeros(1, dtype=torch.int32, device=device)
        workspace = _stream_counters[index, stream] = slot
    return workspace


def _next(index: int) -> torch.Tensor | None:
    with _taking:
        used = _used.get(index, _COUNTERS)
        if used == _COUNTERS:
            return None
        _used[index] = used + 1
    return _slabs[index][used : used + 1]
