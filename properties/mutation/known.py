"""The reviewed list of mutants that no check can reject, or none on the CPU."""

import pathlib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from properties.mutation.mutant import Mutant

FIELDS = ("file", "function", "operator", "code", "before", "after", "occurrence")
KINDS = ("equivalent", "out_of_reach")


class ListError(ValueError):
    """The list does not fit the mutants."""


@dataclass(frozen=True)
class Known:
    """One entry.

    Attributes:
        kind: "equivalent" of what computes the same, "out_of_reach" of what differs where no test on the CPU goes.
        fields: of a mutant's identity those that must be so, or one of a list; the others may be anything.
        reason: why it survives, in a sentence.
    """

    kind: str
    fields: Mapping[str, Any]
    reason: str

    def speaks_of(self, mutant: Mutant) -> bool:
        """Whether a mutant is meant."""
        return all(getattr(mutant, name) in self.alternatives(name) for name in self.fields)

    def alternatives(self, name: str) -> list[Any]:
        """The values that a field may have."""
        value = self.fields[name]
        return value if isinstance(value, list) else [value]


def read(path: pathlib.Path) -> list[Known]:
    """The list in a TOML file of tables ``[[equivalent]]`` and ``[[out_of_reach]]``.

    Raises:
        ListError: an entry lacks a file, an operator or a reason, or has a field that there is not.
    """
    entries = []
    for kind, tables in tomllib.loads(path.read_text()).items():
        for table in tables:
            fields = {name: value for name, value in table.items() if name != "reason"}
            unknown = sorted(fields.keys() - set(FIELDS))
            missing = sorted({"file", "operator", "reason"} - table.keys())
            if kind not in KINDS or unknown or missing:
                wrong = [f"no {name}" for name in missing] + [f"{name}?" for name in unknown]
                raise ListError(f"{path.name}: {kind} {table}: {', '.join(wrong) or 'unknown kind'}")
            entries.append(Known(kind, fields, table["reason"]))
    return entries


def classified(
    entries: Sequence[Known], mutants: Sequence[Mutant], outcomes: Mapping[tuple, str]
) -> tuple[dict[tuple, Known], list[str]]:
    """Which entry speaks of which mutant, and what is wrong with the list.

    Args:
        entries: of the list.
        mutants: all there are of the files at hand.
        outcomes: the status of those that were tried, by identity.

    Returns:
        The entry of each mutant that one speaks of, by identity; and a sentence for each entry that speaks of nothing
        that there is, or of a mutant that was killed.
    """
    found: dict[tuple, Known] = {}
    problems = []
    files = {mutant.file for mutant in mutants}
    for entry in entries:
        if not files.issuperset(entry.alternatives("file")):
            continue
        meant = [mutant for mutant in mutants if entry.speaks_of(mutant)]
        missing = [
            f"{name} = {value!r}"
            for name in entry.fields
            for value in entry.alternatives(name)
            if not any(getattr(mutant, name) == value for mutant in meant)
        ]
        if missing:
            problems.append(f"listed, but there is no such mutant: {dict(entry.fields)}: {', '.join(missing)}")
        for mutant in meant:
            found[mutant.identity] = entry
            if outcomes.get(mutant.identity) == "killed":
                problems.append(f"listed as {entry.kind}, but killed: {mutant.identity}")
    return found, problems
