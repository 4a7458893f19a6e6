"""Kernels that come with a reference and example inputs: KernelBench, the three names, operators of torch.library."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fourfold
from fourfold import tensor
from fourfold.candidates.load import kernelbench_problems, modules

QUICK: dict[str, Any] = {"examples": 5, "device": "cpu", "seed": 1}


pytestmark = pytest.mark.usefixtures("on_the_cpu")

PROBLEM = """
import torch
batch_size, dim = 4096, 16384

class Model(torch.nn.Module):
    def __init__(self, out):
        super().__init__()
        self.linear = torch.nn.Linear(dim, out)

    def forward(self, x):
        return torch.relu(self.linear(x)).sum(dim=1, keepdim=True)

def get_inputs():
    return [torch.rand(batch_size, dim)]

def get_init_inputs():
    return [8]
"""
SOLUTION = """
import torch
import triton
import triton.language as tl

@triton.jit
def relu_sum_kernel(x_ptr, out_ptr, cols, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * cols + at, mask=at < cols, other=-1.0)
    tl.store(out_ptr + row, tl.sum(tl.maximum(x, {least}), axis=0))

class ModelNew(torch.nn.Module):
    def __init__(self, out):
        super().__init__()
        self.linear = torch.nn.Linear(16, out)

    def forward(self, x):
        hidden = self.linear(x)
        out = torch.empty(hidden.shape[0], 1)
        relu_sum_kernel[(hidden.shape[0],)](hidden, out, hidden.shape[1], BLOCK={block})
        return out
"""

BESIDE = """
import torch
from beside import {doubled}

class {model}(torch.nn.Module):
    def forward(self, x):
        return {doubled}(x)

def get_inputs():
    return [torch.rand(3, 4)]

def get_init_inputs():
    return []
