"""The candidate's side of `fourfold.candidates.process.client`: the process that runs a user's kernel.

It imports neither pytest nor Hypothesis, nor any oracle, record or check. A first process imports torch and Triton
once, and forks a process for each candidate, and another when one has died. A candidate's output goes to a file that
only the judge reads.
"""

import contextlib
import faulthandler
import functools
import importlib
import inspect
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from fourfold.backends.python_source import SizeComparison
from fourfold.candidates.frames import own_frames, unwrapped, words
from fourfold.candidates.load import models, modules
from fourfold.candidates.load.calling import CannotBeCalled, as_operation
from fourfold.candidates.process import protocol
from fourfold.candidates.process.child import adopt_orphans, children, die_with
from fourfold.candidates.process.protocol import Connection
from fourfold.instruments import sparse_memory
from fourfold.instruments.concurrent_calls import NeverReturns, called_at_once
from fourfold.instruments.costs import living_tensors
from fourfold.instruments.line_recorder import recorder
from fourfold.instruments.operator_watch import Fallbacks
from fourfold.instruments.redzones import Arena
from fourfold.instruments.size_comparisons import Compared
from fourfold.instruments.tampering import Tampered, default_dtype, nothing_else_changes
from fourfold.operations.blame import blame_of, statement
from fourfold.operations.case import Case
from fourfold.operations.outputs import outputs_of, packed
from fourfold.operations.refusals import Fault, chain, is_order

# The most causes, frames and characters of an exception in its description.
MOST_CAUSES, MOST_FRAMES, MOST_WORDS = 8, 50, 20_000
# The largest file that a candidate can write.
MOST_FILE_BYTES = 1 << 32


# ---- the first process


def main(descriptor: str) -> None:
    """Answer the judge until it closes the connection."""
    adopt_orphans()  # processes that a candidate leaves behind become children of this process
    if os.environ.get("TRITON_INTERPRET") == "1":
        importlib.import_module("fourfold.backends.triton.interpreter.corrections").install()
        # Hide from kernels that they are interpreted.
        importlib.import_module("triton").knobs.runtime.interpret = True
        del os.environ["TRITON_INTERPRET"]
    control = Connection(socket.socket(fileno=int(descriptor)))
    running: set[int] = set()
    with contextlib.suppress(protocol.Ended):
        while True:
            text, _, files = control.receive()
            if text["do"] == "start":
                own = os.getpid()
                process = os.fork()
                if process == 0:
                    die_with(own)
                    control.close()
                    become_candidate(files[0], Path(text["folder"]), text["most_bytes"])
                running.add(process)
                control.send({"process": process}, {})
            else:
                control.send({"code": end(text["process"], text["seconds"], running)}, {})
            for file in files:
                os.close(file)


def end(process: int, seconds: float, running: set[int]) -> int | None:
    """End a candidate's process and all its children; return its exit code if it ended by itself.

    Args:
        process: its process id.
        seconds: the time that it has to end by itself.
        running: the process ids of all candidates.
    """
    code, deadline = None, time.monotonic() + seconds
    while time.monotonic() < deadline:
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            code = os.waitstatus_to_exitcode(status)
            break
        time.sleep(0.002)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)
    if code is None:
        os.waitpid(process, 0)
    running.discard(process)
    while orphans := children() - running:
        for orphan in orphans:
            os.kill(orphan, signal.SIGKILL)
            os.waitpid(orphan, 0)
    return code


