"""Adapters for kernels that come with a reference and example inputs instead of a declaration.

- `like` makes an operation from a torch function and example inputs.
- `verify_contract` takes a module with ``kernel_fn``, ``reference_fn`` and ``get_inputs``.
- `verify_kernelbench` takes a problem of KernelBench, with ``Model``, ``get_inputs`` and ``get_init_inputs``, and a
  solution with ``ModelNew``.

Source of the latter: A. Ouyang et al., KernelBench: Can LLMs Write Efficient GPU Kernels?, 2025.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fourfold.api.verify import verify
from fourfold.candidates.load.kernelbench_problems import KernelBenchProblem, attribute_of, existing_file
from fourfold.declaration.inference import like
from fourfold.engine.verdict import Verdict
from fourfold.operations.claims import Claims
from fourfold.operations.limits import CALL_SECONDS


def verify_contract(module: Any, *, vary: bool = False, **options: Any) -> Verdict:
    """Verify a module's ``kernel_fn`` against its ``reference_fn`` on inputs such as ``get_inputs()`` gives.

    Args:
        module: a module with these three functions. `get_inputs` returns the arguments of a call, in order or by name.
        vary: see `like`.
        **options: those of `fourfold.verify`.

    Raises:
        AttributeError: the module lacks a function. The message names it.
    """
    kernel, reference, get_inputs = (attribute_of(module, name) for name in ("kernel_fn", "reference_fn", "get_inputs"))
    inputs = get_inputs()
    inputs = inputs if isinstance(inputs, Mapping) else tuple(inputs)
    return verify(kernel, like(reference, inputs, vary=vary), **options)


def verify_kernelbench(
    problem: str | Path,
    solution: str | Path,
    *,
    sizes: Mapping[str, Any] | str | None = None,
    vary: bool = False,
    claims: Claims | None = None,
    seed: int = 0,
    **options: Any,
) -> Verdict:
    """Verify the ``ModelNew`` of a solution against the ``Model`` of a KernelBench problem, forward only.

    Both models are made with the same random numbers, and with the same weights if these have the same names.

    Args:
        problem: a Python file with Model, get_inputs and get_init_inputs.
        solution: a Python file with ModelNew.
        sizes: values in place of the problem's own global variables, such as ``{"batch_size": 4}``. The sizes of
            KernelBench are meant for timing, too large for a reference. "small" finds smaller ones: see `small_sizes`.
        vary: see `like`.
        claims: of the solution. By default: contiguous tensors of finite numbers in the dtype of the problem's
            inputs, float32 in nearly all, on the default stream and outside of autocast; two calls may give other bits.
        seed: of the models' random numbers.
        **options: those of `fourfold.verify`. With ``untrusted=True`` the solution runs in its own process, which never
            sees the problem.

    Raises:
        FileNotFoundError: a file does not exist.
        AttributeError: a file lacks one of the names, or `sizes` names a variable that the problem lacks.
        ValueError: the inputs are too large: see `sizes`; or the Model draws random numbers, as dropout does.
    """
    answer = existing_file(solution)
    kernelbench = KernelBenchProblem.of(problem, sizes, vary, seed)
    limits = kernelbench.claims if claims is None else claims
    if not options.get("untrusted"):
        return verify(kernelbench.solution(answer), kernelbench.record, claims=limits, **options)
    with tempfile.TemporaryDirectory() as folder:
        seconds = options.get("call_seconds", CALL_SECONDS)
        candidate = kernelbench.solution_elsewhere(answer, Path(folder), seconds=seconds)
        return verify(candidate, kernelbench.record, claims=limits, **options)
