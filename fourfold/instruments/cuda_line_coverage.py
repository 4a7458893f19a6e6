"""Lines of `.cu` files for the report of unexecuted lines: see `fourfold.instruments.line_coverage`."""

import bisect
import functools
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fourfold.backends.cuda.declarations import strip_comments
from fourfold.backends.cuda.emulator.reached import Line

_HEAD = re.compile(r"(?:\b(if|while|for|switch)\b\s*(?:constexpr\s*)?\((.*)\)|\b(else))\s*$", re.DOTALL)


def coverage_lines(lines: Sequence[Line], with_uncalled: bool) -> list[list[Any]]:
    """Return the lines of kernels, in the format of `StatementMap.report`.

    Args:
        lines: of all kernels compiled since `launcher.trace_lines`.
        with_uncalled: whether to include functions without an executed line. A candidate's file may hold others.
    """
    hits: dict[tuple[str, int], bool] = {}
    functions: dict[tuple[str, int], str] = {}
    called_functions = {(line.file, line.function) for line in lines if line.called and line.ran}
    for line in lines:
        place = line.file, line.line
        if not line.called and ((line.file, line.function) in called_functions or not with_uncalled):
            continue
        hits[place] = hits.get(place, False) or line.ran
        functions.setdefault(place, line.function)
    return [
        [file, line, line, condition_of(Path(file), line), functions[file, line], 0, True, hit]
        for (file, line), hit in sorted(hits.items())
    ]


def condition_of(file: Path, line: int) -> str:
    """Return the test of the innermost ``if``, ``while``, ``for`` or ``switch`` around a line, "else", or ""."""
    code, starts, braces = _read_source(file)
    head_text = code[: starts[line - 1]].rstrip()
    if head := _HEAD.search(head_text[_end_of_last_statement(head_text) :]):  # a head without braces
        return _condition_text(head)
    enclosing = [(start, end) for start, end in braces if start < starts[line - 1] <= end]
    for start, _ in reversed(enclosing):
        if head := _HEAD.search(code[_end_of_last_statement(code[:start]) : start]):
            return _condition_text(head)
    return ""


def _condition_text(head: re.Match[str]) -> str:
    text = " ".join((head[2] or "").split())
    return "else" if head[3] else f"{head[1]} ({text})" if head[1] in ("for", "switch") else text


def _end_of_last_statement(code: str) -> int:
    """Return the start of a text's last statement: after a ``;`` or a brace outside of parentheses."""
    depth = 0
    for index in range(len(code) - 1, -1, -1):
        depth += (code[index] == ")") - (code[index] == "(")
        if depth == 0 and code[index] in ";{}":
            return index + 1
    return 0


@functools.lru_cache(16)
def _read_source(file: Path) -> tuple[str, list[int], list[tuple[int, int]]]:
    """Return the code, the offsets of its lines, and those of each pair of braces, the outer pairs first."""
    code = strip_comments(file.read_text(errors="replace"))
    starts = [0, *itertools.accumulate(len(line) for line in code.splitlines(keepends=True))]
    openings, pairs = list[int](), list[tuple[int, int]]()
    for match in re.finditer(r"[{}]", code):
        if match[0] == "{":
            openings.append(match.start())
        elif openings:
            bisect.insort(pairs, (openings.pop(), match.start()))
    return code, starts, pairs
