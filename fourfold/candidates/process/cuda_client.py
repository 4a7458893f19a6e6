"""A `__global__` function that runs in its own process, on the CPU: compiled code can write over any memory.

The judge's process reads the text of the `.cu` file, its launch and the launch's expressions. It neither compiles nor
loads the file. Everything else works as for a Python function: see `fourfold.candidates.process.client`.
"""

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fourfold.backends.cuda.declarations import source_closure
from fourfold.backends.cuda.emulator import launcher
from fourfold.backends.cuda.emulator.reached import Line
from fourfold.backends.cuda.functions import DTYPES
from fourfold.candidates.load.calling import CannotBeCalled
from fourfold.candidates.load.cuda_candidates import CudaCandidate
from fourfold.candidates.load.cuda_launches import RESULT
from fourfold.candidates.process import protocol
from fourfold.candidates.process.client import MOST_BYTES, ThreadResults, UntrustedFunction
from fourfold.candidates.process.first_process import Unanswered
from fourfold.candidates.process.session import Session
from fourfold.operations.claims import claims
from fourfold.processes.child import printable

# Variables that control how a kernel is compiled for the CPU and run there.
VARIABLES = ("FOURFOLD_CACHE", "FOURFOLD_CUDA_ON_CPU", "FOURFOLD_CUDA_ON_CPU_SECONDS", "CXX")
# The most lines that a process may report, and the most characters of a function's name.
MOST_LINES, LONGEST = 1 << 16, 200


class UntrustedKernel(UntrustedFunction):
    """A kernel of a `.cu` file that is compiled, loaded and launched in its own process.

    Args:
        candidate: the kernel as this process knows it.
        seconds: the time limit of a call, or of the compilation.
        most_bytes: the limit of its process's own memory.

    Raises:
        CannotBeCalled: the kernel does not compile.
    """

    def __init__(self, candidate: CudaCandidate, seconds: float, most_bytes: int = MOST_BYTES) -> None:
        self.candidate = candidate
        plan = candidate.plan
        super().__init__(plan.file, plan.name, candidate.signature, candidate.operation.name, seconds, most_bytes)
        self.file = Path(plan.file)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the kernel's output.

        Raises:
            Unanswered: its process gave no answer, or a malformed one.
            Exception: for arguments that the operation refuses, or the process's own, such as an access out of bounds.
        """
        return super().__call__(**self._prepare(*args, **kwargs))

    def call_at_once(
        self,
        calls: Sequence[tuple[Mapping[str, Any], torch.Tensor]],
        inputs_of_calls: Sequence[Sequence[str]],
        functions: float,
        output: tuple[Sequence[str], int] | None = None,
    ) -> tuple[int, list[list[ThreadResults]]]:
        """Call from several threads at once: see `UntrustedFunction.call_at_once`."""
        requests = [(self._prepare(**arguments), cotangent) for arguments, cotangent in calls]
        return super().call_at_once(requests, inputs_of_calls, functions, output)

    def kernel_lines(self) -> list[Line]:
        """Return the lines of its files, and whether they ran in its process, as it reports them."""
        with self.lock, contextlib.suppress(Unanswered):
            if self.session is not None and not self.session.over:
                answer, _ = self._ask(self.session, protocol.ReadKernelLines(), protocol.KernelLinesRead)
                return list(_lines(answer.lines, source_closure(self.file)))
        return []

    def _prepare(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        arguments, template = self.candidate.prepare(*args, **kwargs)
        return {**arguments, RESULT: template}

    def _load(self, session: Session) -> None:
        ask = protocol.LoadKernel(
            plan=self.candidate.plan.to_json(),
            traced=launcher.traces_lines(),
            variables={name: os.environ[name] for name in VARIABLES if name in os.environ},
            threads=torch.get_num_threads(),
        )
        answer, _ = self._ask(session, ask, protocol.KernelLoaded | protocol.Uncallable)
        if isinstance(answer, protocol.Uncallable):
            raise CannotBeCalled(printable(answer.reason))
        for name, reason in answer.refused.items():
            if name in DTYPES:
                self.candidate.kernels.refuse(DTYPES[name], printable(reason)[:1000])
        claims()(self)


@functools.cache
def start(candidate: CudaCandidate, seconds: float, process: int) -> UntrustedKernel:
    """Return the kernel in its process, cached by the number of this `process`, so that a fork starts its own."""
    return UntrustedKernel(candidate, seconds)


def _lines(lines: list[tuple[str, int, str, bool, bool]], files: Mapping[str, str]) -> Iterator[Line]:
    """Yield the valid lines that a process reports for these files."""
    for file, line, function, was_executed, was_called in lines[:MOST_LINES]:
        if file in files and 1 <= line <= len(files[file].splitlines()):
            yield Line(file, line, printable(function)[:LONGEST], was_executed, was_called)
