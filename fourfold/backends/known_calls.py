"""Known calls: record the launches of a call, so that a later call like it repeats them at once.

A small call spends most of its time in Python on the host: it checks arguments, merges axes, plans, converts numbers,
looks up compiled kernels. All of this depends only on the numbers and on the tensors' sizes, strides, dtypes, devices
and alignment, and on whether they require gradients. Calls with the same of these are of one kind. An operator may name
numbers that it only passes to its kernels: calls of a kind may differ in these. The second call of a kind is recorded:
the tensors that it allocates, and the kernels that it launches on them. Later calls of this kind allocate the same
results and launch the same kernels. What nobody gets, as temporary tensors and statistics that only a gradient would
need, shares one allocation: the scratch. A call that does anything else, such as copying a tensor, is never repeated in
this way.

A kind is looked up by a key, which takes some microseconds to make. The last kind of a shape is compared first, by a
function of torch.
"""

import itertools
import operator
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fourfold.backends import launch_records
from fourfold.compat import torch_internals

# The number of kinds of calls that an operator keeps before it discards them all.
MOST_KINDS = 2048
# Callers of kernels, and Triton, inspect addresses modulo this many bytes.
ALIGNMENT = 16
# Tensors in the scratch begin at multiples of this many bytes, as those of torch's allocator do.
SCRATCH_ALIGNMENT = 512

# Launches a kernel again, given the values of a call and the stream.
Launch = Callable[[Sequence[Any], int], None]

_thread = threading.local()
# The types of tensors whose calls may be repeated. Their sizes can be a key.
TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter)
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
        device: the index of the GPU.
        allocations: sizes, strides and dtype of each tensor that a call allocates: its results in order, then the
            scratch, if there is one.
        offsets: of the tensors in the scratch, except the first, which begins there.
        provided: functions that return further tensors, such as counters.
        constants: what the launches pass in each call.
        launches: in order. They receive the values of a call: the addresses of its tensors, the numbers in which calls
            of a kind may differ, the addresses of the allocated tensors, of the others in the scratch and of the
            provided tensors, and the constants.
        results: their number, or None for one that is not a tuple.
    """

    device: int
    allocations: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]
    offsets: tuple[int, ...]
    provided: tuple[Callable[[], torch.Tensor], ...]
    constants: tuple[Any, ...]
    launches: tuple[Launch, ...]
    results: int | None

    def repeat(self, values: list[Any]) -> Any:
        """Repeat such a call on the current device, given the values of its arguments. It appends to them."""
        device, allocations, offsets, provided, constants, launches, results = self
        empty = torch_internals.empty_on_current_gpu
        allocated = [empty(size, stride, dtype) for size, stride, dtype in allocations]
        values += [tensor.data_ptr() for tensor in allocated]
        if offsets:
            scratch = values[-1]
            values += [scratch + offset for offset in offsets]
        if provided:
            values += [provide().data_ptr() for provide in provided]
        values += constants
        stream = torch_internals.current_stream(device)
        for launch in launches:
            launch(values, stream)
        return allocated[0] if results is None else tuple(allocated[:results])


class UnrepeatedCalls(NamedTuple):
    """Calls of a kind that cannot be repeated: see `KnownCalls`."""

    implementation: Callable[..., Any]
    public: int | slice | None

    def repeat(self, arguments: list[Any]) -> Any:
        """Run the implementation on the call's arguments."""
        return public_results(self.implementation(*arguments), self.public)


class CallPlaces:
    """The places of a launch's arguments among the values of a call.

    Args:
        addresses: of the call's tensors; 0 in the place of a number.
    """

    def __init__(self, addresses: Sequence[int]) -> None:
        self._addresses = addresses
        self.constants: list[Any] = []

    def find_address(self, address: int) -> int:
        """Return the place of the tensor at an address. Raise ValueError if the call has none there."""
        if not address:  # of a tensor without elements, which a call may leave out
            return self.add_constant(0)
        return self._addresses.index(address)

    def add_constant(self, value: Any) -> int:
        """Add a value that the launch passes in each call, and return its place."""
        self.constants.append(value)
        return len(self._addresses) + len(self.constants) - 1


