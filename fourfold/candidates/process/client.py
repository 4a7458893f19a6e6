"""The judge's side of a candidate that runs in its own process: see `fourfold.candidates.process.server`.

`UntrustedFunction` is called like the candidate. Exceptions come back with the same name, message and builtin base, and
with the frames of the candidate's own code, so that a refusal stays a refusal. An exit or a crash of the process is the
failure of one call.

It is no sandbox: the process has the rights of the user who runs it.
"""

import contextlib
import functools
import inspect
import os
import sys
import threading
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from fourfold.backends.cuda.emulator.reached import Line
from fourfold.backends.python_source import SizeComparison
from fourfold.backends.triton.front_end import CompilerAnswer, CompilerRefusal
from fourfold.candidates.load.calling import CannotBeCalled
from fourfold.candidates.process import protocol
from fourfold.candidates.process.first_process import Unanswered
from fourfold.candidates.process.foreign_exceptions import exception
from fourfold.candidates.process.session import NotSent, Session, TimedOut, end_if_malformed
from fourfold.compat import torch_internals
from fourfold.instruments import concurrent_calls
from fourfold.instruments.concurrent_calls import NeverReturns
from fourfold.instruments.operator_watch import ENTERED, Fallbacks
from fourfold.instruments.redzones import Arena
from fourfold.instruments.size_comparisons import LARGEST
from fourfold.operations.claims import claims
from fourfold.operations.limits import CALL_SECONDS
from fourfold.operations.outputs import TAKES_ITEMS
from fourfold.processes.child import printable
from fourfold.processes.messages import Malformed

# The number of calls that exceed the limit or end the first process, after which a candidate gets no further calls.
MOST_COSTLY = 3
# The limit in bytes of the own memory of a candidate's process.
MOST_BYTES = 8 << 30


# The results of a call in one of several threads: its output, its gradients, and the output under `no_grad`.
ThreadResults = tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]


class CannotBeImported(Exception):
    """The candidate's file or module fails on import, or has no such function."""


class RemoteCall:
    """A call in the candidate's process that may still need gradients. When it is gone, that process forgets it."""

    def __init__(
        self,
        session: Session,
        number: int,
        tensors: dict[str, torch.Tensor],
        outputs: Sequence[torch.Tensor],
        differentiable: Sequence[bool],
    ) -> None:
        self.session, self.number, self.thread = session, number, threading.get_ident()
        self.tensors, self.outputs, self.differentiable = tensors, tuple(outputs), differentiable
        # For an output, an alias with its memory and version: to hold the output itself would keep the call forever.
        self.results = {str(place): output.detach() for place, output in enumerate(outputs)}
        self.versions = {name: _num_writes(result) for name, result in self.results.items()}
        weakref.finalize(self, session.forgotten_calls.append, number).atexit = False

    def count_writes(self) -> dict[str, int]:
        """Return how often autograd saw each input written, and each output since the call, by its number."""
        inputs = {name: _num_writes(tensor) for name, tensor in self.tensors.items()}
        return inputs | {name: _num_writes(result) - self.versions[name] for name, result in self.results.items()}


