"""The operands of comparisons in an implementation's own Python code that decide which branch it takes.

During a call a trace function evaluates both operands if that has no side effects: names, attributes, subscripts,
arithmetic and the sizes of tensors. For any other function that a comparison calls, the trace function takes the result
of that very call. Nothing is called twice.
"""

import ast
import functools
import math
import operator
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import getattr_static
from types import FrameType, ModuleType
from typing import Any

import torch

from fourfold.backends.python_source import SizeComparison, name_of

_BINARY: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}
# Attributes of tensors, dtypes and shapes that are safe to read.
_ATTRIBUTES = {"shape", "ndim", "dtype", "itemsize", "nbytes"}
_METHODS = {"numel", "nelement", "size", "dim", "ndimension", "element_size", "stride", "storage_offset"}
_OF_TORCH = (torch.Tensor, torch.dtype, torch.Size, torch.device)
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "len": len,
    "min": min,
    "max": max,
    "abs": abs,
    "int": int,
    "float": float,
    "prod": math.prod,
    "cdiv": lambda a, b: -(-a // b),
    "next_power_of_2": lambda n: 1 << max(n - 1, 0).bit_length(),
}
# A side of at least this magnitude is not a size.
LARGEST = 1e15


class _Unknown(Exception):
    """A side cannot be evaluated, or not without the risk of a side effect."""


@dataclass
class _PendingLine:
    """Comparisons of a running line, and the results of the functions that the line has called."""

    numbers: list[int]
    returns: list[tuple[str, Any]] = field(default_factory=list)


class Compared:
    """A context that records both sides of comparisons, each when it is first reached.

    Args:
        comparisons: the comparisons to record.

    Attributes:
        sides: both sides of a comparison, by its number, if both are numbers.
    """

    def __init__(self, comparisons: Sequence[SizeComparison]) -> None:
        self.sides: dict[int, tuple[float, float]] = {}
        self._comparisons = comparisons
        self._lines: dict[str, dict[int, list[int]]] = {}
        for number, comparison in enumerate(comparisons):
            self._lines.setdefault(comparison.file, {}).setdefault(comparison.line, []).append(number)
        self._pending: dict[FrameType, _PendingLine] = {}
        self._traces = False

    def __enter__(self) -> "Compared":
        if sys.gettrace() is None:
            self._traces = True
            sys.settrace(self._on_call)
        return self

    def __exit__(self, *raised: object) -> None:
        if self._traces:
            sys.settrace(None)
        self._pending.clear()

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        caller = self._pending.get(frame.f_back) if frame.f_back is not None else None
        if caller is not None:
            frame.f_trace_lines = False
            return functools.partial(self._on_return, caller)
        return self._frame_tracer if _real(frame.f_code.co_filename) in self._lines else None

    def _on_return(self, caller: _PendingLine, frame: FrameType, event: str, argument: Any) -> None:
        if event == "return":
            caller.returns.append((frame.f_code.co_name, argument))

    def _frame_tracer(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        pending = self._pending.pop(frame, None)
        for number in pending.numbers if pending else ():
            self._note(number, frame, iter(pending.returns) if pending else iter(()))
        if event == "line":
            numbers = self._lines[_real(frame.f_code.co_filename)].get(frame.f_lineno, ())
            unread = [number for number in numbers if number not in self.sides]
            unread = [number for number in unread if not self._note(number, frame, iter(()))]
            if unread:  # evaluate them after the functions that the line calls
                self._pending[frame] = _PendingLine(unread)
        return self._frame_tracer

    def _note(self, number: int, frame: FrameType, returns: Iterator[tuple[str, Any]]) -> bool:
        comparison = self._comparisons[number]
        evaluated = _Evaluated(frame, returns)
        try:
            sides = [evaluated.value(_parse(text)) for text in (comparison.left, comparison.right)]
        except Exception:
            return False
        if all(type(side) in (int, float) and abs(side) < LARGEST for side in sides):
            self.sides.setdefault(number, (sides[0], sides[1]))
        return True


@functools.lru_cache(1024)
def _parse(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


@functools.lru_cache(1024)
def _real(file: str) -> str:
    return os.path.realpath(file)


class _Evaluated:
    """An evaluator of expressions in a frame.

    Args:
        frame: the frame of the comparison.
        returns: the names of the functions that the frame's line called, and their results.
    """

    def __init__(self, frame: FrameType, returns: Iterator[tuple[str, Any]]) -> None:
        self._frame, self._on_return = frame, returns

    def value(self, node: ast.expr) -> Any:
        """Return the value of an expression.

        Raises:
            Exception: the expression has no value, or evaluating it might have side effects.
        """
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                names = (self._frame.f_locals, self._frame.f_globals)
                return next(namespace[name] for namespace in names if name in namespace)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self.value(operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                sides = self.value(left), self.value(right)
                if all(type(side) in (int, float) for side in sides):
                    return _BINARY[type(op)](*sides)
            case ast.Attribute(value=of, attr=name):
                return self._attribute(self.value(of), name)
            case ast.Subscript(value=of, slice=at):
                owner, key = self.value(of), self.value(at)
                if type(owner) in (tuple, list, dict, torch.Size):
                    return owner[key]
            case ast.Call(func=function, args=arguments, keywords=[]):
                return self._call(function, arguments)
        raise _Unknown

    @staticmethod
    def _attribute(owner: Any, name: str) -> Any:
        if isinstance(owner, _OF_TORCH):
            if name in _ATTRIBUTES:
                return getattr(owner, name)
            raise _Unknown
        attribute = vars(owner)[name] if isinstance(owner, ModuleType) else getattr_static(owner, name)
        if hasattr(type(attribute), "__get__"):  # a descriptor, whose code would run
            raise _Unknown
        return attribute

    def _call(self, function: ast.expr, arguments: list[ast.expr]) -> Any:
        name = name_of(function)
        if isinstance(function, ast.Attribute) and name in _METHODS | {"get"}:
            owner = self.value(function.value)
            if type(owner) is dict if name == "get" else isinstance(owner, torch.Tensor):
                return getattr(owner, name)(*map(self.value, arguments))
        if name in _FUNCTIONS:
            return _FUNCTIONS[name](*map(self.value, arguments))
        return next(value for function_name, value in self._on_return if function_name == name)