def arguments_at(
    places: Sequence[int], conversions: Mapping[int, Callable[[Any], Any]]
) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return the function from the values of a call to the arguments of a launch.

    Args:
        places: of the arguments among the values.
        conversions: by the index of an argument, the function from the value to the argument.
    """
    take = _items(places)
    if not conversions:
        return take

    def convert(values: Sequence[Any]) -> tuple[Any, ...]:
        arguments = list(take(values))
        for i, conversion in conversions.items():
            arguments[i] = conversion(arguments[i])
        return tuple(arguments)

    return convert


class CallRecorder(torch_internals.dispatch_mode()):  # type: ignore[misc]
    """A mode that records one call. Launches report to it by `record_launch`.

    Args:
        arguments: of the call.
        numbers: those in which calls of a kind may differ. Each is an object of its own.
    """

    def __init__(self, arguments: Sequence[Any], numbers: Sequence[float] = ()) -> None:
        super().__init__()
        self._allocated: list[torch.Tensor] = []
        self._provided: list[tuple[torch.Tensor, Callable[[], torch.Tensor]]] = []
        self._launches: list[Callable[[CallPlaces], Launch]] = []
        # By a tensor map's id: the map, kept alive so that its id stays unique, and what `record_map` takes with it.
        self.maps: dict[int, tuple[Any, int, Callable[[int], Any]]] = {}
        self._tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
        self._numbers = {id(number): place for place, number in enumerate(numbers, len(self._tensors))}
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
        """Return the place of a number that a launch passes to a kernel, or None if all calls of a kind pass it."""
        place = self._numbers.get(id(number))
        if place is not None:
            self._passed.add(place)
        return place

    def record_launch(self, again: Callable[[CallPlaces], Launch]) -> None:
        """Record a launch. `again` takes the places of its arguments, and returns a `Launch`."""
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
        """Return the actions of the call, given those of its results to return, or None if it cannot be repeated."""
        single = isinstance(results, torch.Tensor)
        # The dispatcher may wrap what a mode returns in another object, so a tensor is identified by its address.
        allocated = [_form(tensor) for tensor in self._allocated]
        returned = [_form(result) for result in ((results,) if single else results or ())]
        others = [tensor for tensor, form in zip(self._allocated, allocated) if form[0] and form not in returned]
        ends = [*itertools.accumulate(_scratch_bytes(tensor) for tensor in others)]
        made = [form[0] for form in returned] + [t.data_ptr() for t in (*others, *(t for t, _ in self._provided))]
        addresses = [*(t.data_ptr() for t in self._tensors), *[0] * len(self._numbers), *made]
        distinct = [address for address in addresses if address]
        # A number that no launch passes has an effect that nothing records.
        unknown_effect = len(self._passed) < len(self._numbers)
        # A result may be a part of an argument.
        known_results = all(form in allocated for form in returned)
        if not self._repeatable or unknown_effect or not known_results or len(set(distinct)) < len(distinct):
            return None
        places = CallPlaces(addresses)
        try:
            launches = tuple(again(places) for again in self._launches)
        except ValueError:  # a tensor that is none of the call's
            return None
        return KnownCalls(
            torch.cuda.current_device(),
            (*(form[1:] for form in returned), *([((ends[-1],), (1,), torch.uint8)] if ends else [])),
            tuple(ends[:-1]),
            tuple(provider for _, provider in self._provided),
            tuple(places.constants),
            launches,
            None if single else len(returned),
        )


def _form(tensor: torch.Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _scratch_bytes(tensor: torch.Tensor) -> int:
    return -(-tensor.untyped_storage().nbytes() // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT


def public_results(results: Any, public: int | slice | None) -> Any:
    """Return the results of a call that its caller gets: see `Repeater`."""
    return results if public is None else results[public]


def _items(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return a function that returns the items at `places`."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda items: tuple([items[place] for place in places])


_Actions = KnownCalls | UnrepeatedCalls
# How to make a call: for all of its results, for the public ones, what both take, and whether a tensor of the call
# requires a gradient.
Found = tuple[_Actions, _Actions, list[Any], bool]


def recorder() -> CallRecorder | None:
    """Return the recorder that watches this thread's call, if there is one."""
    return getattr(_thread, "recorder", None)


# Takes the arguments and the setting of a call, and returns the arguments' values; None for a call of another kind.
_Recognize = Callable[[Sequence[Any], Hashable], list[Any] | None]


class _Kind(NamedTuple):
    """A kind of calls that are repeated.

    Attributes:
        requires_grad: whether a tensor requires a gradient.
        actions: of the calls.
        for_public: the actions of calls that return the public results alone.
        recognize: recognizes the calls.
    """

    requires_grad: bool
    actions: KnownCalls
    for_public: KnownCalls
    recognize: _Recognize


