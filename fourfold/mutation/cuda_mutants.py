"""Mutants of CUDA C++ kernels: edits of single tokens or statements in the bodies of device functions.

This module only tokenizes C++, it does not parse it. Tokens alone do not always distinguish an expression from a
type, so some edits do not compile. The trial reports those as "invalid". tree-sitter's grammar of CUDA (0.21) would
tell them apart, but finds errors in half of the files here, as in ``extern __shared__ __align__(16) char x[]``.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from fourfold.mutation.mutant import Edit, Mutant, apply_edits

_SKIPPED = re.compile(
    r"""(?P<skipped>\s+|//[^\n]*|/\*.*?\*/|^[ \t]*\#(?:[^\n]*\\\n)*[^\n]*)
      | (?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
      | (?P<number>(?:0[xX][0-9a-fA-F]+|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)[uUlLfF]*)
      | (?P<name>[A-Za-z_]\w*)
      | (?P<sign><<=|>>=|->|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|::|.)""",
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
COMPARISONS = {
    "<": {"boundary": "<=", "comparison turned round": ">="},
    "<=": {"boundary": "<", "comparison turned round": ">"},
    ">": {"boundary": ">=", "comparison turned round": "<="},
    ">=": {"boundary": ">", "comparison turned round": "<"},
    "==": {"comparison turned round": "!="},
    "!=": {"comparison turned round": "=="},
}
ARITHMETIC = {"+": "-", "-": "+", "*": "+", "/": "*", "%": "/", "&": "|", "|": "&", "^": "|"}
ARITHMETIC |= {"<<": ">>", ">>": "<<", "&&": "||", "||": "&&"}
ARITHMETIC |= {"+=": "-=", "-=": "+=", "*=": "+=", "/=": "*=", "|=": "&=", "&=": "|=", "^=": "|="}
_OPPOSITES = (
    *(("max", "min"), ("maximum", "minimum"), ("fmaxf", "fminf"), ("fmax", "fmin")),
    ("through_maximum", "through_minimum"),
)
OTHER_FUNCTIONS = {operand: other for pair in _OPPOSITES for operand, other in (pair, pair[::-1])}
OTHER_FUNCTIONS |= {"rsqrt": "sqrt", "__shfl_xor_sync": "__shfl_down_sync", "atomicAdd": "atomicMax"}
# Barriers and fences: without them a kernel may read data that is not written yet.
ORDER = {"__syncthreads", "__syncwarp", "__threadfence", "__threadfence_block"}
_ASSIGNMENTS = {"=", "+=", "-=", "*=", "/=", "|=", "&=", "^=", "<<=", ">>="}
_OPENING, _CLOSING = {"(": ")", "[": "]", "{": "}"}, {")", "]", "}"}


@dataclass(frozen=True)
class Token:
    """A token of C++: its kind ("string", "number", "name" or "sign"), its text and its range in the file."""

    kind: str
    text: str
    start: int
    end: int


def tokens(text: str) -> list[Token]:
    """Return the tokens of C++ text without comments, space and preprocessor lines."""
    result = []
    for match in _SKIPPED.finditer(text):
        kind = match.lastgroup or ""
        if kind != "skipped":
            result.append(Token(kind, match[0], *match.span()))
    return result


def cuda_mutants(file: str, text: str) -> list[Mutant]:
    """Return the mutants of every function that is marked ``__global__`` or ``__device__`` and has a body.

    Args:
        file: the file's name in the mutants.
        text: the file's text.
    """
    return apply_edits(file, text, _File(text).edits())


def cuda_functions(text: str) -> list[tuple[str, str, str]]:
    """Return (name, struct, body) of every function that can have mutants; the struct is "" for a free function."""
    return _File(text).functions()


class _File:
    def __init__(self, text: str) -> None:
        self.text, self.tokens = text, tokens(text)
        self.partner: dict[int, int] = {}
        openings: list[int] = []
        for i, token in enumerate(self.tokens):
            if token.text in _OPENING:
                openings.append(i)
            elif token.text in _CLOSING and openings:
                self.partner[i] = openings.pop()
                self.partner[self.partner[i]] = i

    def edits(self) -> Iterator[Edit]:
        for name, strides, first, last in self._bodies():
            yield from self._function_edits(name, strides, first, last)

    def functions(self) -> list[tuple[str, str, str]]:
        return [
            (name, self._struct_around(first), self.text[self.tokens[first].start : self.tokens[last].end])
            for name, _, first, last in self._bodies()
        ]

    def _struct_around(self, inside: int) -> str:
        for i in range(inside - 1, -1, -1):
            if self.tokens[i].text == "struct":
                name = i + 1 if self.tokens[i + 1].text != "__align__" else self.partner[i + 2] + 1
                begin = name
                while self.tokens[begin].text not in ("{", ";"):
                    begin += 1
                if self.tokens[begin].text == "{" and begin < inside < self.partner[begin]:
                    return self.tokens[name].text
        return ""

    def _bodies(self) -> Iterator[tuple[str, list[str], int, int]]:
        i = 0
        while i < len(self.tokens):
            if self.tokens[i].text in ("__global__", "__device__") and (body := self._find_body(i)):
                yield body
                i = body[-1]
            i += 1

    def _find_body(self, i: int) -> tuple[str, list[str], int, int] | None:
        """Return the name, the stride parameters, and the first (after the parameters) and last token of the body."""
        while i < len(self.tokens) and self.tokens[i].text not in (";", "{", "}"):
            if self.tokens[i].text == "(":
                previous = self.tokens[i - 1].text
                end = self.partner[i]
                if previous not in ("__launch_bounds__", "__align__"):
                    body = end
                    while self.tokens[body].text not in ("{", ";"):
                        body = self.partner[body] + 1 if self.tokens[body].text == "(" else body + 1
                    if self.tokens[body].text == ";":
                        return None
                    name = "operator[]" if previous == "]" else previous
                    strides = [t.text for t in self.tokens[i:end] if t.kind == "name" and "stride" in t.text]
                    return name, strides, end + 1, self.partner[body]
                i = end
            i += 1
        return None

    def _function_edits(self, function: str, strides: list[str], first: int, last: int) -> Iterator[Edit]:
        i = first
        while i <= last:
            token, previous = self.tokens[i], self.tokens[i - 1]
            if token.text == "asm":
                i = self._end_of_statement(i, last)
                continue
            if token.text == "template":
                i = self._end_of_brackets(i + 1)
                continue
            # Comparisons have space around `<` and `>`, template arguments do not.
            spaced = self.text[token.start - 1].isspace() and self.text[token.end : token.end + 1].isspace()
            spot = (function, self._line(token.start), self._line(token.end))
            if token.text in COMPARISONS and (spaced or token.text not in "<>"):
                for name, other in COMPARISONS[token.text].items():
                    yield self._edit(spot, name, i, i, other)
            elif token.text in ARITHMETIC and spaced:
                yield self._edit(spot, f"{token.text} to {ARITHMETIC[token.text]}", i, i, ARITHMETIC[token.text])
            elif token.text in "-!~" and previous.text in {*"(=,?:<>+-*/&|", "return", "&&", "||"} and not spaced:
                yield self._edit(spot, "negation dropped", i, i, "")
            elif token.kind == "number":
                yield from self._number(spot, i)
            elif token.text in OTHER_FUNCTIONS and self.tokens[i + 1].text == "(":
                yield self._edit(
                    spot, f"{token.text} to {OTHER_FUNCTIONS[token.text]}", i, i, OTHER_FUNCTIONS[token.text]
                )
            elif token.text in strides and len(strides) > 1:
                other = strides[(strides.index(token.text) + 1) % len(strides)]
                yield self._edit(spot, "stride of another axis", i, i, other)
            elif token.text == "?":
                yield from self._ternary(spot, i)
            elif token.text == "(" and self._inside(i) == "long long":
                yield self._edit(spot, "64 bits dropped", i, self.partner[i], "")
            elif token.text == "C" and self.tokens[i + 1].text == "(" and self.tokens[i + 2].kind != "number":
                inside = self.text[self.tokens[i + 1].start : self.tokens[self.partner[i + 1]].end]
                yield self._edit(spot, "precision lowered", i, self.partner[i + 1], f"C(float(__half(float{inside})))")
            elif token.text == "double" and self.tokens[i + 1].text in ("(", ")"):
                yield self._edit(spot, "precision lowered", i, i, "float")
            if i > first and self._begins_statement(i):
                yield from self._drop(spot, i, last)
            i += 1

    def _number(self, spot: tuple[str, int, int], i: int) -> Iterator[Edit]:
        text = self.tokens[i].text
        digits = text.rstrip("uUlL")
        suffix = text[len(digits) :]
        if re.fullmatch(r"\d+", digits):
            value = int(digits)
            for other in {value + 1, max(value - 1, 0)} - {value}:
                yield self._edit(spot, "constant changed", i, i, f"{other}{suffix}")
        elif digits.lower().startswith("0x"):
            yield self._edit(spot, "constant changed", i, i, f"{int(digits, 16) >> 1:#x}{suffix}")
        else:
            digits = text.rstrip("fFlL")
            number = repr(float(digits) * 1.01 if float(digits) else 1.0)
            yield self._edit(spot, "constant changed", i, i, number + text[len(digits) :])

    def _ternary(self, spot: tuple[str, int, int], i: int) -> Iterator[Edit]:
        """Swap b and c in `a ? b : c`; c ends at a comma, a semicolon or a closing bracket."""
        depth, colon, end = 0, None, i + 1
        while end < len(self.tokens):
            text = self.tokens[end].text
            if text in _OPENING:
                end = self.partner[end]
            elif text == "?" and colon is None:
                depth += 1
            elif text == ":" and colon is None:
                if depth == 0:
                    colon = end
                depth -= 1
            elif text in _CLOSING or text in (",", ";"):
                break
            end += 1
        if colon is not None:
            start, stop = self.tokens[i + 1].start, self.tokens[end - 1].end
            first = self.text[start : self.tokens[colon - 1].end]
            second = self.text[self.tokens[colon + 1].start : stop]
            function, *lines = spot
            yield Edit("branches swapped", start, stop, f"{second} : {first}", function, (lines[0], self._line(stop)))

    def _begins_statement(self, i: int) -> bool:
        previous = self.tokens[i - 1].text
        if previous in (";", "{", "}", "else"):
            return True
        # The statement after the header of a loop or a condition.
        return previous == ")" and self.tokens[self.partner[i - 1] - 1].text in ("if", "for", "while")

    def _drop(self, spot: tuple[str, int, int], i: int, last: int) -> Iterator[Edit]:
        """Drop a call, an assignment or a jump, but no declaration."""
        end = self._end_of_statement(i, last) - 1
        if end >= last or self.tokens[end].text != ";":
            return
        text = self.tokens[i].text
        # The parts of a for header are not statements.
        openings = [j for j in range(i - 1, -1, -1) if self.tokens[j].text in "([" and self.partner.get(j, 0) > i][:1]
        if openings and self.tokens[openings[0] - 1].text == "for":
            return
        following = self.tokens[i + 1].text
        operator = "statement dropped"
        if text in ORDER:
            operator = "barrier dropped"
        elif text in ("continue", "break") or (text == "return" and following == ";"):
            pass
        elif text == "*" or (self.tokens[i].kind == "name" and text not in ("return", "if", "for", "using", "asm")):
            if not (text == "*" or following in _ASSIGNMENTS or following in {"[", "(", ".", "->"}):
                return
        else:
            return
        yield self._edit(spot, operator, i, end, ";", self._line(self.tokens[end].end))

    def _inside(self, i: int) -> str:
        return " ".join(token.text for token in self.tokens[i + 1 : self.partner[i]])

    def _end_of_statement(self, i: int, last: int) -> int:
        while i <= last and self.tokens[i].text != ";":
            i = self.partner[i] if self.tokens[i].text in ("(", "[", "{") else i
            i += 1
        return i + 1

    def _end_of_brackets(self, i: int) -> int:
        depth = 0
        while True:
            depth += {"<": 1, ">": -1, ">>": -2}.get(self.tokens[i].text, 0)
            i += 1
            if depth <= 0:
                return i

    def _line(self, position: int) -> int:
        return self.text.count("\n", 0, position) + 1

    def _edit(
        self, spot: tuple[str, int, int], operator: str, first: int, last: int, new: str, end: int | None = None
    ) -> Edit:
        function, start_line, end_line = spot
        return Edit(
            operator, self.tokens[first].start, self.tokens[last].end, new, function, (start_line, end or end_line)
        )
