"""Choose a configuration of a kernel with triton.autotune, without timing, because there is no GPU.

On a GPU any configuration may be the fastest for a key, and the first launch for a key runs all of them on the same
memory. So each launch here takes a configuration that depends on its numbers and sizes, and every other one of these
launches tries a second configuration first, with the hooks that Triton calls around a trial. A kernel that works in
place without ``restore_value``, or that adds to what it finds without ``reset_to_zero``, then gives other results.
"""

import contextlib
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter
from triton.runtime.autotuner import Autotuner


class Tuning:
    """Runs tuned kernels in the place of `Autotuner.run`.

    Attributes:
        all_configs: whether every configuration that is not pruned is run, each on the same inputs; the last one's
            results stand. Otherwise one is run, and maybe another one before it.
    """

    def __init__(self) -> None:
        self.all_configs = False
        self._shipped = Autotuner.run

    def run(self, tuner: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run the chosen configurations of a tuned kernel."""
        configurations: list[Any] = tuner.configs
        tuner.nargs = dict(zip(tuner.arg_names, args))
        configs = tuner.prune_configs(kwargs) if len(configurations) > 1 else configurations
        is_first = self.all_configs
        if len(configs) > 1 and not self.all_configs:
            number = fingerprint({**tuner.nargs, **kwargs})
            is_first, number = bool(number % 2), number // 2
            at, step = number % len(configs), 1 + number // len(configs) % (len(configs) - 1)
            if is_first:
                with _skip_refused():
                    _try(tuner, configs[(at + step) % len(configs)], args, kwargs)
            for place in range(at, at + len(configs) - 1):
                with _skip_refused():
                    return self._run_configurations(tuner, [configs[place % len(configs)]], args, kwargs, is_first)
            configs = [configs[at - 1]]
        return self._run_configurations(tuner, configs, args, kwargs, is_first)

    def _run_configurations(
        self, tuner: Any, configs: list[Any], args: Sequence[Any], kwargs: dict[str, Any], is_first: bool
    ) -> Any:
        """Run some configurations of a tuned kernel, each on the same inputs; return the last one's result."""
        all_configs, result = tuner.configs, None
        for number, config in enumerate(configs):
            if len(all_configs) > 1 and is_first:  # as Triton does once it has taken the times
                tuner.pre_hook({**tuner.nargs, **kwargs, **config.all_kwargs()}, reset_only=True)
            tuner.configs = [config]
            try:
                with restore_memory([*args, *kwargs.values()] if number < len(configs) - 1 else []):
                    result = self._shipped(tuner, *args, **kwargs)
            finally:
                tuner.configs = all_configs
            tuner.nargs = dict(zip(tuner.arg_names, args))
        return result


@contextlib.contextmanager
def _skip_refused() -> Iterator[None]:
    """End quietly where a static assertion refuses a configuration, as Triton's tuner does."""
    try:
        yield
    except interpreter.InterpreterError as error:
        cause: BaseException | None = error
        while isinstance(cause, interpreter.InterpreterError):
            cause = cause.__cause__
        if not isinstance(cause, RefusedStatically):
            raise


class RefusedStatically(AssertionError):
    """A ``tl.static_assert`` that does not hold: the kernel does not compile with these constants."""


def static_assert(condition: Any, message: str = "") -> None:
    """Perform ``tl.static_assert``."""
    if not condition:
        raise RefusedStatically(message)


def fingerprint(arguments: Mapping[str, Any]) -> int:
    """Return a hash of a launch's numbers, dtypes and sizes: the same in every process."""
    described = [
        (name, value.dtype, tuple(value.shape)) if isinstance(value, torch.Tensor) else (name, value)
        for name, value in sorted(arguments.items())
        if isinstance(value, torch.Tensor | int | float | str)
    ]
    return zlib.crc32(repr(described).encode())


def _try(tuner: Any, config: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Run a configuration as Triton does to take its time."""
    current = {**kwargs, **config.all_kwargs()}
    arguments = {**tuner.nargs, **current}
    if config.pre_hook:
        config.pre_hook(arguments)
    tuner.pre_hook(arguments)
    try:
        tuner.fn.run(*args, **current)
    except Exception as error:
        tuner.post_hook(arguments, exception=error)
        raise
    tuner.post_hook(arguments, exception=None)


TUNING = Tuning()


def install() -> None:
    """Let tuned kernels run as `TUNING` says, one after another: a tuner keeps the arguments of its launch."""
    turns = threading.RLock()

    def run(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        with turns:
            return TUNING.run(tuner, args, kwargs)

    Autotuner.run = run


@contextlib.contextmanager
def restore_memory(arguments: list[Any]) -> Iterator[None]:
    """Restore the memory of these tensors, and the arrays kept with their storages, at the end."""
    storages = [x.untyped_storage() for x in arguments if isinstance(x, torch.Tensor)]
    saved = [(storage, storage.clone(), _arrays(storage)) for storage in storages]
    yield
    for storage, copy, arrays in saved:
        storage.copy_(copy)
        for name, array in arrays.items():
            setattr(storage, name, array)


def _arrays(storage: torch.UntypedStorage) -> dict[str, np.ndarray]:
    return {name: array.copy() for name, array in vars(storage).items() if isinstance(array, np.ndarray)}
