"""Calls that are timed: one implementation on one workload in one direction, with results that can be checked."""

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch

from fourfold.numerics.bounded import Bounded
from fourfold.numerics.compare import Disagreement, compare
from fourfold.numerics.dtypes import DTYPES, DType, returned
from fourfold.operations.outputs import outputs_of, parts_of, row_of
from fourfold.operations.record import Cost, Operation, reference, reference_gradients
from fourfold.operations.workloads import Workload
from fourfold.performance.timing import GRAPH_CALLS, Runnable

DIRECTIONS = ("forward", "backward", "both")
HOST = "host"  # the direction of a benchmark that times the host


def directions_of(operation: Operation) -> tuple[str, ...]:
    """Return the `DIRECTIONS` of an operation: forward alone if nothing has a gradient."""
    return DIRECTIONS if operation.differentiable else DIRECTIONS[:1]


Results = Mapping[str, torch.Tensor]
# A result as it is returned: one tensor, or each of several outputs.
Parts = tuple[torch.Tensor, ...]


class Checkable(Runnable, Protocol):
    """A runnable that keeps its results for a check."""

    def poison(self) -> None:
        """Overwrite the results with NaN, so that a call that writes nothing cannot pass with old results."""

    @property
    def results(self) -> Results:
        """The results of the last call, by name."""

    @property
    def single_call(self) -> "Call":
        """A call that may be made besides the timed ones."""


class Call:
    """Calls of an implementation on tensors that this object owns.

    Args:
        implementation: takes the operation's arguments. If there are several outputs, it concerns those that have
            gradients, each under its part of the cotangent. They are joined where results are read, which is not timed.
        operation: the operation; it says which inputs have gradients.
        workload: gives the inputs, the parameters and the grad_output.
        dtype: the dtype of the tensors.
        device: the device of the tensors.
        direction: "forward" (without autograd), "backward" (of one forward call, made once) or "both" (a forward call
            and its backward pass).
    """

    def __init__(
        self,
        implementation: Callable[..., Any],
        operation: Operation,
        workload: Workload,
        dtype: DType,
        device: str,
        direction: str,
    ) -> None:
        if direction not in DIRECTIONS:
            raise ValueError(f"direction must be one of {', '.join(DIRECTIONS)}, not {direction!r}")
        self.calls_per_run = 1
        self._implementation, self._names = implementation, operation.differentiable_in(workload.case)
        self.tensors = {name: workload.tensor(name, dtype, device) for name in workload.case.inputs}
        # What a call changes in place has its former values again before a call whose results are checked.
        self._former = {name: self.tensors[name].clone() for name in operation.mutates}
        self._parameters = workload.case.parameters
        self._grad_output = workload.tensor("grad_output", dtype, device)
        self._outputs, self._joined = tuple(operation.outputs), operation.joined_places
        case, part = workload.case.grad_output, workload.part.grad_output
        if len(self._joined) > 1 and case.shape[-1:] != part.shape[-1:]:
            raise ValueError("workload: several outputs can be repeated along their first of two or more axes alone")
        # The parts of the cotangent are known when the outputs' shapes are.
        self._cotangents: list[torch.Tensor] | None = None
        self._output: Parts = ()
        self._last: dict[str, Parts] = {}
        if direction != "forward":
            for name in self._names:
                self.tensors[name].requires_grad_()
        if direction == "backward":
            self._output = self._call()
        self._direction = direction

    def _call(self) -> Parts:
        result = self._implementation(**self.tensors, **self._parameters)
        if not self._outputs or isinstance(result, torch.Tensor):
            return (result,)
        outputs = outputs_of(result, self._outputs)
        return tuple([outputs[place] for place in self._joined])

    def _forward(self) -> dict[str, Parts]:
        return {"output": self._call()}

    def _gradients(self, output: Parts, retain_graph: bool) -> dict[str, Parts]:
        if self._cotangents is None:
            self._cotangents = parts_of(self._grad_output, output)
        inputs = [self.tensors[name] for name in self._names]
        gradients = torch.autograd.grad(output, inputs, self._cotangents, retain_graph=retain_graph)
        return {name: (gradient,) for name, gradient in zip(self._names, gradients)}

    def _backward(self) -> dict[str, Parts]:
        return self._gradients(self._output, retain_graph=True)

    def _forward_and_backward(self) -> dict[str, Parts]:
        output = self._call()
        return {"output": output, **self._gradients(output, retain_graph=False)}

    def run(self, calls: int) -> None:
        """Make `calls` calls."""
        # Do not keep the bound method on self: the reference cycle would keep the tensors' memory after the last use.
        call = {"forward": self._forward, "backward": self._backward, "both": self._forward_and_backward}[
            self._direction
        ]
        for _ in range(calls):
            self._last = call()

    def poison(self) -> None:
        """Overwrite the results with NaN, integers with -1, except those that share memory with the inputs."""
        tensors = [*self.tensors.values(), self._grad_output, *(self._cotangents or ()), *self._output]
        shared = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        for result in (part for parts in self._last.values() for part in parts):
            if result.untyped_storage().data_ptr() not in shared:
                result.detach().fill_(torch.nan if result.is_floating_point() else -1)
        for name, former in self._former.items():
            self.tensors[name].copy_(former)
        self._last = {}

    @property
    def parts(self) -> dict[str, Parts]:
        """The results of the last call, by name, before outputs are joined."""
        return self._last

    @property
    def results(self) -> Results:
        """The results of the last call, by name."""
        return {name: row_of(parts) for name, parts in self._last.items()}

    @property
    def single_call(self) -> "Call":
        """This call."""
        return self

    @property
    def arguments(self) -> dict[str, torch.Tensor]:
        """The arguments of a call: inputs, cotangent and, for a backward pass alone, the output."""
        tensors = {**self.tensors, "grad_output": self._grad_output}
        for name, parts in {"grad_output": self._cotangents or (), "output": self._output}.items():
            tensors |= {f"{name} {place}" if len(parts) > 1 else name: part for place, part in enumerate(parts)}
        return tensors

    @property
    def bytes(self) -> int:
        """The size of the inputs and of grad_output, in bytes."""
        return sum(tensor.nbytes for tensor in (*self.tensors.values(), self._grad_output))