"""


def kernelbench(folder: Path, sizes: dict[str, int] | None = None, **of_solution: Any) -> fourfold.Verdict:
    (folder / "problem.py").write_text(PROBLEM)
    (folder / "solution.py").write_text(SOLUTION.format(**{"least": "0.0", "block": 8, **of_solution}))
    given = {"batch_size": 4, "dim": 16} if sizes is None else sizes
    return fourfold.verify_kernelbench(folder / "problem.py", folder / "solution.py", sizes=given, **QUICK)


def test_a_solution_of_kernelbench_is_accepted(tmp_path: Path) -> None:
    verdict = kernelbench(tmp_path)
    assert verdict.passed, str(verdict)
    assert {o.dtype for o in verdict.outcomes} == {"float32"}
    assert verdict.operation == "problem"


@pytest.mark.full(but=1)
@pytest.mark.parametrize("fault", [{"least": "-1.0"}, {"block": 4}])
def test_a_wrong_solution_of_kernelbench_is_rejected(tmp_path: Path, fault: dict[str, Any]) -> None:
    verdict = kernelbench(tmp_path, **fault)
    assert verdict.grade == "wrong", str(verdict)


def test_problem_and_solution_import_what_lies_beside_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, model, doubled in (("problem", "Model", "twice"), ("solution", "ModelNew", "doubled")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "beside.py").write_text(f"def {doubled}(x):\n    return 2 * x\n")
        (folder / f"{name}.py").write_text(BESIDE.format(model=model, doubled=doubled))
    files = (tmp_path / "problem" / "problem.py", tmp_path / "solution" / "solution.py")
    verdict = fourfold.verify_kernelbench(*files, only=["forward"], **QUICK)
    assert verdict.passed, str(verdict)
    files[1].write_text(files[1].read_text().replace("doubled(x)", "doubled(doubled(x))"))
    assert fourfold.verify_kernelbench(*files, only=["forward"], **QUICK).grade == "wrong"


@pytest.mark.parametrize(
    ("sizes", "error", "says"),
    [
        ({"dim": 16, "batch_size": (1 << 18) + 1}, ValueError, "x has 4194320 elements"),
        ({"batches": 2}, AttributeError, "has no batches"),
    ],
)
def test_sizes_that_cannot_be_are_errors(
    tmp_path: Path, sizes: dict[str, int], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        kernelbench(tmp_path, sizes)


def test_a_missing_file_or_name_is_named(tmp_path: Path) -> None:
    (tmp_path / "problem.py").write_text(PROBLEM)
    with pytest.raises(FileNotFoundError, match=r"solution\.py"):
        fourfold.verify_kernelbench(tmp_path / "problem.py", tmp_path / "solution.py")
    with pytest.raises(AttributeError, match="ModelNew"):
        fourfold.verify_kernelbench(tmp_path / "problem.py", tmp_path / "problem.py", sizes={"dim": 16})


def test_a_problem_that_draws_random_numbers_is_refused(tmp_path: Path) -> None:
    problem = tmp_path / "problem.py"
    dropping = PROBLEM.replace("torch.relu(self.linear(x))", "torch.nn.functional.dropout(self.linear(x))")
    problem.write_text(dropping.replace("4096, 16384", "8, 16"))
    with pytest.raises(ValueError, match="another result in a second call"):
        kernelbench_problems.KernelBenchProblem.of(problem)


def test_a_solution_is_held_to_the_dtype_of_the_problems_inputs(tmp_path: Path) -> None:
    problem = tmp_path / "problem.py"
    problem.write_text(PROBLEM.replace("4096, 16384", "8, 16").replace("dim)]", "dim).half()]"))
    with pytest.raises(RuntimeError, match="dtype"):  # its weights are float32
        kernelbench_problems.KernelBenchProblem.of(problem)
    problem.write_text(problem.read_text().replace("self.linear(x)", "x"))
    given = kernelbench_problems.KernelBenchProblem.of(problem)
    assert given.claims.dtypes == ("float16",)


@pytest.mark.full(but=2)
@pytest.mark.parametrize(("training", "passes"), [("self.training", True), ("True", True), ("False", False)])
def test_batch_normalization_takes_the_statistics_of_the_batch(tmp_path: Path, training: str, passes: bool) -> None:
    """KernelBench leaves models in training mode."""
    problem, solution = tmp_path / "problem.py", tmp_path / "solution.py"
    text = PROBLEM.replace("4096, 16384", "6, 4").replace("torch.nn.Linear(dim, out)", "torch.nn.BatchNorm1d(dim)")
    text = text.replace("self.linear", "self.norm")
    problem.write_text(text)
    normalized = (
        f"torch.nn.functional.batch_norm(x, self.norm.running_mean, self.norm.running_var, training={training})"
    )
    solution.write_text(text.replace("Model(", "ModelNew(").replace("self.norm(x)", normalized))
    verdict = fourfold.verify_kernelbench(problem, solution, only=["forward", "history", "memory"], **QUICK)
    assert verdict.passed == passes, str(verdict)


def test_a_solution_is_not_called_under_autocast_unless_it_claims_so(tmp_path: Path) -> None:
    """The weights of a model are not inputs, so no bound includes their rounding by autocast."""
    problem, solution = tmp_path / "problem.py", tmp_path / "solution.py"
    # x times 4 (1 + 2^-10) - 4, and times 0 where the weights are rounded: it shows for every x but 0.
    text = PROBLEM.replace("torch.relu(self.linear(x)).sum(dim=1, keepdim=True)", "x * self.linear(torch.ones_like(x))")
    text = text.replace("(dim, out)", "(dim, 1).requires_grad_(False)").replace(
        "\n    def forward", "        self.linear.weight[:], self.linear.bias[:] = 1 + 2**-10, -4\n\n    def forward"
    )
    problem.write_text(text.replace("4096, 16384", "2, 4"))
    solution.write_text(problem.read_text().replace("Model(", "ModelNew("))
    verdict = fourfold.verify_kernelbench(problem, solution, only=["forward", "autocast"], **QUICK)
    assert verdict.passed, str(verdict)
    (reason,) = {each.reason for each in verdict.outcomes if each.check == "autocast"}
    assert reason == "not claimed: calls under autocast"
    claims = replace(kernelbench_problems.OF_KERNELBENCH, autocast=True)
    verdict = fourfold.verify_kernelbench(problem, solution, claims=claims, only=["autocast"], **QUICK)
    assert "under autocast to bfloat16" in str(verdict.failures[0])


def test_small_sizes_of_a_problem_are_found(tmp_path: Path) -> None:
    file = tmp_path / "problem.py"
    file.write_text(PROBLEM)
    module = modules.load_file(file, anew=True)
    sizes = kernelbench_problems.small_sizes(module, 5000)
    assert (module.batch_size, module.dim) == (4096, 16384)
    assert 1 < sizes["dim"] < 16384
    assert sizes["batch_size"] * sizes["dim"] + 8 * (sizes["dim"] + 1) <= 5000
    given = kernelbench_problems.KernelBenchProblem.of(file, "small")
    assert sum(p.numel() for p in given.reference.parameters()) <= kernelbench_problems.SMALL_ELEMENTS
    with pytest.raises(ValueError, match="sizes must be a mapping or 'small', not 'tiny'"):
        kernelbench_problems.KernelBenchProblem.of(file, "tiny")


def scaled(x: torch.Tensor, index: torch.Tensor, scale: float) -> torch.Tensor:
    return x[index] * scale


@pytest.mark.full(but=2)
@pytest.mark.parametrize("vary", [False, True])
@pytest.mark.parametrize(("factor", "grade"), [(1.0, "exact"), (1.01, "wrong")])
def test_the_three_names_are_enough(vary: bool, factor: float, grade: str) -> None:
    module = SimpleNamespace(
        reference_fn=scaled,
        kernel_fn=lambda x, index, scale: torch.index_select(x, 0, index) * (scale * factor),
        get_inputs=lambda: (torch.randn(6, 5), torch.tensor([0, 3, 5]), 0.5),
    )
    verdict = fourfold.verify_contract(module, vary=vary, dtypes=["float32"], only=["forward", "backward"], **QUICK)
    assert verdict.grade == grade, str(verdict)
    assert verdict.passed == (grade == "exact")


@fourfold.operation(x=tensor("... cols"))
def doubled_squares(x: torch.Tensor) -> torch.Tensor:
    return 2 * x.square()


# Its operators live as long as the library object, and torch examines all existing ones.
LIBRARY = torch.library.Library("fourfold_adapters", "DEF")
LIBRARY.define("squares(Tensor x, float factor=2.0) -> Tensor")
LIBRARY.impl("squares", lambda x, factor=2.0: factor * x * x, "CPU")


@pytest.mark.full
def test_an_operator_of_torch_library_is_verified() -> None:
    operator = torch.ops.fourfold_adapters.squares
    claims = fourfold.Claims(accuracy="storage", gradients=False)
    verdict = fourfold.verify(operator, doubled_squares, claims=claims, **QUICK)
    assert verdict.passed, str(verdict)
    forward: dict[str, Any] = {"only": ["forward"], "dtypes": ["float32"], **QUICK}
    assert not fourfold.verify(lambda x: operator(x, 2.5), doubled_squares, **forward).passed
