"""The gate rejects slower benchmarks and no others, on simulated times and on planted slowdowns."""

import math
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import warm
from samples import sampled
from subjects import KERNEL

from fourfold.performance import gate, gate_trial, sources, static
from fourfold.performance.gate import Change, alternate, decide, least_difference, match_benchmarks, run_spread
from fourfold.performance.gate_trial import UNCHANGED, GateTrial, Waits, add_waits, length_for, trial
from fourfold.pytest_plugin.options import slowdowns

ROOT = Path(__file__).parents[2]
BENCHMARKS = 200


def log_ratios(rng: np.random.Generator, slowdown: float, spread: float, turns: int = 8) -> np.ndarray:
    """Simulate `alternate`: rounds vary, some are interrupted, and the memory of each epoch makes a difference.

    Args:
        rng: the random generator.
        slowdown: the slowdown of today's code; 0.02 for 2%.
        spread: the standard deviation of a round's log time; an epoch's is a fifth of it.
        turns: the number of turns in an epoch.
    """
    rounds = rng.normal(0, spread, (gate.EPOCHS, turns, 4))
    rounds += (rng.random(rounds.shape) < 0.03) * rng.exponential(0.2, rounds.shape)
    differences = (rounds[..., 0] + rounds[..., 3] - rounds[..., 1] - rounds[..., 2]) / 2
    return np.median(differences, axis=1) + rng.normal(0, spread / 5, gate.EPOCHS) + math.log1p(slowdown)


def gate_verdicts(slowdowns: list[float], spread: float, seed: int) -> list[str]:
    """Return the gate's verdict on a benchmark with each of these slowdowns."""
    rng = np.random.default_rng(seed)
    measured = {str(i): log_ratios(rng, slowdown, spread) for i, slowdown in enumerate(slowdowns)}
    verdicts = {change.name: change.verdict for change in decide(measured, len(measured))}
    return [verdicts[str(i)] for i in range(len(slowdowns))]


@pytest.mark.parametrize("spread", sampled([0.005, 0.02, 0.05], 0.02))
def test_unchanged_code_gives_no_alarm(spread: float) -> None:
    verdicts = [verdict for seed in range(3) for verdict in gate_verdicts([0.0] * BENCHMARKS, spread, seed)]
    assert set(verdicts) <= {"same", "ambiguous"}
    if spread < 0.03:
        assert verdicts.count("same") > 0.9 * len(verdicts)


@pytest.mark.full(but=2)
@pytest.mark.parametrize(
    ("slowdown", "spread", "least"),
    [(0.02, 0.005, 1.0), (0.02, 0.02, 0.9), (0.05, 0.03, 1.0), (0.10, 0.05, 1.0), (0.01, 0.005, 0.2)],
)
def test_planted_slowdowns_are_found_among_others(slowdown: float, spread: float, least: float) -> None:
    planted = BENCHMARKS // 4
    verdicts = gate_verdicts([slowdown] * planted + [0.0] * (BENCHMARKS - planted), spread, seed=11)
    assert verdicts[:planted].count("slower") >= least * planted
    assert not {"slower", "faster"} & set(verdicts[planted:])


@pytest.mark.parametrize("sign", [-1, 1])
def test_an_epoch_that_something_else_disturbed_hides_no_slowdown(sign: int) -> None:
    rng = np.random.default_rng(6)
    ratios = {str(i): log_ratios(rng, 0.02, 0.005) for i in range(50)}
    for disturbed in ratios.values():
        disturbed[rng.integers(gate.EPOCHS)] += sign * rng.uniform(0.3, 1.0)
    assert {change.verdict for change in decide(ratios, BENCHMARKS)} == {"slower"}


