"""Known calls: record the launches of a call, so that a later call like it repeats them at once.

A small call spends most of its time in Python on the host: it checks arguments, merges axes, plans, converts numbers,
looks up compiled kernels. All of this depends only on the numbers and on the tensors' sizes, strides, dtypes, devices
and alignment, and on whether they require gradients. Calls with the same of these are of one kind. An operator may name
numbers that it only passes to its kernels: calls of a kind may differ in these. The second call of a kind is recorded:
the tensors that it allocates, and the kernels that it launches on them. Later calls of this kind allocate the same
tensors and launch the same kernels. A call that does anything else, such as copying a tensor, is never repeated in this
way.

A kind is looked up by a key, which takes some microseconds to make. The last kind of a shape is compared first, by a
function of torch.
"""

import functools
import operator
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from fourfold.backends import launch_records
from fourfold.compat import torch_internals

# The number of kinds of calls that an operator keeps before it discards them all.
MOST_KINDS = 2048
# Callers of kernels, and Triton, inspect addresses modulo this many bytes.
ALIGNMENT = 16

# Launches a kernel again, given the values of a call and the stream. The values are the addresses of tensors, and the
# numbers in which calls of a kind may differ.
Launch = Callable[[Sequence[Any], int], None]

_thread = threading.local()
# Operators that allocate, and launch nothing.
MAKE = frozenset(
    (
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.new_empty.default,
        torch.ops.aten.new_empty_strided.default,
    )
)


class KnownCalls(NamedTuple):
    """The actions of calls of one kind.

    Attributes:
        allocations: sizes, strides and dtype of each tensor that a call allocates.
        provided: functions that return further tensors, such as counters.
        launches: in order. They receive a value for each argument (the address of a tensor, a number in which calls of
            a kind may differ, 0 for others), and the addresses of the allocated and of the provided tensors.
        results: indices of the results among the allocated tensors; a single number if the result is not a tuple.
    """

    allocations: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]
    provided: tuple[Callable[[], torch.Tensor], ...]
    launches: tuple[Launch, ...]
    results: tuple[int, ...] | int

    def repeat(self, values: list[Any], device: int) -> Any:
        """Repeat such a call on the current device, given the values of its arguments. It appends to them."""
        empty = torch_internals.empty_on_current_gpu
        allocations = [empty(size, stride, dtype) for size, stride, dtype in self.allocations]
        values += [tensor.data_ptr() for tensor in allocations]
        values += [provide().data_ptr() for provide in self.provided]
        stream = torch_internals.current_stream(device)
        for launch in self.launches:
            launch(values, stream)
        results = self.results
        return allocations[results] if isinstance(results, int) else tuple([allocations[i] for i in results])