class Replay:
    """Calls on several sets of tensors in one CUDA graph: together larger than the L2 cache, launched without the host.

    Args:
        make: makes a call on new tensors.
        cache_bytes: the size of the L2 cache.

    Raises:
        RuntimeError: a call cannot be captured, or the capture might need more memory than is free.
    """

    def __init__(self, make: Callable[[], Call], cache_bytes: int) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # A backward pass runs on the stream of its forward pass, so the forward pass must run on this stream.
            first = make()
            sets = min(GRAPH_CALLS, max(2, 3 * cache_bytes // max(first.bytes, 1) + 1))
            self._calls = [first, *(make() for _ in range(sets - 1))]
            before = bytes_allocated_so_far()
            for call in self._calls:
                call.run(1)
            require_memory_for_capture(bytes_allocated_so_far() - before)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        with disable_garbage_collection(), warnings.catch_warnings():
            # A call that launches nothing gives an empty graph: the gradient of a sum is grad_output itself.
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")
            with torch.cuda.graph(self._graph, stream=stream):
                for call in self._calls:
                    call.run(1)
        self._graph.instantiate()
        self._captured = [dict(call.parts) for call in self._calls]

    @property
    def graph(self) -> int:
        """The address of the captured graph."""
        return self._graph.raw_cuda_graph()

    @property
    def calls_per_run(self) -> int:
        """The number of calls in the graph."""
        return len(self._calls)

    def run(self, calls: int) -> None:
        """Replay the graph `calls` times."""
        for _ in range(calls):
            self._graph.replay()

    def poison(self) -> None:
        """Overwrite the results with NaN; the next replay writes to the same memory."""
        for call, captured in zip(self._calls, self._captured):
            call._last = dict(captured)
            call.poison()

    @property
    def results(self) -> Results:
        """The results of the last captured call, by name."""
        return {name: row_of(parts) for name, parts in self._captured[-1].items()}

    @property
    def single_call(self) -> Call:
        """One of the calls in the graph."""
        return self._calls[0]


def bytes_allocated_so_far() -> int:
    """Return the sum of all allocations of this process on the current GPU, those that were freed included."""
    return torch.cuda.memory_stats().get("allocated_bytes.all.allocated", 0)


def require_memory_for_capture(allocated: int) -> None:
    """Refuse to capture calls whose allocations are larger than the free memory.

    A capture may be unable to use the memory of a freed tensor again. If it runs out of memory, torch's allocator can
    free no cached memory for the rest of the process.

    Args:
        allocated: the sum of all allocations of the calls, in bytes.

    Raises:
        RuntimeError: so much memory is not free.
    """
    free, _ = torch.cuda.mem_get_info()
    free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    if allocated > free:
        raise RuntimeError(f"the calls allocate {allocated / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free")


@contextlib.contextmanager
def disable_garbage_collection() -> Iterator[None]:
    """Disable garbage collection: a CUDA graph capture must not free memory, and a collection before it takes 0.2 s."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def cost_of(operation: Operation, workload: Workload, direction: str) -> Cost:
    """Return the fewest bytes and flops that a call in this direction needs."""
    forward, backward = operation.cost(workload.case)
    if direction == "both":
        return Cost(forward.bytes + backward.bytes, forward.flops + backward.flops)
    return backward if direction == "backward" else forward


class References:
    """The oracle's results for workloads, computed once for all contenders."""

    def __init__(self) -> None:
        self._results: dict[Any, Mapping[str, Bounded]] = {}

    def of(
        self, operation: Operation, name: str, workload: Workload, dtype: DType, gradients: bool = True
    ) -> dict[str, Bounded]:
        """Return the oracle's output for the workload's part and, with `gradients`, its gradients, by name."""
        bounds: dict[str, Bounded] = {}
        for of_gradients in (False, True)[: 1 + gradients]:
            key = id(operation), name, dtype.name, of_gradients
            if key not in self._results:
                self._results[key] = (
                    reference_gradients(operation, workload.part, dtype)
                    if of_gradients
                    else {"output": reference(operation, workload.part, dtype)}
                )
            bounds |= self._results[key]
        return bounds


def worst_error(
    results: Results,
    expected: Mapping[str, Bounded],
    workload: Workload,
    dtype: DType,
    returns: str | None = None,
    joined: bool = False,
) -> float:
    """Return the largest error as a multiple of its bound.

    Args:
        results: those of a call of the workload's case.
        expected: the oracle's, of its part.
        workload: the case and its part.
        dtype: that of the inputs.
        returns: that of the output, as `Operation.returns` says, where it holds integers.
        joined: whether the output is that of several in a row, whose dtypes may differ.

    Raises:
        Disagreement: the error exceeds its bound, a dtype is wrong, or there is no result.
    """
    if not results:
        raise Disagreement("there is no result")
    worst = 0.0
    for name, result in results.items():
        storage = dtype
        if name == "output":  # a cotangent has its dtype, unless it holds integers and has no gradient
            storage = returned(dtype, returns) if returns else DTYPES[workload.part.grad_output.dtype.name]
            result = result.to(storage.torch) if joined else result
        if result.dtype != storage.torch:
            raise Disagreement(f"{name} has dtype {result.dtype}, expected {storage.torch}")
        is_whole = workload.part is workload.case
        beginning = result if is_whole else result[tuple(map(slice, expected[name].shape))]
        bound = workload.expected(name, expected[name], storage)
        worst = max(worst, compare(dtype.array(beginning), bound, storage, name).worst)
    return worst
