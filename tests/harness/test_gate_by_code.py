"""The gate treats benchmarks of the same compiled code as the same, and judges all others by time."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from fourfold.performance import code_identity, gate, gated, report
from fourfold.performance.gate import LEAST
from fourfold.performance.gated import BaselineHistory, Gated, Remeasuring
from fourfold.performance.measurement import Bench
from fourfold.performance.timed_run import TimedRun

MACHINE = {"device": "cuda", "gpu": "H200", "driver": "580", "cuda": "13.0", "torch": "2.14"}
KERNELS = {
    code: {
        "name": "k",
        "arch": "sm_90a",
        "registers": 32,
        "spill_store_bytes": 0,
        "spill_load_bytes": 0,
        "shared_bytes": 0,
        "code_sha256": code,
        "instruction_counts": counts,
    }
    for code, counts in (("old", {"LDG": 4, "FFMA": 8}), ("new", {"LDG": 4, "FFMA": 8, "MUFU": 2}))
}

CELL = {"operation": "softmax", "contender": "cuda", "dtype": "float32"}


def launches(code: str = "old", torch: Sequence[str] = (), unknown: str = "") -> dict[str, Any]:
    """Return the launches of a benchmark: one kernel."""
    return {
        "sha256": f"{code} {len(torch)}",
        "workload": "",
        "launches": [f"k {code}: grid (1, 1, 1)"],
        "kernels": [code],
        "torch": list(torch),
        "unknown": unknown,
    }


Launches = Mapping[str, Any] | None


def record_run(medians: Mapping[str, float], of: Mapping[str, Launches], machine: Mapping[str, str] = MACHINE) -> Any:
    """Return a run as pytest-benchmark keeps it."""
    return {
        "benchmarks": [
            {
                "fullname": name,
                "stats": {"median": median},
                "extra_info": {**CELL, "launched": of[name]} if of.get(name) else CELL,
            }
            for name, median in medians.items()
        ],
        "machine_info": {"fourfold": machine},
        "launched_kernels": KERNELS,
    }


def finish_run(medians: Mapping[str, float], of: Mapping[str, Launches]) -> Any:
    """Return a finished run."""
    return SimpleNamespace(
        medians=medians,
        launched={name: found for name, found in of.items() if found},
        launched_kernels=KERNELS,
        timed={name: SimpleNamespace(gated=True) for name in medians},
        least_differences=dict.fromkeys(medians, LEAST),
        benchmarks=record_run(medians, of)["benchmarks"],
        static=lambda benchmarks: {"kernels": code_identity.kernels_by_cell(benchmarks, KERNELS)},
        bench=SimpleNamespace(implementation=lambda measurement: finish_run),
    )


def judged(
    now: tuple[Mapping[str, float], Mapping[str, Launches]],
    then: tuple[Mapping[str, float], Mapping[str, Launches]],
    machine: Mapping[str, str] = MACHINE,
    again: Remeasuring | None = None,
) -> Gated:
    return Gated.of(finish_run(*now), BaselineHistory(record_run(*then), [record_run(*then)], machine), again)


def noisy(rng: np.random.Generator, count: int) -> dict[str, float]:
    """Return medians of a machine that varies by 3%, with one benchmark in twenty far off."""
    logs = rng.normal(math.log(1e-4), 0.03, count) + (rng.random(count) < 0.05) * rng.exponential(0.3, count)
    return {f"b[{number}]": float(median) for number, median in enumerate(np.exp(logs))}


@pytest.fixture
def measured_again(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, float]], list[str]]:
    """Simulate the second stage with a slowdown for each benchmark. The list receives the benchmarks measured again."""
    suspects: list[str] = []

    def simulate(slowdowns: Mapping[str, float]) -> list[str]:
        rng = np.random.default_rng(8)

        def alternate(name: str, *_: Any) -> np.ndarray:
            suspects.append(name)
            return rng.normal(math.log1p(slowdowns.get(name, 0.0)), 0.002, gate.EPOCHS)

        monkeypatch.setattr(gated, "_baseline", lambda *_: (object(), ""))
        monkeypatch.setattr(gated, "load", lambda baseline, measurement, candidates: measurement)
        monkeypatch.setattr(gated.gate, "alternate", alternate)
        return suspects

    return simulate


def of_names(run: Any) -> Any:
    """Return a run whose measurement is known by its benchmark's name."""
    run.timed = {name: SimpleNamespace(gated=True, name=name) for name in run.timed}
    run.bench.against = lambda measurement, former, rng: measurement.name
    return run


