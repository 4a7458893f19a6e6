"""Problems of KernelBench, and their solutions.

Source: A. Ouyang et al., KernelBench: Can LLMs Write Efficient GPU Kernels?, 2025.
"""

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fourfold.candidates.load import models, modules
from fourfold.candidates.process.client import UntrustedFunction
from fourfold.declaration.definition import DefinedOperation
from fourfold.declaration.inference import MOST_ELEMENTS, like
from fourfold.numerics.dtypes import DTYPES
from fourfold.operations.claims import Claims

# The value of `sizes` that requests `small_sizes`, and the most elements of all inputs and weights then.
SMALL, SMALL_ELEMENTS = "small", 1 << 16
# The default claims of a solution of KernelBench. Convolutions by cuDNN are not deterministic.
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
        init: the arguments of the models' classes.
        seed: of the models' random numbers.
        record: the operation.
        claims: the default claims of a solution.
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
        """Load the problem of a file: see `verify_kernelbench`.

        Raises:
            ValueError: its Model draws random numbers, as dropout does.
        """
        module = _module(file)
        if isinstance(sizes, str) and sizes != SMALL:
            raise ValueError(f"sizes must be a mapping or {SMALL!r}, not {sizes!r}")
        for name, value in (small_sizes(module) if isinstance(sizes, str) else sizes or {}).items():
            attribute_of(module, name)
            setattr(module, name, value)
        init = attribute_of(module, "get_init_inputs")()
        reference = models.freeze_running_statistics(models.make_module(attribute_of(module, "Model"), init, seed))
        inputs = tuple(attribute_of(module, "get_inputs")())
        if _draws_numbers(reference, inputs):
            raise ValueError("Model gives another result in a second call: what it draws at random cannot be compared")
        record = like(reference.forward, inputs, vary=vary, name=Path(file).stem)
        floating = {t.dtype for t in inputs if isinstance(t, torch.Tensor) and t.is_floating_point()}
        dtypes = [name for name, dtype in DTYPES.items() if dtype.torch in floating]
        claims = replace(OF_KERNELBENCH, dtypes=tuple(dtypes) or OF_KERNELBENCH.dtypes)
        return cls(reference=reference, init=init, seed=seed, record=record, claims=claims)

    def solution(self, file: str | Path) -> torch.nn.Module:
        """Return the ModelNew of a file, with the weights of the reference."""
        model = models.make_module(attribute_of(_module(file), "ModelNew"), self.init, self.seed)
        return models.load_weights(model, self.reference.state_dict())

    def solution_elsewhere(self, file: Path, folder: Path, **limits: Any) -> UntrustedFunction:
        """Return the ModelNew of a file, to run in its own process.

        Args:
            file: of the solution.
            folder: the folder for the model's state, which must exist as long as the solution is called.
            **limits: of `UntrustedFunction`.
        """
        state = folder / "state.pt"
        models.keep(self.reference, self.init, self.seed, state)
        signature = inspect.signature(self.record.definition)
        return UntrustedFunction(str(file.resolve()), "ModelNew", signature, self.record.name, state=state, **limits)


def _draws_numbers(model: torch.nn.Module, inputs: tuple[Any, ...]) -> bool:
    """Return whether a model gives another result in a second call."""
    if any(isinstance(t, torch.Tensor) and t.numel() > MOST_ELEMENTS for t in inputs):
        return False  # refused for that
    with torch.no_grad():
        first, second = (copy.deepcopy(model)(*copy.deepcopy(inputs)) for _ in range(2))
    return isinstance(first, torch.Tensor) and not torch.allclose(first, second, equal_nan=True)


def small_sizes(problem: ModuleType, limit: int = SMALL_ELEMENTS) -> dict[str, Any]:
    """Return values for a problem's global variables that limit the elements of its inputs and weights.

    The largest variable is halved repeatedly, as long as the model still accepts the inputs. Nothing is computed:
    shapes are propagated on torch's meta device.

    Args:
        problem: a module with Model, get_inputs and get_init_inputs. It is restored afterwards.
        limit: the limit of the elements of all inputs and weights together.
    """
    attributes = {name: value for name, value in vars(problem).items() if _largest(value) > 1}
    sizes, fixed = dict(attributes), set[str]()
    try:
        while (count := _elements(problem)) is None or count > limit:
            name = max((n for n in sizes if n not in fixed), key=lambda n: _largest(sizes[n]), default="")
            if not name:
                break
            setattr(problem, name, _halve(sizes[name]))
            if _largest(sizes[name]) > 3 and _elements(problem) is not None:
                sizes[name] = _halve(sizes[name])
            else:
                fixed.add(name)
                setattr(problem, name, sizes[name])
    finally:
        for name, value in attributes.items():
            setattr(problem, name, value)
    return {name: size for name, size in sizes.items() if size != attributes[name]}


def _largest(value: Any) -> int:
    """Return the largest of one or more sizes, or 0 for anything else."""
    values = value if isinstance(value, tuple) else (value,)
    return max(values, default=0) if all(type(v) is int for v in values) else 0


def _halve(value: Any) -> Any:
    """Halve a size, or the largest of several."""
    if not isinstance(value, tuple):
        return value // 2
    index = value.index(max(value))
    return (*value[:index], value[index] // 2, *value[index + 1 :])


def _elements(problem: ModuleType) -> int | None:
    """Return the number of elements of a problem's inputs and weights, or None if the model rejects the inputs."""
    try:
        with torch.device("meta"), torch.no_grad():
            model = models.make_module(problem.Model, problem.get_init_inputs(), 0)
            inputs = problem.get_inputs()
            model(*inputs)
    except Exception:
        return None
    tensors = [*model.parameters(), *model.buffers(), *(t for t in inputs if isinstance(t, torch.Tensor))]
    return sum(t.numel() for t in tensors)


def attribute_of(module: Any, name: str) -> Any:
    """Return an attribute of a module.

    Raises:
        AttributeError: the module lacks it. The message names the module's file.
    """
    if not hasattr(module, name):
        raise AttributeError(f"{getattr(module, '__file__', module)} has no {name}")
    return getattr(module, name)


def existing_file(path: str | Path) -> Path:
    """Return the absolute path of a file.

    Raises:
        FileNotFoundError: the file does not exist.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} is no file")
    return Path(path).resolve()


def _module(path: str | Path) -> ModuleType:
    # `sizes` changes its variables, and its text may be another than at the last call.
    return modules.load_file(existing_file(path), anew=True)
