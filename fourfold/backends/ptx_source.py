"""The syntax of PTX, which inline assembly of CUDA C++ and of Triton shares."""

import re
from collections.abc import Iterator

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|.', re.DOTALL)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_LABEL = re.compile(r"([\w$]+)\s*:(?!:)")
GUARD = re.compile(r"@(!?)([\w%$]+) ")


class UnknownInstruction(Exception):
    """Inline PTX contains an instruction that is not emulated."""


def split(text: str, separator: str) -> list[str]:
    """Split a text at separators outside of brackets and strings."""
    parts, depth = [""], 0
    for token in _TOKEN.findall(text):
        depth += (token in "([{") - (token in ")]}") if len(token) == 1 else 0
        if token == separator and not depth:
            parts.append("")
        else:
            parts[-1] += token
    return [part.strip() for part in parts]


def closing(text: str, at: int) -> int:
    """Return the position of the parenthesis that closes the one before `at`.

    Raises:
        UnknownInstruction: there is none.
    """
    depth = 1
    for token in _TOKEN.finditer(text, at):
        depth += (token[0] == "(") - (token[0] == ")")
        if not depth:
            return token.start()
    raise UnknownInstruction("asm without an end")


def statements(text: str) -> Iterator[str]:
    """Yield a text's instructions without comments, each on one line, its braces, and its labels with their colon."""
    text = _COMMENT.sub(" ", text)
    at = 0
    while at < len(text := text.rstrip()):
        if text[at].isspace() or text[at] == ";":
            at += 1
        elif text[at] in "{}":
            yield text[at]
            at += 1
        elif label := _LABEL.match(text, at):
            yield f"{label[1]}:"
            at = label.end()
        else:
            end = text.find(";", at)
            end = len(text) if end < 0 else end
            yield " ".join(text[at:end].split())
            at = end + 1


def instruction(text: str) -> tuple[str, list[str]]:
    """Return the opcode and the operands of an instruction without its guard."""
    opcode, _, rest = text.partition(" ")
    return opcode, split(rest, ",") if rest else []
