"""Annotations of lines in a pull request: workflow commands, which GitHub reads in the output of a step.

Source:
    https://docs.github.com/actions/reference/workflow-commands-for-github-actions
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_ESCAPED = {"%": "%25", "\r": "%0D", "\n": "%0A"}
_ESCAPED_IN_PROPERTY = {**_ESCAPED, ":": "%3A", ",": "%2C"}


def in_github_actions() -> bool:
    """Return whether this process runs in a step of GitHub Actions."""
    return os.environ.get("GITHUB_ACTIONS") == "true"


def annotation(message: str, title: str, file: str | Path, line: int, level: str = "error") -> str:
    """Return the command that annotates a line.

    Args:
        message: the text.
        title: its heading.
        file: the file; a path in the workspace is shown from there.
        line: the line, from 1.
        level: "error", "warning" or "notice".
    """
    path, workspace = Path(file).absolute(), Path(os.environ.get("GITHUB_WORKSPACE") or Path.cwd())
    relative = path.relative_to(workspace) if path.is_relative_to(workspace) else path
    properties = {"file": str(relative), "line": str(line), "title": title}
    fields = ",".join(f"{name}={_escape(text, _ESCAPED_IN_PROPERTY)}" for name, text in properties.items())
    return f"::{level} {fields}::{_escape(message, _ESCAPED)}"


def lines_in(text: str, file: str | Path) -> list[int]:
    """Return the lines of a file that a failure's text names, in its order: the innermost frame is the last."""
    return [int(line) for line in re.findall(rf'{re.escape(Path(file).name)}(?:", line |:)(\d+)', text)]


def check_annotations(checks: Sequence[Mapping[str, Any]], file: Path, line: int) -> Iterator[str]:
    """Yield an annotation for each distinct failure among a verdict's checks.

    Args:
        checks: of a verdict's JSON.
        file: the kernel's file.
        line: the line of its definition, for failures that name no line of the file.
    """
    causes = set()
    for check in checks:
        cause = check.get("cause") or check.get("message")
        if check["outcome"] == "failed" and cause not in causes:
            causes.add(cause)
            lines = lines_in(f"{check.get('frames', '')}\n{check['message']}\n{cause}", file)
            parts = (check["message"], check.get("likely_cause"), check.get("counterexample"), check.get("repeat"))
            message, title = "\n".join(filter(None, parts)), f"{check['check']}, {check['dtype']}"
            yield annotation(message, title, file, lines[-1] if lines else line)


def violation_annotations(violations: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield an annotation for each finding of the sanitizer, as its JSON holds it."""
    for fault in violations:
        level = "warning" if fault["warning"] else "error"
        yield annotation(fault["message"], f"{fault['kind']} in {fault['kernel']}", fault["file"], fault["line"], level)


def _escape(text: str, escapes: Mapping[str, str]) -> str:
    return "".join(escapes.get(letter, letter) for letter in text)
