"""The records of all operations, by name."""

from fourfold.declaration import defaults
from fourfold.instruments import tampering
from fourfold.operations import registry
from fourfold.operations.record import Operation


def operations() -> dict[str, Operation]:
    """Every operation of this library and of other installed packages, by name: see `fourfold.operations.registry`.

    Their oracles judge, and are watched from then on.

    Raises:
        ValueError: a record is no Operation, or two have one name.
    """
    found: dict[str, Operation] = {}
    for name, module in registry.modules().items():
        operation = module.operation
        if not isinstance(operation, Operation):
            raise ValueError(f"operation in {name} must be an Operation, not {type(operation).__name__}")
        if operation.name in found:
            raise ValueError(f"operation in {name} has the name of another one: {operation.name}")
        for oracle in registry.oracles(name, operation.forward.__module__):
            tampering.watch(oracle)
        found[operation.name] = defaults.completed(operation)
    return found