def compared(now: Any, record: BaselineHistory) -> Gated:
    record.baseline["sources"] = {"sha256": "", "candidates": {}}
    return Gated.of(of_names(now), record, Remeasuring(0.1, [Path()], lambda line: None))


def test_of_a_thousand_unchanged_benchmarks_none_is_slower_or_measured_again(measured_again: Any) -> None:
    rng = np.random.default_rng(0)
    suspects = measured_again({})
    now, then = noisy(rng, 1000), noisy(rng, 1000)
    of = dict.fromkeys(now, launches())
    result = compared(finish_run(now, of), BaselineHistory(record_run(then, of), [record_run(then, of)], MACHINE))
    assert {(change.verdict, change.stage, change.reason) for change in result.changes} == {("same", 0, "same code")}
    assert not suspects
    assert not result.slower
    lines = list(result.lines())
    assert "1000 of 1000 benchmarks: the same code, and so the same without a clock" in lines
    told = [line for line in lines if line.endswith("the difference is of the machine")]
    assert len(told) == gated.SHOWN
    assert all("same code" in line for line in told)


def test_what_changed_among_unchanged_benchmarks_is_found_by_the_clock_and_shown_in_instructions(
    measured_again: Any,
) -> None:
    rng = np.random.default_rng(1)
    then = noisy(rng, 1000)
    slowdowns = {f"b[{number}]": 0.05 for number in range(40)}  # the code of b[40] to b[49] differs, the time does not
    suspects = measured_again(slowdowns)
    now = {name: median * (1 + slowdowns.get(name, 0.0)) for name, median in noisy(rng, 1000).items()}
    of_then = dict.fromkeys(then, launches("old"))
    of_now = {name: launches("new" if place < 50 else "old") for place, name in enumerate(now)}
    result = compared(
        finish_run(now, of_now), BaselineHistory(record_run(then, of_then), [record_run(then, of_then)], MACHINE)
    )
    assert {change.name for change in result.slower} == set(slowdowns)
    assert set(suspects) <= {f"b[{number}]" for number in range(50)}
    assert sum(change.stage == 0 for change in result.changes) == 950
    lines = list(result.lines())
    (slower,) = [place for place, line in enumerate(lines) if "is slower" in line and line.endswith("in b[7]")]
    assert "at 95% for all 50 benchmarks together" in lines[slower]
    assert lines[slower + 1] == "  k for sm_90a: 14 instructions, was 12: +2 MUFU"
    assert lines[slower + 2 : slower + 4] == ["  now: k new: grid (1, 1, 1)", "  was: k old: grid (1, 1, 1)"]


ONE = {"b[0]": 1.2e-4}, {"b[0]": 1e-4}
ADD = ["aten.add.Tensor(x: torch.float32[3])"]


