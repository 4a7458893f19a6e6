"""The time of every operation, backend and direction beside its peers. Only right results are timed."""

from typing import Any

from fourfold.performance.measurement import Measurement
from fourfold.performance.plugin import Performance


def test_timed_call_is_right(benchmark: Any, measurement: Measurement, performance: Performance) -> None:
    performance.time(benchmark, measurement)