class CallRecorder(torch_internals.dispatch_mode()):  # type: ignore[misc]
    """A mode that records one call. Launches report to it by `record_launch`.

    Args:
        arguments: of the call.
        numbers: the places of the numbers in which calls of a kind may differ. Each is an object of its own.
    """

    def __init__(self, arguments: Sequence[Any], numbers: Sequence[int] = ()) -> None:
        super().__init__()
        self._allocated: list[torch.Tensor] = []
        self._provided: list[tuple[torch.Tensor, Callable[[], torch.Tensor]]] = []
        self._launches: list[Callable[[Callable[[int], int]], Launch]] = []
        # By a tensor map's id: the map, kept alive so that its id stays unique, and what `record_map` takes with it.
        self.maps: dict[int, tuple[Any, int, Callable[[int], Any]]] = {}
        self._arguments = arguments
        self._numbers = {id(arguments[place]): place for place in numbers}
        self._passed: set[int] = set()
        self._repeatable = True

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator of torch. The call can be repeated if it makes an unwritten tensor or a view."""
        result = operator(*args, **(kwargs or {}))
        if operator in MAKE:
            self._allocated.append(result)
        elif not torch_internals.is_view(operator) and operator is not torch.ops.aten.promote_types.default:
            self._repeatable = False
        return result

    def place_of_number(self, number: Any) -> int | None:
        """Return the place of the argument that a launch passes to a kernel, if calls of a kind may differ in it."""
        place = self._numbers.get(id(number))
        if place is not None:
            self._passed.add(place)
        return place

    def record_launch(self, again: Callable[[Callable[[int], int]], Launch]) -> None:
        """Record a launch. `again` takes a function from an address to its index, and returns a `Launch`."""
        self._launches.append(again)

    def provide(self, tensor: torch.Tensor, provider: Callable[[], torch.Tensor]) -> None:
        """Record a tensor of the call, and the function that provides it to later calls."""
        self._provided.append((tensor, provider))

    def record_map(self, tensor_map: Any, address: int, encode: Callable[[int], Any]) -> None:
        """Record the tensor map of an address, and the function that returns such a map of any address."""
        self.maps[id(tensor_map)] = tensor_map, address, encode

    def refuse(self) -> None:
        """Mark the call as not repeatable."""
        self._repeatable = False

    def repeatable_actions(self, results: Any) -> KnownCalls | None:
        """Return the actions of the call, given its results, or None if it cannot be repeated."""
        pointers = [a.data_ptr() if isinstance(a, torch.Tensor) else 0 for a in self._arguments]
        addresses = [*pointers, *(t.data_ptr() for t in self._allocated), *(t.data_ptr() for t, _ in self._provided)]
        distinct = [address for address in addresses if address]
        # A number that no launch passes has an effect that nothing records.
        unknown_effect = len(self._passed) < len(self._numbers)
        if not self._repeatable or unknown_effect or len(set(distinct)) < len(distinct):
            return None
        # The dispatcher may wrap what a mode returns in another object, so a tensor is identified by its address.
        allocations = [_form(tensor) for tensor in self._allocated]
        unclaimed: list[Any] = list(allocations)
        places = []
        try:
            launches = tuple(again(addresses.index) for again in self._launches)
            for result in (results,) if isinstance(results, torch.Tensor) else results or ():
                places.append(unclaimed.index(_form(result)))
                unclaimed[places[-1]] = None
        except ValueError:  # a tensor of neither kind, such as a part of an argument
            return None
        forms = tuple(form[1:] for form in allocations)
        provided = tuple(provider for _, provider in self._provided)
        return KnownCalls(forms, provided, launches, places[0] if isinstance(results, torch.Tensor) else tuple(places))


def _form(tensor: torch.Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def recorder() -> CallRecorder | None:
    """Return the recorder that watches this thread's call, if there is one."""
    return getattr(_thread, "recorder", None)


# Takes the arguments and the setting of a call, and returns the arguments' values; None for a call of another kind.
_Recognize = Callable[[Sequence[Any], Hashable], list[Any] | None]


class _Kind(NamedTuple):
    """A kind of calls that are repeated: whether a tensor requires a gradient, their actions, and their recognizer."""

    requires_grad: bool
    actions: KnownCalls
    recognize: _Recognize