@pytest.mark.parametrize(
    ("now", "then", "machine", "same"),
    [
        (launches(), launches(), MACHINE, True),
        (launches(), launches(), {**MACHINE, "torch": "2.15", "driver": "590", "cuda": "13.1"}, True),
        (launches(torch=ADD), launches(torch=ADD), MACHINE, True),
        (launches(torch=ADD), launches(torch=ADD), {**MACHINE, "torch": "2.15"}, False),
        (launches(torch=ADD), launches(torch=ADD), {**MACHINE, "driver": "590"}, False),
        (launches("new"), launches(), MACHINE, False),
        (launches(unknown="its time includes the host's"), launches(), MACHINE, False),
        (launches(), launches(unknown="its time includes the host's"), MACHINE, False),
        (launches(), None, MACHINE, False),  # a baseline from before launches were recorded
        (None, launches(), MACHINE, False),
        (None, None, MACHINE, False),  # a benchmark of the host, of torch, or on the CPU
    ],
)
def test_only_what_is_known_to_be_the_same_is_not_judged_by_the_clock(
    now: Launches, then: Launches, machine: Mapping[str, str], same: bool
) -> None:
    (change,) = judged((ONE[0], {"b[0]": now}), (ONE[1], {"b[0]": then}), machine).changes
    assert (change.verdict, change.reason) == (("same", "same code") if same else ("ambiguous", ""))
    assert change.ratio == pytest.approx(1.2)
    clock = judged((ONE[0], {}), (ONE[1], {}), machine).changes
    assert (clock == [change]) is not same


def test_the_resources_of_launched_code_are_compared_on_a_gpu() -> None:
    medians = {"b[0]": 1e-4, "b[1]": 1e-4}
    now = medians, {"b[0]": launches("new"), "b[1]": launches("old")}
    both = dict.fromkeys(medians, launches("old"))
    worse = "softmax-cuda-float32: k for sm_90a: 14 instructions, after 12: +2 MUFU"
    assert judged((ONE[0], {"b[0]": launches("new")}), (ONE[1], both)).static == [worse]
    assert judged((medians, both), (medians, both)).static == []
    # The baseline has not timed b[0], which alone launches the other code.
    assert judged(now, ({"b[1]": 1e-4}, both)).static == []
    run = TimedRun(cast(Bench, SimpleNamespace(device="cuda")))
    run.__dict__["launched_kernels"] = KERNELS
    assert run.static(record_run(*now)["benchmarks"]) == {
        "kernels": {"softmax-cuda-float32": [*KERNELS.values()][::-1]}
    }
    assert run.static(record_run(medians, {})["benchmarks"]) == {"kernels": {}}


def test_the_report_marks_the_same_code(tmp_path: Path) -> None:
    result = judged((ONE[0], {"b[0]": launches()}), (ONE[1], {"b[0]": launches()}))
    part = report.performance([], {}, {"measured": {}}, {"kernels": {}}, [], result.changes, list(result.lines()))
    assert part["verdicts"][0]["reason"] == "same code"
    assert part["verdicts"][0]["stage"] == 0


def test_on_the_cpu_the_clock_alone_decides_and_is_said_to() -> None:
    said = "on the CPU no compiled code is compared: the clock alone decides"
    on_cpu = judged((ONE[0], {}), (ONE[1], {}), {**MACHINE, "device": "cpu"})
    assert said in on_cpu.lines()
    assert said not in judged((ONE[0], {}), (ONE[1], {})).lines()


@pytest.mark.parametrize(
    ("codes", "alarms"),
    [
        (["old"] * 12, False),
        (["old"] * 2 + ["new"] * 10, True),
        ([None] * 12, True),  # not recorded
        (["old"] * 11 + [None], True),
    ],
    ids=["the same", "changed", "unknown", "unknown today"],
)
def test_a_drift_is_told_only_where_the_code_changed(codes: list[str | None], alarms: bool) -> None:
    def of(number: int) -> dict[str, Launches]:
        code = codes[number]
        return {"b[0]": launches(code) if code else None}

    medians = [{"b[0]": 1e-4 * 1.005**number} for number in range(12)]
    history = [record_run(medians[number], of(number)) for number in range(11)]
    result = Gated.of(finish_run(medians[11], of(11)), BaselineHistory(history[-1], history, MACHINE), None)
    assert bool(result.drifts) == alarms
    of_machine = [
        line for line in result.lines() if line.endswith("its code has been the same, so this is of the machine")
    ]
    assert bool(of_machine) != alarms
