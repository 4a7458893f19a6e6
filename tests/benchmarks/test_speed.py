"""How long right results take: every operation, backend and direction, beside its peers."""

from typing import Any

from properties.performance.measurement import Measurement
from properties.performance.plugin import Performance


def test_timed_call_is_right(benchmark: Any, measurement: Measurement, performance: Performance) -> None:
    performance.time(benchmark, measurement)
