"""Chooses a configuration of a kernel with triton.autotune, without taking times: there is no GPU that has any."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from triton.runtime.autotuner import Autotuner


class Tuning:
    """Runs tuned kernels in the place of `Autotuner.run`.

    Attributes:
        all_configs: whether every configuration that is not pruned is run, each on the same inputs; the last one's
            results stand. Otherwise the first is run.
    """

    def __init__(self) -> None:
        self.all_configs = False
        self._shipped = Autotuner.run
        self._known: set[int] = set()

    def run(self, tuner: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run the chosen configurations of a tuned kernel."""
        given: list[Any] = tuner.configs
        tuner.nargs = dict(zip(tuner.arg_names, args))
        chosen = tuner.prune_configs(kwargs) if len(given) > 1 else given
        chosen = chosen if self.all_configs else chosen[:1]
        result = None
        for number, config in enumerate(chosen):
            if len(given) > 1 and (id(tuner) not in self._known or number):  # as Triton does where it takes times
                self._known.add(id(tuner))
                tuner.pre_hook({**tuner.nargs, **kwargs, **config.all_kwargs()}, reset_only=True)
            tuner.configs = [config]
            try:
                with restored([*args, *kwargs.values()] if number < len(chosen) - 1 else []):
                    result = self._shipped(tuner, *args, **kwargs)
            finally:
                tuner.configs = given
            tuner.nargs = dict(zip(tuner.arg_names, args))
        return result


TUNING = Tuning()


def install() -> None:
    """Let tuned kernels run as `TUNING` says."""
    Autotuner.run = lambda tuner, *args, **kwargs: TUNING.run(tuner, args, kwargs)


@contextlib.contextmanager
def restored(arguments: list[Any]) -> Iterator[None]:
    """After it, the memory of these tensors holds what it held, and so do arrays that are kept with a storage."""
    storages = [x.untyped_storage() for x in arguments if isinstance(x, torch.Tensor)]
    kept = [(storage, storage.clone(), _arrays(storage)) for storage in storages]
    yield
    for storage, copy, arrays in kept:
        storage.copy_(copy)
        for name, array in arrays.items():
            setattr(storage, name, array)


def _arrays(storage: torch.UntypedStorage) -> dict[str, np.ndarray]:
    return {name: array.copy() for name, array in vars(storage).items() if isinstance(array, np.ndarray)}
