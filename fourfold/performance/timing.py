"""Clocks and rounds: how to time a call on a device, and how often, in a form that pytest-benchmark can use.

A clock is pytest-benchmark's timer. pytest-benchmark calls it before and after a round, and the difference is the
time of one call in seconds.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fourfold.compat import torch_internals

# A round of less is mostly the clock's resolution and Python.
SHORTEST_HOST_ROUND = 100e-6
# Of a call with fewer bytes, the launch and the events are a large part of the measured time. Replaying a graph avoids
# both. The bytes decide, not the time: all implementations of a workload are then timed in the same way.
GRAPH_BYTES = 2**25
GRAPH_CALLS = 64
PILOT_ROUNDS = 7
# The relative precision of the median that the number of rounds aims at.
PRECISION = 0.005
USUAL_ROUNDS = 30  # the minimum if time allows, even if the first few rounds agree closely
MOST_ROUNDS = 1000
MOST_CALLS = 1000  # per round
# The number of attempts at a round that comes late. Each attempt doubles the time allowed for the host.
MOST_ATTEMPTS = 10
# A stream holds some thousand launches. A round with more begins before the host has enqueued all, whatever the wait.
LONGEST_WAIT = 1.0


class Runnable(Protocol):
    """Something that can be timed."""

    @property
    def calls_per_run(self) -> int:
        """The number of calls of the implementation in one run."""

    def run(self, calls: int) -> None:
        """Run `calls` times; the results of the last run stay available."""


class Clock(Protocol):
    """A timer whose differences are the seconds of one call: the seconds of a round divided by its calls."""

    calls: int  # per round
    __name__: str

    @property
    def late(self) -> bool:
        """Whether the time of the last round may include waiting for the host."""

    def __call__(self) -> float:
        """Return the time; called at the beginning and at the end of a round."""


class HostClock:
    """The host's wall-clock time, from the call to its return."""

    __name__ = "host_seconds"
    late = False

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.calls = 1
        self._now = clock

    def __call__(self) -> float:
        """Return the current time in seconds, divided by the calls of a round."""
        return self._now() / self.calls


class Device(Protocol):
    """The operations of a GPU that `DeviceClock` needs."""

    def flush(self) -> None:
        """Enqueue a write that evicts all earlier data from the L2 cache."""

    def spin(self, seconds: float) -> None:
        """Enqueue a busy wait of this many seconds."""

    def record(self) -> Any:
        """Enqueue an event and return it."""

    def passed(self, event: Any) -> bool:
        """Return whether the device has reached an event, without waiting."""

    def seconds_between(self, start: Any, end: Any) -> float:
        """Wait for both events and return the seconds between them."""


class DeviceClock:
    """The GPU's time between an event before a round and one after it, with a cold L2 cache.

    A busy wait keeps the device occupied until the host has enqueued the whole round. Otherwise the device would wait
    for the host within the round, and the clock would measure the host. A round is late if the device began it before
    the host had enqueued it all. After a late round the wait doubles. Once it would exceed `LONGEST_WAIT`, the clock
    stops waiting for good (`waits_for_host`), and the time includes the host's.
    """

    __name__ = "device_seconds"

    def __init__(self, device: Device | None = None) -> None:
        self.calls = 1
        self.cold = True
        self.host_seconds = 0.0  # the host's time to enqueue a round; the device stays busy for twice as long
        self.late = False
        self.late_rounds = 0
        self.waits_for_host = False
        self._device = device
        self._start: Any = None
        self._total = 0.0

    @property
    def device(self) -> Device:
        """The GPU, looked up at first use."""
        if self._device is None:
            self._device = cuda_device()
        return self._device

    def __call__(self) -> float:
        """Begin a round, or end the current one and wait for it. Return the total seconds per call of all rounds."""
        if self._start is None:
            if self.cold:
                self.device.flush()
            self.device.spin(2 * self.host_seconds)
            self._start = self.device.record()
        else:
            end = self.device.record()
            self.late = self.host_seconds > 0 and self.device.passed(self._start)
            if self.late:
                self.late_rounds += 1
                self.host_seconds *= 2
                if self.host_seconds > LONGEST_WAIT:
                    self.host_seconds, self.late, self.waits_for_host = 0.0, False, True
            self._total += self.device.seconds_between(self._start, end) / self.calls
            self._start = None
        return self._total


