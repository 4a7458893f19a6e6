"""Ways in for kernels that come with a reference and example inputs instead of a declaration.

- `like` makes an operation of a torch function and inputs to call it with.
- `verify_contract` takes a module with ``kernel_fn``, ``reference_fn`` and ``get_inputs``.
- `verify_kernelbench` takes a problem of KernelBench, with ``Model``, ``get_inputs`` and ``get_init_inputs``, and a
  solution with ``ModelNew``.

Source of the latter: A. Ouyang et al., KernelBench: Can LLMs Write Efficient GPU Kernels?, 2025.
"""

import copy
import functools
import inspect
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fourfold.candidates.load import models, modules
from fourfold.candidates.process.client import CALL_SECONDS, UntrustedFunction
from fourfold.declaration.arguments import TensorInput, Values, tensor, values
from fourfold.declaration.definition import DefinedOperation, operation
from fourfold.engine.verdict import Verdict
from fourfold.engine.verification import verify
from fourfold.numerics.dtypes import DTYPES
from fourfold.operations.claims import Claims

# Elements of an input. The reference of more takes minutes a case.
MOST_ELEMENTS = 1 << 22
# What stands for sizes that are found, and the elements of all inputs and weights then.
SMALL, SMALL_ELEMENTS = "small", 1 << 16
_INTEGERS = {torch.int64: "int64", torch.int32: "int32"}


def like(
    definition: Callable[..., torch.Tensor],
    inputs: Sequence[Any] | Mapping[str, Any],
    *,
    vary: bool = False,
    name: str | None = None,
    **fields: Any,
) -> DefinedOperation:
    """The operation of a torch function, declared by a call.

    Args:
        definition: the function that says what is right.
        inputs: the arguments of a call, in order or by name. Integers of a tensor stay between its smallest and its
            largest one. What is no tensor stays as it is.
        vary: whether sizes are drawn. Axes of one size then have the same size in every case. Otherwise all sizes are
            those of the call.
        name: of the operation; the function's unless given.
        **fields: of the operation, see `fourfold.operation`.

    Raises:
        ValueError: an input is of a dtype that cannot be drawn, or too large.
        TypeError: the function does not take the inputs.
    """
    signature = inspect.signature(definition)
    bound = signature.bind(**inputs) if isinstance(inputs, Mapping) else signature.bind(*inputs)
    tensors = [given for given in bound.arguments.values() if isinstance(given, torch.Tensor)]
    lengths = sorted({size for given in tensors for size in given.shape if size > 1})
    declared: dict[str, Any] = {
        argument: _declared(argument, given, lengths if vary else []) for argument, given in bound.arguments.items()
    }

    @functools.wraps(definition)
    def defined(*args: Any, **kwargs: Any) -> torch.Tensor:
        return definition(*args, **kwargs)

    defined.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[p for p in signature.parameters.values() if p.name in declared]
    )
    defined.__name__ = name or str(getattr(definition, "__name__", "reference"))
    sizes = {} if vary else {_axis(size): size for size in lengths}
    # What has no bound is found by the verdict: here a definition is somebody else's.
    return operation(sizes=sizes, tried=False, **declared, **fields)(defined)


def _axis(size: int) -> str:
    return f"of_{size}" if size > 1 else str(size)


def _declared(argument: str, given: Any, lengths: Sequence[int]) -> TensorInput | Values:
    """What is known of an argument. Integers below one of the lengths that vary are taken to be places along it."""
    if not isinstance(given, torch.Tensor):
        return values(given)
    if given.numel() > MOST_ELEMENTS:
        raise ValueError(f"{argument} has {given.numel()} elements: a reference takes at most {MOST_ELEMENTS}")
    axes = " ".join(map(_axis, given.shape))
    if given.is_floating_point():
        return tensor(axes)
    if given.dtype == torch.bool:
        return tensor(axes, dtype="bool")
    if given.dtype not in _INTEGERS:
        raise ValueError(f"{argument} has dtype {given.dtype}, which cannot be drawn")
    low, high = (int(given.min()), int(given.max()) + 1) if given.numel() else (0, 1)
    along = next((length for length in lengths if length >= high and low >= 0), None)
    return tensor(
        axes, dtype=_INTEGERS[given.dtype], low=low if along is None else 0, high=_axis(along) if along else high
    )


