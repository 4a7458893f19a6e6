"""The interpreter and a GPU get the same launches, with the same block sizes."""

import json

import numpy as np
import pytest
import torch
import warm
from fourfold.impls.layer_norm import triton_kernel

from fourfold.checks.ahead_of_time import environment
from fourfold.checks.records import operations

# The script records launches instead of making them, so the compiling process needs no GPU.
LAUNCHES = """
import json, sys
from fourfold import backends
from fourfold.backends.triton import launch as triton_launch
from fourfold.checks.outputs import join_outputs
from fourfold.checks.records import operations
from fourfold.instruments.evaluation import evaluate_tensors
from fourfold.numerics.dtypes import DTYPES

launches = []


def launch(kernel, grid, tensors, scalars, **options):
    launches.append([kernel.fn.__name__, grid, {name: str(value) for name, value in options.items()}])


triton_launch.launch = launch
found = {}
for operation in map(operations().__getitem__, sys.argv[1:]):
    implementation = join_outputs(backends.load(operation.name, "triton"), operation)
    for dtype in map(DTYPES.__getitem__, ("float16", "float32", "float64")):
        for name, make in operation.examples.items():
            launches.clear()
            evaluate_tensors(implementation, operation, make(dtype), dtype, "cpu")
            found[f"{operation.name} {name} {dtype}"] = list(launches)
print(json.dumps({"interpreted": triton_launch.INTERPRETED, "launches": found}))
"""
# These options use an instruction that the interpreter does not support: a prefetch into a cache.
ON_A_GPU_ALONE = {"FETCH"}
# A tuned operation launches one of its configurations. Another test verifies each of them.
TUNED = {"matmul", "scaled_matmul"}


OPERATIONS = sorted(operations().keys() - TUNED)


def launches(interpreted: bool) -> dict[str, list]:
    """Return kernel, grid and options of each launch, by case."""
    known = {**environment(), "TRITON_INTERPRET": "1" if interpreted else "0"}
    found = json.loads(warm.printed(LAUNCHES, *OPERATIONS, env=known))
    assert found["interpreted"] == interpreted
    for options in (options for of_case in found["launches"].values() for _, _, options in of_case):
        for name in ON_A_GPU_ALONE:
            options.pop(name, None)
    return found["launches"]


@pytest.mark.full
def test_the_interpreter_runs_the_blocks_that_a_gpu_runs() -> None:
    interpreted, compiled = launches(True), launches(False)
    assert interpreted.keys() == compiled.keys()
    for operation in OPERATIONS:
        assert any(made for case, made in compiled.items() if case.startswith(f"{operation} ")), operation
    for case, made in compiled.items():
        assert interpreted[case] == made, case


@pytest.mark.parametrize(("partials", "cols"), [(1, 70), (64, 33), (65, 33), (130, 70), (20, 16_500)])
def test_partial_sums_of_any_number_are_all_added(partials: int, cols: int, device: str) -> None:
    # On a GPU hundreds of programs store a partial sum each; the interpreter runs only a few programs.
    numbers = np.random.default_rng(partials).integers(-8, 9, (2, partials, cols))
    partial = torch.from_numpy(numbers).to(torch.float32).to(device)
    found = torch.full((2, cols), torch.nan, device=device)
    triton_kernel.launch_sums(found[0], found[1], partial)
    assert found.tolist() == numbers.sum(axis=1).tolist()
    block_partials, block_cols = triton_kernel.summing_blocks(cols, partials)
    assert block_partials * block_cols <= 2048
