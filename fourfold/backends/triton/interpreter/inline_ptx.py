"""Supply the interpreter with inline assembly, which kernels call by ``tl.inline_asm_elementwise``.

A register is an array of unsigned integers with an element for each instance of the assembly, and an instruction is a
function of such arrays. Instructions that access memory, wait for other threads or read a clock are unknown: the
interpreter cannot judge a kernel that has them. See the PTX ISA for the instructions, and the description of
``tl.inline_asm_elementwise`` for the order of the registers.
"""

import functools
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from triton.runtime import interpreter

from fourfold.backends import ptx_source
from fourfold.backends.triton.interpreter.arithmetic import BFLOAT16, Handle, fused_multiply_add, numpy_type
from fourfold.operations.blame import Lack

Registers = dict[str, np.ndarray]
# The types of PTX. A packed type has two elements in a register.
_TYPES: dict[str, Any] = {
    **{f"{kind}{bits}": np.dtype(f"u{bits // 8}") for kind in "bu" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": np.dtype(f"i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"f{bits}": np.dtype(f"f{bits // 8}") for bits in (16, 32, 64)},
    "bf16": BFLOAT16,
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "pred": np.dtype(bool),
}
_FLOATS = {"f16": "fp16", "bf16": "bf16", "f32": "fp32", "f64": "fp64"}
_BITS_OF_CONSTRAINT = {"h": 16, "r": 32, "f": 32, "l": 64, "d": 64, "b": 1}
# Hints to caches, and fences and waits of programs that run one after the other here.
_NO_EFFECT = r"(prefetchu?|createpolicy|griddepcontrol|fence|membar|nanosleep|discard|applypriority)\b.*"
_COMPARISONS: dict[str, Callable] = {
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "lo": operator.lt,
    "ls": operator.le,
    "hi": operator.gt,
    "hs": operator.ge,
}
# tanh.approx has a relative error of up to 2^-11: its result has 11 bits here.
_BITS_OF_TANH = 11


class PtxCall(NamedTuple):
    """The results of inline assembly."""

    results: tuple[Handle, ...]

    def get_result(self, number: int) -> Handle:
        """Return a result."""
        return self.results[number]


class Assembly(interpreter.InterpreterBuilder):
    """Calls of inline assembly."""

    def create_inline_asm(
        self, asm: str, constraints: str, arguments: Sequence[Any], types: Sequence[Any], isPure: bool, pack: int
    ) -> PtxCall:
        """Run inline assembly on the elements of blocks of one shape, `pack` consecutive ones in each instance."""
        shape = np.broadcast_shapes((1,), *(argument.data.shape for argument in arguments))
        inputs = [np.broadcast_to(argument.data, shape).reshape(-1) for argument in arguments]
        kinds = [numpy_type(kind) for kind in types]
        outputs = run(asm, constraints, inputs, kinds, pack)
        return PtxCall(tuple(Handle(x.reshape(shape), kind.scalar) for x, kind in zip(outputs, types)))


