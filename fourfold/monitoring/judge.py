"""The judge of recorded calls: a process of its own, which compares their results with the operation's bounds.

The oracle changes settings of torch while it runs, takes seconds for a large call, and may need much memory: the run
that is monitored notices none of this.
"""

import json
import os
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fourfold.checks.catalogue import FORWARD, check_named
from fourfold.checks.given_case import with_cotangent
from fourfold.checks.grades import Imprecise
from fourfold.checks.outputs import select_output
from fourfold.checks.search import Search, Subject
from fourfold.declaration.definition import DefinedOperation
from fourfold.engine.failures import finding
from fourfold.numerics.bounded import OPEN
from fourfold.numerics.dtypes import DTYPES
from fourfold.operations.arguments import LIMITED
from fourfold.operations.case import Case, is_floating
from fourfold.operations.case_file import CaseFile
from fourfold.operations.claims import Claims
from fourfold.operations.outcomes import Failure
from fourfold.operations.outputs import list_of
from fourfold.operations.record import Operation, sizes_of
from fourfold.operations.refusals import Fault, reason
from fourfold.processes.child import Child

# The prefixes of what a call returned, and of the new values of what it changed, among the results of a recorded call.
RETURNED, CHANGED = "returned", "changed "
# The priority of the judge's process below that of the run.
NICE = 10


class JudgeDied(Exception):
    """The judge's process ended, or took too long."""


class JudgeProcess:
    """The process that judges, started at the first call and again after its death.

    Args:
        operation: the operation.
        claims: the kernel's claims.
        name: the kernel's name.
        seconds: the time limit of a call.
    """

    def __init__(self, operation: Operation, claims: Claims, name: str, seconds: float) -> None:
        self._operation, self._claims, self._name, self._seconds = operation, claims, name, seconds
        self._child: Child | None = None
        self._connection: Connection | None = None
        self._lock = threading.Lock()

    def judge(self, content: bytes) -> dict[str, str]:
        """Return the status, message and cause of a call that `CaseFile.encode` encodes.

        Raises:
            JudgeDied: the process died or took too long.
        """
        connection = self._connect()
        try:
            connection.send_bytes(content)
            if connection.poll(self._seconds):
                return json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            death = self.end()
            raise JudgeDied(f"the judge {death or 'ended'}") from None
        self.end()
        raise JudgeDied(f"the judge took more than {self._seconds:g} s")

    def end(self) -> object:
        """Kill the process; return its end."""
        with self._lock:
            child, self._child = self._child, None
            if self._connection is not None:
                self._connection.close()
            return child and child.kill()

    def _connect(self) -> Connection:
        with self._lock:
            if self._child is None or self._connection is None:
                self._connection, far_end = Pipe()
                near_end = self._connection

                def work() -> None:
                    near_end.close()
                    serve(self._operation, self._claims, self._name, far_end)

                self._child = Child.fork(work, quiet=True)
                far_end.close()
            return self._connection


def serve(operation: Operation, claims: Claims, name: str, connection: Connection) -> None:
    """Judge each call that comes, until the other side closes the connection."""
    torch.set_num_threads(1)
    os.nice(NICE)
    replay = RecordedCall()

    def sibling(name: str) -> Any:
        raise NotImplementedError("a recorded call has no siblings")

    subjects: dict[str, Subject] = {}
    while True:
        try:
            file = replay.file = CaseFile.decode(connection.recv_bytes())
        except EOFError:
            return
        if file.dtype not in subjects:
            subjects[file.dtype] = Subject(
                operation=operation,
                backend=name,
                dtype=DTYPES[file.dtype].with_contract(OPEN),
                device="cpu",
                implementation=replay.call,
                sibling=sibling,
                differentiable=False,
                claims=claims,
                foreign=True,
            )
        connection.send_bytes(json.dumps(judgement(subjects[file.dtype], file.case)).encode())


class RecordedCall:
    """An implementation that repeats a recorded call: it changes and returns what the call did."""

    file: CaseFile

    def call(self, **arguments: Any) -> Any:
        """Write the new values of the changed arguments; return what the call returned."""
        dtype, results = DTYPES[self.file.dtype], self.file.results
        for name, values in results.items():
            if name.startswith(CHANGED):
                tensor_of(arguments, name.removeprefix(CHANGED)).copy_(dtype.tensor(values, "cpu"))
        outputs = {n: dtype.tensor(values, "cpu") for n, values in results.items() if n.startswith(RETURNED)}
        return outputs[RETURNED] if RETURNED in outputs else tuple(outputs.values()) or None


def tensor_of(arguments: Mapping[str, Any], name: str) -> torch.Tensor:
    """Return a tensor of a call by its name, such as ``x`` or ``xs[0]``."""
    argument = arguments[list_of(name)]
    return argument if name in arguments else argument[int(name.rpartition("[")[2][:-1])]


def judgement(subject: Subject, case: Case) -> dict[str, str]:
    """Return the status of a recorded call, "right", "imprecise", "wrong" or "refused", with a message and a cause."""
    try:
        for output in [select_output(subject, name) for name in subject.operation.outputs] or [subject]:
            refusal = why_outside(output, case)
            judged_case = case if refusal else with_cotangent(output.operation, case, output.dtype)
            if refusal := refusal or output.claims.outside(output.operation, judged_case, output.dtype):
                return {"status": "refused", "message": refusal, "cause": ""}
            search = Search(examples=1, case=judged_case, shrinks=False, seeks_claims=False)
            check_named(FORWARD).judge(output, search)
    except Exception as error:
        if not isinstance(error, Failure | Fault):
            return {"status": "refused", "message": reason(error), "cause": ""}
        failure = finding(error, Path(os.devnull), "")
        status = "imprecise" if isinstance(error, Imprecise) else "wrong"
        return {"status": status, "message": failure.message, "cause": failure.cause}
    return {"status": "right", "message": "", "cause": ""}


def why_outside(subject: Subject, case: Case) -> str | None:
    """Return why the operation says nothing about a case, or the claims about its dtype; None if they do.

    Raises:
        ValueError: the shapes do not fit the operation.
    """
    operation, claims, dtype = subject.operation, subject.claims, subject.dtype
    if claims.dtypes and dtype.name not in claims.dtypes:
        return f"the claims exclude {dtype}"
    sizes = sizes_of(operation, case)
    for name, array in case.inputs.items():
        expected = operation.input_dtype(name, dtype).name
        if array.dtype.name in DTYPES and array.dtype.name != expected:
            return f"{name} has dtype {array.dtype.name}, expected {expected}"
    for name in operation.ordinary:
        if name in case.inputs and is_floating(case[name]) and not np.isfinite(case[name].astype(np.float64)).all():
            return f"{name} has numbers that are not finite"
    if isinstance(operation, DefinedOperation):
        declaration = operation.declaration
        for axis, size in sizes.items():
            if axis in declaration.allowed and declaration.allowed[axis].nearest(size) != size:
                return f"{axis} = {size}"
        for name, array in case.inputs.items():
            tensor = declaration.tensors[name]
            if tensor.is_floating and not any(kind not in LIMITED for kind in tensor.kinds):
                low, high = 0.0, np.inf if "positive" in tensor.kinds else 1.0
            elif not tensor.is_floating and tensor.high is not None:
                low, high = float(tensor.low), float(tensor.range(sizes)[1] - 1)
            else:
                continue
            inside = (low <= array) & (array <= high)
            if not (inside | np.isin(array, tensor.also)).all():
                return f"{name} has numbers outside of {low:g} to {high:g}"
        if not operation.allows(case):
            return "a parameter has none of its values for the sizes"
    return None
