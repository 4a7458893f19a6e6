"""The device's ceilings, measured in the same run: bytes per second, flop per second and launch time."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from fourfold.numerics.dtypes import DTYPES
from fourfold.operations.record import Cost
from fourfold.performance.timing import Clock, DeviceClock, HostClock, one_round

ROUNDS = 15
# Bytes of one array. On the CPU the sizes cover every cache level, because a workload may fit in any of them.
SIZES = {"cpu": tuple(1 << n for n in range(12, 25, 2)), "cuda": (1 << 30,)}
EXTENTS = {"cpu": dict.fromkeys(DTYPES, 512), "cuda": dict.fromkeys(DTYPES, 8192) | {"float64": 4096}}
LAUNCHES = 100
# Float16's speed on tensor cores over the highest speed of wider dtypes there. TF32 has half of float16's speed. A
# kernel may split float64 into five parts of 11 bits, and needs the 15 products of parts that reach its last bit.
TENSOR_CORE_SLOWDOWN = {"float32": 2, "float64": 15}


@dataclass(frozen=True)
class Ceilings:
    """The fastest rounds of calls that only move data, multiply matrices or launch.

    Attributes:
        bytes_per_second: bytes read and written by the fastest of copy, add and fill.
        flops_per_second: the speed of torch.matmul, by dtype.
        launch_seconds: the time of a call that fills one element.
        cache_bytes: how much of what a call writes may still be in a cache, not in memory, when the call ends.
    """

    bytes_per_second: float
    flops_per_second: Mapping[str, float]
    launch_seconds: float
    cache_bytes: int = 0

    def least_seconds(self, cost: Cost, dtype: str) -> float:
        """Return the shortest possible time of a call with this cost; 0 if the cost is 0."""
        return max(cost.bytes / self.bytes_per_second, cost.flops / self.most_flops_per_second(dtype))

    def most_flops_per_second(self, dtype: str) -> float:
        """Return the speed that no right kernel exceeds, even one that multiplies parts of numbers on tensor cores."""
        on_tensor_cores = self.flops_per_second.get("float16", 0.0) / TENSOR_CORE_SLOWDOWN.get(dtype, 1)
        return max(self.flops_per_second[dtype], on_tensor_cores)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, for the JSON record."""
        return asdict(self)


def measure(device: str) -> Ceilings:
    """Measure a device's ceilings. The fastest round counts, so that no right kernel can exceed them."""
    clock: Clock = DeviceClock() if device == "cuda" else HostClock()
    flops = {}
    for name, dtype in DTYPES.items():
        # The CPU multiplies half types in float32, sometimes inefficiently, so their ceiling is float32's speed.
        tensor_type = torch.float32 if device == "cpu" and name in ("float16", "bfloat16") else dtype.torch
        extent = EXTENTS[device][name]
        a, b = (torch.ones(extent, extent, dtype=tensor_type, device=device) for _ in range(2))
        # The layouts of a forward and a backward pass: their speeds differ by some per cent.
        products = ((a, b), (a, b.T), (a.T, b))
        flops[name] = 2 * extent**3 / min(_fastest(clock, partial(torch.matmul, *operands)) for operands in products)
    scalar = torch.empty(1, device=device)

    def launches() -> None:
        for _ in range(LAUNCHES):
            scalar.fill_(1.0)

    return Ceilings(
        bytes_per_second=max(_bytes_per_second(clock, size, device) for size in SIZES[device]),
        flops_per_second=flops,
        launch_seconds=_fastest(clock, launches) / LAUNCHES,
        cache_bytes=torch.cuda.get_device_properties(device).L2_cache_size if device == "cuda" else 0,
    )


def _bytes_per_second(clock: Clock, size: int, device: str) -> float:
    out, x, y = (torch.zeros(size // 4, device=device) for _ in range(3))
    calls = max(1, (1 << 20) // size) if device == "cpu" else 1  # enough to exceed the clock's resolution

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
        # The clock needs the host's time, so that the device does not wait for the host within a round.
        clock.host_seconds = one_round(HostClock(), run, torch.cuda.synchronize)
    return min(one_round(clock, run) for _ in range(ROUNDS))
