"""What a device can do at best, measured in the same run: the most bytes and operations in a second."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from properties.dtypes import DTYPES
from properties.operation import Cost
from properties.performance.timing import Clock, DeviceClock, HostClock, one_round

ROUNDS = 15
# Bytes of one array. On the CPU every cache is tried, as what is timed may lie in any.
SIZES = {"cpu": tuple(1 << n for n in range(12, 25, 2)), "cuda": (1 << 30,)}
EXTENTS = {"cpu": dict.fromkeys(DTYPES, 512), "cuda": dict.fromkeys(DTYPES, 8192) | {"float64": 4096}}
LAUNCHES = 100


@dataclass(frozen=True)
class Ceilings:
    """The fastest rounds of what does nothing but move, multiply, or start.

    Attributes:
        bytes_per_second: of the best of copying, adding and filling, so many bytes read and written.
        flops_per_second: of torch.matmul, by dtype.
        launch_seconds: of a call that fills one element.
    """

    bytes_per_second: float
    flops_per_second: Mapping[str, float]
    launch_seconds: float

    def least_seconds(self, cost: Cost, dtype: str) -> float:
        """What a call of this cost takes at the least; 0 where it has none."""
        moving = cost.bytes / self.bytes_per_second
        return max(moving, cost.flops / self.flops_per_second[dtype])

    def as_dict(self) -> dict[str, Any]:
        """For the record."""
        return asdict(self)


def measured(device: str) -> Ceilings:
    """The ceilings of a device, the fastest round counting: nothing that is right can be faster."""
    clock: Clock = DeviceClock() if device == "cuda" else HostClock()
    flops = {}
    for name, dtype in DTYPES.items():
        # Half types are multiplied in float32 on the CPU, and not always well.
        tensor_type = torch.float32 if device == "cpu" and name in ("float16", "bfloat16") else dtype.torch
        extent = EXTENTS[device][name]
        a, b = (torch.ones(extent, extent, dtype=tensor_type, device=device) for _ in range(2))
        # As they lie forward and backward: one is faster than another by some per cent.
        products = ((a, b), (a, b.T), (a.T, b))
        flops[name] = 2 * extent**3 / min(_fastest(clock, partial(torch.matmul, *both)) for both in products)
    one = torch.empty(1, device=device)

    def launches() -> None:
        for _ in range(LAUNCHES):
            one.fill_(1.0)

    return Ceilings(
        bytes_per_second=max(_bytes_per_second(clock, size, device) for size in SIZES[device]),
        flops_per_second=flops,
        launch_seconds=_fastest(clock, launches) / LAUNCHES,
    )


def _bytes_per_second(clock: Clock, size: int, device: str) -> float:
    out, x, y = (torch.zeros(size // 4, device=device) for _ in range(3))
    calls = max(1, (1 << 20) // size) if device == "cpu" else 1  # more than the clock's resolution

    def times(step: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(calls):
                step()

        return run

    streams = {2: lambda: out.copy_(x), 3: lambda: torch.add(x, y, out=out), 1: lambda: out.fill_(1.0)}
    return max(arrays * size * calls / _fastest(clock, times(step)) for arrays, step in streams.items())


def _fastest(clock: Clock, run: Callable[[], Any]) -> float:
    run()
    if isinstance(clock, DeviceClock):
        # The device is not to wait for the host in the midst of a round.
        clock.host_seconds = one_round(HostClock(), run, torch.cuda.synchronize)
    return min(one_round(clock, run) for _ in range(ROUNDS))
