"""fourfold.grade on a GPU, where a candidate and its judge are one process."""

from pathlib import Path

import pytest

import fourfold
from fourfold.grading.worker import own_caches

PROBLEM = """
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return x + {added}
def get_inputs():
    return [torch.rand(8, 32)]
def get_init_inputs():
    return []
"""
# Generated kernels have equal names, and torch caches an extension by its name.
SOLUTION = """
import torch
from torch.utils.cpp_extension import load_inline
added = load_inline(
    name="fused_op",
    cpp_sources="torch::Tensor fused(torch::Tensor x) {{ return x + {added}; }}",
    functions=["fused"],
)
class ModelNew(torch.nn.Module):
    def forward(self, x):
        return added.fused(x)
"""


def test_a_candidate_compiles_in_a_folder_of_its_own(tmp_path: Path) -> None:
    assert all(Path(folder).is_relative_to(tmp_path) for folder in own_caches(tmp_path).values())


def test_extensions_of_one_name_do_not_meet(device: str) -> None:
    if device != "cuda":
        pytest.skip("needs --device cuda: on the CPU a candidate cannot write where another one reads")
    candidates = [
        {
            "id": str(added),
            "language": "kernelbench",
            "problem": PROBLEM.format(added=added),
            "source": SOLUTION.format(added=added),
        }
        for added in (1, 2, 3)
    ]
    verdicts = list(fourfold.grade(candidates, gpus=1, workers=3, examples=2, seed=1))
    assert [verdict.kind for verdict in verdicts] == ["right"] * 3, [str(verdict) for verdict in verdicts]
