"""Compile an operation's Triton kernels, without a GPU, as its named examples call for them.

    python -m properties.ahead_of_time giou float32 80 90 100

prints, as JSON, what each kernel needs on each architecture: registers, spills, shared memory, instructions. Without
arguments it answers each line of its input, which holds some, by a line.
"""

import dataclasses
import json
import os
import re
import sys
from typing import Any

import torch

from impls import backends
from impls.cuda_launch import CPP_TYPES, CudaKernel
from properties.case import Case
from properties.dtypes import DTYPES
from properties.operation import evaluate_tensors, operations

# Runs this module.
COMMAND = (sys.executable, "-W", "ignore", "-m", "properties.ahead_of_time")


def environment() -> dict[str, str]:
    """Of a process that compiles: the one that asks may interpret kernels, and then cannot."""
    return {**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}


def needs(kernel: Any) -> dict[str, Any]:
    """What a compiled kernel needs, as JSON takes it."""
    return {**vars(kernel), "instruction_counts": dict(kernel.instruction_counts)}


def representative(examples: list[Case], dtype: str) -> list[Case]:
    """Cases of the ways in which kernels are specialised: the largest example as it is, and with every input strided.

    Of one dtype, as it is alike for all, the smallest too: where a size is 1, it is a constant.
    """

    def size(case: Case) -> int:
        return sum(array.size for array in case.inputs.values())

    largest = max(examples, key=size)
    strided = dict.fromkeys((*largest.inputs, "grad_output"), "sliced_columns")
    cases = [largest, dataclasses.replace(largest, layouts=strided)]
    if dtype == "float32":
        not_empty = (case for case in examples if all(array.size for array in case.inputs.values()))
        cases.append(min(not_empty, key=size, default=largest))
    return cases


def is_for(kernel: CudaKernel, dtype: str) -> bool:
    """Whether a kernel is an instance for a dtype: the first that its name names; for float32 where it names none."""
    named = [name for name in re.findall(r"\w+", kernel.name) if name in CPP_TYPES.values()]
    return (named or [CPP_TYPES[torch.float32]])[0] == CPP_TYPES[getattr(torch, dtype)]


def answer(operation_name: str, dtype_name: str, *capabilities: str) -> str:
    """Compile; gives the JSON."""
    # It imports Triton, which this module is not to do for those who only import it.
    from impls import triton_compile

    operation, dtype = operations()[operation_name], DTYPES[dtype_name]
    implementation = backends.load(operation_name, "triton")
    examples = [make(dtype) for make in operation.examples.values()]
    resources = []
    for capability in map(int, capabilities):
        with triton_compile.compiled_for(capability) as compiled:
            for case in representative(examples, dtype_name):
                evaluate_tensors(implementation, operation, case, dtype, "cpu")
        # A kernel that these do not launch, as another size is its, is compiled for the first that does.
        for case in examples:
            with triton_compile.compiled_for(capability, but={kernel.name for kernel in compiled}) as others:
                evaluate_tensors(implementation, operation, case, dtype, "cpu")
            compiled += others
        resources += compiled
    return json.dumps([needs(kernel) for kernel in resources])


def main(*arguments: str) -> None:
    """Print the answer, or answers."""
    for words in [arguments] if arguments else map(str.split, sys.stdin):
        print(answer(*words), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