def become_candidate(descriptor: int, folder: Path, most_bytes: int) -> None:
    """Run a candidate in this freshly forked process until the judge closes the connection."""
    os.setsid()
    adopt_orphans(False)
    with contextlib.suppress(OSError):  # if memory runs out, the system kills this process before the judge
        Path("/proc/self/oom_score_adj").write_text("1000")
    resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_FILE_BYTES, MOST_FILE_BYTES))
    printed = os.open(folder / "printed", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    faulthandler.enable(all_threads=False)
    os.environ["TMPDIR"] = str(folder)
    os.chdir(folder)
    try:
        with contextlib.suppress(protocol.Ended):
            Served(Connection(socket.socket(fileno=descriptor))).run()
    finally:
        os._exit(0)


# ---- a candidate's own process


class Twin:
    """A tensor of this process that stands for one tensor object of the judge, with the same memory and layout."""

    def __init__(self, tensor: torch.Tensor, written: int = 0) -> None:
        self.tensor = tensor
        self.written = written  # the number of the judge's writes that autograd knows here
        self.place = place_of(tensor)

    def note_writes(self, written: int) -> None:
        """Tell autograd about in-place writes of the judge, which it would see in a single process."""
        for _ in range(written - self.written):
            torch.autograd.graph.increment_version(self.tensor)
        self.written = max(written, self.written)


def place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a tensor's place in memory, its layout and its dtype, and whether it is a leaf of autograd's graph."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_leaf


class Twins:
    """The twins of the tensors that the judge passes: the same object for the same object, as in a single process.

    A kernel may keep results by the identity of a tensor.
    """

    def __init__(self) -> None:
        self._of: dict[int, tuple[dict[str, Any], Twin]] = {}  # by the object's number: its description and its twin

    def __len__(self) -> int:
        return len(self._of)

    def of(self, said: dict[str, Any], storages: dict[int, torch.UntypedStorage]) -> Twin:
        """Return the twin of an argument; a new one if the object was not passed before, or has changed its layout."""
        described = {name: said[name] for name in said if name not in ("object", "written", "needs_gradient")}
        known, twin = self._of.get(said["object"], (None, None))
        if twin is None or known != described or place_of(twin.tensor) != twin.place:
            twin = Twin(protocol.as_value({"tensor": said}, storages), said["written"])
            self._of[said["object"]] = described, twin
        elif twin.tensor.requires_grad != said["needs_gradient"]:
            twin.tensor.requires_grad_(said["needs_gradient"])
        twin.note_writes(said["written"])
        return twin

    def forget(self, numbers: Sequence[int]) -> None:
        """Forget the twins of objects that are gone."""
        for number in numbers:
            self._of.pop(number, None)


class OpenCall:
    """A call whose gradients may still be requested."""

    def __init__(self, inputs: dict[str, Twin], outputs: Sequence[torch.Tensor], watch: AbstractContextManager) -> None:
        self.inputs, self.outputs, self.watch = inputs, outputs, watch
        self.watched = {**inputs, **{str(place): Twin(output) for place, output in enumerate(outputs)}}

    def note_writes(self, written: dict[str, int]) -> None:
        """Tell autograd about in-place writes of the judge into inputs and outputs."""
        for name, count in written.items():
            self.watched[name].note_writes(count)


class Unspecified(torch.autograd.Function):
    """The identity, with a gradient that autograd knows to be zero and that has no memory."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        """Return the same values."""
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> None:
        """Return None."""


class Served:
    """The server that answers the judge."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.function: Callable[..., Any] = lambda: None
        self.origin = Path(os.devnull)
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.shared: set[int] = set()  # numbers of storages in memory shared with the judge
        self.last: dict[int, bytes] = {}
        self.calls: dict[int, OpenCall] = {}
        self.twins = Twins()
        self.made = 0

    def run(self) -> None:
        """Answer until the judge has gone."""
        answers = {
            "load": self.load,
            "load_kernel": self.load_kernel,
            "call": self.call,
            "backward": self.backward,
            "at_once": self.at_once,
            "compare": self.compare,
            "watch": self.watch,
            "lines": self.lines,
            "kernel_lines": self.kernel_lines,
            "living_tensors": lambda text: {"count": living_tensors(text["keep_garbage"]) - len(self.twins)},
        }
        while True:
            text, contents, files = self.connection.receive()
            self._take(text, contents, files)
            try:
                answer = answers[text["do"]](text)
            except BaseException as error:
                answer = {"raised": self._told(error)}
            copied = ((n, storage) for n, storage in self.storages.items() if n not in self.shared)
            self.connection.send({"number": text["number"], **answer}, protocol.changed(copied, self.last))

    def _take(self, text: dict[str, Any], contents: dict[int, bytes], files: Sequence[int]) -> None:
        """Apply the judge's changes: forget calls, tensors and storages, and update the others."""
        for number in text["forgotten_calls"]:
            self.calls.pop(number, None)
        self.twins.forget(text["forgotten_objects"])
        for number in text["forgotten"]:
            self.storages.pop(number, None)
            self.last.pop(number, None)
            self.shared.discard(number)
        for (number, size), file in zip(text["shared"], files):
            self.storages[number] = sparse_memory.shared(file, size).untyped_storage()
            self.shared.add(number)
            os.close(file)
        for number, held in contents.items():
            if number not in self.storages:
                self.storages[number] = torch.UntypedStorage(len(held))
            protocol.put(self.storages[number], held)
        self.last |= contents

    def load(self, text: dict[str, Any]) -> dict[str, Any]:
        """Import the candidate."""
        place, function = text["place"], text["function"]
        torch.set_num_threads(text["threads"])
        sys.path[:] = text["path"]
        parameters = [
            inspect.Parameter(
                name,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=default[0] if default else inspect.Parameter.empty,
            )
            for name, *default in text["parameters"]
        ]
        with contextlib.chdir(text["from"]):  # a file may read others on import
            if place.endswith(".py"):
                self.origin = Path(place)
                found: Any = modules.of_file(self.origin)
            else:
                found = importlib.import_module(place)
                self.origin = Path(getattr(found, "__file__", None) or os.devnull)
        for name in function.split("."):
            found = getattr(found, name, None)
        if found is None:
            return {"missing": True}
        if text["state"] is not None:
            found = models.like(found, Path(text["state"]))
        try:
            called = as_operation(found, inspect.Signature(parameters), text["operation"])
            self.function = packed(called, text["lists"])
        except CannotBeCalled as error:
            return {"cannot": str(error)[:MOST_WORDS]}
        claims = sys.modules.get("fourfold.operations.claims")  # the module of its decorator
        claimed = claims and {name: listed(value) for name, value in vars(claims.claims_of(self.function)).items()}
        return {"claims": claimed, "file": str(self.origin)}

    def load_kernel(self, text: dict[str, Any]) -> dict[str, Any]:
        """Compile and load a kernel of a `.cu` file."""
        torch.set_num_threads(text["threads"])
        os.environ.update(text["variables"])
        launches = importlib.import_module("fourfold.candidates.load.cuda_launches")
        if text["traced"]:
            importlib.import_module("fourfold.backends.cuda.emulator.launcher").trace_lines()
        self.origin = Path(text["plan"]["file"])
        try:
            self.function, refused = launches.compiled(text["plan"])
        except (OSError, LookupError, ValueError, RuntimeError) as error:
            return {"cannot": str(error)[:MOST_WORDS]}
        return {"refused": refused}

    def call(self, text: dict[str, Any]) -> dict[str, Any]:
        """Call the candidate."""
        twins = {
            name: self.twins.of(said["tensor"], self.storages)
            for name, said in text["arguments"]
            if isinstance(said, dict) and "tensor" in said
        }
        arguments = given(text["arguments"], self.storages, {name: twin.tensor for name, twin in twins.items()})
        watch = watching(text)
        with conditions(text, watch):
            output = self.function(**arguments)
        # The numbers of tensors are looked up only now, because a candidate may return one of its inputs.
        several = isinstance(output, tuple | list) and 0 < len(output) <= protocol.MOST_RESULTS
        outputs = list(output) if several else [output]
        told = [self._result(each) for each in outputs]
        if any(isinstance(each, torch.Tensor) and each.requires_grad for each in outputs):
            self.calls[text["number"]] = OpenCall(twins, outputs, watch)
        return {"output": {"several": told} if several else told[0], **seen_by(watch)}

    def backward(self, text: dict[str, Any]) -> dict[str, Any]:
        """Return the gradients of a call."""
        kept = self.calls[text["call"]]
        kept.note_writes(text["written"])
        inputs = [kept.inputs[name].tensor for name in text["inputs"]]
        of_each = [(o, said) for o, said in zip(kept.outputs, text["cotangents"]) if said is not None]
        outputs = [output for output, _ in of_each]
        cotangents = [protocol.as_tensor(said, self.storages) for _, said in of_each]
        if not outputs:
            output = next(o for o in kept.outputs if isinstance(o, torch.Tensor) and o.requires_grad)
            outputs = [Unspecified.apply(output)]
            cotangents = [torch.zeros_like(output)]

        def passed_back() -> tuple[torch.Tensor | None, ...]:
            with conditions(text, kept.watch):
                return torch.autograd.grad(outputs, inputs, cotangents, retain_graph=True, allow_unused=True)

        if text["another_thread"]:
            with ThreadPoolExecutor(1) as another:
                gradients = another.submit(passed_back).result()
        else:
            gradients = passed_back()
        return {"gradients": [None if g is None else self._result(g) for g in gradients], **seen_by(kept.watch)}

    def at_once(self, text: dict[str, Any]) -> dict[str, Any]:
        """Call from several threads at once, each on its own tensors."""
        try:
            with conditions(text, contextlib.nullcontext()):
                calls = [functools.partial(self._called, said, text["output"]) for said in text["calls"]]
                wanted, found = called_at_once(calls, text["functions"], patience=text["patience"])
        except NeverReturns as error:
            return {"never": str(error)}
        results = [[[self._result(part) for part in parts] for parts in thread] for thread in found]
        return {"wanted": wanted, "results": results}

    def compare(self, text: dict[str, Any]) -> dict[str, Any]:
        """Return both sides of comparisons in a call, and ignore its result."""
        arguments = given(text["arguments"], self.storages)
        with (
            Compared([SizeComparison(*each) for each in text["comparisons"]]) as compared,
            contextlib.suppress(Exception),
        ):
            self.function(**arguments)
        return {"compared": [[number, *sides] for number, sides in compared.found.items()]}

    def watch(self, text: dict[str, Any]) -> dict[str, Any]:
        """Record executed lines from now on."""
        of_numbers = {file: {int(n): first for n, first in lines.items()} for file, lines in text["statements"].items()}
        recorder.watch(of_numbers)
        return {}

    def lines(self, text: dict[str, Any]) -> dict[str, Any]:
        """Return the executed lines."""
        return {"lines": {file: sorted(lines) for file, lines in recorder.lines().items()}, "blind": recorder.blind}

    def kernel_lines(self, text: dict[str, Any]) -> dict[str, Any]:
        """Return the executed lines of a `.cu` file."""
        on_cpu = importlib.import_module("fourfold.backends.cuda.emulator.launcher")
        return {"lines": [list(line) for line in on_cpu.lines_that_ran()]}

    def _called(self, said: dict[str, Any], wanted: Sequence[Any] | None) -> list[Any]:
        """Return the output, the gradients, and the output under `no_grad`, of calls on copies of the tensors.

        Of several outputs it is the wanted one.
        """
        storages = {number: storage.clone() for number, storage in list(self.storages.items())}
        arguments = given(said["arguments"], storages)

        def output_of(arguments: Mapping[str, Any]) -> Any:
            output = self.function(**arguments)
            return output if wanted is None else outputs_of(output, wanted[0])[wanted[1]]

        output, gradients = output_of(arguments), list[torch.Tensor]()
        inputs = [arguments[name] for name in said["inputs"]]
        if inputs:
            cotangent = protocol.as_tensor(said["cotangent"], storages)
            found = torch.autograd.grad(output, inputs, cotangent, allow_unused=True)
            gradients = [torch.zeros_like(i) if g is None else g for i, g in zip(inputs, found)]
        with torch.no_grad():
            plain = output_of({n: v.detach() if isinstance(v, torch.Tensor) else v for n, v in arguments.items()})
        return [output, *gradients, plain]

    def _result(self, result: Any) -> dict[str, Any]:
        """Return the description of a result."""
        if (
            type(result) is not torch.Tensor
            or result.layout != torch.strided
            or not result.is_cpu
            or result.is_complex()
        ):
            kind = type(result).__name__
            return {"other": kind if kind != "Tensor" else f"tensor on {result.device} with layout {result.layout}"}
        requires_gradient = result.requires_grad
        result = result.detach().resolve_neg()
        storage = result.untyped_storage()
        held = {each.data_ptr(): number for number, each in self.storages.items() if each.nbytes() >= storage.nbytes()}
        number = held.get(storage.data_ptr()) if storage.nbytes() else None
        if number is None:
            self.made -= 1
            number = self.made
            self.storages[number] = storage
        return {"tensor": protocol.of_tensor(result, number), "requires_gradient": requires_gradient}

    def _told(self, error: BaseException) -> dict[str, Any]:
        """Return the description of an exception."""
        frames = own_frames(error, self.origin)[-MOST_FRAMES:]
        return {
            "causes": [
                {
                    "type": type(cause).__name__,
                    "bases": [base.__name__ for base in type(cause).__mro__ if base.__module__ == "builtins"],
                    "words": (words(cause) or statement(cause))[:MOST_WORDS],
                    "fault": isinstance(cause, Fault),
                    "cause": cause.__cause__ is not None,
                    "line": getattr(cause, "line", None) if type(getattr(cause, "line", None)) is int else None,
                }
                for cause, _ in zip(chain(unwrapped(error)), range(MOST_CAUSES))
            ],
            "frames": [[frame.filename, frame.lineno or 0, frame.name, frame.line or ""] for frame in frames],
            "blame": blame_of(error).value,
            "escape": is_order(error),
            "tampered": isinstance(error, Tampered),
        }


def given(
    spelled: Sequence[Sequence[Any]],
    storages: dict[int, torch.UntypedStorage],
    known: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the arguments of a call: those that are `known`, and new ones."""
    arguments: dict[str, Any] = {}
    for name, said in spelled:
        same = said.get("same") if isinstance(said, dict) else None
        if same is None:
            arguments[name] = known[name] if name in known else protocol.as_value(said, storages)
        else:
            arguments[name] = arguments[same]
    return arguments


def listed(value: Any) -> Any:
    """Return a claim as JSON."""
    return dict(value) if isinstance(value, dict) else list(value) if isinstance(value, list | tuple | set) else value


def watching(text: dict[str, Any]) -> AbstractContextManager:
    """Return the mode that watches a call: its use of memory, or of torch's operators."""
    if text["poison"] is not None:
        return Arena(text["poison"])
    return Fallbacks() if text["fallbacks"] else contextlib.nullcontext()


def seen_by(watch: AbstractContextManager) -> dict[str, Any]:
    """Return the observations of a mode."""
    if isinstance(watch, Arena):
        return {"trespasses": list(watch.trespasses())[: protocol.MOST_STORAGES]}
    return {"fallbacks": list(watch.found)} if isinstance(watch, Fallbacks) else {}


@contextlib.contextmanager
def conditions(text: dict[str, Any], watch: AbstractContextManager) -> Iterator[None]:
    """Reproduce the conditions of the call in the judge's process."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(text["grad"]))
        if text["inference"]:
            stack.enter_context(torch.inference_mode())
        stack.enter_context(default_dtype(protocol.dtype_of(text["default_dtype"])))
        if text["autocast"] is not None:
            stack.enter_context(torch.autocast("cpu", dtype=protocol.dtype_of(text["autocast"])))
        if text["undefined_lanes_are_zero"] is not None:
            memory = importlib.import_module("fourfold.backends.triton.interpreter.memory")
            memory.undefined_lanes_are_zero(text["undefined_lanes_are_zero"])
        if text["order"] is not None:
            on_cpu = importlib.import_module("fourfold.backends.cuda.emulator")
            stack.enter_context(on_cpu.schedule(text["order"]))
        stack.enter_context(nothing_else_changes(Case({}, np.empty(0, np.float32))))
        stack.enter_context(watch)
        begun = recorder.begin()
        stack.callback(recorder.end, begun)
        yield
