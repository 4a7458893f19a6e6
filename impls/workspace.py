"""Counters by which the last block of a launch learns that it is the last: zero before each launch, left zero by it."""

import torch

_COUNTERS = 1 << 14  # a device; one for each stream, and one for each call captured in a CUDA graph
_slabs: dict[int, torch.Tensor] = {}
_used: dict[int, int] = {}
_of_stream: dict[tuple[int, int], torch.Tensor] = {}


def counter(device: torch.device) -> torch.Tensor:
    """An int32 counter ``[1]`` that is 0 when the launch begins and that no launch running at the same time shares.

    Launches of a stream run one after another, so a stream has one counter for good. A captured call may be replayed
    on any stream beside any other, so it gets a counter that nobody else ever has. On the CPU it is made anew.
    """
    if device.type == "cpu":
        return torch.zeros(1, dtype=torch.int32)
    index = device.index
    if torch.cuda.is_current_stream_capturing():
        own = _next(index)
        # None left, or the capture came first: a counter that the graph itself clears, for the price of a node.
        return own if own is not None else torch.zeros(1, dtype=torch.int32, device=device)
    stream = torch._C._cuda_getCurrentRawStream(index)
    found = _of_stream.get((index, stream))
    if found is None:
        if index not in _slabs:
            _slabs[index] = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)
            _used[index] = 0
            torch.cuda.synchronize(index)  # other streams must not run ahead of the zeros
        own = _next(index)
        if own is None:
            return torch.zeros(1, dtype=torch.int32, device=device)
        found = _of_stream[index, stream] = own
    return found


def _next(index: int) -> torch.Tensor | None:
    used = _used.get(index, _COUNTERS)
    if used == _COUNTERS:
        return None
    _used[index] = used + 1
    return _slabs[index][used : used + 1]
