"""A mutant: a source file with one small mistake."""

import difflib
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Edit:
    """What one operator does to a file's text: `text[start:end]` becomes `replacement`.

    Attributes:
        operator: what kind of mistake it is.
        start, end, replacement: what is put where, in characters.
        function: the kernel or device function that it is in.
        lines: first and last line, from 1, of the statement that it is in; of a loop or branch, the header alone.
    """

    operator: str
    start: int
    end: int
    replacement: str
    function: str
    lines: tuple[int, int]


@dataclass(frozen=True)
class Mutant:
    """One mutant of a file. Two of a file never have the same identity, whatever is edited elsewhere in it.

    Attributes:
        file: relative to the package, or as it was given.
        function, operator: as in `Edit`.
        code: the line that is changed, or begins to be, without its indentation.
        before, after: the text that is replaced, and by what.
        occurrence: how many of the same file, function, operator, code, before and after there are above it.
        line, column: where, from 1.
        lines: as in `Edit`.
        text: the whole file.
    """

    file: str
    function: str
    operator: str
    code: str
    before: str
    after: str
    occurrence: int
    line: int
    column: int
    lines: tuple[int, int]
    text: str

    @property
    def identity(self) -> tuple[str, str, str, str, str, str, int]:
        """What it is known by in lists that outlive edits elsewhere."""
        return self.file, self.function, self.operator, self.code, self.before, self.after, self.occurrence

    def diff(self, original: str) -> str:
        """What `patch` would take."""
        old, new = (text.splitlines(keepends=True) for text in (original, self.text))
        return "".join(difflib.unified_diff(old, new, fromfile=self.file, tofile=self.file, n=0))

    def described(self, original: str) -> dict[str, Any]:
        """Everything but the whole text, for a report."""
        fields = asdict(self)
        del fields["text"]
        return {**fields, "diff": self.diff(original)}


def applied(file: str, text: str, edits: Iterable[Edit]) -> list[Mutant]:
    """The mutants that edits of a file make, in the order of the text; of edits with one result only the first."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    seen: set[str] = set()
    counts: Counter[tuple] = Counter()
    mutants = []
    for edit in sorted(edits, key=lambda edit: (edit.start, edit.end)):
        changed = text[: edit.start] + edit.replacement + text[edit.end :]
        if changed == text or changed in seen:
            continue
        seen.add(changed)
        row = max(i for i, start in enumerate(starts) if start <= edit.start)
        code = text[starts[row] :].partition("\n")[0].strip()
        before = " ".join(text[edit.start : edit.end].split())
        after = " ".join(edit.replacement.split())
        key = (edit.function, edit.operator, code, before, after)
        place = (counts[key], row + 1, edit.start - starts[row] + 1, edit.lines)
        mutants.append(Mutant(file, *key, *place, changed))
        counts[key] += 1
    return mutants
