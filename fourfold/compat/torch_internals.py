"""torch's private parts: streams, dispatch, and settings of its compiler."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd import forward_ad

from fourfold.compat import find, uses

# What torch's message says of a tensor that was written into after autograd had kept it.
_WRITTEN_INTO = ("inplace operation", "modified inplace")


def _current_stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


@uses("torch._C._cuda_getCurrentRawStream", otherwise=_current_stream)
def current_stream(device: int) -> int:
    """The address of torch's current stream on a CUDA device.

    The public ``torch.cuda.current_stream(device).cuda_stream`` makes a Python object: 1.8 us in place of 0.1 at each
    launch, on the host of an H200. It serves where the private function is missing, as in a build without CUDA.
    """
    return torch._C._cuda_getCurrentRawStream(device)


def _empty_on_current_gpu(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


@uses("torch._C._dynamo.guards._empty_strided_cuda", otherwise=_empty_on_current_gpu)
def empty_on_current_gpu(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An unwritten tensor on the current CUDA device.

    It is how code allocates that torch's compiler wrote. Sizes and strides must be plain tuples. The public
    ``torch.empty`` takes 5.7 us on the host of an H200.
    """
    return torch._C._dynamo.guards._empty_strided_cuda(size, stride, dtype)


def _always() -> bool:
    return True


@uses(
    "torch._C._len_torch_dispatch_stack",
    "torch._C._len_torch_function_stack",
    "torch._C._are_functorch_transforms_active",
    "torch.autograd.forward_ad._current_level",
    otherwise=_always,
)
def calls_are_watched() -> bool:
    """Whether a mode, a transform or forward-mode differentiation is at work, and must see every call.

    No public function says so. Where one of the parts is missing the answer is True: a call then goes through the
    dispatcher, which is right at any time and slower.
    """
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


@uses(
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._python_dispatch.TorchDispatchMode._should_skip_dynamo",
)
def dispatch_mode() -> Any:
    """The class of modes that see each operator which torch dispatches, by a method ``__torch_dispatch__``.

    torch's own notes on extending it tell users to derive from this class; it has no public name. Of a class that
    derives from it, torch keeps the method from being compiled, and for that imports its compiler, which takes two
    seconds. Here it does not: nothing is compiled while such a mode is on.
    """

    def skips_compiler(cls: type) -> bool:
        return False

    base = find("torch.utils._python_dispatch.TorchDispatchMode")
    return type("DispatchMode", (base,), {"_should_skip_dynamo": classmethod(skips_compiler)})


@uses("torch._ops.OpOverload.namespace")
def namespace(operator: Any) -> str:
    """The library that an operator belongs to: "aten", or that of a custom operator. It is in no documentation."""
    return operator.namespace


@uses("torch._ops.OpOverload.overloadpacket")
def without_overload(operator: Any) -> Any:
    """``torch.ops.aten.add`` of ``torch.ops.aten.add.Tensor``. It is in no documentation."""
    return operator.overloadpacket


@uses("torch._ops.OpOverload().is_view")
def is_view(operator: Any) -> bool:
    """Whether an operator's results share the memory of its arguments. It is in no documentation."""
    return operator.is_view


@uses("torch._ops.OpOverload()._schema")
def argument_names(operator: Any) -> list[str]:
    """The names of an operator's arguments, in order. An operator has no signature that `inspect` could read."""
    return [argument.name for argument in operator._schema.arguments]


@uses("torch._ops.OpOverload()._schema")
@functools.cache
def written_arguments(operator: Any) -> tuple[tuple[int, str], ...]:
    """The arguments that an operator writes: their indices and names."""
    arguments = enumerate(operator._schema.arguments)
    return tuple((i, x.name) for i, x in arguments if x.alias_info is not None and x.alias_info.is_write)


@uses(
    "torch.cuda._DeviceGuard",
    "torch.cuda._exchange_device",
    "torch.cuda._maybe_exchange_device",
    "torch._C._dynamo.guards._empty_strided_cuda",
)
def replace_in_compiled_code(guard: Any) -> None:
    """Replace for good what code that torch's compiler wrote asks of a GPU: its choice, and memory.

    Args:
        guard: takes the device's number, and is a context.
    """

    def empty_strided(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device="cuda")

    torch.cuda._DeviceGuard = guard
    torch.cuda._exchange_device = torch.cuda._maybe_exchange_device = lambda device: 0
    torch._C._cuda_getCurrentRawStream = lambda device: 0
    torch._C._dynamo.guards._empty_strided_cuda = empty_strided


