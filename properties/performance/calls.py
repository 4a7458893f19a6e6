"""What is timed: a call of an implementation on a workload, in one direction, whose results can be checked after."""

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch

from properties.comparison import Disagreement, compare
from properties.dtypes import DType
from properties.operation import Cost, Operation, reference, reference_gradients
from properties.performance.timing import GRAPH_CALLS, Runnable
from properties.running_error import Bounded
from properties.workloads import Workload

DIRECTIONS = ("forward", "backward", "both")
Results = Mapping[str, torch.Tensor]


class Checkable(Runnable, Protocol):
    """What is timed, and leaves results."""

    def poison(self) -> None:
        """Overwrite the results, so that a call which writes nothing does not find them in the memory it is given."""

    @property
    def results(self) -> Results:
        """Of the last call."""


class Call:
    """An implementation on tensors of its own.

    Args:
        implementation: takes the operation's arguments.
        operation: whose gradients are wanted.
        workload: what it is called with.
        dtype: of the tensors.
        device: where they are.
        direction: "forward" without autograd, "backward" of one forward call, or "both", one after the other.
    """

    def __init__(
        self,
        implementation: Callable[..., torch.Tensor],
        operation: Operation,
        workload: Workload,
        dtype: DType,
        device: str,
        direction: str,
    ) -> None:
        if direction not in DIRECTIONS:
            raise ValueError(f"direction must be one of {', '.join(DIRECTIONS)}, not {direction!r}")
        self.calls_per_run = 1
        self._implementation, self._names = implementation, operation.differentiable
        self.tensors = {name: workload.tensor(name, dtype, device) for name in workload.case.inputs}
        self._parameters = workload.case.parameters
        self._grad_output = workload.tensor("grad_output", dtype, device)
        self._output: torch.Tensor | None = None
        self._last: dict[str, torch.Tensor] = {}
        if direction != "forward":
            for name in self._names:
                self.tensors[name].requires_grad_()
        if direction == "backward":
            self._output = self._call()
        self._direction = direction

    def _call(self) -> torch.Tensor:
        return self._implementation(**self.tensors, **self._parameters)

    def _forward(self) -> dict[str, torch.Tensor]:
        return {"output": self._call()}

    def _gradients(self, output: torch.Tensor, again: bool) -> dict[str, torch.Tensor]:
        inputs = [self.tensors[name] for name in self._names]
        return dict(zip(self._names, torch.autograd.grad(output, inputs, self._grad_output, retain_graph=again)))

    def _backward(self) -> dict[str, torch.Tensor]:
        assert self._output is not None
        return self._gradients(self._output, again=True)

    def _both(self) -> dict[str, torch.Tensor]:
        output = self._call()
        return {"output": output, **self._gradients(output, again=False)}

    def run(self, calls: int) -> None:
        """Make so many calls."""
        # Not kept, as a method holds what it is a method of: its tensors' memory is wanted as soon as it is dropped.
        once = {"forward": self._forward, "backward": self._backward, "both": self._both}[self._direction]
        for _ in range(calls):
            self._last = once()

    def poison(self) -> None:
        """Overwrite the results that are in memory of their own."""
        lent = [*self.tensors.values(), self._grad_output, *([self._output] if self._output is not None else [])]
        shared = {tensor.untyped_storage().data_ptr() for tensor in lent}
        for result in self._last.values():
            if result.untyped_storage().data_ptr() not in shared:
                result.detach().fill_(torch.nan)
        self._last = {}

    @property
    def results(self) -> Results:
        """Of the last call."""
        return self._last

    @property
    def bytes(self) -> int:
        """Of its tensors."""
        return sum(tensor.nbytes for tensor in (*self.tensors.values(), self._grad_output))


class Replay:
    """Calls on several sets of tensors, captured in one CUDA graph: more data than the L2 cache holds, without a host.

    Args:
        make: gives a new call on tensors of its own.
        cache_bytes: of the L2 cache.
    """

    def __init__(self, make: Callable[[], Call], cache_bytes: int) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # The backward pass runs on the stream of its forward pass, so that has to be the captured one.
            first = make()
            sets = min(GRAPH_CALLS, max(2, 3 * cache_bytes // max(first.bytes, 1) + 1))
            self._calls = [first, *(make() for _ in range(sets - 1))]
            for call in self._calls:
                call.run(1)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with garbage_kept(), warnings.catch_warnings():
            # Calls that launch nothing, as the gradients of a sum are the cotangent itself, are an empty graph.
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")
            with torch.cuda.graph(self._graph, stream=stream):
                for call in self._calls:
                    call.run(1)
        self._captured = [dict(call.results) for call in self._calls]

    @property
    def calls_per_run(self) -> int:
        """As many as it holds."""
        return len(self._calls)

    def run(self, calls: int) -> None:
        """Replay the graph so many times."""
        for _ in range(calls):
            self._graph.replay()

    def poison(self) -> None:
        """Overwrite the results; the graph writes to where they are."""
        for call, captured in zip(self._calls, self._captured):
            call._last = dict(captured)
            call.poison()

    @property
    def results(self) -> Results:
        """Of the last of the captured calls."""
        return self._captured[-1]


@contextlib.contextmanager
def garbage_kept() -> Iterator[None]:
    """Free nothing of the allocator's meanwhile, as a capture asks; to free all of it before would take 0.2 s."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def cost_of(operation: Operation, workload: Workload, direction: str) -> Cost:
    """The least that a direction must move and compute."""
    forward, backward = operation.cost(workload.case)
    if direction == "both":
        return Cost(forward.bytes + backward.bytes, forward.flops + backward.flops)
    return backward if direction == "backward" else forward


class References:
    """The oracle's results of workloads, kept for all who are compared to them."""

    def __init__(self) -> None:
        self._kept: dict[Any, Mapping[str, Bounded]] = {}

    def of(
        self, operation: Operation, name: str, workload: Workload, dtype: DType, gradients: bool = True
    ) -> dict[str, Bounded]:
        """The output of a workload's part, and its gradients where they are asked for."""
        found: dict[str, Bounded] = {}
        for of_gradients in (False, True)[: 1 + gradients]:
            key = operation.name, name, dtype.name, of_gradients
            if key not in self._kept:
                self._kept[key] = (
                    reference_gradients(operation, workload.part, dtype)
                    if of_gradients
                    else {"output": reference(operation, workload.part, dtype)}
                )
            found |= self._kept[key]
        return found


def worst_error(results: Results, expected: Mapping[str, Bounded], workload: Workload, dtype: DType) -> float:
    """The largest error over its bound.

    Raises:
        Disagreement: it is above 1, or there is no result.
    """
    if not results:
        raise Disagreement("there is no result")
    worst = 0.0
    for name, result in results.items():
        if result.dtype != dtype.torch:
            raise Disagreement(f"{name} has dtype {result.dtype}, expected {dtype.torch}")
        beginning = result[tuple(map(slice, expected[name].shape))]
        within = workload.expected(name, expected[name], dtype)
        worst = max(worst, compare(dtype.array(beginning), within, dtype, name).worst)
    return worst