class CudaDevice:
    """torch's current GPU."""

    def __init__(self) -> None:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        # Twice the size of the cache, because the cache does not always evict the oldest line first.
        self._buffer = torch.empty(2 * properties.L2_cache_size, dtype=torch.int8, device="cuda")
        cycles = 10_000_000
        torch_internals.keep_stream_busy(1000)
        start = self.record()
        torch_internals.keep_stream_busy(cycles)
        self._cycles_per_second = cycles / self.seconds_between(start, self.record())

    @property
    def cache_bytes(self) -> int:
        """The size of the L2 cache."""
        return self._buffer.numel() // 2

    def flush(self) -> None:
        """Overwrite the L2 cache."""
        self._buffer.zero_()

    def spin(self, seconds: float) -> None:
        """Keep the stream busy for this many seconds."""
        if seconds:
            torch_internals.keep_stream_busy(int(seconds * self._cycles_per_second))

    def record(self) -> torch.cuda.Event:
        """Record an event on the current stream and return it."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def passed(self, event: torch.cuda.Event) -> bool:
        """Return whether the stream has reached the event, without waiting."""
        return event.query()

    def seconds_between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Wait for `end` and return the seconds since `start`."""
        end.synchronize()
        return start.elapsed_time(end) / 1e3


_devices: dict[int, CudaDevice] = {}


def cuda_device() -> CudaDevice:
    """Return the cached `CudaDevice` of torch's current GPU."""
    index = torch.cuda.current_device()
    if index not in _devices:
        _devices[index] = CudaDevice()
    return _devices[index]


@dataclass(frozen=True)
class Rounds:
    """The plan for timing a call: runs per round, and rounds."""

    calls: int
    rounds: int
    pilot_seconds: float  # the median time of one call in the pilot rounds


def one_round(clock: Clock, run: Callable[[], Any], setup: Callable[[], None] = lambda: None) -> float:
    """Time one round and return the seconds of one call. Repeat a late round, at most `MOST_ATTEMPTS` times in all."""
    for _ in range(MOST_ATTEMPTS):
        setup()
        start = clock()
        run()
        seconds = clock() - start
        if not clock.late:
            break
    return seconds


def spread(samples: Sequence[float]) -> float:
    """Return half the width of the median's 95% interval over the median (McGill, Tukey and Larsen, 1978)."""
    if len(samples) < 2:
        return math.inf
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return 1.57 * (high - low) / math.sqrt(len(samples)) / middle if middle else 0.0


def enough_rounds(samples: Sequence[float], round_seconds: float, least_rounds: int, most_seconds: float) -> int:
    """Return the number of rounds that should give the median to `PRECISION`, as far as the time allows.

    Args:
        samples: the seconds of one call in each pilot round.
        round_seconds: the whole time of a round, with the preparation before it.
        least_rounds: the minimum number of rounds.
        most_seconds: the maximum time of all rounds.
    """
    required = math.ceil(len(samples) * (spread(samples) / PRECISION) ** 2) if len(samples) > 1 else MOST_ROUNDS
    affordable = int(most_seconds / round_seconds) if round_seconds else MOST_ROUNDS
    return max(least_rounds, min(max(required, USUAL_ROUNDS), affordable, MOST_ROUNDS))


def plan_rounds(
    clock: Clock,
    runnable: Runnable,
    setup: Callable[[], None],
    least_rounds: int,
    most_seconds: float,
    host_clock: Callable[[], float] = time.perf_counter,
) -> Rounds:
    """Warm up until the time no longer falls, then choose calls and rounds from a few pilot rounds.

    Args:
        clock: the clock; this sets its `calls`.
        runnable: what to time.
        setup: the untimed preparation before each round.
        least_rounds: the minimum number of rounds.
        most_seconds: the maximum time of all rounds.
        host_clock: the host's clock.
    """
    clock.calls = runnable.calls_per_run
    start, former = host_clock(), math.inf
    # The first calls compile, tune and fill caches.
    while (seconds := one_round(clock, lambda: runnable.run(1), setup)) < 0.95 * former:
        former = seconds
        if host_clock() - start > most_seconds:
            break
    calls = 1
    if isinstance(clock, HostClock) and seconds < SHORTEST_HOST_ROUND:
        calls = min(MOST_CALLS, math.ceil(SHORTEST_HOST_ROUND / max(seconds, 1e-9)))
    clock.calls = runnable.calls_per_run * calls
    samples: list[float] = []
    start = host_clock()
    while len(samples) < PILOT_ROUNDS and (len(samples) < 2 or host_clock() - start < most_seconds / 2):
        samples.append(one_round(clock, lambda: runnable.run(calls), setup))
    rounds = enough_rounds(samples, (host_clock() - start) / len(samples), least_rounds, most_seconds)
    return Rounds(calls, rounds, statistics.median(samples))