@uses("torch.utils._device._device_constructors")
def constructors() -> set[Any]:
    """The functions that make tensors on torch's default device. No documentation lists them."""
    return find("torch.utils._device._device_constructors")()


@uses("torch.utils._device.CURRENT_DEVICE")
def default_device() -> torch.device:
    """What ``torch.set_default_device`` was last given.

    The public ``torch.get_default_device()`` makes a tensor there, which takes a GPU.
    """
    return find("torch.utils._device.CURRENT_DEVICE") or torch.device("cpu")


@uses("torch._ops.OpOverload.redispatch", "torch._C.DispatchKey", "torch._C.DispatchKeySet")
def run_kernel(operator: Any, device_type: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run what an operator registered for "cpu" or "cuda", below autograd and below any mode.

    A mode that called the operator itself while it is on would be asked again, without end.
    """
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, device_type.upper()))
    return operator.redispatch(keys, *args, **kwargs)


@uses(
    "torch.ops.aten._to_copy",
    "torch.ops.aten._local_scalar_dense",
    "torch.ops.aten._reshape_copy",
    "torch.ops.aten._unsafe_view",
)
def copying_operators() -> set[Any]:
    """Operators that move values and compute nothing, among those that torch's public functions turn into."""
    aten = torch.ops.aten
    return {aten._to_copy, aten._local_scalar_dense, aten._reshape_copy, aten._unsafe_view}


@uses("torch.cuda._sleep")
def keep_stream_busy(cycles: int) -> None:
    """Enqueue a wait of so many of the GPU's cycles on the current stream.

    Nothing public does: an event waits for other work, and work takes as long as it does.
    """
    torch.cuda._sleep(cycles)


@uses("torch.autograd.grad saying 'inplace operation'; 'modified inplace' of a custom Function's view")
def says_written_into(error: RuntimeError) -> bool:
    """Whether autograd refuses because what it kept, or a view, was written into; its error has no class of its own."""
    return any(words in str(error) for words in _WRITTEN_INTO)


@uses("torch.Tensor._version")
def version(tensor: torch.Tensor) -> int:
    """How often a tensor, or a view of it, was written into in place. torch's notes on autograd name it."""
    return tensor._version


def _imaginary_part(tensor: torch.Tensor) -> torch.Tensor:
    return torch.complex(torch.zeros_like(tensor), tensor).conj().imag


def _never(tensor: torch.Tensor) -> bool:
    return False


@uses("torch.Tensor._is_zerotensor", otherwise=_never)
def is_without_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor is known to be zeros and has no memory: autograd makes such cotangents.

    No public interface tells. Without this one such a tensor has the address 0.
    """
    return tensor._is_zerotensor()


@uses("torch.Tensor._is_view", otherwise=_never)
def shares_a_base(tensor: torch.Tensor) -> bool:
    """Whether autograd knows a tensor as a view of another. No public interface tells."""
    return tensor._is_view()


@uses("torch._neg_view", otherwise=_imaginary_part)
def negated_view(tensor: torch.Tensor) -> torch.Tensor:
    """The negatives of a tensor as a view of it: the same memory, with the negative bit.

    The public way, the imaginary part of a complex conjugate, has other strides, and there are no such views of
    bfloat16.
    """
    return torch._neg_view(tensor)


@uses("torch.fx.experimental._config.use_duck_shape")
def sizes_are_their_own() -> AbstractContextManager:
    """Within it, torch.compile does not take sizes which happen to be equal in one call to be so in all."""
    return find("torch.fx.experimental._config").patch(use_duck_shape=False)


@uses("torch.Tensor._make_wrapper_subclass")
def wrapper_tensor(cls: type, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, dtype: torch.dtype) -> Any:
    """A tensor of a subclass without memory of its own, whose operators go to the class's ``__torch_dispatch__``.

    torch's notes on extending it make such tensors so; there is no public function.
    """
    return torch.Tensor._make_wrapper_subclass(cls, shape, strides=strides, storage_offset=offset, dtype=dtype)


def _documented_decompositions() -> dict[str, Callable[..., Any]]:
    return {str(operator): function for operator, function in torch.export.default_decompositions().items()}


@functools.cache
@uses("torch._decomp.decomposition_table", otherwise=_documented_decompositions)
def decompositions() -> dict[str, Callable[..., Any]]:
    """torch's functions that compute an operator by simpler ones, by the operator's full name.

    The documented ``torch.export.default_decompositions`` leaves out some, as those of interpolation and of pooling.
    """
    table = find("torch._decomp.decomposition_table")
    return {str(operator): function for operator, function in table.items()}
