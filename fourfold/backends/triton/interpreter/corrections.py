"""Corrections to Triton's interpreter, which runs the kernels on a machine without a GPU.

`install` installs them. Each concern has its own module in this folder:
- `arithmetic` computes as compiled code does, in particular for bfloat16, whose bits the interpreter adds;
- `memory` checks every access, and returns conspicuous values in masked lanes without another value;
- `tuning` chooses a configuration of a tuned kernel;
- `libdevice` supplies the functions of NVIDIA's mathematical library, and `inline_ptx` inline assembly;
- `source` makes ``and``, ``or`` and ``not`` of blocks work element by element;
- `marks` records which lines of a kernel have run;
- `replay` saves time: it records what an operation does to operands of certain types;
- `batches` saves more: it runs many programs at once;
- `launches` remembers the kernels that have run, for the compiler;
- this module launches kernels: numbers get the types that the compiler gives them, and no CPU tensor is copied.
`parts` lists the private parts of Triton that these modules use.
"""

import contextlib
import dataclasses
import functools
import inspect
import itertools
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import min_dot_size
from triton.runtime import interpreter, jit

from fourfold.backends import observers
from fourfold.backends.launch import ImpossibleLaunch, check_grid
from fourfold.backends.triton.interpreter import (
    arithmetic,
    batches,
    inline_ptx,
    launches,
    libdevice,
    marks,
    replay,
    tuning,
)
from fourfold.backends.triton.interpreter.arithmetic import Handle, numpy_type, to_bfloat16
from fourfold.backends.triton.interpreter.memory import CheckedMemory, restrict_memory
from fourfold.backends.triton.interpreter.parts import missing
from fourfold.backends.triton.interpreter.source import LOGIC, KernelSource

_ABSENT = object()


class Builder(
    batches.Batches,
    CheckedMemory,
    arithmetic.Operators,
    arithmetic.Conversions,
    libdevice.Functions,
    inline_ptx.Assembly,
):
    """The interpreter's builder, which runs the language's operations, with all corrections."""

    # The mark that `install` looks for. The class itself would not do: a baseline's implementations, loaded beside
    # today's, bring a copy of this module with classes of its own.
    corrected = True