@pytest.mark.parametrize(
    ("seconds", "of_host", "minded"),
    [(1e-3, False, {"2%", "5%"}), (3e-6, False, {"5%"}), (1e-6, False, set()), (1e-3, True, {"5%"})],
)
def test_what_where_things_lie_may_make_is_of_no_concern(seconds: float, of_host: bool, minded: set[str]) -> None:
    rng = np.random.default_rng(7)
    ratios = {name: log_ratios(rng, slowdown, 0.005) for name, slowdown in (("2%", 0.02), ("5%", 0.05))}
    least = dict.fromkeys(ratios, least_difference(seconds, of_host))
    verdicts = {change.name: change.verdict for change in decide(ratios, 10, least)}
    assert verdicts == {name: "slower" if name in minded else "same" for name in ratios}


def test_what_became_faster_is_said_to_be() -> None:
    assert gate_verdicts([-0.05] * 5 + [0.0] * 5, 0.02, seed=3)[:5] == ["faster"] * 5


def test_a_difference_of_no_concern_is_the_same_however_certain() -> None:
    assert gate_verdicts([0.005] * 20, 0.001, seed=5) == ["same"] * 20


def test_the_interval_holds_the_true_ratio_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    level = 0.1
    missed = 0
    for _ in range(300):
        low, high = gate.Estimate.of(log_ratios(rng, 0.03, 0.02)).interval(level)
        missed += not low <= math.log1p(0.03) <= high
    assert 0.04 < missed / 300 < 0.17


def test_the_more_benchmarks_the_stronger_the_evidence_must_be() -> None:
    ratios = {"a": log_ratios(np.random.default_rng(4), 0.02, 0.06)}
    alone, among_many = decide(ratios, 1)[0], decide(ratios, 1000)[0]
    assert among_many.high - among_many.low > 1.5 * (alone.high - alone.low)
    assert (alone.verdict, among_many.verdict) == ("slower", "ambiguous")


def test_times_that_do_not_vary_are_decided() -> None:
    assert decide({"a": np.full(gate.EPOCHS, math.log(1.05))}, 10)[0].verdict == "slower"
    assert decide({"a": np.zeros(gate.EPOCHS)}, 10)[0].verdict == "same"


def screen(now: float, then: float, history: list[float]) -> str:
    return gate.screen("x", now, then, run_spread(history)).verdict


QUIET = [1.0, 1.001, 0.999, 1.002, 1.0, 0.998]
NOISY = [1.0, 1.04, 0.97, 1.05, 0.96, 1.01]


def test_medians_settle_only_what_the_history_lets_them() -> None:
    assert screen(1.003, 1.0, QUIET) == "same"
    assert screen(1.02, 1.0, QUIET) == screen(0.97, 1.0, QUIET) == "ambiguous"
    # If runs vary by as much anyway, or the history is too short, equal medians do not prove "same".
    assert screen(1.0, 1.0, NOISY) == screen(1.0, 1.0, QUIET[:3]) == "ambiguous"


def test_a_change_in_the_history_is_no_spread() -> None:
    assert run_spread([*QUIET, *(1.5 * median for median in QUIET)]) < 2 * run_spread(QUIET)


def test_the_first_stage_lets_few_slowdowns_pass_that_are_worth_finding() -> None:
    rng = np.random.default_rng(2)
    for spread in (0.002, 0.004, 0.02):
        passed = sum(
            gate.screen("x", math.exp(rng.normal(0.02, spread)), math.exp(rng.normal(0, spread)), spread).verdict
            == "same"
            for _ in range(2000)
        )
        assert passed < 0.07 * 2000


class Machine:
    """Two kernels on a simulated machine that becomes slower all the time."""

    def __init__(self, ratio: float, drift: float) -> None:
        self.time, self.ratio, self.drift = 0.0, ratio, drift
        self.order: list[str] = []

    def now(self) -> float:
        return self.time

    def round_of(self, name: str, seconds: float) -> Callable[[], float]:
        def timed() -> float:
            self.order.append(name)
            taken = seconds * (1 + self.drift * self.time)
            self.time += taken
            return taken

        return timed

    def pair(self) -> tuple[Callable[[], float], Callable[[], float]]:
        self.order.append("|")
        return self.round_of("A", 1e-3), self.round_of("B", 1e-3 * self.ratio)


