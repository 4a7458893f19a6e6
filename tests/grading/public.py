"""Published generated kernels: solutions of KernelBench. None of them is in this repository.

- https://github.com/technoabsurdist/KernelBench at 9202a5c: four models wrote a `ModelNew` in CUDA C++ for each
  problem. KernelBench compared it with `Model` on an A100, five times, to within 1e-2. They need a GPU and nvcc.
- https://github.com/hzeng2000/KernelBench at 833e16d: two models wrote one in Triton, CUDA C++ and two other languages
  for each problem of level 2, without a verdict.
- https://github.com/sekstini/CUDA-L1 at 69eb9e3: solutions of CUDA-L1, by torch or in CUDA C++, each for one of six
  GPUs. Its authors published those that KernelBench had found right.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .labelled import RIGHT, WRONG, Labelled

UNKNOWN = "unknown"  # the label of what was published without a verdict
# Verdicts that say nothing about a kernel: the machine was too small for the problem, or it was not compiled for it.
NO_VERDICT = re.compile(r"out of memory|no kernel image is available", re.IGNORECASE)
SOLUTION = re.compile(r"level_(\d)_problem_(\d+)_sample_\d+_kernel\.py")


def candidates(checkout: Path) -> Iterator[Labelled]:
    """Yield each solution of a checkout of one of the sources, with its published verdict.

    Raises:
        FileNotFoundError: the folder is no such checkout.
    """
    found = [*_run_solutions(checkout), *_paired_solutions(checkout)]
    if not found:
        raise FileNotFoundError(
            f"{checkout} is no checkout of a source of tests/grading/public.py: it has neither"
            " runs/*/level_*_kernel.py nor unpacked/*/*/*/custom_code.py"
        )
    yield from found


def _run_solutions(checkout: Path) -> Iterator[Labelled]:
    """Yield the solutions of a run in KernelBench's format: one file each, and optionally a file with all verdicts."""
    for run in sorted((checkout / "runs").glob("*")):
        verdicts = run / "eval_results.json"
        said = json.loads(verdicts.read_text()) if verdicts.is_file() else None
        for file in sorted(run.glob("level_*_kernel.py"), key=_numbers):
            level, problem = _numbers(file)
            problems = list((checkout / "KernelBench" / f"level{level}").glob(f"{problem}_*.py"))
            label = UNKNOWN if said is None else _label(said.get(str(problem)))
            if len(problems) == 1 and label:
                name = f"{run.name} level{level} {problems[0].stem}"
                yield label, _candidate(name, file.read_text(), problems[0].read_text())


def _numbers(file: Path) -> tuple[int, int]:
    level, problem = SOLUTION.fullmatch(file.name).groups()  # type: ignore[union-attr]
    return int(level), int(problem)


def _label(said: Any) -> str | None:
    """Return the label of a verdict of KernelBench; None if it has none."""
    said = said[0] if isinstance(said, list) else said
    if said is None or NO_VERDICT.search(json.dumps(said.get("metadata", {}))):
        return None
    return RIGHT if said.get("correctness") else WRONG


def _paired_solutions(checkout: Path) -> Iterator[Labelled]:
    """Yield solutions beside their problems, in folders by GPU, level and number."""
    for file in sorted(checkout.glob("unpacked/*/*/*/custom_code.py"), key=_place):
        problem, text = file.with_name("ref_code.py"), file.read_text()
        if problem.is_file() and "ModelNew" in text:
            gpu, level, number = _place(file)
            yield RIGHT, _candidate(f"{gpu} level{level} {number}", text, problem.read_text())


def _place(file: Path) -> tuple[str, int, int]:
    gpu, level, number = file.parts[-4:-1]
    return gpu, int(level), int(number)


def _candidate(name: str, source: str, problem: str) -> dict[str, Any]:
    given = {"id": name, "language": "kernelbench", "source": source, "problem": problem}
    return {**given, "sizes": "small", "seconds": 300}


# torch and Triton run on a CPU. Graphs and compiled extensions need a GPU.
NEEDS_GPU = re.compile(r"cpp_extension|load_inline|CUDAGraph|cuda\.graph|cutlass|tilelang|import cupy")
ON_CPU = (
    (re.compile(r"\.is_cuda\b"), ".is_cpu"),
    (re.compile(r"\.cuda\(\)"), ""),
    (re.compile(r"""(["'])cuda(:0)?\1"""), '"cpu"'),
)


def on_cpu(found: Iterator[Labelled]) -> Iterator[Labelled]:
    """Yield the candidates that run on a CPU. Let Triton kernels accept tensors of the CPU instead of a GPU."""
    for label, candidate in found:
        text = candidate["source"]
        if NEEDS_GPU.search(text):
            continue
        for before, after in ON_CPU if "triton.jit" in text else ():
            text = before.sub(after, text)
        yield label, {**candidate, "source": text}
