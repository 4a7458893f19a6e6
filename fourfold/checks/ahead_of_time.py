"""Compile an operation's kernels without a GPU: the Triton kernels that its named examples launch.

    python -m fourfold.checks.ahead_of_time giou float32 80 90 100

prints, as JSON, the resources of each kernel on each architecture: registers, spills, shared memory and instructions.
``--compile-only`` after the architectures prints shared memory alone, in half the time. ``--cuda`` there compiles the
CUDA C++ kernels. ``--kernels FOLDER`` at the end takes the kernels from ``FOLDER/impls`` in place of the library's.
Without other arguments the program reads lines of arguments from its input and answers each with a line.
"""

import dataclasses
import json
import os
import re
import sys
from typing import Any

import torch

import fourfold
from fourfold import backends
from fourfold.backends.cuda.compile import compile_ahead_of_time
from fourfold.backends.cuda.launch import CPP_TYPES, CudaKernel, architecture
from fourfold.checks.outputs import join_outputs
from fourfold.checks.records import operations
from fourfold.instruments.evaluation import evaluate_tensors
from fourfold.numerics.dtypes import DTYPES
from fourfold.operations.case import Case

COMPILE_ONLY, CUDA, KERNELS = "--compile-only", "--cuda", "--kernels"
# The command line that runs this module.
COMMAND = (sys.executable, "-W", "ignore", "-m", "fourfold.checks.ahead_of_time")


def environment() -> dict[str, str]:
    """Return the environment variables of a process that compiles.

    The parent process may run with TRITON_INTERPRET=1, which disables compilation.
    """
    return {**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}


def needs(kernel: Any) -> dict[str, Any]:
    """Return a compiled kernel's resources as a dictionary for JSON."""
    if isinstance(kernel, tuple):
        return kernel._asdict()  # type: ignore[attr-defined]
    return {**vars(kernel), "instruction_counts": dict(kernel.instruction_counts)}


def representative(examples: list[Case], dtype: str) -> list[Case]:
    """Return cases for Triton's specialisations of a kernel: the largest example, as it is and with strided tensors.

    For float32 add the smallest example, whose sizes of 1 become constants. Other dtypes specialise in the same way.
    """

    largest = max(examples, key=lambda case: case.elements)
    strided = dict.fromkeys((*largest.inputs, "grad_output"), "sliced_columns")
    cases = [largest, dataclasses.replace(largest, layouts=strided)]
    if dtype == "float32":
        not_empty = (case for case in examples if all(array.size for array in case.inputs.values()))
        cases.append(min(not_empty, key=lambda case: case.elements, default=largest))
    return cases


def is_for(kernel: CudaKernel, dtype: str) -> bool:
    """Return whether a kernel is the instance for a dtype: the first one in its name, or float32 if it has none."""
    dtype_names = [name for name in re.findall(r"\w+", kernel.name) if name in CPP_TYPES.values()]
    return (dtype_names or [CPP_TYPES[torch.float32]])[0] == CPP_TYPES[getattr(torch, dtype)]


def cuda_kernels(operation: str, dtype: str, capability: int) -> list[dict[str, Any]]:
    """Compile the CUDA C++ kernels of an operation for a dtype; return their resources.

    Raises:
        CudaError: a kernel does not compile.
    """
    kernels = [kernel for kernel in backends.module(operation, "cuda").KERNELS if is_for(kernel, dtype)]
    resources: list[dict[str, Any]] = []
    for source in dict.fromkeys(kernel.source for kernel in kernels):
        names = [kernel.name for kernel in kernels if kernel.source == source]
        resources += map(needs, compile_ahead_of_time(source, names, architecture(*divmod(capability, 10))).values())
    return resources


def answer(operation_name: str, dtype_name: str, *words: str) -> str:
    """Compile the kernels; return their resources as JSON."""
    capabilities = [word for word in words if word.isdecimal()]
    if CUDA in words:
        lists = (cuda_kernels(operation_name, dtype_name, int(capability)) for capability in capabilities)
        return json.dumps([kernel for kernels in lists for kernel in kernels])
    disassembled = COMPILE_ONLY not in words
    # Imported here, because it imports Triton, which an import of this module must not do.
    from fourfold.backends.triton import compile as triton_compile

    operation, dtype = operations()[operation_name], DTYPES[dtype_name]
    implementation = join_outputs(backends.load(operation_name, "triton"), operation)  # a tuple has no gradient
    examples = [make(dtype) for make in operation.examples.values()]
    resources: list[Any] = []
    for capability in map(int, capabilities):
        with triton_compile.compile_launches(capability, disassembled=disassembled) as compiled:
            for case in representative(examples, dtype_name):
                evaluate_tensors(implementation, operation, case, dtype, "cpu")
        # Compile a kernel for other sizes, which these cases do not launch, for the first example that launches it.
        for case in examples:
            names = {kernel.name for kernel in compiled}
            with triton_compile.compile_launches(capability, names, disassembled) as launches:
                evaluate_tensors(implementation, operation, case, dtype, "cpu")
            compiled += launches
        resources += compiled
    return json.dumps([needs(kernel) for kernel in resources])


def main(*arguments: str) -> None:
    """Print the answer to the arguments, or to each line of the input."""
    if KERNELS in arguments:
        index = arguments.index(KERNELS)
        fourfold.__path__.insert(0, arguments[index + 1])
        arguments = arguments[:index]
    for words in [arguments] if arguments else map(str.split, sys.stdin):
        print(answer(*words), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