def test_a_drift_of_the_machine_is_no_difference() -> None:
    machine = Machine(ratio=1.03, drift=0.5)
    ratios = alternate(machine.pair, 1.0, np.random.default_rng(0), clock=machine.now)
    assert np.allclose(ratios, math.log(1.03), atol=1e-5)
    epochs = "".join(machine.order).split("|")[1:]
    assert len(epochs) == gate.EPOCHS
    turns = {epoch[i : i + 4] for epoch in epochs for i in range(0, len(epoch), 4)}
    assert turns == {"ABBA", "BAAB"}


def test_benchmarks_of_one_run_alone_are_named() -> None:
    assert match_benchmarks(["a", "b", "c"], ["b", "d"]) == (["b"], ["d"], ["a", "c"])


def worse(**changes: object) -> list[str]:
    return list(static.regressions({"c": [{**KERNEL, **changes}]}, {"c": [KERNEL]}))


def test_what_compiled_code_needs_more_of_is_reported() -> None:
    assert worse() == []
    assert worse(registers=32, shared_bytes=0, instruction_counts={"FFMA": 8}) == []
    assert "16 bytes of spills, after 0" in worse(spill_load_bytes=16)[0]
    assert "+6 BAR" in worse(instruction_counts={"LDG": 4, "FFMA": 8, "BAR": 7})[0]
    assert "shared memory" in worse(shared_bytes=2048)[0]


def test_registers_count_where_fewer_warps_fit() -> None:
    assert static.warps_by_registers(32) == static.warps_by_registers(30) == 64
    assert static.warps_by_registers(255) == 8
    more = [{**KERNEL, "registers": registers} for registers in (57, 64)]
    assert list(static.regressions({"c": more[1:]}, {"c": more[:1]})) == []  # the same allocation step
    assert "28 warps a multiprocessor at the most, after 32" in worse(registers=65)[0]


def test_variants_of_a_kernel_are_told_apart_and_new_ones_named() -> None:
    then = {"c": [KERNEL, {**KERNEL, "registers": 128}], "gone": [KERNEL]}
    assert list(static.regressions(then, then)) == []
    assert list(static.regressions({"c": [KERNEL]}, then)) == ["c: k for sm_90a, variant 2 is no more"]
    assert list(static.regressions(then, {"c": [KERNEL]})) == ["c: k for sm_90a, variant 2 is new"]


def test_sources_are_kept_once_and_loaded_beside_todays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOURFOLD_CACHE", str(tmp_path / "cache"))
    files = sources.read_sources({})
    doubled = files["fourfold/impls/vector_add/torch_eager.py"].replace(b"return x + y", b"return x + y + y")
    assert doubled != files["fourfold/impls/vector_add/torch_eager.py"]
    files["fourfold/impls/vector_add/torch_eager.py"] = doubled
    path = sources.save(tmp_path, files)
    assert path == sources.save(tmp_path, files)
    baseline = sources.Baseline(path)
    from fourfold import backends

    one = torch.ones(3)
    assert baseline.load("vector_add", "torch")(one, one).tolist() == [3.0] * 3
    assert backends.load("vector_add", "torch")(one, one).tolist() == [2.0] * 3
    # Its operators have their own namespace, so they do not collide with today's.
    backends.load("vector_add", "cuda")
    assert baseline.load("vector_add", "cuda").__module__.startswith(f"fourfold_{baseline.suffix}.")
    with pytest.raises(sources.SourceError, match="does not load"):
        baseline.load("vector_subtract", "torch")
    path.write_bytes(sources.save(tmp_path / "other", {"fourfold/impls/a.py": b""}).read_bytes())
    with pytest.raises(sources.SourceError, match="does not hold"):
        sources.Baseline(path)
    with pytest.raises(sources.SourceError, match="not kept"):
        sources.Baseline(tmp_path / "0.zip")