def verify_contract(module: Any, *, vary: bool = False, **options: Any) -> Verdict:
    """Verify a module's ``kernel_fn`` against its ``reference_fn`` on inputs such as ``get_inputs()`` gives.

    Args:
        module: has these three functions. `get_inputs` returns the arguments of a call, in order or by name.
        vary: see `like`.
        **options: those of `fourfold.verify`.

    Raises:
        AttributeError: the module lacks a function. The message names it.
    """
    kernel, reference, get_inputs = (_named(module, name) for name in ("kernel_fn", "reference_fn", "get_inputs"))
    inputs = get_inputs()
    inputs = inputs if isinstance(inputs, Mapping) else tuple(inputs)
    return verify(kernel, like(reference, inputs, vary=vary), **options)


# What a solution of KernelBench is held to, unless it claims otherwise. Convolutions by cuDNN are not deterministic.
# Under autocast torch rounds the weights of a model, too, which are no inputs of the operation.
OF_KERNELBENCH = Claims(
    dtypes=("float32",),
    contiguous=True,
    gradients=False,
    finite=True,
    deterministic=False,
    streams=False,
    autocast=False,
)


@dataclass(frozen=True, kw_only=True)
class KernelBenchProblem:
    """A problem of KernelBench.

    Attributes:
        reference: its Model.
        init: the arguments that models are made of.
        seed: of the models' random numbers.
        record: the operation.
        claims: what a solution is held to, unless it claims otherwise.
    """

    reference: torch.nn.Module
    init: Any
    seed: int
    record: DefinedOperation
    claims: Claims

    @classmethod
    def of(
        cls, file: str | Path, sizes: Mapping[str, Any] | str | None = None, vary: bool = False, seed: int = 0
    ) -> "KernelBenchProblem":
        """The problem of a file: see `verify_kernelbench`.

        Raises:
            ValueError: its Model draws random numbers, as dropout does.
        """
        given = _module(file)
        if isinstance(sizes, str) and sizes != SMALL:
            raise ValueError(f"sizes must be a mapping or {SMALL!r}, not {sizes!r}")
        for name, value in (small_sizes(given) if isinstance(sizes, str) else sizes or {}).items():
            _named(given, name)
            setattr(given, name, value)
        init = _named(given, "get_init_inputs")()
        reference = models.without_running_statistics(models.made(_named(given, "Model"), init, seed))
        inputs = tuple(_named(given, "get_inputs")())
        if _draws_numbers(reference, inputs):
            raise ValueError("Model gives another result in a second call: what it draws at random cannot be compared")
        record = like(reference.forward, inputs, vary=vary, name=Path(file).stem)
        floating = {each.dtype for each in inputs if isinstance(each, torch.Tensor) and each.is_floating_point()}
        dtypes = [name for name, dtype in DTYPES.items() if dtype.torch in floating]
        claims = replace(OF_KERNELBENCH, dtypes=tuple(dtypes) or OF_KERNELBENCH.dtypes)
        return cls(reference=reference, init=init, seed=seed, record=record, claims=claims)

    def solution(self, file: str | Path) -> torch.nn.Module:
        """The ModelNew of a file, with the weights of the reference."""
        model = models.made(_named(_module(file), "ModelNew"), self.init, self.seed)
        return models.with_weights(model, self.reference.state_dict())

    def solution_elsewhere(self, file: Path, folder: Path, **limits: Any) -> UntrustedFunction:
        """The same in a process of its own.

        Args:
            file: of the solution.
            folder: where what the model is made of is kept, as long as the solution is called.
            **limits: of `UntrustedFunction`.
        """
        state = folder / "state.pt"
        models.keep(self.reference, self.init, self.seed, state)
        signature = inspect.signature(self.record.definition)
        return UntrustedFunction(str(file.resolve()), "ModelNew", signature, self.record.name, state=state, **limits)


def _draws_numbers(model: torch.nn.Module, inputs: tuple[Any, ...]) -> bool:
    """Whether a model gives another result in a second call."""
    if any(isinstance(each, torch.Tensor) and each.numel() > MOST_ELEMENTS for each in inputs):
        return False  # refused for that
    with torch.no_grad():
        first, second = (copy.deepcopy(model)(*copy.deepcopy(inputs)) for _ in range(2))
    return isinstance(first, torch.Tensor) and not torch.allclose(first, second, equal_nan=True)


