"""Clocks and rounds: how a call's time is taken on a device, and how often, so that pytest-benchmark can keep it.

A clock is what pytest-benchmark calls a timer: it is called before and after a round, and the difference is the
seconds of one call.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

# A round of less is mostly the clock's resolution and Python.
SHORTEST_HOST_ROUND = 100e-6
# Below this a launch and its events are a large part of what is measured; replayed graphs have neither.
GRAPH_SECONDS = 10e-6
GRAPH_CALLS = 64
PILOT_ROUNDS = 7
# Rounds are added until the median is known this well.
PRECISION = 0.005
USUAL_ROUNDS = 30  # that a few alike rounds at the start do not make do without
MOST_ROUNDS = 1000
MOST_CALLS = 1000  # of a round
# Of a round that came late, each with twice the time for the host.
MOST_ATTEMPTS = 10
# A stream holds some thousand launches: a round of more begins before all are enqueued, however long the device waits.
LONGEST_WAIT = 1.0


class Runnable(Protocol):
    """What is timed."""

    @property
    def calls_per_run(self) -> int:
        """Calls of the implementation that `run` makes for each that it is asked for."""

    def run(self, calls: int) -> None:
        """Make so many calls; the last one's results stay."""


class Clock(Protocol):
    """Seconds that have passed, divided by the calls of a round."""

    calls: int  # of a round
    __name__: str

    @property
    def late(self) -> bool:
        """Whether more than the calls may be in the last round's time."""

    def __call__(self) -> float:
        """Called at the beginning and at the end of a round."""


class HostClock:
    """The processor's time, from the call to its return."""

    __name__ = "host_seconds"
    late = False

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.calls = 1
        self._now = now

    def __call__(self) -> float:
        """The time now, in units of a round's calls."""
        return self._now() / self.calls


class Device(Protocol):
    """What a clock needs of a GPU."""

    def flush(self) -> None:
        """Enqueue what takes all former data out of the L2 cache."""

    def spin(self, seconds: float) -> None:
        """Enqueue a wait of the device."""

    def record(self) -> Any:
        """Enqueue an event."""

    def passed(self, event: Any) -> bool:
        """Whether the device has come to an event."""

    def seconds_between(self, start: Any, end: Any) -> float:
        """Wait for both events; the time between them."""


class DeviceClock:
    """A GPU's time between an event before a round and one after it, with a cold L2 cache.

    The device is kept busy until the host has enqueued the whole round: else it would wait for the host within the
    round, and the host's time would be measured. Where it began before, as the host was slower than it is as a rule,
    the round is late, and from then on the device is kept busy for longer, if that is not too long: then never again,
    and the time is what the device takes with the host.
    """

    __name__ = "device_seconds"

    def __init__(self, device: Device | None = None) -> None:
        self.calls = 1
        self.cold = True
        self.host_seconds = 0.0  # of a round; what the device is kept busy for
        self.late = False
        self.late_rounds = 0
        self.waits_for_host = False
        self._device = device
        self._start: Any = None
        self._total = 0.0

    @property
    def device(self) -> Device:
        """The GPU, looked for when first needed."""
        if self._device is None:
            self._device = cuda_device()
        return self._device

    def __call__(self) -> float:
        """Begins a round where none has begun; else ends it and waits for it."""
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
        # Twice the cache: what it replaces is not known to be the oldest.
        self._buffer = torch.empty(2 * properties.L2_cache_size, dtype=torch.int8, device="cuda")
        cycles = 10_000_000
        torch.cuda._sleep(1000)
        start = self.record()
        torch.cuda._sleep(cycles)
        self._cycles_per_second = cycles / self.seconds_between(start, self.record())

    @property
    def cache_bytes(self) -> int:
        """Of L2."""
        return self._buffer.numel() // 2

    def flush(self) -> None:
        """Overwrite the cache."""
        self._buffer.zero_()

    def spin(self, seconds: float) -> None:
        """Keep the stream busy."""
        if seconds:
            torch.cuda._sleep(int(seconds * self._cycles_per_second))

    def record(self) -> torch.cuda.Event:
        """An event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def passed(self, event: torch.cuda.Event) -> bool:
        """Does not wait."""
        return event.query()

    def seconds_between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Waits for `end`."""
        end.synchronize()
        return start.elapsed_time(end) / 1e3


_devices: dict[int, CudaDevice] = {}


def cuda_device() -> CudaDevice:
    """The one of torch's current GPU."""
    index = torch.cuda.current_device()
    if index not in _devices:
        _devices[index] = CudaDevice()
    return _devices[index]


@dataclass(frozen=True)
class Rounds:
    """How a call is timed: so many calls a round, so many rounds."""

    calls: int
    rounds: int
    pilot_seconds: float  # of one call, as a first few rounds say


def one_round(clock: Clock, run: Callable[[], Any], before: Callable[[], None] = lambda: None) -> float:
    """Seconds of one call; rounds that come late are made again."""
    for _ in range(MOST_ATTEMPTS):
        before()
        start = clock()
        run()
        seconds = clock() - start
        if not clock.late:
            break
    return seconds


def spread(samples: Sequence[float]) -> float:
    """Half the width of the median's 95% interval, as a share of the median (McGill, Tukey and Larsen, 1978)."""
    if len(samples) < 2:
        return math.inf
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return 1.57 * (high - low) / math.sqrt(len(samples)) / middle if middle else 0.0


def enough_rounds(samples: Sequence[float], round_seconds: float, least: int, most_seconds: float) -> int:
    """Rounds after which the median should be known to `PRECISION`, as far as the time allows.

    Args:
        samples: of some rounds.
        round_seconds: how long a round takes in all, with what is around it.
        least: rounds at the least.
        most_seconds: for all rounds.
    """
    wanted = math.ceil(len(samples) * (spread(samples) / PRECISION) ** 2) if len(samples) > 1 else MOST_ROUNDS
    affordable = int(most_seconds / round_seconds) if round_seconds else MOST_ROUNDS
    return max(least, min(max(wanted, USUAL_ROUNDS), affordable, MOST_ROUNDS))


def plan_rounds(
    clock: Clock,
    runnable: Runnable,
    before: Callable[[], None],
    least: int,
    most_seconds: float,
    now: Callable[[], float] = time.perf_counter,
) -> Rounds:
    """Warm up until the time no longer falls, then choose calls and rounds by what the last rounds were like.

    Args:
        clock: how time is taken; its `calls` are set.
        runnable: what is timed.
        before: what comes before each round and is not timed.
        least: rounds at the least.
        most_seconds: for all rounds.
        now: the host's time.
    """
    clock.calls = runnable.calls_per_run
    begun, former = now(), math.inf
    # The first calls compile, tune and fill caches.
    while (seconds := one_round(clock, lambda: runnable.run(1), before)) < 0.95 * former:
        former = seconds
        if now() - begun > most_seconds:
            break
    calls = 1
    if isinstance(clock, HostClock) and seconds < SHORTEST_HOST_ROUND:
        calls = min(MOST_CALLS, math.ceil(SHORTEST_HOST_ROUND / max(seconds, 1e-9)))
    clock.calls = runnable.calls_per_run * calls
    samples: list[float] = []
    begun = now()
    while len(samples) < PILOT_ROUNDS and (len(samples) < 2 or now() - begun < most_seconds / 2):
        samples.append(one_round(clock, lambda: runnable.run(calls), before))
    rounds = enough_rounds(samples, (now() - begun) / len(samples), least, most_seconds)
    return Rounds(calls, rounds, statistics.median(samples))
