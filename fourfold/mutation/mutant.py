"""A mutant: a source file with one small mistake."""

import bisect
import difflib
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Edit:
    """One edit of a file's text: `text[start:end]` becomes `replacement`.

    Attributes:
        operator: the mutation operator, such as "constant changed".
        start, end: the replaced range, in characters.
        replacement: the new text.
        function: the name of the kernel or device function around it.
        lines: first and last line, from 1, of the statement around it; of a loop or branch, only its header.
    """

    operator: str
    start: int
    end: int
    replacement: str
    function: str
    lines: tuple[int, int]


@dataclass(frozen=True)
class Mutant:
    """One mutant of a file. No two mutants of a file share an identity. It has no line number, so it outlives edits.

    Attributes:
        file: the path relative to the kernels' package, or the candidate's path as given.
        function, operator: as in `Edit`.
        code: the first changed line, without indentation.
        before, after: the replaced text and its replacement, with whitespace collapsed.
        occurrence: the number of mutants above it with the same file, function, operator, code, before and after.
        line, column: the position of the change, from 1.
        lines: as in `Edit`.
        text: the text of the whole mutated file.
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
        """The key in lists and reports. It stays the same when other lines of the file change."""
        return self.file, self.function, self.operator, self.code, self.before, self.after, self.occurrence

    def diff(self, original: str) -> str:
        """Return a unified diff that `patch` accepts."""
        old, new = (text.splitlines(keepends=True) for text in (original, self.text))
        return "".join(difflib.unified_diff(old, new, fromfile=self.file, tofile=self.file, n=0))

    def report(self, original: str) -> dict[str, Any]:
        """Return all fields except the text, and the diff, for a report."""
        fields = asdict(self)
        del fields["text"]
        return {**fields, "diff": self.diff(original)}


def apply_edits(file: str, text: str, edits: Iterable[Edit]) -> list[Mutant]:
    """Apply each edit to the text alone, and return the mutants in text order. Skip edits with an earlier result."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    texts: set[str] = set()
    counts: Counter[tuple] = Counter()
    mutants = []
    for edit in sorted(edits, key=lambda edit: (edit.start, edit.end)):
        mutated = text[: edit.start] + edit.replacement + text[edit.end :]
        if mutated == text or mutated in texts:
            continue
        texts.add(mutated)
        row = bisect.bisect_right(starts, edit.start) - 1
        code = text[starts[row] :].partition("\n")[0].strip()
        original = " ".join(text[edit.start : edit.end].split())
        replacement = " ".join(edit.replacement.split())
        key = (edit.function, edit.operator, code, original, replacement)
        place = (counts[key], row + 1, edit.start - starts[row] + 1, edit.lines)
        mutants.append(Mutant(file, *key, *place, mutated))
        counts[key] += 1
    return mutants