def run(
    asm: str, constraints: str, inputs: Sequence[np.ndarray], kinds: Sequence[np.dtype], pack: int
) -> list[np.ndarray]:
    """Return the results of inline assembly.

    Args:
        asm: the instructions. The registers ``$0``, ``$1`` and so on are those of the results, then of the inputs.
        constraints: LLVM's, as ``"=r,r"``.
        inputs: arrays ``[elements]``.
        kinds: the types of the results.
        pack: the number of elements of an instance. Elements of fewer than 32 bits share a register.

    Raises:
        Lack: an instruction is unknown.
        ValueError: the constraints name another number of registers than the operands have.
    """
    elements = max((len(x) for x in inputs), default=1)
    instances = -(-elements // pack)
    letters = [each.strip() for each in constraints.split(",") if each.strip() and "~" not in each]
    count = sum(_registers_of(kind, pack) for kind in kinds)
    values = [register for x in inputs for register in _registers(x, instances, pack)]
    if len(letters) != count + len(values):
        raise ValueError(
            f"inline assembly with {len(letters)} constraints ({constraints}) and {count + len(values)} registers"
        )
    registers: Registers = {}
    for number, letter in enumerate(letters):
        bits = _BITS_OF_CONSTRAINT.get(letter.strip("=&+"), 32)
        kind = np.dtype(f"u{bits // 8}") if bits > 1 else _TYPES["pred"]
        value = np.zeros(instances, kind) if number < count else values[number - count]
        if letter.startswith("+"):
            raise Lack("the interpreter has no registers that inline assembly both reads and writes")
        registers[f"${number}"] = value if value.dtype == kind or bits == 1 else value.astype(kind)
        if letter.isdigit():  # the register of a result, which begins with the value of an input
            registers[f"${letter}"] = value
    for statement in ptx_source.statements(asm):
        if statement not in ("{", "}"):
            _execute(statement, registers, instances)
    results, at = [], 0
    for kind in kinds:
        last = at + _registers_of(kind, pack)
        results.append(_elements([registers[f"${number}"] for number in range(at, last)], kind, pack)[:elements])
        at = last
    return results


def _each_register(kind: np.dtype, pack: int) -> int:
    """Return the number of elements in a register."""
    return min(max(4 // kind.itemsize, 1), pack)


def _registers_of(kind: np.dtype, pack: int) -> int:
    return pack // _each_register(kind, pack)


def _registers(x: np.ndarray, instances: int, pack: int) -> list[np.ndarray]:
    """Return the registers of the elements of an operand, the first element in the lowest bits."""
    count = _each_register(x.dtype, pack)
    padded = np.zeros(instances * pack, x.dtype)
    padded[: len(x)] = x
    words = np.ascontiguousarray(padded.reshape(instances, pack // count, count)).view(f"u{count * x.dtype.itemsize}")
    return [np.ascontiguousarray(words[:, number, 0]) for number in range(pack // count)]


def _elements(registers: Sequence[np.ndarray], kind: np.dtype, pack: int) -> np.ndarray:
    """Return the elements of a result."""
    count = _each_register(kind, pack)
    if kind.kind == "b":
        return np.stack([register != 0 for register in registers], axis=1).reshape(-1)
    words = np.stack([register.astype(f"u{count * kind.itemsize}") for register in registers], axis=1)
    return np.ascontiguousarray(words).view(kind).reshape(-1)


class _Scope(NamedTuple):
    """The operands of an instruction."""

    registers: Registers
    operands: list[str]
    instances: int

    def read(self, operand: int | str, kind: str) -> np.ndarray:
        """Return an operand's value as an array of a type; for a packed type, ``[instances, 2]``."""
        text = self.operands[operand] if isinstance(operand, int) else operand
        packed, element = kind.endswith("x2"), kind.removesuffix("x2")
        dtype = _TYPES[element]
        if kind == "pred" and text.startswith("!"):
            return ~self.read(text[1:], kind)
        if text in self.registers:
            bits = self.registers[text]
            if dtype.kind == "b":
                return bits.astype(bool)
            size = dtype.itemsize * (2 if packed else 1)
            if bits.dtype.kind == "b":
                raise ValueError(text)
            words = np.ascontiguousarray(bits.astype(f"u{size}")).view(dtype)
            return words.reshape(-1, 2) if packed else words
        if packed:
            words = np.array([_immediate(text)], np.uint64).astype(f"u{2 * dtype.itemsize}").view(dtype)
            return np.broadcast_to(words, (self.instances, 2))
        number = _immediate(text, dtype)
        return np.broadcast_to(number, (self.instances,))

    def write(self, operand: int | str, value: np.ndarray) -> None:
        """Store an array of a type in a register, with 0 in the bits above it, or the sign of an integer."""
        text = self.operands[operand] if isinstance(operand, int) else operand
        if text == "_":
            return
        register = self.registers[text]
        value = np.ascontiguousarray(value)
        if value.ndim == 2:
            value = value.view(f"u{2 * value.dtype.itemsize}")[:, 0]
        elif value.dtype.kind not in "iub":
            value = value.view(f"u{value.dtype.itemsize}")
        self.registers[text] = np.broadcast_to(value.astype(register.dtype), (self.instances,))


def _immediate(text: str, dtype: np.dtype | None = None) -> Any:
    """Return a number of the assembly: an integer, or a float by its value or by its bits (``0f3F800000``)."""
    if bits := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})|0[dD]([0-9a-fA-F]{16})", text):
        size = 4 if bits[1] else 8
        number: Any = np.array([int(bits[1] or bits[2], 16)], f"u{size}").view(f"f{size}")[0]
    elif re.fullmatch(r"[-+]?(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?", text):
        number = int(re.sub(r"^([-+]?)0+(?=\d)", r"\1", text.rstrip("U")), 0)
    else:
        number = float(text)  # raises ValueError for an unknown register
    if dtype is None:
        return int(number) & (1 << 64) - 1
    if dtype.kind in "iu":
        size = 8 * dtype.itemsize
        return np.array([int(number) & (1 << size) - 1], f"u{dtype.itemsize}").view(dtype)[0]
    return np.asarray(number).astype(dtype)


def _execute(text: str, registers: Registers, instances: int) -> None:
    """Run an instruction.

    Raises:
        Lack: it is unknown.
    """
    unknown = Lack(f"the interpreter does not know this instruction of inline assembly: {text}")
    if declared := re.fullmatch(r"\.reg \.(\w+) (.*)", text):
        dtype = _TYPES.get(declared[1])
        if dtype is None:
            raise unknown
        kind = dtype if dtype.kind == "b" else np.dtype(f"u{dtype.itemsize}")
        for name in ptx_source.split(declared[2], ","):
            many = re.fullmatch(r"([\w%$]+)<(\d+)>", name)
            for each in [f"{many[1]}{number}" for number in range(int(many[2]))] if many else [name]:
                registers[each] = np.zeros(instances, kind)
        return
    guard = None
    if guarded := ptx_source.GUARD.match(text):
        if guarded[2] not in registers:
            raise unknown
        guard = registers[guarded[2]].astype(bool)
        guard, text = ~guard if guarded[1] else guard, text[guarded.end() :]
    opcode, operands = ptx_source.instruction(text)
    if re.fullmatch(_NO_EFFECT, opcode):
        return
    for pattern, function in _INSTRUCTIONS:
        if match := re.fullmatch(pattern, opcode):
            before = dict(registers)
            try:
                function(match, _Scope(registers, operands, instances))
            except (IndexError, KeyError, ValueError) as error:
                raise unknown from error
            if guard is not None:
                for name, old in before.items():
                    if registers[name] is not old:
                        registers[name] = np.where(guard, registers[name], old)
            return
    raise unknown


def _rounded(value: np.ndarray, kind: str, modifiers: str = "") -> np.ndarray:
    """Round to a type, and apply ``.sat`` and ``.ftz``."""
    if "sat" in modifiers.split("."):
        value = np.clip(np.where(np.isnan(value), 0, value), 0, 1)
    result = np.asarray(value).astype(_TYPES[kind.removesuffix("x2")])
    if "ftz" in modifiers.split(".") and kind == "f32":
        result = np.where(np.abs(result) < np.finfo(np.float32).tiny, np.copysign(0, result), result)
    return result.astype(_TYPES[kind.removesuffix("x2")])


def _wide(x: np.ndarray) -> np.ndarray:
    """Return numbers of a type of 16 bits as float32."""
    return x.astype(np.float32) if x.dtype.itemsize < 4 and x.dtype.kind not in "iub" else x


def _compute_in_float64(match: re.Match, scope: _Scope, function: Callable[..., np.ndarray], count: int) -> None:
    """Compute a function of floats in float64 and round.

    Of a sum, product, quotient or root of numbers of 24 bits the second rounding changes nothing: 53 >= 2 * 24 + 2. See
    Figueroa, When is double rounding innocuous?, 1995.
    """
    kind = match["kind"]
    sources = [scope.read(number, kind) for number in range(1, count + 1)]
    if kind.endswith("32"):
        sources = [_rounded(x, kind, match["modifiers"].replace("sat", "")) for x in sources]
    wide = [x.astype(np.float64) for x in sources]
    scope.write(0, _rounded(function(*wide), kind, match["modifiers"]))


def _add(match: re.Match, scope: _Scope, function: Callable) -> None:
    """Compute a sum or a difference, and a product of floats."""
    kind = match["kind"]
    if kind.removesuffix("x2") not in _FLOATS:
        a, b = (scope.read(number, kind) for number in (1, 2))
        if "sat" in match["modifiers"]:
            limits = np.iinfo(a.dtype)
            scope.write(
                0, np.clip(function(a.astype(object), b.astype(object)), limits.min, limits.max).astype(a.dtype)
            )
        else:
            scope.write(0, function(a, b))
    else:
        _compute_in_float64(match, scope, function, 2)


def _multiply_integers(match: re.Match, scope: _Scope) -> None:
    """Compute mul and mad of integers: the low half, the high half or the whole product, plus a third operand."""
    kind, part, bits = match["kind"], match["part"], int(match["kind"][1:])
    product = scope.read(1, kind).astype(object) * scope.read(2, kind).astype(object)
    if part == "hi":
        product = product >> bits
    size = 2 * bits if part == "wide" else bits
    if match["operation"] == "mad":
        product = product + scope.read(3, f"{kind[0]}{size}").astype(object)
    scope.write(0, (product & (1 << size) - 1).astype(f"u{size // 8}"))


def _fused(match: re.Match, scope: _Scope) -> None:
    kind = match["kind"].removesuffix("x2")
    a, b, c = (_wide(scope.read(number, match["kind"])) for number in (1, 2, 3))
    result = fused_multiply_add(a, b, c, _FLOATS[kind])
    result = result.view(BFLOAT16) if kind == "bf16" else result
    if "relu" in match["modifiers"]:
        result = np.maximum(result, result.dtype.type(0))
    scope.write(0, _rounded(result, kind, match["modifiers"]))


def _divide(match: re.Match, scope: _Scope) -> None:
    kind = match["kind"]
    if kind in _FLOATS:
        return _compute_in_float64(match, scope, np.divide, 2)
    a, b = (scope.read(number, kind).astype(object) for number in (1, 2))
    quotient = np.where(b == 0, -1, np.abs(a) // np.maximum(np.abs(b), 1) * np.where((a < 0) != (b < 0), -1, 1))
    remainder = a - b * quotient
    value = quotient if match["operation"] == "div" else remainder
    size = int(kind[1:])
    return scope.write(0, (value & (1 << size) - 1).astype(f"u{size // 8}"))


def _extreme(match: re.Match, scope: _Scope) -> None:
    """Compute min and max, which ignore one NaN unless ``.NaN`` is given."""
    kind, least = match["kind"], match["operation"] == "min"
    a, b = (scope.read(number, kind) for number in (1, 2))
    if kind.removesuffix("x2") not in _FLOATS:
        return scope.write(0, np.minimum(a, b) if least else np.maximum(a, b))
    propagates = "NaN" in match["modifiers"]
    function = (np.minimum, np.maximum)[not least] if propagates else (np.fmin, np.fmax)[not least]
    wide = function(_wide(a), _wide(b))
    zeros = (_wide(a) == 0) & (_wide(b) == 0)  # -0 is less than +0
    signs = np.signbit(_wide(a)) | np.signbit(_wide(b)) if least else np.signbit(_wide(a)) & np.signbit(_wide(b))
    return scope.write(0, _rounded(np.where(zeros, np.where(signs, -0.0, 0.0), wide), kind, match["modifiers"]))


def _sign(match: re.Match, scope: _Scope) -> None:
    """Compute abs and neg."""
    kind, negates = match["kind"], match["operation"] == "neg"
    x = scope.read(1, kind)
    if kind[0] == "s":
        return scope.write(0, -x if negates else np.abs(x))
    bits = x.view(f"u{x.dtype.itemsize}")
    top = bits.dtype.type(1 << 8 * bits.dtype.itemsize - 1)
    return scope.write(0, (bits ^ top if negates else bits & ~top).view(x.dtype))


def _copy_sign(match: re.Match, scope: _Scope) -> None:
    a, b = scope.read(1, match["kind"]), scope.read(2, match["kind"])
    scope.write(0, np.copysign(b, a))


def _tanh(x: np.ndarray) -> np.ndarray:
    mantissa, exponent = np.frexp(np.tanh(x))
    return np.ldexp(np.rint(mantissa * 2**_BITS_OF_TANH) / 2**_BITS_OF_TANH, exponent)


_UNARY: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "rcp": np.reciprocal,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": _tanh,
}


def _unary(match: re.Match, scope: _Scope) -> None:
    _compute_in_float64(match, scope, _UNARY[match["operation"]], 1)


def _bitwise(match: re.Match, scope: _Scope) -> None:
    kind = match["kind"]
    function = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[match["operation"]]
    scope.write(0, function(scope.read(1, kind), scope.read(2, kind)))


def _shift(match: re.Match, scope: _Scope) -> None:
    """Compute shl and shr: of the width or more, 0 or the sign remains."""
    kind, left = match["kind"], match["operation"] == "shl"
    x, distance = scope.read(1, kind), scope.read(2, "u32")
    bits = 8 * x.dtype.itemsize
    bounded = np.minimum(distance, bits - 1).astype(x.dtype)
    shifted = np.left_shift(x, bounded) if left else np.right_shift(x, bounded)
    scope.write(0, shifted if kind[0] == "s" and not left else np.where(distance < bits, shifted, 0).astype(x.dtype))


def _funnel_shift(match: re.Match, scope: _Scope) -> None:
    low, high, distance = (scope.read(number, "u32").astype(np.uint64) for number in (1, 2, 3))
    distance = np.minimum(distance, 32) if match["mode"] == "clamp" else distance & np.uint64(31)
    both = high << np.uint64(32) | low
    shifted = (both << distance) >> np.uint64(32) if match["side"] == "l" else both >> distance
    scope.write(0, shifted.astype(np.uint32))


def _any_logic(match: re.Match, scope: _Scope) -> None:
    """Compute lop3: the bit of a table at the place that three bits give."""
    a, b, c = (scope.read(number, "b32") for number in (1, 2, 3))
    table, result = _immediate(scope.operands[4]), np.zeros_like(a)
    for place in range(8):
        if table >> place & 1:
            result |= (a if place & 4 else ~a) & (b if place & 2 else ~b) & (c if place & 1 else ~c)
    scope.write(0, result)


def _permute(match: re.Match, scope: _Scope) -> None:
    """Compute prmt: four of the eight bytes of two registers, or their signs."""
    a, b, selection = (scope.read(number, "b32").astype(np.uint64) for number in (1, 2, 3))
    both, result = b << np.uint64(32) | a, np.zeros(scope.instances, np.uint64)
    for place in range(4):
        selector = selection >> np.uint64(4 * place) & np.uint64(15)
        byte = both >> np.uint64(8) * (selector & np.uint64(7)) & np.uint64(255)
        byte = np.where(selector & np.uint64(8), (byte >> np.uint64(7)) * np.uint64(255), byte)
        result |= byte << np.uint64(8 * place)
    scope.write(0, result.astype(np.uint32))


def _extract(match: re.Match, scope: _Scope) -> None:
    """Compute bfe: a field of bits, with the sign of its last one for a signed type."""
    kind = match["kind"]
    size = int(kind[1:])
    x = scope.read(1, f"u{size}").astype(object)
    begin, length = (scope.read(number, "u32").astype(object) & 255 for number in (2, 3))
    signed = scope.read(1, f"s{size}").astype(object) if kind[0] == "s" else x
    field = np.where(length >= size, signed >> begin, (signed >> begin) & ((1 << length.astype(object)) - 1))
    if kind[0] == "s":
        last = np.minimum(begin + length - 1, size - 1)
        negative = (length > 0) & ((x >> last) & 1 == 1)
        field = np.where(negative & (length < size), field | (-1 << length), field)
    scope.write(0, (field & (1 << size) - 1).astype(f"u{size // 8}"))


def _insert(match: re.Match, scope: _Scope) -> None:
    """Compute bfi: b with the low bits of a in a field."""
    size = int(match["kind"][1:])
    a, b = (scope.read(number, f"u{size}").astype(object) for number in (1, 2))
    begin, length = (scope.read(number, "u32").astype(object) & 255 for number in (3, 4))
    mask = (((1 << length) - 1) << begin) & (1 << size) - 1
    scope.write(0, (b & ~mask | (a << begin) & mask).astype(f"u{size // 8}"))


def _count_bits(match: re.Match, scope: _Scope) -> None:
    size = int(match["kind"][1:])
    x = scope.read(1, f"u{size}").astype(object)
    functions: dict[str, Callable[[int], int]] = {
        "popc": lambda each: each.bit_count(),
        "clz": lambda each: size - each.bit_length(),
        "brev": lambda each: int(f"{each:0{size}b}"[::-1], 2),
    }
    kind = f"u{size // 8}" if match["operation"] == "brev" else "u4"
    scope.write(0, np.array([functions[match["operation"]](int(each)) for each in x], kind))


def _compare(match: re.Match, scope: _Scope) -> None:
    """Compute setp: a predicate, and with two destinations its opposite."""
    kind, name = match["kind"], match["comparison"]
    a, b = (scope.read(number, kind) for number in (1, 2))
    if kind in _FLOATS:
        a, b = _wide(a), _wide(b)
        unordered = np.isnan(a) | np.isnan(b)
        if name in ("num", "nan"):
            result = unordered if name == "nan" else ~unordered
        elif name.endswith("u"):
            result = unordered | _COMPARISONS[name[:-1]](a, b)
        else:
            result = ~unordered & _COMPARISONS[name](a, b)
    else:
        result = _COMPARISONS[name](a, b)
    opposite = ~result
    if match["boolean"]:
        third = scope.read(3, "pred")
        function = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[match["boolean"]]
        result, opposite = function(result, third), function(opposite, third)
    first, *second = scope.operands[0].split("|")
    scope.write(first, result)
    for name in second:
        scope.write(name, opposite)


def _select(match: re.Match, scope: _Scope) -> None:
    kind = match["kind"]
    scope.write(0, np.where(scope.read(3, "pred"), scope.read(1, kind), scope.read(2, kind)))


def _move(match: re.Match, scope: _Scope) -> None:
    """Compute mov: of a register, of registers to the parts of a wider one, or of its parts to registers."""
    kind, (to, source) = match["kind"], scope.operands
    if to.startswith("{"):
        names = ptx_source.split(to.strip("{}"), ",")
        bits = scope.read(1, kind)
        size = bits.dtype.itemsize // len(names)
        parts = np.ascontiguousarray(bits).view(f"u{size}").reshape(-1, len(names))
        for number, name in enumerate(names):
            scope.write(name, parts[:, number])
    elif source.startswith("{"):
        names = ptx_source.split(source.strip("{}"), ",")
        size = int(kind[1:]) // len(names)
        parts = np.stack([scope.read(name, f"b{size}") for name in names], axis=1)
        scope.write(0, np.ascontiguousarray(parts).view(_TYPES[kind])[:, 0])
    else:
        scope.write(0, scope.read(1, kind))


_ROUNDINGS = {"ni": np.rint, "zi": np.trunc, "mi": np.floor, "pi": np.ceil}


def _convert(match: re.Match, scope: _Scope) -> None:
    """Compute cvt between integers and floats, and the packed ones to and from types of 16 and 8 bits."""
    to, source, modifiers = match["to"], match["source"], match["modifiers"] or ""
    target, words = to.removesuffix("x2"), modifiers.split(".")
    if set(words) - {"", "rn", "rz", "rni", "rzi", "rmi", "rpi", "ftz", "sat", "satfinite", "relu"}:
        raise ValueError(modifiers)
    if to.endswith("x2") and source == "f32":
        value = np.stack([scope.read(2, source), scope.read(1, source)], axis=1)  # the first one is the upper half
    else:
        value = scope.read(1, source)
    floats = source.removesuffix("x2") not in _TYPES or _TYPES[source.removesuffix("x2")].kind not in "iub"
    if "rz" in words and floats and target in ("f16", "bf16", "f32"):
        raise ValueError(modifiers)
    value = value.astype(np.float64) if floats else value.astype(object)
    if floats and "relu" in words:
        value = np.where(value < 0, 0.0, value)
    dtype = _TYPES[target]
    if dtype.kind in "iu":
        if floats:
            rounding = next((_ROUNDINGS[word[1:]] for word in words if word[1:] in _ROUNDINGS), None)
            if rounding is None:
                raise ValueError(modifiers)
            value = rounding(np.where(np.isnan(value), 0, value))
        limits = np.iinfo(dtype)
        if floats or "sat" in words:  # a float outside of the integers becomes the nearest one
            value = np.minimum(np.maximum(value, float(limits.min) if floats else limits.min), limits.max)
            value = np.array([min(int(each), limits.max) for each in value.reshape(-1)], object).reshape(value.shape)
        size = 8 * dtype.itemsize
        return scope.write(0, (value & (1 << size) - 1).astype(f"u{dtype.itemsize}").view(dtype))
    if not floats:
        return scope.write(0, np.array([dtype.type(int(each)) for each in value.reshape(-1)], dtype))
    if to == source and words[1:2] and words[-1][1:] in _ROUNDINGS:
        value = _ROUNDINGS[words[-1][1:]](value)
    if "satfinite" in words:
        largest = float(ml_dtypes.finfo(dtype).max)
        value = np.where(np.isnan(value), value, np.clip(value, -largest, largest))
    return scope.write(0, _rounded(value, target, modifiers.replace("satfinite", "")))


_MODIFIERS = r"(?P<modifiers>(?:\.(?:rn|ftz|sat|relu|approx|full|NaN|noftz|ab|global))*)"
_FLOAT = r"\.(?P<kind>f16x2|bf16x2|f16|bf16|f32|f64)"
_INTEGER = r"\.(?P<kind>[us](?:16|32|64))"
_BITS = r"\.(?P<kind>pred|b16|b32|b64)"
_ANY = r"\.(?P<kind>[busf](?:16|32|64)|bf16|f16x2|bf16x2|pred)"
_CONVERTIBLE = r"[usf](?:8|16|32|64)|bf16x2|f16x2|bf16|e4m3x2|e5m2x2"
_INSTRUCTIONS: tuple[tuple[str, Callable[[re.Match, _Scope], None]], ...] = (
    (rf"mov{_ANY}", _move),
    (rf"cvt(?P<modifiers>(?:\.[a-z]+)*)\.(?P<to>{_CONVERTIBLE})\.(?P<source>{_CONVERTIBLE})", _convert),
    *(
        (rf"{name}{_MODIFIERS}{_ANY}", functools.partial(_add, function=function))
        for name, function in (("add", np.add), ("sub", np.subtract))
    ),
    (rf"mul{_MODIFIERS}{_FLOAT}", functools.partial(_add, function=np.multiply)),
    (rf"(?P<operation>mul|mad)\.(?P<part>lo|hi|wide){_INTEGER}", _multiply_integers),
    (rf"(?:fma|mad){_MODIFIERS}{_FLOAT}", _fused),
    (rf"(?P<operation>div|rem){_MODIFIERS}{_ANY}", _divide),
    (rf"(?P<operation>min|max){_MODIFIERS}{_ANY}", _extreme),
    (rf"(?P<operation>abs|neg){_MODIFIERS}{_ANY}", _sign),
    (rf"copysign{_FLOAT}", _copy_sign),
    (rf"(?P<operation>{'|'.join(_UNARY)}){_MODIFIERS}{_FLOAT}", _unary),
    (rf"(?P<operation>and|or|xor){_BITS}", _bitwise),
    (rf"not{_BITS}", lambda match, scope: scope.write(0, ~scope.read(1, match["kind"]))),
    (r"(?P<operation>shl|shr)\.(?P<kind>[bus](?:16|32|64))", _shift),
    (r"shf\.(?P<side>[lr])\.(?P<mode>wrap|clamp)\.b32", _funnel_shift),
    (r"lop3\.b32", _any_logic),
    (r"prmt\.b32", _permute),
    (r"bfe\.(?P<kind>[us](?:32|64))", _extract),
    (r"bfi\.(?P<kind>b(?:32|64))", _insert),
    (r"(?P<operation>popc|clz|brev)\.(?P<kind>b(?:32|64))", _count_bits),
    (
        r"setp\.(?P<comparison>[a-z]+?)(?:\.(?P<boolean>and|or|xor))?(?:\.ftz)?\.(?P<kind>[busf](?:16|32|64)|bf16)",
        _compare,
    ),
    (r"selp\.(?P<kind>[busf](?:16|32|64)|bf16)", _select),
)
