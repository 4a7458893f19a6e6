"""Arithmetic of the command line, such as ``ceil(n / 256)``: only numbers and sizes, no other Python."""

import ast
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

_BYTES = {"char": 1, "half": 2, "__half": 2, "__nv_bfloat16": 2, "float": 4, "int": 4, "float4": 16, "double": 8}
_CONSTANTS: Mapping[str, Any] = {"nullptr": None, "NULL": None, "true": True, "false": False}


class ExpressionError(ValueError):
    """An expression is malformed, or uses an unknown name."""


def evaluate(text: str, names: Mapping[str, Any]) -> Any:
    """Return the value of an expression: a number, one of `names`, None, or a tuple of them.

    The grammar has + - * / // % **, tuples, ``x.shape[0]`` and ``x.numel()`` of a tensor, ceil, floor, min, max,
    ``cdiv(a, b)``, ``next_power_of_2(n)`` and ``sizeof(float)``. For integers ``/`` is C++'s division, which drops
    the remainder; within ceil and floor it is exact.

    Raises:
        ExpressionError: the text is another kind of expression, or uses another name.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise ExpressionError(f"{text!r} is no arithmetic expression: {error.msg}") from None
    try:
        return _value(tree, names, False)
    except (ZeroDivisionError, OverflowError, TypeError, IndexError) as error:
        raise ExpressionError(f"{text!r} cannot be evaluated: {error}") from None


def _value(node: ast.expr, names: Mapping[str, Any], exact: bool) -> Any:
    match node:
        case ast.Constant(value=bool() | int() | float() | None):
            return node.value
        case ast.Name(id=name):
            return _look_up(name, names)
        case ast.Tuple(elts=parts):
            return tuple(_value(part, names, exact) for part in parts)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, names, exact)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left, names, exact), _value(right, names, exact), exact)
        case ast.Call(func=ast.Name(id="sizeof"), args=[ast.Name(id=name)], keywords=[]) if name in _BYTES:
            return _BYTES[name]
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            exactly = name in ("ceil", "floor")
            return _FUNCTIONS[name](*(_value(argument, names, exactly) for argument in args))
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="numel"), args=[], keywords=[]):
            return _tensor(name, names).numel()
        case ast.Subscript(value=ast.Attribute(value=ast.Name(id=name), attr="shape"), slice=axis):
            return _tensor(name, names).shape[_value(axis, names, exact)]
    raise ExpressionError(f"{ast.unparse(node)!r} is no arithmetic of sizes")


def _look_up(name: str, names: Mapping[str, Any]) -> Any:
    if name in names:
        return names[name]
    if name in _CONSTANTS:
        return _CONSTANTS[name]
    raise ExpressionError(f"there is no {name!r}: there are {', '.join(names)}")


def _tensor(name: str, names: Mapping[str, Any]) -> Any:
    value = _look_up(name, names)
    if not hasattr(value, "shape"):
        raise ExpressionError(f"{name!r} is no tensor")
    return value


def _divide(a: Any, b: Any, exact: bool) -> Any:
    if not isinstance(a, int | Fraction) or not isinstance(b, int | Fraction):
        return a / b
    return Fraction(a) / Fraction(b) if exact else a // b


def _power(a: Any, b: Any, exact: bool) -> Any:
    if abs(b) > 64:
        raise OverflowError(f"{a} to the power of {b}")
    return a**b


_OPERATORS: Mapping[type, Callable[[Any, Any, bool], Any]] = {
    ast.Add: lambda a, b, exact: a + b,
    ast.Sub: lambda a, b, exact: a - b,
    ast.Mult: lambda a, b, exact: a * b,
    ast.FloorDiv: lambda a, b, exact: a // b,
    ast.Mod: lambda a, b, exact: a % b,
    ast.Div: _divide,
    ast.Pow: _power,
}
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "ceil": math.ceil,
    "floor": math.floor,
    "min": min,
    "max": max,
    "cdiv": lambda a, b: -(-a // b),
    "next_power_of_2": lambda n: 1 << max(n - 1, 0).bit_length(),
}
