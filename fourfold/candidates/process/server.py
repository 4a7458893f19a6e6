"""The candidate's side of `fourfold.candidates.process.client`: the process that runs a user's kernel.

It imports neither pytest nor Hypothesis, nor any oracle, record or check. A first process imports torch and Triton
once, and forks a process for each candidate, and another when one has died. A candidate's output goes to a file that
only the judge reads.
"""

import contextlib
import faulthandler
import fcntl
import functools
import importlib
import inspect
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from fourfold.backends.launch import explain_launch
from fourfold.backends.triton import front_end
from fourfold.candidates.frames import innermost_error, own_frames, words
from fourfold.candidates.load import models, modules
from fourfold.candidates.load.calling import CannotBeCalled, as_operation
from fourfold.candidates.process import protocol
from fourfold.compat import torch_internals
from fourfold.instruments import sparse_memory
from fourfold.instruments.concurrent_calls import NeverReturns, call_at_once
from fourfold.instruments.costs import living_tensors
from fourfold.instruments.hide_test_runner import INTERPRETER, HiddenModules
from fourfold.instruments.line_recorder import recorder
from fourfold.instruments.operator_watch import Fallbacks
from fourfold.instruments.redzones import Arena
from fourfold.instruments.size_comparisons import Compared
from fourfold.instruments.tampering import Tampered, default_dtype, nothing_else_changes
from fourfold.operations.blame import blame_of, statement
from fourfold.operations.case import Case
from fourfold.operations.outputs import outputs_of, pack_lists
from fourfold.operations.refusals import Fault, chain, is_order
from fourfold.processes.child import Child, Limits
from fourfold.processes.family import adopt_orphans, kill_children, show_command
from fourfold.processes.messages import MOST_STORAGES, Connection, Ended

# The most causes, frames and characters of an exception in its description.
MOST_CAUSES, MOST_FRAMES, MOST_WORDS = 8, 50, 20_000
# This package's modules, which a candidate does not find among the loaded ones, unless it imports them.
JUDGE = HiddenModules(["fourfold"])
# The largest file that a candidate can write.
MOST_FILE_BYTES = 1 << 32
# The command line of a plain process names this script.
SCRIPT = "main.py"
# The limit in seconds of processor time for a plain process.
PLAIN_SECONDS = 3600


# ---- the first process


def main(descriptor: str) -> None:
    """Import what candidates need, and answer the judge."""
    os.environ[INTERPRETER] = "1"  # read when Triton is imported
    importlib.import_module("fourfold.backends.triton.interpreter.corrections").install()
    # Hide from kernels that they are interpreted.
    importlib.import_module("triton").knobs.runtime.interpret = True
    del os.environ[INTERPRETER]
    warnings.simplefilter("ignore")
    torch_internals.import_for_gradients()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    answer(int(descriptor))


def answer(descriptor: int) -> None:
    """Answer the judge until it closes the connection."""
    adopt_orphans()  # processes that a candidate leaves behind become children of this process
    control = Connection(descriptor)
    lifeline = os.pipe()
    children: dict[int, Child] = {}
    with contextlib.suppress(Ended):
        while True:
            ask, _, files = control.receive_with_storages(protocol.OfFirst)
            if isinstance(ask, protocol.StartCandidate):
                become = become_plain_process if ask.plain else become_candidate
                body = functools.partial(become, control, files[0], Path(ask.folder), lifeline)
                limits = (
                    Limits(processor=PLAIN_SECONDS)
                    if ask.plain
                    else Limits(memory=ask.most_bytes, file=MOST_FILE_BYTES)
                )
                handlers = {signal.SIGINT: signal.default_int_handler}
                adopt_orphans(not ask.plain)
                child = Child.fork(body, printed=True, limits=limits, handlers=handlers)
                if ask.plain:
                    child.wait()  # the process that it forked has no parent here from now on
                    adopt_orphans()
                children[child.pid] = child
                control.send(protocol.CandidateStarted(child.pid))
            elif isinstance(ask, protocol.ForkFirst):
                child = Child.fork(functools.partial(become_another, control, files[0], lifeline))
                children[child.pid] = child
                control.send(protocol.CandidateStarted(child.pid))
            else:
                child = children.pop(ask.process)
                plain = child.death is not None
                by_itself = None if plain else child.wait(ask.seconds)
                death = child.kill()
                kill_children(children)
                printed = death.printed if death is not None else ""
                control.send(protocol.CandidateEnded(by_itself.code if by_itself is not None else None, printed))
            for file in files:
                os.close(file)