class Language:
    """Patches that make the functions of triton.language call the interpreter while kernels run.

    Triton patches the language again for each kernel and each device function. Here the patches are collected once, and
    applied for the duration of a launch.
    """

    def __init__(self) -> None:
        self.launches = 0
        self.shipped = interpreter._patch_lang

    @functools.cached_property
    def changes(self) -> list[tuple[Any, str, Any, Any]]:
        """The attributes to change: the object, the name, the value while kernels run, and the former value."""
        before: dict[tuple[int, str], tuple[Any, Any]] = {}
        scope = self.shipped(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        for place, name, original in scope._changes:
            before.setdefault((id(place), name), (place, original))
        after = {key: vars(place)[key[1]] for key, (place, _) in before.items()}
        scope.restore()
        # Triton 3.6 makes an int of an array with one axis, which NumPy 2.5 refuses.
        after[id(tl.tensor), "__index__"] = lambda number: batches.number_of(number.handle)
        after[id(tl.tensor), "__bool__"] = replay.truth
        after[id(tl.tensor), "T"] = property(replay.transpose)
        for place in (tl, tl.core):
            after[id(place), "range"] = batches.loop
            after[id(place), "static_assert"] = tuning.static_assert
        functions: dict[Any, Callable] = {}
        for key, (_, original) in before.items():
            if key[1] in replay.REPLAYED and tl.core.is_builtin(original):
                if original not in functions:
                    functions[original] = replay.record_once(key[1], original)
                after[key] = functions[original]
        places = [(place, name) for (_, name), (place, _) in before.items()]
        return [(place, name, after[id(place), name], vars(place).get(name, _ABSENT)) for place, name in places]

    @contextlib.contextmanager
    def call_interpreter(self) -> Iterator[None]:
        """Make the functions call the interpreter."""
        changes = self.changes
        self.launches += 1
        try:
            if self.launches == 1:
                for place, name, value, _ in changes:
                    setattr(place, name, value)
            yield
        finally:
            self.launches -= 1
            if self.launches == 0:
                for place, name, _, original in changes:
                    if original is _ABSENT:
                        delattr(place, name)
                    else:
                        setattr(place, name, original)

    def patch(self, function: Callable) -> Any:
        """Patch the language in place of `interpreter._patch_lang`, which Triton calls before each device function."""
        return interpreter._LangPatchScope() if self.launches else self.shipped(function)


LANGUAGE = Language()
# The interpreter has one builder with the index of one program: launches of several threads take turns.
_RUNNING = threading.RLock()


class InterpretedLaunch(interpreter.GridExecutor):
    """The launch of a kernel.

    Its arguments get the types that the compiler gives them, and it may access the memory of its tensors. NumPy's
    warnings are off: kernels are tested with NaN and infinity.
    """

    def __init__(self, fn: Callable, arg_names: list[str], grid: Any, *rest: Any) -> None:
        super().__init__(fn, arg_names, grid, *rest)
        self.signature, self.declared = _signature(fn)
        self.constexprs = launches.constant_names(fn)

    def __call__(self, *args_dev: Any, **kwargs: Any) -> None:
        """Launch the kernel. Tensors that are not on the CPU are copied there, and back."""
        with observers.around_launch():
            self.run_untraced(args_dev, kwargs)

    def run_untraced(self, args_dev: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Launch the kernel without tracing, as the kernel itself has marks.

        Raises:
            ImpossibleLaunch: a tensor is on the device meta.
        """
        kwargs = {name: value for name, value in kwargs.items() if name in self.signature.parameters}
        devices = {_device(argument) for argument in (*args_dev, *kwargs.values())}
        if "meta" in devices:
            raise ImpossibleLaunch(f"{self.fn.__name__}: a tensor on the device meta has no data")
        copied = bool(devices - {"cpu"})
        args, named = self._init_args_hst(args_dev, kwargs) if copied else (args_dev, kwargs)
        for hook in self.pre_run_hooks:
            hook(*args, **named)
        bound = self.signature.bind(*args, **named)
        bound.apply_defaults()
        with _RUNNING, LANGUAGE.call_interpreter(), np.errstate(all="ignore"), restrict_memory(bound.arguments):
            self.run_programs(bound.arguments)
        if copied:
            self._restore_args_dev(args_dev, args, kwargs, named)

    def run_each(self, programs: Iterator[tuple[int, int, int]], values: dict[str, Any]) -> None:
        """Run these programs on the kernel's arguments, one after the other."""
        builder = interpreter.interpreter_builder
        for index in programs:
            builder.set_grid_idx(*index)
            self.fn(**values)

    def run_together(self, programs: list[tuple[int, int, int]], values: dict[str, Any]) -> None:
        """Run these programs on the kernel's arguments, as many as possible at once."""
        batches.Runner(self.fn, values, lambda some: self.run_each(some, values)).run(programs)

    def value(self, name: str, argument: Any) -> Any:
        """Return an argument as the kernel sees it."""
        return _value(argument, self.declared.get(name))

    def run_programs(self, arguments: dict[str, Any]) -> None:
        """Run all programs."""
        grid = self.grid(arguments) if callable(self.grid) else self.grid
        if len(grid) > 3:
            raise ValueError(f"a grid has up to three axes, not {len(grid)}")
        x, y, z = (*grid, 1, 1)[:3]
        check_grid(self.fn.__name__, (x, y, z))
        values = {
            name: argument if name in self.constexprs else self.value(name, argument)
            for name, argument in arguments.items()
        }
        builder = interpreter.interpreter_builder
        builder.set_grid_dim(x, y, z)
        try:
            programs = itertools.product(range(x), range(y), range(z))
            if x * y * z > 1:
                self.run_together(list(programs), values)
            else:
                self.run_each(programs, values)
        except Exception as error:
            if triton.knobs.compilation.front_end_debugging:
                raise
            raise interpreter.InterpreterError(repr(error)) from error


@functools.cache
def _signature(function: Callable) -> tuple[inspect.Signature, dict[str, str]]:
    """Return the parameters of a kernel, and the names of the declared types of some of them."""
    declared = {}
    for name, annotation in inspect.get_annotations(function).items():
        kind = jit._normalize_ty(annotation)
        with contextlib.suppress(KeyError):
            tl.str_to_ty(kind, None)
            declared[name] = kind
    return inspect.signature(function), declared


def _device(argument: Any) -> str:
    """Return the type of an argument's device; "cpu" for arguments other than tensors."""
    if isinstance(argument, tuple):
        return next((device for device in map(_device, argument) if device != "cpu"), "cpu")
    return getattr(getattr(getattr(argument, "base", argument), "device", None), "type", "cpu")


def _value(argument: Any, declared: str | None = None) -> Any:
    """Return an argument as the kernel sees it; a number is rounded to the type that the kernel is compiled for."""
    if isinstance(argument, int):
        return _integer(argument, declared)
    if isinstance(argument, float):
        return _number(argument, declared)
    if isinstance(argument, tuple):
        parts = [_value(part) for part in argument]
        return type(argument)(*parts) if hasattr(argument, "_fields") else tuple(parts)
    if type(argument) is torch.Tensor:
        handle = Handle(np.array([argument.data_ptr()], dtype=np.uint64), _pointer_type(argument.dtype))
        return tl.tensor(handle, handle.dtype)
    return interpreter._implicit_cvt(argument)


def _number(value: float, declared: str | None) -> Any:
    name = declared or ("u1" if isinstance(value, bool) else jit.mangle_type(value))
    kind = tl.str_to_ty(name, None)
    numbers = np.array([value])
    bits = to_bfloat16(numbers.astype(np.float32)) if kind.name == "bf16" else numbers.astype(numpy_type(kind))
    return tl.tensor(Handle(bits, kind), kind)


# Integers are cached by value and type, as 1 == True. Floats are not, as 0.0 == -0.0.
_integer = functools.lru_cache(1 << 12, typed=True)(_number)


@functools.cache
def _pointer_type(dtype: torch.dtype) -> tl.pointer_type:
    return tl.str_to_ty(jit.mangle_type(torch.empty(0, dtype=dtype)), None)


def install() -> None:
    """Install all corrections. A second call does nothing.

    From then on an access outside of the storages of a launch's tensors raises `memory.OutOfBounds`, unless the launch
    makes pointers from integers.

    Raises:
        RuntimeError: this release of Triton has changed a private part that is used here. The message names it.
    """
    if getattr(interpreter.interpreter_builder, "corrected", False):
        return
    if changed := missing():
        raise RuntimeError(
            f"the corrections of the interpreter do not fit Triton {triton.__version__}: {'; '.join(changed)}"
        )
    interpreter.TensorHandle = Handle
    interpreter._get_np_dtype = numpy_type
    interpreter.InterpreterBuilder = Builder
    interpreter.interpreter_builder.__class__ = Builder
    # The overflow checks compute every sum of integers again, in 64 bits.
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
    # The interpreter multiplies blocks of any sizes, but the compiler refuses a K below 16, for example.
    interpreter.interpreter_builder.codegen_fns["min_dot_size"] = min_dot_size(GPUTarget("cuda", 90, 32))
    interpreter.ReduceOps, interpreter.ScanOps = batches.BatchedReduce, batches.BatchedScan
    interpreter.GridExecutor = InterpretedLaunch
    interpreter._patch_lang = LANGUAGE.patch
    interpreter.FunctionRewriter.ast_transformer = property(lambda self: KernelSource(self.fn))
    vars(interpreter).update(LOGIC)
    marks.install()
    replay.remember_shapes()
    libdevice.install()
    tuning.install()
    launches.install()
