"""Modules of torch made reproducibly, also in two processes: from the same arguments, random numbers and weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


def made(kind: type[torch.nn.Module], init: Any, seed: int) -> torch.nn.Module:
    """Return a module without gradients, in training mode unless it chooses another.

    KernelBench compares freshly made models: their batch normalization uses the mean of the batch.

    Args:
        kind: its class.
        init: the arguments of the class, in order or by name.
        seed: of torch's random numbers while it is made.
    """
    torch.manual_seed(seed)
    model = kind(**init) if isinstance(init, Mapping) else kind(*init)
    return model.requires_grad_(False)


def without_running_statistics(model: torch.nn.Module) -> torch.nn.Module:
    """Keep calls from changing the running statistics of batch normalizations; return the module."""
    for each in model.modules():
        if each.training and getattr(each, "track_running_stats", False):
            each.track_running_stats = False
    return model


def with_weights(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """Return the module, with the given weights if its own have the same names."""
    if model.state_dict().keys() == weights.keys():
        model.load_state_dict(weights)
    return model


def keep(reference: torch.nn.Module, init: Any, seed: int, file: Path) -> None:
    """Write a file from which `like` makes a module like the reference.

    Raises:
        TypeError: the arguments of the class hold an object that cannot be sent to another process.
    """
    try:
        torch.save({"init": init, "seed": seed, "weights": reference.state_dict()}, file)
        torch.load(file, weights_only=True)
    except Exception as error:
        raise TypeError(f"get_init_inputs: what it gives cannot be sent to another process: {error}") from error


def like(kind: type[torch.nn.Module], file: Path) -> torch.nn.Module:
    """Return a module of this class like the one given to `keep`."""
    kept = torch.load(file, weights_only=True)
    return with_weights(made(kind, kept["init"], kept["seed"]), kept["weights"])
