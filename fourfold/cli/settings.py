"""The table [tool.fourfold] of the user's pyproject.toml: the defaults of the commands' options.

[tool.fourfold]
device = "cpu"
dtypes = ["float32", "float16"]
examples = 50

[tool.fourfold.kernels."my_kernels.py:my_softmax"]
as = "softmax"
claims = "contiguous=True"
"""

import tomllib
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fourfold.operations.registry import did_you_mean

_OF_TYPE: Mapping[str, type] = {"device": str, "dtypes": list, "examples": int, "kernels": dict}
_OF_KERNEL: Mapping[str, type] = {"as": str, "claims": str}
_NAMED = {str: "a string", list: "a list of strings", int: "a number", dict: "a table"}


class BadSettings(ValueError):
    """The table has an unknown key, or a value of another type."""


@dataclass(frozen=True)
class ProjectSettings:
    """The settings of a project.

    Attributes:
        device: for --device; "" if not set.
        dtypes: for --dtype.
        examples: for --examples; 0 if not set.
        kernels: the operation, as ``as``, and the ``claims`` of each kernel, by ``FILE:FUNCTION``.
    """

    device: str = ""
    dtypes: tuple[str, ...] = ()
    examples: int = 0
    kernels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def words(self, accepted: Container[str], words: Sequence[str]) -> list[str]:
        """Return the words of a command line, with settings for known options that are not among them."""
        names = {word.partition("=")[0] for word in words}
        values: dict[str, list[object]]
        values = {"--device": [self.device], "--dtype": [*self.dtypes], "--examples": [self.examples]}
        unnamed = [name for name in values if name in accepted and name not in names]
        return [*(f"{name}={value}" for name in unnamed for value in values[name] if value), *words]

    @classmethod
    def of(cls, folder: Path) -> "ProjectSettings":
        """Read the settings of the project around a folder.

        Raises:
            BadSettings: a file cannot be read, or its table has an unknown key or a value of another type.
        """
        file = next((f / "pyproject.toml" for f in (folder, *folder.parents) if (f / "pyproject.toml").is_file()), None)
        if file is None:
            return cls()
        try:
            table = tomllib.loads(file.read_text(encoding="utf-8")).get("tool", {}).get("fourfold", {})
        except (OSError, ValueError) as error:
            raise BadSettings(f"{file}: {error}") from None
        entries = _check_table(f"{file}: [tool.fourfold]", table, _OF_TYPE)
        kernels = {}
        for name, kernel in entries.pop("kernels", {}).items():
            entry = _check_table(f"{file}: [tool.fourfold.kernels.{name!r}]", kernel, _OF_KERNEL)
            place, colon, function = name.rpartition(":")
            if not colon:
                raise BadSettings(f"{file}: [tool.fourfold.kernels]: expected FILE_OR_MODULE:FUNCTION, not {name!r}")
            inside = _relative_to(file.parent / place, folder) if (file.parent / place).is_file() else place
            kernels[f"{inside}:{function}"] = entry
        return cls(**{**entries, "dtypes": tuple(entries.get("dtypes", ())), "kernels": kernels})


def _relative_to(file: Path, folder: Path) -> str:
    """Return the path of a file from a folder, or its whole path if it lies elsewhere."""
    return str(file.relative_to(folder) if file.is_relative_to(folder) else file)


def _check_table(place: str, table: Any, types: Mapping[str, type]) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise BadSettings(f"{place} must be a table, not {table!r}")
    for key, value in table.items():
        if key not in types:
            raise BadSettings(f"{place} takes {', '.join(types)}, not {key}{did_you_mean(key, types)}")
        strings = not isinstance(value, list) or all(isinstance(item, str) for item in value)
        if type(value) is not types[key] or not strings:
            raise BadSettings(f"{place}: {key} must be {_NAMED[types[key]]}, not {value!r}")
    return dict(table)