def small_sizes(problem: ModuleType, most: int = SMALL_ELEMENTS) -> dict[str, Any]:
    """Values for a problem's global variables, by which its inputs and weights have at most so many elements.

    The largest variable is halved, time and again, as long as the model still takes the inputs. Nothing is computed:
    shapes are followed on torch's meta device.

    Args:
        problem: has Model, get_inputs and get_init_inputs. It is left as it is.
        most: elements of all inputs and weights together.
    """
    given = {name: value for name, value in vars(problem).items() if _largest(value) > 1}
    sizes, fixed = dict(given), set[str]()
    try:
        while (count := _elements(problem)) is None or count > most:
            name = max(
                (each for each in sizes if each not in fixed), key=lambda each: _largest(sizes[each]), default=""
            )
            if not name:
                break
            setattr(problem, name, _halved(sizes[name]))
            if _largest(sizes[name]) > 3 and _elements(problem) is not None:
                sizes[name] = _halved(sizes[name])
            else:
                fixed.add(name)
                setattr(problem, name, sizes[name])
    finally:
        for name, value in given.items():
            setattr(problem, name, value)
    return {name: size for name, size in sizes.items() if size != given[name]}


def _largest(value: Any) -> int:
    """The largest of one or more sizes; 0 of anything else."""
    several = value if isinstance(value, tuple) else (value,)
    return max(several, default=0) if all(type(each) is int for each in several) else 0


def _halved(value: Any) -> Any:
    """One size, or the largest of several, made half as large."""
    if not isinstance(value, tuple):
        return value // 2
    at = value.index(max(value))
    return (*value[:at], value[at] // 2, *value[at + 1 :])


def _elements(problem: ModuleType) -> int | None:
    """The elements of a problem's inputs and weights; None if the model does not take the inputs."""
    try:
        with torch.device("meta"), torch.no_grad():
            model = models.made(problem.Model, problem.get_init_inputs(), 0)
            inputs = problem.get_inputs()
            model(*inputs)
    except Exception:
        return None
    tensors = [*model.parameters(), *model.buffers(), *(each for each in inputs if isinstance(each, torch.Tensor))]
    return sum(each.numel() for each in tensors)


def verify_kernelbench(
    problem: str | Path,
    solution: str | Path,
    *,
    sizes: Mapping[str, Any] | str | None = None,
    vary: bool = False,
    claims: Claims | None = None,
    seed: int = 0,
    **options: Any,
) -> Verdict:
    """Verify the ``ModelNew`` of a solution against the ``Model`` of a KernelBench problem, forward only.

    Both models are made with the same random numbers, and with the same weights if these have the same names.

    Args:
        problem: a Python file with Model, get_inputs and get_init_inputs.
        solution: a Python file with ModelNew.
        sizes: values in place of the problem's own global variables, such as ``{"batch_size": 4}``. The sizes of
            KernelBench are made for timing, and too large for a reference. "small" finds some: see `small_sizes`.
        vary: see `like`.
        claims: of the solution. Unless given: contiguous tensors of finite numbers in the dtype of the problem's
            inputs, float32 in nearly all, on the default stream and outside of autocast; two calls may give other bits.
        seed: of the models' random numbers.
        **options: those of `fourfold.verify`. With ``untrusted=True`` the solution runs in a process of its own, which
            never sees the problem.

    Raises:
        FileNotFoundError: there is no such file.
        AttributeError: a file lacks one of the names, or `sizes` names a variable that the problem does not have.
        ValueError: the inputs are too large: see `sizes`; or the Model draws random numbers, as dropout does.
    """
    answer = _file(solution)
    given = KernelBenchProblem.of(problem, sizes, vary, seed)
    limits = given.claims if claims is None else claims
    if not options.get("untrusted"):
        return verify(given.solution(answer), given.record, claims=limits, **options)
    with tempfile.TemporaryDirectory() as folder:
        seconds = options.get("call_seconds", CALL_SECONDS)
        candidate = given.solution_elsewhere(answer, Path(folder), seconds=seconds)
        return verify(candidate, given.record, claims=limits, **options)


def _named(module: Any, name: str) -> Any:
    if not hasattr(module, name):
        raise AttributeError(f"{getattr(module, '__file__', module)} has no {name}")
    return getattr(module, name)


def _file(path: str | Path) -> Path:
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} is no file")
    return Path(path).resolve()


def _module(path: str | Path) -> ModuleType:
    # `sizes` changes its variables, and its text may be another than at the last call.
    return modules.of_file(_file(path), anew=True)