def _recognizer(
    arguments: Sequence[Any], setting: Hashable, tensors: Sequence[int], numbers: Sequence[int]
) -> _Recognize:
    """Return a function that recognizes calls of the kind of this one in less time than their key takes to make.

    It takes as many arguments, of any types. It recognizes no call if a tensor of this one does not begin at a multiple
    of `ALIGNMENT`.

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
    types = tuple(map(type, constants))
    # 0.0 and -0.0 are equal.
    zeros = [(place, str(x)) for place, x in zip(others, constants) if type(x) is float and x == 0]
    if match is None or any(tensor.data_ptr() % ALIGNMENT for tensor in tensors_of(arguments)):
        return lambda arguments, now: None

    def recognize(arguments: Sequence[Any], now: Hashable) -> list[Any] | None:
        given = tensors_of(arguments)
        if now != setting or not match(*given):
            return None
        if constants and ((found := others_of(arguments)) != constants or tuple(map(type, found)) != types):
            return None
        values: list[Any] = []
        bits = 0
        for tensor in given:
            address = tensor.data_ptr()
            values.append(address)
            bits |= address
        for place in numbers:
            number = arguments[place]
            if type(number) is not float:
                return None
            values.append(number)
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
        public: the index of the results that callers get unless they need a gradient. None: all.
    """

    def __init__(
        self,
        implementation: Callable[..., Any],
        tensors: Sequence[int],
        usable: Callable[[], bool],
        numbers: Sequence[int] = (),
        setting: Callable[[], Hashable] = lambda: None,
        public: int | slice | None = None,
    ) -> None:
        self._implementation, self._tensors, self._usable = implementation, tuple(tensors), usable
        self._setting, self._public = setting, public
        self._unrepeated = UnrepeatedCalls(implementation, None), UnrepeatedCalls(implementation, public)
        self._numbers = tuple(numbers)
        self._kinds: dict[tuple[Any, ...], _Kind | bool] = {}
        # By the shape of the first tensor: the kind of the last such call that its key recognized.
        self._recent: dict[torch.Size, _Kind] = {}

    def find(self, arguments: Sequence[Any]) -> Found | None:
        """Return how to make the call: repeat the recorded one of the same kind, or else run the implementation.

        Return None if calls are not repeated now, or if no call of this kind was recorded.
        """
        return self.find_recent(arguments) or self.find_kind(arguments)

    def find_kind(self, arguments: Sequence[Any]) -> Found | None:
        """Return how to make the call, looked up by its key: see `find`."""
        first = arguments[self._tensors[0]]
        if self._device(first) < 0:
            return None
        kind, values = self._recognize(arguments)
        known = self._kinds.get(kind)
        if known is False:
            return *self._unrepeated, list(arguments), kind[0]
        if not isinstance(known, _Kind):
            return None
        self._recent[first.shape] = known
        return known.actions, known.for_public, values, known.requires_grad

    def find_recent(self, arguments: Sequence[Any]) -> Found | None:
        """Return how to repeat the call if it is of the last kind of its shape. The arguments may be of any types."""
        first = arguments[self._tensors[0]]
        recent = self._recent.get(first.shape) if type(first) in TENSOR_TYPES else None
        # Repeated calls bypass the functions that record.
        if recent is None or launch_records.current is not None or not self._usable():
            return None
        requires_grad, actions, for_public, recognize = recent
        values = recognize(arguments, self._setting())
        if values is None or actions.device != torch.cuda.current_device():
            return None
        return actions, for_public, values, requires_grad

    def _device(self, tensor: torch.Tensor | None) -> int:
        """Return the device of a call with this first tensor, or -1 if it may not be repeated now."""
        device = -1 if tensor is None else tensor.get_device()
        if (
            device < 0
            or device != torch.cuda.current_device()
            or launch_records.current is not None
            or not self._usable()
        ):
            return -1
        return device

    def _recognize(self, arguments: Sequence[Any]) -> tuple[tuple[Any, ...], list[Any]]:
        """Return the kind of a call and the values of its arguments.

        A kind begins with whether a tensor requires a gradient. It is empty if a tensor has the negative bit.
        """
        addresses: list[Any] = []
        numbers: list[Any] = []
        parts, tensors, gradient = list(arguments), self._tensors, False
        for place, x in enumerate(arguments):
            if place in tensors:
                if x is None:
                    continue
                if x.is_neg():  # its memory has the negatives of its values
                    return (), []
                address = x.data_ptr()
                addresses.append(address)
                requires_grad = x.requires_grad
                gradient = gradient or requires_grad
                parts[place] = x.shape, x.stride(), x.dtype, x.get_device(), address % ALIGNMENT, requires_grad
            elif type(x) is float:
                if place in self._numbers:
                    numbers.append(x)
                    parts[place] = float
                elif x == 0:
                    parts[place] = str(x)  # 0.0 and -0.0 are equal
        return (gradient, self._setting(), *parts), addresses + numbers

    def __call__(self, *arguments: Any) -> Any:
        """Repeat a known call, or call the implementation, and record the second call of a kind."""
        if (found := self.find(arguments)) is not None:
            known, _, values, _ = found
            return known.repeat(values)
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
        numbers = [place for place in self._numbers if type(arguments[place]) is float]
        for place in numbers:
            given[place] *= 1.0  # makes a new object, by which a launch is seen to pass this number
        watching = CallRecorder(given, [given[place] for place in numbers])
        _thread.recorder = watching
        try:
            with watching:
                results = implementation(*given)
        finally:
            _thread.recorder = None
        actions = watching.repeatable_actions(results)
        for_public = actions if self._public is None else watching.repeatable_actions(results[self._public])
        recognize = _recognizer(arguments, kind[1], self._tensors, self._numbers)
        if actions is None or for_public is None:
            kinds[kind] = False
        else:
            kinds[kind] = _Kind(kind[0], actions, for_public, recognize)
        return results