def test_verdicts_fit_a_terminal() -> None:
    name = "tests/benchmarks/test_speed.py::test_timed_call_is_right[giou_loss_ragged-article-bfloat16-backward-triton]"
    assert len(str(Change(name, "ambiguous", 1.021, 0.99, 1.05, 2))) <= 90


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Copy this project, so that a test may change its kernels."""
    for name in ("fourfold", "impls", "oracles", "properties", "tests/benchmarks", "tests/known_wrong"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.mark.full
def test_a_planted_slowdown_fails_the_gate_and_is_named(project: Path) -> None:
    common = ["tests/benchmarks", "-k", "small and forward", "--device=cpu", "--op=vector_add", "--backend=torch"]

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        command = ["pytest", *common, "--benchmark-only", "--benchmark-max-time=0.05", *options]
        return warm.run(*command, cwd=project, env=warm.variables())

    assert run("--benchmark-autosave").returncode == 0
    kernel = project / "impls" / "vector_add" / "torch_eager.py"
    text = kernel.read_text()
    assert "return x + y" in text
    kernel.write_text(text.replace("return x + y", "return torch.sub(x + y, 0)"))
    done = run("--benchmark-compare", "--perf-gate", "--perf-gate-seconds=0.2")
    assert done.returncode == 1, done.stdout
    said = re.search(r"fourfold\.impls\.vector_add\.torch_eager\.vector_add is slower: \+(\d+)\.\d%", done.stdout)
    assert said, done.stdout
    assert int(said[1]) > 5
    (record,) = project.glob(".benchmarks/*/*.json")
    record.write_text(re.sub(r'("gpu": )""', r'\1"NVIDIA L4"', record.read_text()))
    refused = run("--benchmark-compare")
    assert refused.returncode == pytest.ExitCode.USAGE_ERROR
    assert "of another machine: gpu is '', but was 'NVIDIA L4'" in refused.stderr


KERNELS = """
template <class T> __global__ void declared(const T* x);  // no body
__device__ float half(float x) { return x / 2; }
template <class T, int N>
__global__ void __launch_bounds__(N > 1 ? (N / 2) : 1) first(
    const T* x,  // [n / (2)]
    float* y) {
    y[0] = half(x[0]);
}
extern "C" __global__ void second() {
}
"""


def test_every_kernel_waits_first_and_nothing_else_does() -> None:
    made = add_waits(KERNELS, 4096)
    assert made.count("4096ULL") == 2
    for before in ("float* y) {", "second() {"):
        assert "volatile" in made.partition(before)[2].splitlines()[2]
    assert made.index("declared") < made.index("half") < made.index("4096ULL")
    without = re.sub(r"\n    \{\n.*?\n    \}\n", "", made, flags=re.DOTALL)
    assert without == KERNELS


@pytest.mark.parametrize("slowdown", [0.01, 0.1])
def test_a_wait_is_as_long_as_the_slowdown_that_is_wanted(slowdown: float) -> None:
    def hidden_at_first(length: int) -> float:  # behind latency that the kernel has anyway
        return math.log1p(max(length - 300, 0) * 1e-5)

    length = length_for(slowdown, 1e-4, hidden_at_first)
    assert length is not None
    assert hidden_at_first(length) == pytest.approx(math.log1p(slowdown), rel=0.1)


def test_what_no_wait_makes_slower_is_not_planted_in() -> None:
    tried: list[int] = []

    def without_a_kernel(length: int) -> float:
        tried.append(length)
        return 0.0

    assert length_for(0.01, 1e-4, without_a_kernel) is None
    assert max(tried) < 1e7  # another kernel that reads the length may really have to wait this long


@pytest.mark.full
def test_kernels_wait_as_long_as_they_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOURFOLD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FOURFOLD_CUDA_ON_CPU", "fast")
    monkeypatch.setattr(sys, "path", [*sys.path])
    waits = Waits.of("cpu", tmp_path)
    x = torch.arange(512.0)
    seconds = {}
    for name, side in (("reference", waits.reference), ("slowed", waits.slowed)):
        add = side.load("vector_add", "cuda")
        for length in (0, 20_000):
            waits.wait(length)
            assert torch.equal(add(x, x), 2 * x)
            seconds[name, length] = min(timed(lambda add=add: add(x, x)) for _ in range(5))  # type: ignore[misc]
    assert seconds["slowed", 20_000] > 5 * max(
        seconds["slowed", 0], seconds["reference", 0], seconds["reference", 20_000]
    )


def timed(call: Callable[[], object]) -> float:
    """Return the processor time of a call in this thread, which other processes do not increase."""
    begun = time.thread_time()
    call()
    return time.thread_time() - begun


def test_a_trial_tells_false_alarms_and_what_was_not_found() -> None:
    def change(name: str, said: str, ratio: float) -> Change:
        return Change(f"test_speed.py::test[{name}]", said, ratio, ratio - 0.01, ratio + 0.01, 2)

    changes = {
        UNCHANGED: [change("a", "same", 1.0), change("b", "slower", 1.03), change("c", "faster", 0.9)],
        0.02: [change("a", "slower", 1.021), change("b", "ambiguous", 1.018)],
        0.1: [],
    }
    lines = list(GateTrial(changes, {"test_speed.py::test[c]": ["2%", "10%"]}).lines())
    assert lines[:3] == [
        "unchanged: 2 false alarms of 3",
        "planted 2%, measured +1.8% to +2.1%: 1 of 2 called slower",
        "not planted: 2%, 10% in c",
    ]
    assert [line.partition(",")[0] for line in lines[3:]] == ["0% planted", "0% planted", "2% planted"]


@pytest.mark.parametrize(("text", "planted"), [("1,2.5,10", (0.01, 0.025, 0.1)), ("0", ()), ("5,0,5", (0.05,))])
def test_what_is_planted_can_be_chosen(text: str, planted: tuple[float, ...]) -> None:
    assert slowdowns(text) == pytest.approx(planted)


def test_a_trial_that_is_stopped_tells_what_it_has_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def tried(run: Any, name: str, *_: Any) -> Iterator[tuple[float, np.ndarray]]:
        if name == "second":
            raise KeyboardInterrupt
        yield UNCHANGED, np.linspace(-1e-3, 1e-3, 20)

    monkeypatch.setattr(gate_trial, "try_slowdowns", tried)
    run: Any = SimpleNamespace(
        timed={name: SimpleNamespace(gated=True) for name in ("first", "second", "third")},
        bench=SimpleNamespace(device="cpu"),
        sources={},
        least_differences={},
    )
    assert list(trial(run, 0.0, (), lambda line: None).lines()) == [
        "unchanged: 0 false alarms of 1",
        "stopped: 2 benchmarks were not tried",
    ]


@pytest.mark.full
def test_a_run_puts_the_gate_on_trial() -> None:
    command = ["pytest", "tests/benchmarks", "-k", "small and forward", "--device=cpu"]
    command += ["--op=vector_add", "--backend=cuda", "--benchmark-only", "--benchmark-max-time=0.05"]
    command += ["--perf-gate-trial", "--perf-gate-seconds=0.1", "-p", "no:cacheprovider"]
    done = warm.run(*command, cwd=ROOT, env=warm.variables())
    said = re.search(r"unchanged: (\d) false alarms of 1", done.stdout)
    assert said, done.stdout
    assert done.returncode == int(said[1])
    # On a busy machine some slowdowns cannot be planted. The output says so.
    for slowdown in ("1%", "2%", "5%", "10%"):
        assert re.search(rf"planted:? .*\b{slowdown}", done.stdout), done.stdout
