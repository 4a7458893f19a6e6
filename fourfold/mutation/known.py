"""The reviewed list of mutants that no check can reject, or no check on the CPU."""

import pathlib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fourfold.mutation.mutant import Mutant

FIELDS = ("file", "function", "operator", "code", "before", "after", "occurrence")
KINDS = ("equivalent", "out_of_reach")


class ListError(ValueError):
    """The list is malformed."""


@dataclass(frozen=True)
class ReviewedMutant:
    """One entry of the list.

    Attributes:
        kind: "equivalent" if the mutant computes the same, "out_of_reach" if no test on the CPU can see the difference.
        fields: fields of a mutant's identity, each with the required value or a list of allowed values. A field that
            is missing here may have any value.
        reason: one sentence that says why the mutant survives.
        operation: the operation whose checks it survives, for a mutant of a file that several share; "" for all.
    """

    kind: str
    fields: Mapping[str, Any]
    reason: str
    operation: str = ""

    def describes(self, mutant: Mutant) -> bool:
        """Return whether the entry describes a mutant."""
        return all(getattr(mutant, name) in self.alternatives(name) for name in self.fields)

    def alternatives(self, name: str) -> list[Any]:
        """Return the allowed values of a field."""
        value = self.fields[name]
        return value if isinstance(value, list) else [value]


def read_list(path: pathlib.Path) -> list[ReviewedMutant]:
    """Read the list from a TOML file with tables ``[["FILE".equivalent]]`` and ``[["FILE".out_of_reach]]``.

    Raises:
        ListError: a table is of no file, lacks operator or reason, or has an unknown field or kind.
    """
    entries = []
    for file, kinds in tomllib.loads(path.read_text()).items():
        if not isinstance(kinds, dict):
            raise ListError(f'{path.name}: [[{file}]] names no file: expected [["FILE".{file}]]')
        for kind, table in ((kind, table) for kind, tables in kinds.items() for table in tables):
            fields = {name: value for name, value in table.items() if name not in ("reason", "operation")}
            unknown = sorted(fields.keys() - set(FIELDS[1:]))
            absent = sorted({"operator", "reason"} - table.keys())
            if kind not in KINDS or unknown or absent:
                problems = [f"no {name}" for name in absent] + [f"{name}?" for name in unknown]
                raise ListError(f"{path.name}: {file} {kind} {table}: {', '.join(problems) or 'unknown kind'}")
            entries.append(ReviewedMutant(kind, {"file": file, **fields}, table["reason"], table.get("operation", "")))
    return entries


def classify(
    entries: Sequence[ReviewedMutant], mutants: Sequence[Mutant], outcomes: Mapping[tuple, str]
) -> tuple[dict[tuple, ReviewedMutant], list[str]]:
    """Match the entries to the mutants, and find the mistakes of the list.

    Args:
        entries: the entries of the list.
        mutants: all mutants of the files. Entries for other files are ignored.
        outcomes: the status of each mutant that was tried, by identity.

    Returns:
        The entry of each listed mutant, by identity. And a sentence for each entry without a mutant, and for each
        listed mutant that was killed.
    """
    by_mutant: dict[tuple, ReviewedMutant] = {}
    problems = []
    of_files: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        of_files.setdefault(mutant.file, []).append(mutant)
    for entry in entries:
        files = entry.alternatives("file")
        if not of_files.keys() >= {*files}:
            continue
        matches = [mutant for file in files for mutant in of_files[file] if entry.describes(mutant)]
        absent = [
            f"{name} = {value!r}"
            for name in entry.fields
            for value in entry.alternatives(name)
            if not any(getattr(mutant, name) == value for mutant in matches)
        ]
        if absent:
            problems.append(f"listed, but there is no such mutant: {dict(entry.fields)}: {', '.join(absent)}")
        for mutant in matches:
            by_mutant[mutant.identity] = entry
            if outcomes.get(mutant.identity) == "killed":
                problems.append(f"listed as {entry.kind}, but killed: {mutant.identity}")
    return by_mutant, problems
