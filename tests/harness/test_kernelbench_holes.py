"""Ways to pass KernelBench's own evaluation without doing the work: none passes here.

Sources: https://github.com/ScalingIntelligence/KernelBench/pull/82, https://github.com/gpu-mode/pygpubench/pull/7, and
METR, Measuring Automated Kernel Engineering, 2025.
"""

import re
from pathlib import Path
from typing import Any

import pytest

import fourfold

PROBLEM = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x).sum(dim=1, keepdim=True)

def get_inputs():
    return [torch.rand(8, 12)]

def get_init_inputs():
    return []
"""
SOLUTION = """
import time
import torch

def right(x):
    return torch.relu(x).sum(dim=1, keepdim=True)

class Lazy(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        plain = [right(each.of) if isinstance(each, Lazy) else each for each in args]
        return function(*plain, **(kwargs or {{}}))

def lazy(x):
    result = torch.empty(x.shape[0], 1, device=x.device).as_subclass(Lazy)
    result.of = x
    return result

FORMER = {{}}

def earlier(x):
    if x.shape not in FORMER:
        FORMER[x.shape] = right(x)
    return FORMER[x.shape]

def on_side_stream(x):
    with torch.cuda.stream(torch.cuda.Stream()):
        return right(x)

def on_default_stream(x):
    with torch.cuda.stream(torch.cuda.default_stream()):
        return right(x)

def with_patched_clock(x):
    time.perf_counter = lambda: 0.0
    return right(x)

class ModelNew(torch.nn.Module):
    def forward(self, x):
        return {result}
"""
HOLES = {
    "zeros": ("torch.zeros(x.shape[0], 1, device=x.device)", "forward", "output"),
    "nothing": ("torch.empty(x.shape[0], 1, device=x.device)", "memory", "never written|not written|unwritten|output"),
    "recycled": ("earlier(x)", "history", "output"),
    "lazy": ("lazy(x)", "forward", "a Lazy, a kind of tensor of its own"),
    "clock": ("with_patched_clock(x)", "forward", r"replaced time\.perf_counter"),
    "side_stream": ("on_side_stream(x)", "late inputs", "output"),
}


def verdict_on(result: str, folder: Path, device: str, *checks: str, **options: Any) -> fourfold.Verdict:
    (folder / "problem.py").write_text(PROBLEM)
    (folder / "solution.py").write_text(SOLUTION.format(result=result))
    files = (folder / "problem.py", folder / "solution.py")
    return fourfold.verify_kernelbench(*files, device=device, examples=3, only=checks, **options)


@pytest.mark.parametrize("hole", HOLES)
def test_known_hole_is_closed(hole: str, tmp_path: Path, device: str) -> None:
    result, check, says = HOLES[hole]
    if hole == "side_stream" and device != "cuda":
        pytest.skip("needs --device cuda: streams are a GPU's")
    verdict = verdict_on(result, tmp_path, device, check)
    assert not verdict.passed, str(verdict)
    (outcome,) = verdict.outcomes
    assert outcome.failure is not None, str(verdict)
    assert re.search(says, outcome.failure.message), str(verdict)


def test_a_kernel_of_the_default_stream_passes_where_no_other_is_claimed(tmp_path: Path, device: str) -> None:
    if device != "cuda":
        pytest.skip("needs --device cuda: streams are a GPU's")
    verdict = verdict_on("on_default_stream(x)", tmp_path, device)
    assert verdict.passed, str(verdict)
    assert any("on any but the default stream" in warning for warning in verdict.warnings), str(verdict)
    claims = fourfold.Claims(dtypes=("float32",), contiguous=True, gradients=False, finite=True)
    assert not verdict_on("on_default_stream(x)", tmp_path, device, "late inputs", claims=claims).passed
    unclaimed = verdict_on("right(x)", tmp_path, device).warnings
    assert not any("stream" in warning for warning in unclaimed), unclaimed


def test_a_solution_in_a_process_of_its_own_has_the_weights_and_never_the_problem(tmp_path: Path, device: str) -> None:
    if device != "cpu":
        pytest.skip("needs --device cpu: a process of its own is not shared with a GPU yet")
    layer = "self.layer = torch.nn.Linear(12, 3)"
    model = "class {}(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n        " + layer
    forward = "\n    def forward(self, x):\n        return self.layer(x){}\n"
    names = PROBLEM.partition("def get_inputs")
    problem, solution = tmp_path / "problem.py", tmp_path / "solution.py"
    problem.write_text("import torch\n" + model.format("Model") + forward.format("") + "\n" + "".join(names[1:]))
    for added, passes in (("", True), (" + 1e-3", False)):
        looks = (
            "\nimport sys\nassert not any('problem' in str(getattr(m, '__file__', '')) for m in sys.modules.values())"
        )
        solution.write_text("import torch\n" + model.format("ModelNew") + forward.format(added) + looks)
        options = {"only": ["forward"], "examples": 3, "untrusted": True, "device": "cpu"}
        assert fourfold.verify_kernelbench(problem, solution, **options).passed == passes


@pytest.mark.parametrize("check", ["forward", "memory", "history"])
def test_what_does_the_work_passes(check: str, tmp_path: Path, device: str) -> None:
    assert verdict_on("right(x)", tmp_path, device, check).passed