def _items(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return a function that returns the arguments at `places`."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda arguments: tuple([arguments[place] for place in places])


def _recognizer(
    arguments: Sequence[Any], setting: Hashable, tensors: Sequence[int], numbers: Sequence[int]
) -> _Recognize:
    """Return a function that recognizes calls of the kind of this one in less time than their key takes to make.

    It recognizes none if a tensor of this call does not begin at a multiple of `ALIGNMENT`.

    Args:
        arguments: of the call.
        setting: of the call: see `Repeater`.
        tensors: the places of the tensors, which may be None.
        numbers: the places of the floats in which calls of a kind may differ.
    """
    tensors = [place for place in tensors if arguments[place] is not None]
    numbers = [place for place in numbers if type(arguments[place]) is float]
    others = [place for place in range(len(arguments)) if place not in (*tensors, *numbers)]
    tensors_of, others_of = _items(tensors), _items(others)
    match, constants = torch_internals.tensors_match(tensors_of(arguments)), others_of(arguments)
    # 0.0 and -0.0 are equal.
    zeros = [(place, str(x)) for place, x in zip(others, constants) if type(x) is float and x == 0]
    blank = [0] * len(arguments)
    if match is None or any(tensor.data_ptr() % ALIGNMENT for tensor in tensors_of(arguments)):
        return lambda arguments, now: None

    def recognize(arguments: Sequence[Any], now: Hashable) -> list[Any] | None:
        given = tensors_of(arguments)
        if now != setting or not match(*given) or others_of(arguments) != constants:
            return None
        values: list[Any] = blank.copy()
        bits = 0
        for place, tensor in zip(tensors, given):
            values[place] = address = tensor.data_ptr()
            bits |= address
        for place in numbers:
            values[place] = number = arguments[place]
            if type(number) is not float:
                return None
        for place, text in zeros:
            if str(arguments[place]) != text:
                return None
        return None if bits % ALIGNMENT else values

    return recognize


class Repeater:
    """An operator's implementation, which repeats known calls.

    Args:
        implementation: launches kernels. Its actions may depend only on the key of a call: see above.
        tensors: the indices of the arguments that are tensors or None.
        usable: whether known calls may be repeated now.
        numbers: the indices of the floats in which calls of a kind may differ. The implementation passes them to
            kernels as they are, and uses them for nothing else.
        setting: returns what a call's actions depend on beside its key. It is then part of the key.
    """

    def __init__(
        self,
        implementation: Callable[..., Any],
        tensors: Sequence[int],
        usable: Callable[[], bool],
        numbers: Sequence[int] = (),
        setting: Callable[[], Hashable] = lambda: None,
    ) -> None:
        self._implementation, self._tensors, self._usable = implementation, tuple(tensors), usable
        self._setting = setting
        self._numbers = tuple(numbers)
        self._kinds: dict[tuple[Any, ...], _Kind | bool] = {}
        # By the shape of the first tensor: the kind of the last such call that its key recognized.
        self._recent: dict[torch.Size, _Kind] = {}

    def find(self, arguments: Sequence[Any]) -> tuple[Callable[[], Any] | None, bool]:
        """Return a function that makes the call, and whether a tensor requires a gradient.

        The function repeats the recorded call of the same kind, or runs the implementation if that cannot be repeated.
        Return None in its place if calls are not repeated now, or if no call of this kind was recorded.
        """
        first = arguments[self._tensors[0]]
        if (device := self._device(first)) < 0:
            return None, False
        if (recent := self._recent.get(first.shape)) is not None:
            requires_grad, actions, recognize = recent
            if (values := recognize(arguments, self._setting())) is not None:
                return functools.partial(actions.repeat, values, device), requires_grad
        kind, given = self._recognize(arguments)
        known = self._kinds.get(kind)
        if known is False:
            return functools.partial(self._implementation, *arguments), kind[0]
        if not isinstance(known, _Kind):
            return None, False
        self._recent[first.shape] = known
        return functools.partial(known.actions.repeat, given, device), known.requires_grad

    def _device(self, tensor: torch.Tensor | None) -> int:
        """Return the device of a call with this first tensor, or -1 if it may not be repeated now."""
        device = -1 if tensor is None else tensor.get_device()
        if (
            device < 0
            or device != torch.cuda.current_device()
            or launch_records.current is not None  # repeated calls bypass the functions that record
            or not self._usable()
        ):
            return -1
        return device

    def _recognize(self, arguments: Sequence[Any]) -> tuple[tuple[Any, ...], list[Any]]:
        """Return the kind of a call and the values of its arguments.

        A kind begins with whether a tensor requires a gradient. It is empty if a tensor has the negative bit.
        """
        values: list[Any] = [0] * len(arguments)
        parts, tensors, numbers, gradient = list(arguments), self._tensors, self._numbers, False
        for place, x in enumerate(arguments):
            if place in tensors:
                if x is None:
                    continue
                if x.is_neg():  # its memory has the negatives of its values
                    return (), values
                values[place] = address = x.data_ptr()
                requires_grad = x.requires_grad
                gradient = gradient or requires_grad
                parts[place] = x.shape, x.stride(), x.dtype, x.get_device(), address % ALIGNMENT, requires_grad
            elif type(x) is float:
                if place in numbers:
                    values[place], parts[place] = x, float
                elif x == 0:
                    parts[place] = str(x)  # 0.0 and -0.0 are equal
        return (gradient, self._setting(), *parts), values

    def __call__(self, *arguments: Any) -> Any:
        """Repeat a known call, or call the implementation, and record the second call of a kind."""
        make, _ = self.find(arguments)
        if make is not None:
            return make()
        kinds, implementation = self._kinds, self._implementation
        kind = () if self._device(arguments[self._tensors[0]]) < 0 else self._recognize(arguments)[0]
        if not kind:
            return implementation(*arguments)
        if kind not in kinds:
            # The first call of a kind may compile and measure.
            if len(kinds) >= MOST_KINDS:
                kinds.clear()
                self._recent.clear()
            kinds[kind] = True
            return implementation(*arguments)
        if recorder() is not None or torch.cuda.is_current_stream_capturing():
            return implementation(*arguments)
        given = list(arguments)
        for place in self._numbers:
            given[place] *= 1.0  # makes a new object, by which a launch is seen to pass this number
        watching = CallRecorder(given, self._numbers)
        _thread.recorder = watching
        try:
            with watching:
                results = implementation(*given)
        finally:
            _thread.recorder = None
        actions = watching.repeatable_actions(results)
        recognize = _recognizer(arguments, kind[1], self._tensors, self._numbers)
        kinds[kind] = actions is not None and _Kind(kind[0], actions, recognize)
        return results
