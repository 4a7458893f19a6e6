"""The choice of a launch's configuration: measured once, cached, never during a graph capture, and can be forced."""

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from subjects import subject_of

from fourfold import backends
from fourfold.backends import tuning
from fourfold.backends.cuda.compile import CudaError
from fourfold.backends.tuning import Configuration, Misfit, Tuner
from fourfold.checks.configurations import configuration_agrees
from fourfold.checks.search import Search
from fourfold.operations.outcomes import Failure
from fourfold.performance import sources

GPU = torch.device("cuda", 0)
TIMES = {"slow": 3.0, "fast": 1.0, "too_large": None}
SLOW, FAST, TOO_LARGE = (Configuration(name, {"takes": ms}) for name, ms in TIMES.items())


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Simulate a GPU on which each configuration takes the time it states; return the list of measured ones."""
    seen: list[str] = []

    def milliseconds(run: Callable[[], None]) -> float:
        configuration = run.args[0]  # type: ignore[attr-defined]
        seen.append(configuration.name)
        if configuration.options["takes"] is None:
            raise CudaError("more shared memory than there is")
        return configuration.options["takes"]

    monkeypatch.setenv("FOURFOLD_CACHE", str(tmp_path))
    monkeypatch.delenv("FOURFOLD_AUTOTUNE", raising=False)
    monkeypatch.setattr(tuning, "milliseconds", milliseconds)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(tuning, "_kernels", {})
    return seen


def choice(
    tuner: Tuner, kind: object = "kind", fits: Callable = lambda _: True, device: torch.device = GPU, **more: bool
) -> str:
    return tuner.choose(device, kind, fits, lambda: SLOW, lambda configuration: None, **more).name


def tuner() -> Tuner:
    return Tuner("kernel", (SLOW, TOO_LARGE, FAST), Path(__file__))


def test_fastest_is_taken_and_measured_once(measured: list[str]) -> None:
    kernel = tuner()
    assert [choice(kernel), choice(kernel)] == ["fast", "fast"]
    assert measured == ["slow", "too_large", "fast"]


def test_measurement_outlives_the_process(measured: list[str]) -> None:
    choice(tuner())
    measured.clear()
    assert choice(tuner()) == "fast"
    assert not measured
    assert choice(tuner(), "another kind") == "fast"
    assert measured


def test_compilation_alone_runs_what_fits_once_and_keeps_no_choice(measured: list[str]) -> None:
    kernel, ran = tuner(), list[str]()

    def run(configuration: Configuration) -> None:
        ran.append(configuration.name)
        if configuration is TOO_LARGE:
            raise CudaError("more shared memory than there is")

    with tuning.only_compile():
        for _ in range(2):
            assert kernel.choose(GPU, "kind", lambda _: True, lambda: SLOW, run) is SLOW
    assert ran == ["slow", "too_large", "fast"]
    assert not measured
    assert choice(tuner()) == "fast"  # of another process, which measures
    assert measured
    with tuning.only_compile():
        assert choice(tuner()) == "fast"


def test_what_does_not_fit_is_never_taken(measured: list[str]) -> None:
    kernel = tuner()
    assert choice(kernel, fits=lambda configuration: configuration is SLOW) == "slow"
    assert measured == ["slow"]


def test_default_is_taken_while_a_graph_is_captured(measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = tuner()
    with monkeypatch.context() as capturing:
        capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert choice(kernel) == "slow"
    assert not measured
    assert choice(kernel) == "fast"


def test_default_is_taken_for_little_work_on_the_cpu_and_where_tuning_is_off(
    measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = tuner()
    assert choice(kernel, device=torch.device("cpu")) == "slow"
    assert choice(kernel, worthwhile=False) == "slow"
    monkeypatch.setenv("FOURFOLD_AUTOTUNE", "0")
    assert choice(kernel) == "slow"
    assert not measured


def test_forced_configuration_is_taken_wherever_it_fits(measured: list[str]) -> None:
    kernel = tuner()
    assert choice(kernel) == "fast"
    with tuning.force_configuration("kernel", "too_large") as forced:
        assert choice(kernel) == "too_large"
        assert choice(kernel, "another kind", fits=lambda configuration: configuration is not TOO_LARGE) == "slow"
        forced.alone = True
        with pytest.raises(Misfit):
            choice(kernel, fits=lambda configuration: configuration is not TOO_LARGE)
    assert forced.launches == 1
    assert choice(kernel) == "fast"
    with pytest.raises(KeyError), tuning.force_configuration("kernel", "unheard_of"):
        pass


def test_configurations_are_listed(measured: list[str]) -> None:
    tuner()
    assert tuning.configurations("unheard_of") == ()
    assert [configuration.name for configuration in tuning.configurations("kernel")] == ["slow", "too_large", "fast"]


@pytest.mark.usefixtures("measured")
def test_a_baselines_kernels_run_as_todays_while_they_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    today = sources.read_sources({})
    changed = today | {name: text + b"\n" for name, text in today.items() if name.endswith("matmul/triton_kernel.py")}
    files = []
    for of in (today, changed):
        baseline = sources.Baseline(sources.save(tmp_path, of))
        baseline.load("matmul", "triton")
        module = sys.modules[f"fourfold_{baseline.suffix}.impls.matmul.triton_kernel"]
        files.append(module.TUNER._file(GPU))
    backends.load("matmul", "triton")
    now = sys.modules["fourfold.impls.matmul.triton_kernel"].TUNER._file(GPU)
    assert files[0] == now != files[1]


# ---- the check of a configuration


RIGHT, WRONG, UNUSED, MATRICES = (Configuration(name, {}) for name in ("right", "wrong", "unused", "matrices"))
WRONG_GRADIENT = Configuration("wrong_gradient", {}, of_gradients=True)
TUNER = Tuner("vector_add_planted", (RIGHT, WRONG, UNUSED, MATRICES, WRONG_GRADIENT), Path(__file__))
CHOSEN: list[str] = []


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Add, wrongly with one configuration or with wrong gradients with another. Two more fit nothing, and matrices."""

    def fits(configuration: Configuration) -> bool:
        return configuration is not UNUSED and (configuration is not MATRICES or x.ndim == 2)

    chosen = TUNER.choose(x.device, None, fits, lambda: RIGHT, lambda each: None)
    CHOSEN.append(chosen.name)
    output = x - y if chosen is WRONG else x + y
    if chosen is WRONG_GRADIENT and output.requires_grad:
        output.register_hook(torch.neg)
    return output


@pytest.mark.parametrize(
    ("configuration", "says"),
    [
        (RIGHT, None),
        (WRONG, r"output\[.*expected"),
        (WRONG_GRADIENT, r"gradient of \w+\[.*expected"),
        (UNUSED, "no case is one that the configuration unused can do"),
    ],
)
def test_a_configuration_that_is_wrong_or_that_no_case_uses_is_rejected(
    configuration: Configuration, says: str | None
) -> None:
    subject = subject_of("vector_add", add, backend="planted")
    with pytest.raises(Failure, match=says) if says else contextlib.nullcontext():
        configuration_agrees(configuration, subject, Search(examples=3))


def test_what_a_configuration_cannot_do_is_left_to_the_check_of_the_default() -> None:
    subject = subject_of("vector_add", add, backend="planted")
    CHOSEN.clear()
    search = Search(examples=3)
    configuration_agrees(MATRICES, subject, search)
    assert {*CHOSEN} == {"matrices"}
    assert search.ran == len(CHOSEN)
