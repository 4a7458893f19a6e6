"""What a test is for: read from pytest's item where there is one, and carried by the test's reports everywhere else."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pytest

from fourfold.checks.catalogue import ALL, OF
from fourfold.engine.cells import Cell

# Its name among what a test's report carries besides pytest's own.
IDENTITY = "fourfold"


@dataclass(frozen=True)
class Identity:
    """What a test of a cell is for.

    Attributes:
        cell: the cell.
        check: the claim, in words: "forward: output agrees with the oracle", or the name of a law or a
            configuration.
    """

    cell: Cell
    check: str

    @classmethod
    def of_item(cls, item: pytest.Item) -> "Identity | None":
        """What an item is for; None where no cell is among its parameters."""
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        cell, law, configuration, output = (parameters.get(n) for n in ("cell", "law", "configuration", "output"))
        if not isinstance(cell, Cell):
            return None
        test = getattr(item, "originalname", item.name).removeprefix("test_")
        file = item.path.stem.removeprefix("test_")
        named = configuration.name if configuration else law.__name__ if law else test
        of = f" of {output}" if output == ALL else f"{OF}{output}" if output else ""
        return cls(cell, f"{file}: {named}".replace("_", " ") + of)

    @classmethod
    def of_report(cls, report: Any) -> "Identity | None":
        """What a report's test is for, in whichever process that was run."""
        carried = next((value for name, value in report.user_properties if name == IDENTITY), None)
        return cls.of_dict(carried) if carried else None

    @classmethod
    def of_dict(cls, carried: Mapping[str, Any]) -> "Identity":
        """From what `as_dict` gives."""
        return cls(Cell(**carried["cell"]), carried["check"])

    def as_dict(self) -> dict[str, Any]:
        """Fit for JSON."""
        return asdict(self)

    @property
    def property(self) -> tuple[str, dict[str, Any]]:
        """For pytest's `user_properties`."""
        return IDENTITY, self.as_dict()
