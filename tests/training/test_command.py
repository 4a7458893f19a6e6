"""The command of the example writes what its kernels did, whatever they do."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fourfold.docs.examples import train

from fourfold import backends

STEPS = 2


def run_command(tmp_path: Path, device: str, *words: str) -> tuple[int, dict[str, Any]]:
    """Return the exit code of the command, and what it wrote: JSON as others read it, without NaN."""
    out = tmp_path / "curves.json"
    code = train.main(["--device", device, "--steps", str(STEPS), "--out", str(out), *words])

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    return code, json.loads(out.read_text(), parse_constant=refuse)


def test_it_writes_curves_and_tokens_per_second(
    tmp_path: Path, device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = run_command(tmp_path, device, "--replace", "swiglu=triton")
    assert code == 0
    of_torch, replaced, exact, *others = found["runs"]
    assert [run["name"] for run in (of_torch, replaced, exact)] == ["torch", "swiglu=triton", "float64"]
    assert [run["kernels"]["swiglu"] for run in (of_torch, replaced)] == ["torch", "triton"]
    assert [len(other["losses"]) for other in others] == [STEPS] * train.REORDERED
    for run in (of_torch, replaced):
        assert run["comparison"]["same"]
        assert run["losses"] == pytest.approx(exact["losses"], rel=1e-5)
        assert run["tokens_per_second"] == pytest.approx(train.SIZES["tiny"].tokens / run["seconds"])
    table = capsys.readouterr().out.partition("\n\n")[2].partition("\n\nOn a CPU")[0].splitlines()
    assert [line.split(" | ")[0] for line in table[2:4]] == ["| torch", "| swiglu=triton"]
    assert len(table) == 4 + 1 + 2 + STEPS


def test_wrong_and_failing_kernels_end_no_other_run(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str, backend: str) -> Any:
        if backend == "cuda":
            raise RuntimeError("no compiler")
        return lambda gate, up: torch.full_like(gate, torch.nan)

    monkeypatch.setattr(backends, "load", load)
    code, found = run_command(tmp_path, device, "--replace", "swiglu=cuda", "--replace", "swiglu=triton")
    of_torch, failing, wrong, *_ = found["runs"]
    assert code == 1
    assert of_torch["comparison"]["same"]
    assert failing["error"] == "RuntimeError: no compiler"
    assert failing["losses"] == []
    assert failing["comparison"] is None
    assert wrong["losses"] == [None] * STEPS
    assert not wrong["comparison"]["same"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--replace", "softmax=triton"], "softmax=triton"),
        (["--replace", "swiglu=torch"], "swiglu=torch"),
        (["--replace", "swiglu=triton,rope"], "rope"),
        (["--steps", "1"], "--steps"),
        (["--backend", "jax"], "jax"),
    ],
)
def test_a_bad_argument_is_named(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train.main(words)
    message = capsys.readouterr().err
    assert f"argument {words[0]}" in message
    assert named in message.splitlines()[-1]


def test_each_replaces_one_kernel_after_the_other() -> None:
    runs = train.plan([], ["each=triton", "rope=cuda,swiglu=cuda"], "cuda", "float32")
    assert [run.name for run in runs] == [
        "torch",
        *(f"{name}=triton" for name in train.NAMES),
        "rope=cuda, swiglu=cuda",
    ]
    assert all(list(run.kernels.values()).count("triton") == 1 for run in runs[1:-1])


def test_all_backends_are_those_of_the_device() -> None:
    on_cpu, of_floats, of_halves = (
        {run.name for run in train.plan(["all"], [], *how)}
        for how in (("cpu", "bfloat16"), ("cuda", "float32"), ("cuda", "bfloat16"))
    )
    assert on_cpu == {"torch", "triton", "cuda"}
    assert of_floats - on_cpu == {"compile"}
    assert of_halves - of_floats == {"varlen", "compile+varlen"}


def test_the_times_are_written_where_a_reference_failed(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = train.train

    def fail_in_float64(operations: Any, size: Any, device: str, dtype: torch.dtype, *rest: Any) -> Any:
        if dtype == torch.float64:
            raise torch.OutOfMemoryError("no memory")
        return right(operations, size, device, dtype, *rest)

    monkeypatch.setattr(train, "train", fail_in_float64)
    code, found = run_command(tmp_path, device, "--backend", "torch")
    assert code == 1
    of_torch, exact, *_ = found["runs"]
    assert of_torch["tokens_per_second"] > 0
    assert of_torch["comparison"] is None
    assert exact["error"] == "OutOfMemoryError: no memory"
    assert "not compared" in capsys.readouterr().out
