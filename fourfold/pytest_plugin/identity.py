"""The identity of a test: read from pytest's item if there is one, and carried by its reports elsewhere."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pytest

from fourfold.checks.catalogue import ALL, OF
from fourfold.engine.cells import Cell

# The name of its user property in a test's report.
IDENTITY = "fourfold"


@dataclass(frozen=True)
class Identity:
    """The cell and the check that a test is for.

    Attributes:
        cell: the cell.
        check: the claim, in words: "forward: output agrees with the oracle", or the name of a law or a
            configuration.
    """

    cell: Cell
    check: str

    @classmethod
    def of_item(cls, item: pytest.Item) -> "Identity | None":
        """Return the identity of an item, or None if it has no cell among its parameters."""
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        cell, law, configuration, output = (parameters.get(n) for n in ("cell", "law", "configuration", "output"))
        if not isinstance(cell, Cell):
            return None
        test = getattr(item, "originalname", item.name).removeprefix("test_")
        file = item.path.stem.removeprefix("test_")
        claim = configuration.name if configuration else law.__name__ if law else test
        suffix = f" of {output}" if output == ALL else f"{OF}{output}" if output else ""
        return cls(cell, f"{file}: {claim}".replace("_", " ") + suffix)

    @classmethod
    def of_report(cls, report: Any) -> "Identity | None":
        """Return the identity that a report from any process carries, or None."""
        carried = next((value for name, value in report.user_properties if name == IDENTITY), None)
        return cls.of_dict(carried) if carried else None

    @classmethod
    def of_dict(cls, carried: Mapping[str, Any]) -> "Identity":
        """Build an identity from the result of `as_dict`."""
        return cls(Cell(**carried["cell"]), carried["check"])

    def as_dict(self) -> dict[str, Any]:
        """Return the identity as a mapping for JSON."""
        return asdict(self)

    @property
    def property(self) -> tuple[str, dict[str, Any]]:
        """Return the identity as an entry of pytest's `user_properties`."""
        return IDENTITY, self.as_dict()
