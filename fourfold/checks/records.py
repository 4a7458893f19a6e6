"""The records of all operations, by name."""

import importlib
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from fourfold import backends
from fourfold.candidates.load import modules
from fourfold.declaration import defaults
from fourfold.instruments import tampering
from fourfold.operations import registry
from fourfold.operations.record import Operation


def operations(names: Collection[str] | None = None) -> dict[str, Operation]:
    """Return the operations of this library and of other installed packages, by name.

    See `fourfold.operations.registry`. Their oracles judge implementations, so that from now on they are watched for
    tampering.

    Args:
        names: import only the modules of these names; None for all modules.

    Raises:
        ValueError: a record is not an Operation, or two records have the same name.
    """
    records: dict[str, Operation] = {}
    for name, module in registry.modules(names).items():
        operation = module.operation
        if not isinstance(operation, Operation):
            raise ValueError(f"operation in {name} must be an Operation, not {type(operation).__name__}")
        if operation.name in records:
            raise ValueError(f"operation in {name} has the name of another one: {operation.name}")
        for oracle in registry.oracles(name, operation.forward.__module__):
            tampering.watch(oracle)
        records[operation.name] = defaults.complete(operation)
    return records


def operation_named(text: str) -> Operation:
    """Return a known operation by its name, or one that a file declares, as ``FILE_OR_MODULE:OPERATION``.

    Raises:
        TypeError: the operation is no text.
        ValueError: the operation is unknown, or the file or the module cannot be imported.
    """
    if not isinstance(text, str):
        kind = getattr(text, "__name__", type(text).__name__)
        raise TypeError(f"operation: {kind} is neither declared by fourfold.operation nor the name of an operation")
    place, colon, name = text.rpartition(":")
    if not colon:
        records = operations({text})  # to import all takes half a second
        if text not in records:
            records = operations()
        if text not in records:
            suggestion = registry.did_you_mean(text, records)
            raise ValueError(f"operation: there is no {text!r}: there are {', '.join(records)}{suggestion}")
        return records[text]
    try:
        module = modules.load_file(Path(place).resolve()) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:
        raise ValueError(f"operation {text}: {type(error).__name__}: {error}") from error
    record = getattr(module, name, None)
    if not isinstance(record, Operation):
        names = [key for key, value in vars(module).items() if isinstance(value, Operation)]
        raise ValueError(
            f"operation: {place} declares no {name}, as by fourfold.operation{registry.did_you_mean(name, names)}"
        )
    return replace(defaults.complete(record), name=name)


def reference_of(operation: Operation) -> Callable[..., Any]:
    """Return an operation in torch: its definition if it declares one."""
    definition = getattr(operation, "definition", None)
    return definition if definition is not None else backends.load(operation.name, "torch")
