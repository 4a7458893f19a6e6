"""Slow creep over many runs is found in their history, on simulated medians, and nothing else is called a drift."""

import itertools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fourfold.performance.drift import FEWEST, Drift, drifts, rise_probability, trend
from fourfold.performance.gate import LEAST
from fourfold.performance.gated import BaselineHistory, Gated

BENCHMARKS = 200


def history(rng: np.random.Generator, runs: int, spread: float, of_runs: Any = 0.0) -> list[dict[str, float]]:
    """Return medians that vary by `spread`, some of them far off; `of_runs` is added to the logarithms."""
    logs = np.log(rng.uniform(2e-5, 1e-3, BENCHMARKS)) + np.reshape(of_runs, (-1, 1))
    logs = logs + rng.normal(0, spread, (runs, BENCHMARKS))
    logs += (rng.random(logs.shape) < 0.05) * rng.normal(0, 5 * spread, logs.shape)
    return [{str(number): float(median) for number, median in enumerate(np.exp(run))} for run in logs]


def found(runs: list[dict[str, float]]) -> list[Drift]:
    return drifts(runs, dict.fromkeys(runs[-1], LEAST))


def test_the_probability_of_rises_is_that_of_all_orders() -> None:
    for count in (2, 3, 5):
        orders = [sum(a < b for a, b in itertools.combinations(o, 2)) for o in itertools.permutations(range(count))]
        for rises in range(count * (count - 1) // 2 + 1):
            share = sum(order >= rises for order in orders) / len(orders)
            assert rise_probability(count, rises) == pytest.approx(share)


@pytest.mark.parametrize("spread", [0.002, 0.01, 0.05])
def test_noise_is_no_drift(spread: float) -> None:
    rng = np.random.default_rng(0)
    assert not [drift for _ in range(5) for drift in found(history(rng, 20, spread))]


@pytest.mark.parametrize(("spread", "runs", "least"), [(0.002, 11, 0.9), (0.002, 20, 0.99), (0.005, 20, 0.7)], ids=str)
def test_ten_times_half_a_percent_is_found(spread: float, runs: int, least: float) -> None:
    rng = np.random.default_rng(0)
    creeping = np.clip(np.arange(runs) - (runs - 11), 0, None) * math.log(1.005)
    told = found(history(rng, runs, spread, creeping))
    assert len(told) >= least * BENCHMARKS
    assert np.median([drift.ratio for drift in told]) == pytest.approx(1.05, abs=0.012)
    if runs == 11:  # otherwise the first runs do not count for the slope
        assert np.mean([drift.low <= 1.005 ** (drift.runs - 1) <= drift.high for drift in told]) > 0.9


@pytest.mark.parametrize("place", [2, 10, 17, 19])
def test_one_step_is_no_drift(place: int) -> None:
    rng = np.random.default_rng(place)
    step = (np.arange(20) >= place) * math.log(1.05)
    assert len(found(history(rng, 20, 0.005, step))) <= 0.01 * BENCHMARKS


def test_what_became_faster_before_hides_no_drift() -> None:
    logs = np.concatenate([np.full(8, 0.3), np.arange(12) * math.log(1.005)])
    assert len(found(history(np.random.default_rng(0), 20, 0.002, logs))) > 0.9 * BENCHMARKS


def test_few_runs_say_nothing() -> None:
    runs = [{"a": 1e-4 * 1.01**number} for number in range(FEWEST + 2)]
    assert not found(runs[: FEWEST - 1])
    (drift,) = found(runs)
    assert drift.ratio == pytest.approx(1.01 ** (FEWEST + 1))
    assert str(drift) == f"drifts      +9.4% ( +9.4% to  +9.4%) over {FEWEST + 2} runs, +1.00% each: a"
    assert trend("a", [run["a"] for run in reversed(runs)]).p == 1


def test_a_drift_is_told_and_todays_run_counts_once() -> None:
    def run(number: int) -> dict[str, Any]:
        return {"benchmarks": [{"fullname": "a", "stats": {"median": 1e-4 * 1.005**number}}], "machine_info": {}}

    runs = [run(number) for number in range(12)]
    today = {"a": 1e-4 * 1.005**11}
    for kept in (runs, runs[:-1]):  # with --benchmark-autosave today's run is among them
        record = BaselineHistory(runs[-2], kept, {})
        assert len(record.runs(today)) == 12
        timed: Any = SimpleNamespace(
            medians=today,
            timed={"a": SimpleNamespace(gated=True)},
            least_differences={"a": LEAST},
            benchmarks=[],
            static=lambda benchmarks: {"kernels": {}},
            launched={},
            bench=None,
        )
        gated = Gated.of(timed, record, None)
        assert [change.verdict for change in gated.changes] == ["same"]
        assert any(line.startswith("drifts") and "over 12 runs" in line for line in gated.lines())
