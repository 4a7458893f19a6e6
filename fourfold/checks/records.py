"""The records of all operations, by name."""

from fourfold.declaration import defaults
from fourfold.instruments import tampering
from fourfold.operations import registry
from fourfold.operations.record import Operation


def operations() -> dict[str, Operation]:
    """Return the operations of this library and of other installed packages, by name.

    See `fourfold.operations.registry`. Their oracles judge implementations, so that from now on they are watched for
    tampering.

    Raises:
        ValueError: a record is not an Operation, or two records have the same name.
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