def become_another(control: Connection, descriptor: int, lifeline: tuple[int, int]) -> None:
    """Answer another judge in this freshly forked process."""
    control.close()
    for end in lifeline:
        os.close(end)
    answer(descriptor)


def become_candidate(control: Connection, descriptor: int, folder: Path, lifeline: tuple[int, int]) -> None:
    """Run a candidate in this freshly forked process until the judge closes the connection."""
    for end in lifeline:
        os.close(end)
    os.environ["TMPDIR"] = str(folder.parent)
    adopt_orphans(False)
    serve(control, descriptor, folder)


def become_plain_process(control: Connection, descriptor: int, folder: Path, lifeline: tuple[int, int]) -> None:
    """Run a candidate in a process like a user's own: an orphan, which runs a script in the user's folder.

    It ends with the first process, as a child would. Nobody writes to the pipe `lifeline`, so that its reader gets a
    signal only when the last writer is gone.
    """
    if os.fork():
        os._exit(0)
    reader, writer = lifeline
    os.close(writer)
    fcntl.fcntl(reader, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(reader, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(reader, fcntl.F_SETFL, fcntl.fcntl(reader, fcntl.F_GETFL) | os.O_ASYNC)
    os.environ.pop("TMPDIR", None)  # of the judge
    sys.argv[:] = [SCRIPT]
    sys.orig_argv[:] = ["python3", SCRIPT]
    show_command(sys.orig_argv)
    serve(control, descriptor, folder, ThreadPoolExecutor(1))


def serve(control: Connection, descriptor: int, folder: Path, thread: ThreadPoolExecutor | None = None) -> None:
    """Serve the judge in this process: see `Served`."""
    control.close()
    with contextlib.suppress(OSError):  # if memory runs out, the system kills this process before the judge
        Path("/proc/self/oom_score_adj").write_text("1000")
    faulthandler.enable(all_threads=False)
    os.chdir(folder)
    JUDGE.install()
    with contextlib.suppress(Ended):
        Served(Connection(descriptor), thread).run()


# ---- a candidate's own process


class Twin:
    """A tensor of this process that stands for one tensor object of the judge, with the same memory and layout."""

    def __init__(self, tensor: torch.Tensor, written: int = 0) -> None:
        self.tensor = tensor
        self.written = written  # the number of the judge's writes that autograd knows here
        self.place = place_of(tensor)

    def note_writes(self, count: int) -> None:
        """Tell autograd about in-place writes of the judge, which it would see in a single process."""
        for _ in range(count - self.written):
            torch.autograd.graph.increment_version(self.tensor)
        self.written = max(count, self.written)


def place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a tensor's place in memory, its layout and its dtype, and whether it is a leaf of autograd's graph."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_leaf


class Twins:
    """The twins of the tensors that the judge passes: the same object for the same object, as in a single process.

    A kernel may keep results by the identity of a tensor.
    """

    def __init__(self) -> None:
        # By the object's number: its layout and how it was made, and its twin.
        self._twins: dict[int, tuple[Any, Twin]] = {}

    def __len__(self) -> int:
        return len(self._twins)

    def of(self, argument: protocol.TensorArgument, storages: dict[int, torch.UntypedStorage]) -> Twin:
        """Return the twin of an argument; a new one if the object was not passed before, or has changed its layout."""
        key, twin = self._twins.get(argument.object, (None, None))
        if twin is None or key != (argument.layout, argument.origin) or place_of(twin.tensor) != twin.place:
            twin = Twin(protocol.decode_argument(argument, storages), argument.written)
            self._twins[argument.object] = (argument.layout, argument.origin), twin
        elif twin.tensor.requires_grad != argument.needs_gradient:
            twin.tensor.requires_grad_(argument.needs_gradient)
        twin.note_writes(argument.written)
        return twin

    def forget(self, numbers: Sequence[int]) -> None:
        """Forget the twins of objects that are gone."""
        for number in numbers:
            self._twins.pop(number, None)


class OpenCall:
    """A call whose gradients may still be requested."""

    def __init__(self, inputs: dict[str, Twin], outputs: Sequence[torch.Tensor], watch: AbstractContextManager) -> None:
        self.inputs, self.outputs, self.watch = inputs, outputs, watch
        self.watched = {**inputs, **{str(place): Twin(output) for place, output in enumerate(outputs)}}

    def note_writes(self, counts: dict[str, int]) -> None:
        """Tell autograd about in-place writes of the judge into inputs and outputs."""
        for name, count in counts.items():
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
    """The server that answers the judge.

    Args:
        connection: to the judge.
        thread: a thread for the candidate's code, which finds none of this package's functions among its callers;
            None for this thread.
    """

    def __init__(self, connection: Connection, thread: ThreadPoolExecutor | None = None) -> None:
        self.connection, self.thread = connection, thread
        self.function: Callable[..., Any] = lambda: None
        self.origin = Path(os.devnull)
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.shared: set[int] = set()  # numbers of storages in memory shared with the judge
        self.last: dict[int, bytes] = {}
        self.calls: dict[int, OpenCall] = {}
        self.twins = Twins()
        self.last_number = self.request_number = 0

    def run(self) -> None:
        """Answer until the judge has gone."""
        answers: dict[type, Callable[[Any], Any]] = {
            protocol.LoadFunction: self.load,
            protocol.LoadKernel: self.load_kernel,
            protocol.CallFunction: self.call,
            protocol.Backward: self.backward,
            protocol.CallAtOnce: self.call_at_once,
            protocol.CompareSizes: self.compare,
            protocol.WatchLines: self.watch,
            protocol.ReadLines: self.lines,
            protocol.ForgetLines: self.forget_lines,
            protocol.ReadKernelLines: self.kernel_lines,
            protocol.CountTensors: self.count_tensors,
            protocol.AskCompiler: self.ask_compiler,
        }
        while True:
            request, contents, files = self.connection.receive_with_storages(protocol.Request)
            self._take(request, contents, files)
            self.request_number = request.number
            try:
                result = answers[type(request.ask)](request.ask)
            except BaseException as error:
                result = self._describe_exception(error)
            copied = ((n, storage) for n, storage in self.storages.items() if n not in self.shared)
            self.connection.send(protocol.Answer(request.number, result), protocol.changed_storages(copied, self.last))

    def _take(self, request: protocol.Request, contents: dict[int, bytes], files: Sequence[int]) -> None:
        """Apply the judge's changes: forget calls, tensors and storages, and update the others."""
        for number in request.forgotten_calls:
            self.calls.pop(number, None)
        self.twins.forget(request.forgotten_objects)
        for number in request.forgotten:
            self.storages.pop(number, None)
            self.last.pop(number, None)
            self.shared.discard(number)
        for (number, size), file in zip(request.shared, files):
            self.storages[number] = sparse_memory.map_shared(file, size).untyped_storage()
            self.shared.add(number)
            os.close(file)
        for number, content in contents.items():
            if number not in self.storages:
                self.storages[number] = torch.UntypedStorage(len(content))
            protocol.overwrite(self.storages[number], content)
        self.last |= contents

    def load(self, ask: protocol.LoadFunction) -> protocol.FunctionLoaded | protocol.Missing | protocol.Uncallable:
        """Import the candidate."""
        torch.set_num_threads(ask.threads)
        sys.path[:] = ask.path
        parameters = [
            inspect.Parameter(
                name,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=default[0] if default else inspect.Parameter.empty,
            )
            for name, default in ask.parameters
        ]
        # A file may read others on import.
        JUDGE.hide()
        with contextlib.chdir(ask.folder):
            if ask.place.endswith(".py"):
                self.origin = Path(ask.place)
                function: Any = modules.load_file(self.origin, run=self._run)
            else:
                function = self._run(importlib.import_module, ask.place)
                self.origin = Path(getattr(function, "__file__", None) or os.devnull)
        for name in ask.function.split("."):
            function = getattr(function, name, None)
        if function is None:
            return protocol.Missing()
        if ask.state is not None:
            JUDGE.hide()
            function = models.like(function, Path(ask.state))
        try:
            operation = as_operation(function, inspect.Signature(parameters), ask.operation)
            self.function = pack_lists(operation, ask.lists)
        except CannotBeCalled as error:
            return protocol.Uncallable(str(error)[:MOST_WORDS])
        JUDGE.hide()
        claims = JUDGE.modules.get("fourfold.operations.claims")  # the module of its decorator
        fields = vars(claims.claims_of(self.function)) if claims else {}
        return protocol.FunctionLoaded({name: to_json(value) for name, value in fields.items()}, str(self.origin))

    def load_kernel(self, ask: protocol.LoadKernel) -> protocol.KernelLoaded | protocol.Uncallable:
        """Compile and load a kernel of a `.cu` file."""
        torch.set_num_threads(ask.threads)
        os.environ.update(ask.variables)
        launches = importlib.import_module("fourfold.candidates.load.cuda_launches")
        if ask.traced:
            importlib.import_module("fourfold.backends.cuda.emulator.launcher").trace_lines()
        self.origin = Path(ask.plan["file"])
        try:
            self.function, refused = launches.compile_launch(ask.plan)
        except (OSError, LookupError, ValueError, RuntimeError) as error:
            return protocol.Uncallable(str(error)[:MOST_WORDS])
        return protocol.KernelLoaded(refused)

    def count_tensors(self, ask: protocol.CountTensors) -> protocol.TensorsCounted:
        """Count the living tensors beside those of arguments."""
        return protocol.TensorsCounted(living_tensors(ask.keep_garbage) - len(self.twins))

    def ask_compiler(self, ask: protocol.AskCompiler) -> protocol.CompilerAnswered:
        """Ask Triton's compiler about the kernels that ran."""
        accepted, refused, unknown = front_end.answer()
        return protocol.CompilerAnswered(accepted, [(*r,) for r in refused], unknown)

    def call(self, ask: protocol.CallFunction) -> protocol.Called:
        """Call the candidate."""
        twins = {
            name: self.twins.of(argument, self.storages)
            for name, argument in ask.arguments
            if isinstance(argument, protocol.TensorArgument)
        }
        arguments = decode_arguments(ask.arguments, self.storages, {name: twin.tensor for name, twin in twins.items()})
        watch = watching(ask.conditions)
        with self._reproduce_conditions(ask.conditions, watch):
            output = self._run(self.function, **arguments)
        # The numbers of tensors are looked up only now, because a candidate may return one of its inputs.
        is_sequence = isinstance(output, tuple | list) and 0 < len(output) <= protocol.MOST_RESULTS
        outputs = list(output) if is_sequence else [output]
        results = [self._result(o) for o in outputs]
        if any(isinstance(o, torch.Tensor) and o.requires_grad for o in outputs):
            self.calls[self.request_number] = OpenCall(twins, outputs, watch)
        return protocol.Called(results, is_sequence, *observations(watch))

    def backward(self, ask: protocol.Backward) -> protocol.Gradients:
        """Return the gradients of a call."""
        call = self.calls[ask.call]
        call.note_writes(ask.written)
        inputs = [call.inputs[name].tensor for name in ask.inputs]
        of_each = [(o, layout) for o, layout in zip(call.outputs, ask.cotangents) if layout is not None]
        outputs = [output for output, _ in of_each]
        cotangents = [protocol.as_tensor(layout, self.storages) for _, layout in of_each]
        if not outputs:
            output = next(o for o in call.outputs if isinstance(o, torch.Tensor) and o.requires_grad)
            outputs = [Unspecified.apply(output)]
            cotangents = [torch.zeros_like(output)]

        def differentiate() -> tuple[torch.Tensor | None, ...]:
            with self._reproduce_conditions(ask.conditions, call.watch):
                options = {"retain_graph": True, "allow_unused": True}
                return self._run(torch.autograd.grad, outputs, inputs, cotangents, **options)

        if ask.another_thread:
            with ThreadPoolExecutor(1) as executor:
                gradients = executor.submit(differentiate).result()
        else:
            gradients = differentiate()
        return protocol.Gradients(
            [None if g is None else self._result(g) for g in gradients], *observations(call.watch)
        )

    def call_at_once(self, ask: protocol.CallAtOnce) -> protocol.CalledAtOnce | protocol.NeverReturned:
        """Call from several threads at once, each on its own tensors."""
        try:
            with reproduce_conditions(ask.conditions, contextlib.nullcontext()):
                calls = [functools.partial(self._call_once_per_mode, call, ask.output) for call in ask.calls]
                count, threads = call_at_once(calls, ask.functions, patience=ask.patience)
        except NeverReturns as error:
            return protocol.NeverReturned(str(error))
        results = [[[self._result(part) for part in parts] for parts in thread] for thread in threads]
        return protocol.CalledAtOnce(count, results)

    def compare(self, ask: protocol.CompareSizes) -> protocol.SizesCompared:
        """Return both sides of comparisons in a call, and ignore its result."""
        arguments = decode_arguments(ask.arguments, self.storages)
        JUDGE.hide()
        with Compared(ask.comparisons) as compared, contextlib.suppress(Exception):
            self.function(**arguments)
        return protocol.SizesCompared([(number, *sides) for number, sides in compared.sides.items()])

    def watch(self, ask: protocol.WatchLines) -> protocol.Done:
        """Record executed lines from now on."""
        recorder.watch({file: dict(lines) for file, lines in ask.statements.items()})
        return protocol.Done()

    def lines(self, ask: protocol.ReadLines) -> protocol.LinesRead:
        """Return the executed lines."""
        return protocol.LinesRead({file: sorted(lines) for file, lines in recorder.lines().items()}, recorder.blind)

    def forget_lines(self, ask: protocol.ForgetLines) -> protocol.Done:
        """Count statements as not executed until they run again."""
        recorder.forget(ask.lines)
        return protocol.Done()

    def kernel_lines(self, ask: protocol.ReadKernelLines) -> protocol.KernelLinesRead:
        """Return the executed lines of a `.cu` file."""
        on_cpu = importlib.import_module("fourfold.backends.cuda.emulator.launcher")
        return protocol.KernelLinesRead([tuple(line) for line in on_cpu.lines_that_ran()])

    def _run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function in the thread for the candidate's code."""
        if self.thread is None:
            return function(*args, **kwargs)
        return self.thread.submit(function, *args, **kwargs).result()

    @contextlib.contextmanager
    def _reproduce_conditions(self, conditions: protocol.Conditions, watch: AbstractContextManager) -> Iterator[None]:
        """Reproduce the conditions of a call in the thread for the candidate's code."""
        context = reproduce_conditions(conditions, watch)
        self._run(context.__enter__)
        try:
            yield
        except BaseException as error:
            self._run(context.__exit__, type(error), error, error.__traceback__)
            raise
        self._run(context.__exit__, None, None, None)

    def _call_once_per_mode(self, ask: protocol.ThreadCall, output_names: tuple[list[str], int] | None) -> list[Any]:
        """Return the output, the gradients, and the output under `no_grad`, of calls on copies of the tensors.

        If there are several outputs, return the requested one.
        """
        storages = {number: storage.clone() for number, storage in list(self.storages.items())}
        arguments = decode_arguments(ask.arguments, storages)

        def wanted_output(arguments: Mapping[str, Any]) -> Any:
            output = self.function(**arguments)
            return output if output_names is None else outputs_of(output, output_names[0])[output_names[1]]

        output, gradients = wanted_output(arguments), list[torch.Tensor]()
        inputs = [arguments[name] for name in ask.inputs]
        if inputs:
            cotangent = protocol.as_tensor(ask.cotangent, storages)
            grads = torch.autograd.grad(output, inputs, cotangent, allow_unused=True)
            gradients = [torch.zeros_like(i) if g is None else g for i, g in zip(inputs, grads)]
        with torch.no_grad():
            plain = wanted_output({n: v.detach() if isinstance(v, torch.Tensor) else v for n, v in arguments.items()})
        return [output, *gradients, plain]

    def _result(self, result: Any) -> protocol.Result:
        """Return the description of a result."""
        if (
            type(result) is not torch.Tensor
            or result.layout != torch.strided
            or not result.is_cpu
            or result.is_complex()
        ):
            kind = type(result).__name__
            on = f"tensor on {result.device} with layout {result.layout}" if kind == "Tensor" else kind
            return protocol.OtherResult(on)
        requires_gradient = result.requires_grad
        result = result.detach().resolve_neg()
        storage = result.untyped_storage()
        numbers = {s.data_ptr(): number for number, s in self.storages.items() if s.nbytes() >= storage.nbytes()}
        number = numbers.get(storage.data_ptr()) if storage.nbytes() else None
        if number is None:
            self.last_number -= 1
            number = self.last_number
            self.storages[number] = storage
        return protocol.TensorResult(protocol.layout_of(result, number), requires_gradient)

    def _describe_exception(self, error: BaseException) -> protocol.Raised:
        """Return the description of an exception."""
        error = explain_launch(error)
        frames = own_frames(error, self.origin)[-MOST_FRAMES:]
        causes = [
            protocol.Cause(
                type=type(cause).__name__,
                bases=[base.__name__ for base in type(cause).__mro__ if base.__module__ == "builtins"],
                words=(words(cause) or statement(cause))[:MOST_WORDS],
                fault=isinstance(cause, Fault),
                caused=cause.__cause__ is not None,
                line=getattr(cause, "line", None) if type(getattr(cause, "line", None)) is int else None,
            )
            for cause, _ in zip(chain(innermost_error(error)), range(MOST_CAUSES))
        ]
        return protocol.Raised(
            causes=causes,
            frames=[(frame.filename, frame.lineno or 0, frame.name, frame.line or "") for frame in frames],
            blame=blame_of(error).value,
            escape=is_order(error),
            tampered=isinstance(error, Tampered),
        )


def decode_arguments(
    spelled: protocol.Arguments,
    storages: dict[int, torch.UntypedStorage],
    tensors: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the arguments of a call: those that are `tensors`, and new ones."""
    arguments: dict[str, Any] = {}
    for name, argument in spelled:
        if isinstance(argument, protocol.SameArgument):
            arguments[name] = arguments[argument.name]
        else:
            arguments[name] = tensors[name] if name in tensors else protocol.decode_argument(argument, storages)
    return arguments


def to_json(value: Any) -> Any:
    """Return a claim as JSON."""
    return dict(value) if isinstance(value, dict) else list(value) if isinstance(value, list | tuple | set) else value


def watching(conditions: protocol.Conditions) -> AbstractContextManager:
    """Return the mode that watches a call: its use of memory, or of torch's operators."""
    if conditions.poison is not None:
        return Arena(conditions.poison)
    return Fallbacks() if conditions.fallbacks else contextlib.nullcontext()


def observations(watch: AbstractContextManager) -> tuple[list[str], list[str]]:
    """Return the trespasses and the fallbacks that a mode observed."""
    trespasses = list(watch.trespasses())[:MOST_STORAGES] if isinstance(watch, Arena) else []
    return trespasses, list(watch.operators) if isinstance(watch, Fallbacks) else []


module = functools.cache(importlib.import_module)


@contextlib.contextmanager
def reproduce_conditions(conditions: protocol.Conditions, watch: AbstractContextManager) -> Iterator[None]:
    """Reproduce the conditions of the call in the judge's process."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(conditions.grad))
        if conditions.inference:
            stack.enter_context(torch.inference_mode())
        stack.enter_context(default_dtype(protocol.dtype_of(conditions.default_dtype)))
        if conditions.autocast is not None:
            stack.enter_context(torch.autocast("cpu", dtype=protocol.dtype_of(conditions.autocast)))
        if conditions.undefined_lanes_are_zero is not None:
            memory = module("fourfold.backends.triton.interpreter.memory")
            memory.undefined_lanes_are_zero(conditions.undefined_lanes_are_zero)
        if conditions.order is not None:
            on_cpu = module("fourfold.backends.cuda.emulator")
            stack.enter_context(on_cpu.schedule(conditions.order))
        stack.enter_context(nothing_else_changes(Case({}, np.empty(0, np.float32))))
        stack.enter_context(watch)
        stack.enter_context(recorder.record_call())
        JUDGE.hide()
        yield
