"""Mutants of Triton kernels: edits of a file's text at nodes of its syntax tree."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator

from fourfold.mutation.mutant import Edit, Mutant, apply_edits

COMPARISONS = {
    ast.Lt: ("<", {"boundary": "<=", "comparison turned round": ">="}),
    ast.LtE: ("<=", {"boundary": "<", "comparison turned round": ">"}),
    ast.Gt: (">", {"boundary": ">=", "comparison turned round": "<="}),
    ast.GtE: (">=", {"boundary": ">", "comparison turned round": "<"}),
    ast.Eq: ("==", {"comparison turned round": "!="}),
    ast.NotEq: ("!=", {"comparison turned round": "=="}),
}
ARITHMETIC = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "%"),
    ast.Mod: ("%", "//"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}
# Keyed by the last part of a function's dotted name.
OTHER_FUNCTIONS = {
    "max": ("min", "sum"),
    "min": ("max", "sum"),
    "sum": ("max",),
    "maximum": ("minimum",),
    "minimum": ("maximum",),
    "through_maximum": ("through_minimum",),
    "through_minimum": ("through_maximum",),
    "exp": ("exp2",),
    "exp2": ("exp",),
    "rsqrt": ("sqrt",),
    "program_id": ("num_programs",),
    "num_programs": ("program_id",),
}
UNWRAPPED = {"abs": "absolute value dropped"}
LOWER = {"COMPUTE": "tl.float16", "tl.float64": "tl.float32", "tl.float32": "tl.bfloat16"}
# Keywords that affect only speed, at least on the CPU: the kernel computes the same without them.
OF_SPEED_ONLY = {"cache_modifier", "eviction_policy", "sem", "scope", "input_precision", "flatten", "warp_specialize"}


def triton_mutants(file: str, text: str) -> list[Mutant]:
    """Return the mutants of every function with the decorator `triton.jit`.

    Args:
        file: the file's name in the mutants.
        text: the file's text.
    """
    return apply_edits(file, text, [edit for node in _kernels(text) for edit in _Function(text, node).edits()])


def triton_functions(text: str) -> list[tuple[str, str, str]]:
    """Return (name, "", source) of every function that can have mutants; "" stands for the struct of CUDA C++."""
    return [(node.name, "", ast.unparse(node)) for node in _kernels(text)]


def _kernels(text: str) -> list[ast.FunctionDef]:
    return [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list)
    ]


class _Function:
    def __init__(self, text: str, function: ast.FunctionDef) -> None:
        self.text, self.function = text, function
        self.lines = text.splitlines(keepends=True)
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line))
        arguments = function.args.args
        self.strides = [argument.arg for argument in arguments if "stride" in argument.arg]
        self.known = {argument.arg for argument in arguments}
        self.header = (function.lineno, function.lineno)

    def edits(self) -> Iterator[Edit]:
        body = self.function.body
        if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            body = body[1:]
        yield from self._block(body)

    def _block(self, body: list[ast.stmt]) -> Iterator[Edit]:
        for statement in body:
            yield from self._statement(statement)

    def _statement(self, statement: ast.stmt) -> Iterator[Edit]:
        first, last = statement.lineno, statement.end_lineno or statement.lineno
        if isinstance(statement, ast.For | ast.While | ast.If):
            head: list[ast.AST] = [statement.iter] if isinstance(statement, ast.For) else [statement.test]
            last = head[0].end_lineno or first  # type: ignore[attr-defined]
        else:
            head = [statement]
        self.header = (first, last)
        if isinstance(statement, ast.If):
            yield self._wrap("branch turned round", statement.test, "not (", ")")
        if isinstance(statement, ast.For):
            yield from self._loop(statement.iter)
        yield from self._drop_statement(statement)
        for part in head:
            yield from self._expression(part)
        for block in ("body", "orelse"):
            yield from self._block(getattr(statement, block, []))

    def _drop_statement(self, statement: ast.stmt) -> Iterator[Edit]:
        """Drop the statement if it is an expression, an augmented assignment, or assigns only names that are known."""
        droppable = isinstance(statement, ast.Expr | ast.AugAssign)
        if isinstance(statement, ast.Assign):
            names = {node.id for target in statement.targets for node in ast.walk(target) if isinstance(node, ast.Name)}
            droppable = names <= self.known
            self.known |= names
        if droppable:
            yield self._edit("statement dropped", statement, "pass")

    def _loop(self, iterated: ast.expr) -> Iterator[Edit]:
        if not (isinstance(iterated, ast.Call) and iterated.args and "range" in ast.unparse(iterated.func)):
            return
        end = iterated.args[0] if len(iterated.args) == 1 else iterated.args[1]
        yield self._wrap("loop ends early", end, "(", ") - 1")
        yield self._wrap("loop ends late", end, "(", ") + 1")
        if len(iterated.args) > 1:
            yield self._wrap("loop begins late", iterated.args[0], "(", ") + 1")
        if len(iterated.args) > 2:
            yield self._wrap("loop's step changed", iterated.args[2], "(", ") + 1")

    def _expression(self, root: ast.AST) -> Iterator[Edit]:
        skipped: set[ast.AST] = set()
        for node in ast.walk(root):
            if node in skipped:
                skipped.update(ast.iter_child_nodes(node))
                continue
            match node:
                case ast.keyword(arg=name) if name in OF_SPEED_ONLY:
                    skipped.update(ast.iter_child_nodes(node))
                case ast.Compare(left=left, ops=[operator], comparators=[right]) if type(operator) in COMPARISONS:
                    sign, others = COMPARISONS[type(operator)]
                    for name, other in others.items():
                        yield self._sign(name, node, left, right, sign, other)
                case ast.BinOp(left=left, op=operation, right=right) if type(operation) in ARITHMETIC:
                    sign, other = ARITHMETIC[type(operation)]
                    yield self._sign(f"{sign} to {other}", node, left, right, sign, other)
                    if isinstance(operation, ast.BitAnd | ast.BitOr):
                        yield self._edit("condition dropped", node, self._operand(left))
                        yield self._edit("condition dropped", node, self._operand(right))
                case ast.UnaryOp(op=ast.USub() | ast.Not(), operand=operand):
                    yield self._edit("negation dropped", node, self._operand(operand))
                case ast.BoolOp(op=operation, values=[left, right]):
                    sign, other = ("and", "or") if isinstance(operation, ast.And) else ("or", "and")
                    yield self._sign(f"{sign} to {other}", node, left, right, sign, other)
                case ast.IfExp(body=body, orelse=other):
                    yield self._edit("branches swapped", node, self._swap(node, body, other))
                case ast.Constant(value=value) if type(value) in (int, float):
                    yield from self._constant(node)
                case ast.Call():
                    yield from self._call(node)
                case ast.Name(id=name) if name in self.strides:
                    yield from self._stride(node, name)
                case _ if (text := self._operand(node) if isinstance(node, ast.expr) else "") in LOWER:
                    yield self._edit("precision lowered", node, LOWER[text])
                    skipped.update(ast.iter_child_nodes(node))

    def _constant(self, node: ast.Constant) -> Iterator[Edit]:
        value = node.value
        assert isinstance(value, int | float)
        if isinstance(value, int):
            for other in {value + 1, max(value - 1, 0)} - {value}:
                yield self._edit("constant changed", node, str(other))
        elif value == 0.0:
            yield self._edit("constant changed", node, "1.0")
        else:
            yield self._edit("constant changed", node, repr(value * 1.01))

    def _stride(self, node: ast.Name, name: str) -> Iterator[Edit]:
        """Use another stride of the same tensor: the next axis's, else the first axis's. Use 1 if there is no other."""
        tensor = name.split("_")[0]
        siblings = [stride for stride in self.strides if stride.split("_")[0] == tensor and stride != name]
        later = [stride for stride in siblings if self.strides.index(stride) > self.strides.index(name)]
        for other in (later or siblings)[:1]:
            yield self._edit("stride of another axis", node, other)
        if not siblings:
            yield self._edit("stride of another axis", node, "1")

    def _call(self, call: ast.Call) -> Iterator[Edit]:
        name = (call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)).split(".")[-1]
        keywords = {keyword.arg: keyword for keyword in call.keywords}
        if "mask" in keywords:
            yield self._drop_keywords("mask dropped", call, [k for k in ("mask", "other") if k in keywords])
        for keyword, operator in {"other": "other dropped", "propagate_nan": "NaN not propagated"}.items():
            if keyword in keywords:
                yield self._drop_keywords(operator, call, [keyword])
        if isinstance(call.func, ast.Attribute) and name == "to" and len(call.args) == 1:
            wide = self._operand(call.args[0]) in ("tl.int64", "INDEX")
            yield self._edit("64 bits dropped" if wide else "cast dropped", call, self._operand(call.func.value))
        if name == "cast" and len(call.args) == 2:
            wide = self._operand(call.args[1]) in ("tl.int64", "INDEX")
            yield self._edit("64 bits dropped" if wide else "cast dropped", call, self._operand(call.args[0]))
        if name in UNWRAPPED:
            yield self._edit(UNWRAPPED[name], call, self._operand(call.args[0]))
        if name == "where" and len(call.args) == 3:
            _, first, second = call.args
            yield self._edit("branches swapped", call, self._swap(call, first, second))
        if name == "cdiv" and len(call.args) == 2:
            yield self._edit(
                "rounded down", call, f"(({self._operand(call.args[0])}) // ({self._operand(call.args[1])}))"
            )
        for function in OTHER_FUNCTIONS.get(name, ()):
            end = self._span(call.func)[1]
            yield self._make_edit(f"{name} to {function}", end - len(name), end, function)

    # ---- text

    def _offset(self, line: int, column: int) -> int:
        # ast's columns count bytes of UTF-8.
        return self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def _span(self, node: ast.AST) -> tuple[int, int]:
        position = [getattr(node, name) for name in ("lineno", "col_offset", "end_lineno", "end_col_offset")]
        return self._offset(*position[:2]), self._offset(*position[2:])

    def _operand(self, node: ast.AST) -> str:
        """Return an expression's text, in brackets if it needs them elsewhere."""
        text = self.text[slice(*self._span(node))]
        return text if isinstance(node, ast.Name | ast.Constant | ast.Call | ast.Attribute) else f"({text})"

    def _make_edit(self, operator: str, start: int, end: int, replacement: str) -> Edit:
        return Edit(operator, start, end, replacement, self.function.name, self.header)

    def _edit(self, operator: str, node: ast.AST, replacement: str) -> Edit:
        return self._make_edit(operator, *self._span(node), replacement)

    def _wrap(self, operator: str, node: ast.AST, prefix: str, suffix: str) -> Edit:
        start, end = self._span(node)
        return self._edit(operator, node, prefix + self.text[start:end] + suffix)

    def _sign(self, operator: str, node: ast.AST, left: ast.AST, right: ast.AST, sign: str, replacement: str) -> Edit:
        """Replace the sign between two operands, in brackets so that the surrounding expression groups as before."""
        start, end = self._span(node)
        between = slice(self._span(left)[1], self._span(right)[0])
        place = between.start + _sign_position(sign, self.text[between])
        mutated = self.text[start:place] + replacement + self.text[place + len(sign) : end]
        return self._edit(operator, node, f"({mutated})")

    def _swap(self, node: ast.AST, first: ast.AST, second: ast.AST) -> str:
        start, end = self._span(node)
        (a, b), (c, d) = sorted((self._span(first), self._span(second)))
        text = self.text
        return text[start:a] + text[c:d] + text[b:c] + text[a:b] + text[d:end]

    def _drop_keywords(self, operator: str, call: ast.Call, keywords: list[str]) -> Edit:
        arguments = [self._source(argument) for argument in call.args]
        arguments += [f"{k.arg}={self._source(k.value)}" for k in call.keywords if k.arg not in keywords]
        return self._edit(operator, call, f"{self._operand(call.func)}({', '.join(arguments)})")

    def _source(self, node: ast.AST) -> str:
        return self.text[slice(*self._span(node))]


def _sign_position(sign: str, text: str) -> int:
    """Return the index of a sign in the text between two operands, which also holds brackets, space and comments."""
    # These brackets have their partners elsewhere, and the tokenizer rejects unbalanced ones: blank them out.
    readable = re.sub(r"[()\[\]]", " ", text)
    for token in tokenize.generate_tokens(io.StringIO(f"({readable})").readline):
        if token.string == sign:
            preceding = f"({readable})".splitlines(keepends=True)[: token.start[0] - 1]
            return sum(map(len, preceding)) + token.start[1] - 1
    raise ValueError(f"{sign!r} is not between the operands: {text!r}")
