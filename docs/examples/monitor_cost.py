"""Measure what `fourfold.monitor` adds to a call: in a tight loop, and with caches that each call empties."""

import random
import statistics
import time

import numpy as np
import torch

import fourfold

DATA = np.zeros(1 << 23)  # 64 MiB
now = time.perf_counter
began = ended = 0.0


def kernel(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Touch the data, and record when the kernel begins and ends."""
    global began, ended
    began = now()
    result = torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)
    np.add(DATA, 1, out=DATA)
    ended = now()
    return result


def small(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Return the input."""
    return x


def through(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Call the kernel from another function."""
    return kernel(x, weight, eps)


def main(calls: int = 300) -> None:
    """Print the microseconds of a call outside of the kernel, and the monitor's summary."""
    torch.set_num_threads(1)
    arguments = torch.ones(8, 64), torch.ones(64), 1e-6
    monitored, passing, alone = (
        fourfold.monitor(each, "rms_norm", **options)
        for each, options in (
            (kernel, {}),
            (kernel, {"rate": 0.0, "budget": 1e-9}),
            (small, {"rate": 0.0, "budget": 1e-9}),
        )
    )
    ways = {"the kernel": kernel, "a function": through, "the monitor": monitored, "the monitor, passing": passing}
    outside: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(calls):
        for name in random.sample([*ways], len(ways)):
            before = now()
            ways[name](*arguments)
            outside[name].append(1e6 * (began - before + now() - ended))
    for name, times in outside.items():
        print(f"cold, {name}: median {statistics.median(times):.1f} µs")
    for name, each in (("the kernel", small), ("the monitor, passing", alone)):
        before = time.thread_time()
        for _ in range(100_000):
            each(*arguments)
        print(f"hot, {name}: {10 * (time.thread_time() - before):.2f} µs")
    for each in (monitored, passing, alone):
        each.close()
    print(monitored.summary())


if __name__ == "__main__":
    main()