class _Elsewhere(torch.autograd.Function):
    """An autograd function for the outputs of a call in another process."""

    @staticmethod
    def forward(
        ctx: Any, function: "UntrustedFunction", call: RemoteCall, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.function, ctx.call = function, call
        ctx.save_for_backward(torch.empty(0))  # its release distinguishes a second backward pass from the first
        outputs = call.outputs
        del call.outputs
        ctx.mark_non_differentiable(*(o for o, d in zip(outputs, call.differentiable) if not d))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple:
        assert ctx.saved_tensors
        names = [name for name, is_needed in zip(ctx.call.tensors, ctx.needs_input_grad[2:]) if is_needed]
        gradients = dict(zip(names, ctx.function.gradients(ctx.call, names, cotangents)))
        return None, None, *(gradients.get(name) for name in ctx.call.tensors)


class UntrustedFunction:
    """A user's function that runs in its own process.

    Args:
        place: the absolute path of a Python file, or the name of a module.
        function: its name there.
        expected: the signature of the operation.
        operation: its name.
        seconds: the time limit of a call.
        most_bytes: the limit of its process's own memory.
        lists: the names of the arguments that are lists. Calls pass their tensors one by one: see
            `fourfold.operations.outputs.pack_lists`.
        state: a file that describes an ``nn.Module``, see `fourfold.candidates.load.models.keep`; None for a function.

    Raises:
        CannotBeImported: the import fails, or the function does not exist.
        CannotBeCalled: the function does not take the arguments.
    """

    def __init__(
        self,
        place: str,
        function: str,
        expected: inspect.Signature,
        operation: str,
        seconds: float = CALL_SECONDS,
        most_bytes: int = MOST_BYTES,
        state: Path | None = None,
        lists: Sequence[str] = (),
    ) -> None:
        self.place, self.function, self.operation, self.seconds = place, function, operation, seconds
        self.most_bytes, self.state, self.lists = most_bytes, state, lists
        setattr(self, TAKES_ITEMS, True)
        self.__name__ = function.rpartition(".")[2]
        self.__signature__ = expected
        self.costly: list[Unanswered] = []  # calls that took too long, or ended the first process
        self.lock = threading.RLock()
        self.session: Session | None = None
        self._other: Session | None = None  # the process of the calls inside `afresh`, and inside it the first one
        self._plain = False  # whether the calls are inside `afresh`
        self._statements: dict[str, dict[int, int]] = {}
        self.file = Path(place) if place.endswith(".py") else Path(os.devnull)
        try:
            self._start()
        except BaseException:
            self.end()
            raise

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the candidate's output for these arguments, or a tuple of its outputs.

        Raises:
            Unanswered: its process gave no answer, or a malformed one.
            Exception: the candidate's own, or `Escape` in place of an order to end.
        """
        arguments = dict(zip(self.__signature__.parameters, args)) | kwargs
        with self.lock:
            session = self._start()
            messages, tensors, temporary = _encode_arguments(session, arguments)
            answer, storages = self._ask(session, protocol.CallFunction(messages, conditions()), protocol.Called)
            del temporary  # its tensors had to live only until the request was sent
            with end_if_malformed(session):
                results = [_result(result, storages) for result in answer.outputs[: protocol.MOST_RESULTS]]
                if not results or len(results) > 1 > answer.several:
                    raise Malformed(f"{len(results)} results")
            outputs: Any = [result for result, _ in results]
            differentiable = [is_differentiable for _, is_differentiable in results]
            are_tensors = all(isinstance(output, torch.Tensor) for output in outputs)
            if are_tensors and any(differentiable) and any(tensor.requires_grad for tensor in tensors.values()):
                call = RemoteCall(session, session.asked, tensors, outputs, differentiable)
                outputs = _Elsewhere.apply(self, call, *tensors.values())
        return tuple(outputs) if answer.several else outputs[0]

    def gradients(
        self, call: RemoteCall, inputs: Sequence[str], cotangents: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Return the gradients of a call for some of its inputs, given cotangents of its outputs."""
        with self.lock:
            layouts: list[protocol.TensorLayout | None] = []
            temporary: list[torch.Tensor] = []  # temporary tensors that must live until the request is sent
            for cotangent in cotangents:
                if cotangent is None:
                    layouts.append(None)
                    continue
                if torch_internals.is_without_memory(cotangent):
                    cotangent = torch.zeros(cotangent.shape, dtype=cotangent.dtype)
                temporary.append(cotangent)
                layouts.append(protocol.layout_of(cotangent, call.session.number_of(cotangent)))
            moved = threading.get_ident() != call.thread
            ask = protocol.Backward(call.number, list(inputs), layouts, call.count_writes(), moved, conditions())
            answer, storages = self._ask(call.session, ask, protocol.Gradients)
            with end_if_malformed(call.session):
                if len(answer.gradients) != len(inputs):
                    raise Malformed(f"no gradients of {', '.join(inputs)}")
                results = [None if layout is None else _result(layout, storages)[0] for layout in answer.gradients]
                for name, result in zip(inputs, results):
                    tensor = call.tensors[name]
                    if result is not None and (result.shape, result.dtype) != (tensor.shape, tensor.dtype):
                        raise Malformed(f"a gradient of {name} that has another shape or dtype")
            return results

    def call_at_once(
        self,
        calls: Sequence[tuple[Mapping[str, Any], torch.Tensor]],
        inputs_of_calls: Sequence[Sequence[str]],
        functions: float,
        output: tuple[Sequence[str], int] | None = None,
    ) -> tuple[int, list[list[ThreadResults]]]:
        """Call from several threads at once; return the results: see `fourfold.instruments.concurrent_calls`.

        Args:
            calls: the arguments and the cotangent of each thread's calls.
            inputs_of_calls: the inputs of each thread's calls that need gradients.
            functions: the budget of a thread's calls, as in `concurrent_calls.FUNCTIONS`.
            output: the names of the outputs, and the index of the wanted one; None if there is only one.

        Raises:
            NeverReturns: a thread has not ended.
            Unanswered: its process gave no answer, or a malformed one.
            Exception: the candidate's own.
        """
        with self.lock:
            session = self._start()
            requests = []
            kept_tensors = []
            for (arguments, cotangent), inputs in zip(calls, inputs_of_calls):
                messages, _, temporary = _encode_arguments(session, arguments)
                kept_tensors += [*temporary, cotangent]
                layout = protocol.layout_of(cotangent, session.number_of(cotangent))
                requests.append(protocol.ThreadCall(messages, layout, list(inputs)))
            of_several = None if output is None else (list(output[0]), output[1])
            ask = protocol.CallAtOnce(requests, functions, of_several, concurrent_calls.PATIENCE, conditions())
            answer, storages = self._ask(session, ask, protocol.CalledAtOnce | protocol.NeverReturned)
            if isinstance(answer, protocol.NeverReturned):
                raise NeverReturns(printable(answer.reason)[:1000])
            with end_if_malformed(session):
                if len(answer.results) != len(calls):
                    raise Malformed("no results of each thread")
                return answer.count, [
                    _results(result, len(inputs), storages) for result, inputs in zip(answer.results, inputs_of_calls)
                ]

    def compare_sizes(
        self, comparisons: Sequence[SizeComparison], arguments: Mapping[str, Any]
    ) -> dict[int, tuple[float, float]]:
        """Return both sides of comparisons in a call, as its process reports them.

        See `fourfold.instruments.size_comparisons`.
        """
        with self.lock:
            session = self._start()
            messages, _, temporary = _encode_arguments(session, arguments)
            ask = protocol.CompareSizes(messages, list(comparisons))
            answer, _ = self._ask(session, ask, protocol.SizesCompared)
            del temporary  # its tensors had to live only until the request was sent
        return _sides(answer.sides, len(comparisons))

    def watch_lines(self, statements: Mapping[str, Mapping[int, int]]) -> None:
        """Record the statements that run in its process from now on.

        See `fourfold.instruments.line_recorder.LineRecorder.watch`.
        """
        with self.lock:
            for file, lines in statements.items():
                self._statements.setdefault(file, {}).update(lines)
            self._watch(self._start())

    def _watch(self, session: Session) -> None:
        statements = {file: list(lines.items()) for file, lines in self._statements.items()}
        self._ask(session, protocol.WatchLines(statements), protocol.Done)

    def lines(self) -> tuple[dict[str, set[int]], bool]:
        """Return the first lines of the statements that ran in its process, by file, as it reports them.

        Return also whether some lines may be missing, as after the death of the process.
        """
        with self.lock, contextlib.suppress(Unanswered):
            if self.session is not None and not self.session.over:
                answer, _ = self._ask(self.session, protocol.ReadLines(), protocol.LinesRead)
                return {file: set(answer.lines.get(file, ())) for file in self._statements}, answer.blind
        return {}, True

    def forget_lines(self, lines: Mapping[str, Collection[int]]) -> None:
        """Count statements as not executed until they run again: see `LineRecorder.forget`."""
        with self.lock, contextlib.suppress(Unanswered):
            if self.session is not None and not self.session.over:
                ask = protocol.ForgetLines({file: sorted(firsts) for file, firsts in lines.items()})
                self._ask(self.session, ask, protocol.Done)

    def kernel_lines(self) -> list[Line]:
        """Return the lines of a `.cu` file, and whether they ran in its process; a Python function has none."""
        return []

    def living_tensors(self, keep_garbage: bool) -> int:
        """Count the tensors in its process beside those of arguments: see `fourfold.instruments.costs`."""
        with self.lock:
            question = protocol.CountTensors(keep_garbage)
            return self._ask(self._start(), question, protocol.TensorsCounted)[0].count

    def compiler_answer(self) -> CompilerAnswer:
        """Return what Triton's compiler says of the kernels that ran in its process, as it reports."""
        with self.lock:
            answer, _ = self._ask(self._start(), protocol.AskCompiler(), protocol.CompilerAnswered)
        refused = [
            CompilerRefusal(printable(kernel), printable(reason)[:1000], printable(file), line, printable(text))
            for kernel, reason, file, line, text in answer.refused
        ]
        return CompilerAnswer(answer.accepted, refused, [printable(kernel)[:1000] for kernel in answer.unknown])

    @contextlib.contextmanager
    def afresh(self) -> Iterator[None]:
        """Make the calls inside in a second process, which makes no others, and is like a user's own.

        So a candidate that recognises its judge is called where it finds none.
        """
        with self.lock:
            self.session, self._other, self._plain = self._other, self.session, True
            try:
                yield
            finally:
                self.session, self._other, self._plain = self._other, self.session, False

    def end(self) -> None:
        """End its processes. The next call starts another."""
        for session in filter(None, (self.session, self._other)):
            session.end()
        self.session = self._other = None

    def _start(self) -> Session:
        """Return the running process with the candidate imported."""
        if len(self.costly) >= MOST_COSTLY:
            late = f"{len(self.costly)} calls took longer than {self.seconds:g} s, or ended every candidate"
            raise type(self.costly[-1])(f"{self.costly[-1].kind}: {late}; it is called no more")
        if self.session is None or self.session.over or not self.session.first.alive:
            if self.session is not None:
                self.session.end()
            self.session = Session(self.most_bytes, self._plain)
            self._load(self.session)
        return self.session

    def _load(self, session: Session) -> None:
        empty = inspect.Parameter.empty
        ask = protocol.LoadFunction(
            place=self.place,
            function=self.function,
            operation=self.operation,
            lists=list(self.lists),
            parameters=[
                (
                    name,
                    []
                    if parameter.default is empty
                    else [protocol.encode_argument(parameter.default, lambda tensor: 0)],
                )
                for name, parameter in self.__signature__.parameters.items()
            ],
            state=None if self.state is None else str(self.state),
            folder=os.getcwd(),
            path=[str(Path(entry).absolute()) if entry else os.getcwd() for entry in sys.path],
            threads=torch.get_num_threads(),
        )
        answer, _ = self._ask(session, ask, protocol.FunctionLoaded | protocol.Missing | protocol.Uncallable)
        if isinstance(answer, protocol.Missing):
            raise CannotBeImported(f"{self.place} has no function {self.function}")
        if isinstance(answer, protocol.Uncallable):
            raise CannotBeCalled(printable(answer.reason))
        self.file = Path(answer.file)
        claims(**_claims(answer.claims))(self)
        if self._statements and not self._plain:
            self._watch(session)

    def _ask(self, session: Session, request: Any, expected: Any) -> tuple[Any, dict[int, torch.UntypedStorage]]:
        """Return the answer of an expected type, and the storages by number; raise the candidate's exception."""
        try:
            answer, storages = session.ask(request, expected, self.seconds)
        except Unanswered as error:
            if isinstance(error, TimedOut) or not session.first.alive:
                self.costly.append(error)
            raise
        if isinstance(answer, protocol.Raised):
            raise exception(answer)
        if ENTERED and isinstance(answer, protocol.Called | protocol.Gradients):
            mode = ENTERED[-1]
            if isinstance(mode, Arena):
                mode.seen_elsewhere += [printable(t)[:1000] for t in answer.trespasses]
            elif isinstance(mode, Fallbacks):
                mode.operators |= dict.fromkeys(printable(f)[:1000] for f in answer.fallbacks)
        return answer, storages


@functools.cache
def start(
    place: str,
    function: str,
    expected: inspect.Signature,
    operation: str,
    seconds: float,
    process: int,
    lists: tuple[str, ...] = (),
) -> UntrustedFunction:
    """Return the function in its process, cached by the number of this `process`, so that a fork starts its own."""
    return UntrustedFunction(place, function, expected, operation, seconds, lists=lists)


def conditions() -> protocol.Conditions:
    """Return the conditions of a call other than its arguments."""
    mode = ENTERED[-1] if ENTERED else None
    memory = sys.modules.get("fourfold.backends.triton.interpreter.memory")
    on_cpu = sys.modules.get("fourfold.backends.cuda.emulator")
    order = on_cpu.order() if on_cpu else "forward"
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    return protocol.Conditions(
        grad=torch.is_grad_enabled(),
        inference=torch.is_inference_mode_enabled(),
        default_dtype=str(torch.get_default_dtype()).removeprefix("torch."),
        autocast=None if autocast is None else str(autocast).removeprefix("torch."),
        poison=mode.poison if isinstance(mode, Arena) else None,
        fallbacks=isinstance(mode, Fallbacks),
        undefined_lanes_are_zero=memory.are_undefined_lanes_zero() if memory else None,
        order=None if order == "forward" else order,
    )


def _encode_arguments(
    session: Session, arguments: Mapping[str, Any]
) -> tuple[protocol.Arguments, dict[str, torch.Tensor], list[torch.Tensor]]:
    """Return a call's arguments as messages, its tensors by name, and the objects to keep alive until they are sent.

    Raises:
        NotSent: an argument cannot be sent.
    """
    messages: protocol.Arguments = []
    tensors: dict[str, torch.Tensor] = {}
    temporary: list[torch.Tensor] = []
    first_names: dict[int, str] = {}  # the names of tensors by their identity

    def number_of(tensor: torch.Tensor) -> int:
        temporary.append(tensor)
        return session.number_of(tensor)

    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and first_names.setdefault(id(value), name) != name:
            messages.append((name, protocol.SameArgument(first_names[id(value)])))
            continue
        try:
            message = protocol.encode_argument(value, number_of)
        except protocol.Unsendable as error:
            raise NotSent(str(error)) from None
        if isinstance(message, protocol.TensorArgument):
            tensors[name] = value
            number = session.object_number(value)
            origin = protocol.origin_of(value)
            message = protocol.TensorArgument(message.layout, value.requires_grad, origin, number, _num_writes(value))
        messages.append((name, message))
    return messages, tensors, temporary


def _num_writes(tensor: torch.Tensor) -> int:
    """Return how often autograd saw a tensor written; it does not count writes into tensors made for inference."""
    return 0 if tensor.is_inference() else torch_internals.version(tensor)


def _results(
    calls: list[list[protocol.Result]], gradients: int, storages: Mapping[int, torch.UntypedStorage]
) -> list[ThreadResults]:
    """Return the results of one thread."""
    if not all(len(call) == 2 + gradients for call in calls):
        raise Malformed("no outputs and gradients of each call")
    decoded = [[_result(part, storages)[0] for part in call] for call in calls]
    return [(output, list(gradients), plain) for output, *gradients, plain in decoded]


def _result(result: protocol.Result, storages: Mapping[int, torch.UntypedStorage]) -> tuple[Any, bool]:
    """Return a result and whether it requires a gradient; replace a non-tensor by a stub of its class name, or None."""
    if isinstance(result, protocol.TensorResult):
        return protocol.as_tensor(result.layout, storages), result.requires_gradient
    if result.type == type(None).__name__:
        return None, False
    return type(printable(result.type)[:100].replace("\n", " "), (), {})(), False


def _sides(comparisons: list[tuple[int, float, float]], count: int) -> dict[int, tuple[float, float]]:
    """Return the sides of each valid comparison, by its number."""
    return {n: (a, b) for n, a, b in comparisons if n in range(count) and abs(a) < LARGEST and abs(b) < LARGEST}


def _claims(claims: dict[str, Any]) -> dict[str, Any]:
    """Return the candidate's claims as arguments of `claims`."""
    arguments = {name: tuple(value) if isinstance(value, list) else value for name, value in claims.items()}
    sizes = arguments.get("sizes")
    if isinstance(sizes, dict):
        arguments["sizes"] = {axis: tuple(limit) if isinstance(limit, list) else limit for axis, limit in sizes.items()}
    return arguments
