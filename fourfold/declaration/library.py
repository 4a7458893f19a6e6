"""The records of this library's operations: what follows from the signature of the implementation in torch."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

from fourfold import backends
from fourfold.backends.signature import signature_of
from fourfold.declaration import named_cases
from fourfold.declaration.definition import build_operation, declaration_of
from fourfold.operations import axes as notation
from fourfold.operations.arguments import MakeArray
from fourfold.operations.axes import LEADING
from fourfold.operations.declared_errors import Arguments
from fourfold.operations.outputs import alone
from fourfold.operations.record import Operation

# Sizes of derived cases that are left out for axes that no tensor has last: rows by the thousand take most of the time
# of an emulated kernel. The case "many_short_rows" and the large cases have many rows, too.
MANY = (1023, 1024, 1025, 4101)


def arguments_of(name: str, sizes: Mapping[str, int] | None = None) -> Arguments:
    """Return the arguments of an operation, as the signature of its implementation in torch describes them.

    Args:
        name: the operation's name.
        sizes: the sizes of axes in the calls of its errors: see `Arguments`.
    """
    return Arguments(sizes, **signature_of(backends.load(name, "torch")).arguments)


class Declared:
    """An operation whose implementation in torch has a signature.

    Args:
        name: the operation's name.
        outputs: the names of its outputs, if there are several. The first one has the gradients.
        makes: the functions that make tensors, by name: see `make` of `fourfold.operations.arguments.tensor`.
    """

    def __init__(self, name: str, outputs: Sequence[str] = (), **makes: MakeArray) -> None:
        self.name = name
        self.signature = signature_of(backends.load(name, "torch"))
        function = self.signature.function
        self._definition = alone(function, outputs, 0) if outputs else function
        self.arguments = arguments_of(name)
        made = {tensor: replace(self.signature.tensors[tensor], make=make) for tensor, make in makes.items()}
        self.declaration = declaration_of(name, self._definition, {**self.signature.arguments, **made}, {})

    def example(self, *leading: int, **arguments: Any) -> named_cases.Make:
        """Return a named case: see `fourfold.declaration.named_cases.example`."""
        return named_cases.example(*leading, **arguments).of(self.declaration)

    def operation(self, oracle: ModuleType, **fields: Any) -> Operation:
        """Return the record.

        Args:
            oracle: the module with its forward and, if it has gradients, its backward.
            fields: fields of the record. They replace those that follow from the signature; `examples` are added.
        """
        batched = {n: len(t.axes) - 1 for n, t in self.signature.tensors.items() if t.axes[:1] == (LEADING,)}
        arguments: dict[str, Any] = {
            "name": self.name,
            "forward": oracle.forward,
            "backward": getattr(oracle, "backward", lambda *_, **__: ()),
            "source": self.signature.source,
            "batched": batched,
            "errors": self.arguments.errors,
            "ranges": self.arguments.ranges,
        }
        record = build_operation(self._definition, self.declaration, {**arguments, **fields})
        last = notation.last(tensor.axes for tensor in self.declaration.tensors.values())
        labels = ["rows" if axis == LEADING else axis for axis in self.declaration.axes if axis not in last]
        many = {f"{label}_{size}" for label in labels for size in MANY}
        return replace(record, examples={name: make for name, make in record.examples.items() if name not in many})
