"""Inline PTX for the CPU: each asm statement of known instructions is replaced by calls of functions in ptx.h."""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Collection, Iterator

from fourfold.backends.ptx_source import GUARD, UnknownInstruction, closing, instruction, split, statements

# Defined for a file with known inline PTX only, so that its kernels for Hopper are compiled.
HOPPER = "__CUDA_ARCH_FEAT_SM90_ALL"

# Operations that the checker orders like any other access of their threads: at once, or at the wait for a copy.
_PLAIN_OPERATIONS = {"mma", "load_matrices", "load_shared", "store_shared"}
_PLAIN_OPERATIONS |= {"copy_async", "commit_copies", "wait_copies", "wait_all_copies"}
_SITE = "::fourfold::Site{__builtin_FILE(), unsigned(__builtin_LINE())}"
_STATEMENT = re.compile(r"\b(?:asm|__asm__|__asm)\s*(?:volatile|__volatile__|inline)?\s*\(")
_LINE_MARK = re.compile(r'^# (\d+) "([^"\n]*)".*$', re.MULTILINE)
_LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"')


def has_inline_ptx(texts: Collection[str]) -> bool:
    """Return whether these files may contain inline PTX."""
    return any(_STATEMENT.search(text) for text in texts)


def translate(preprocessed: str, files: Collection[str]) -> tuple[str, list[tuple[str, int]]]:
    """Translate the inline PTX of these files in a preprocessed unit; return the unit and the PTX's places.

    A place is a file and a line. Every line of the unit keeps its number.

    Raises:
        UnknownInstruction: an instruction is not emulated.
    """
    marks = list(_LINE_MARK.finditer(preprocessed))
    starts = [mark.start() for mark in marks]
    pieces, places, at = [], [], 0
    for statement in _STATEMENT.finditer(preprocessed):
        mark = marks[max(0, bisect.bisect(starts, statement.start()) - 1)] if marks else None
        if statement.start() < at or mark is None or mark[2] not in files:
            continue
        places.append((mark[2], int(mark[1]) + preprocessed.count("\n", mark.end(), statement.start()) - 1))
        end = closing(preprocessed, statement.end())
        inside = preprocessed[statement.end() : end]
        pieces += [preprocessed[at : statement.start()], _statement(_LINE_MARK.sub("", inside)), _line_marks(inside)]
        at = end + 1
    return "".join([*pieces, preprocessed[at:]]), places


def is_asynchronous(translated: str) -> bool:
    """Return whether a translated unit has mbarriers, bulk copies, wgmma or partial barriers."""
    return bool(set(re.findall(r"::fourfold::ptx::(\w+)\(", translated)) - _PLAIN_OPERATIONS)


def _line_marks(inside: str) -> str:
    """Return the line marks that keep the line number right at the end of a statement of several lines."""
    return "".join(f"\n{mark[0]}\n" for mark in list(_LINE_MARK.finditer(inside))[-1:]) + "\n" * (
        inside.rsplit("\n# ", 1)[-1].count("\n") - (1 if "\n# " in inside else 0)
    )


def _statement(inside: str) -> str:
    """Translate the parentheses' contents of an asm statement to C++."""
    template, *operands = split(inside, ":")
    text = "".join(_LITERAL.findall(template)).encode().decode("unicode_escape")
    # Outputs, then inputs; the clobbered registers follow.
    operands_with_values = [operand for part in operands[:2] for operand in split(part, ",") if operand]
    values = [operand[operand.index("(") + 1 : operand.rindex(")")] for operand in operands_with_values]
    labels: list[str] = []
    body = "".join(_instructions(text, labels))
    if not body:
        return "({ ; })"
    declared = f"__label__ {', '.join(labels)}; " if labels else ""
    bound = "".join(f"auto&& fourfold_{i} = ({value}); " for i, value in enumerate(values))
    return f"({{ {declared}{bound}{' '.join(body.split())} }})"


def _instructions(text: str, labels: list[str]) -> Iterator[str]:
    """Yield C++ for a template's instructions."""
    for statement in statements(text):
        if statement in ("{", "}"):
            yield statement
        elif statement.endswith(":"):
            labels.append(statement[:-1])
            yield f"{statement} ; "
        else:
            yield _instruction(statement)


def _instruction(text: str) -> str:
    if declared := re.fullmatch(r"\.reg \.(\w+) (.*)", text):
        kind = {"pred": "bool", "f32": "float", "b64": "unsigned long long", "u64": "unsigned long long"}
        names = ", ".join(f"ptx_{name.strip()} = 0" for name in declared[2].split(","))
        return f"{kind.get(declared[1], 'unsigned')} {names}; "
    condition = ""
    if guarded := GUARD.match(text):
        condition, text = f"if ({guarded[1]}{_value(guarded[2])}) ", text[guarded.end() :]
    opcode, operands = instruction(text)
    for pattern, make in _INSTRUCTIONS:
        if match := re.fullmatch(pattern, opcode):
            try:
                return f"{condition}{{ {make(match, operands)} }} "
            except (IndexError, ValueError):
                break
    raise UnknownInstruction(text)


def _value(operand: str) -> str:
    """Return C++ for an operand: %3, a number, a register."""
    if re.fullmatch(r"%\d+", operand):
        return f"fourfold_{operand[1:]}"
    if re.fullmatch(r"-?(?:0[xX][0-9a-fA-F]+|\d+)[uU]?", operand):
        return operand
    if re.fullmatch(r"[A-Za-z_$]\w*", operand):
        return f"ptx_{operand}"
    raise ValueError(operand)


def _address(operand: str) -> str:
    """Return C++ for a shared address in brackets, with or without an offset."""
    inside = re.fullmatch(r"\[\s*(%?\w+)\s*(?:\+\s*(\w+)\s*)?\]", operand)
    if not inside:
        raise ValueError(operand)
    return f"unsigned({_value(inside[1])})" + (f" + {_value(inside[2])}" if inside[2] else "")


def _elements(operand: str) -> list[str]:
    return [_value(part) for part in split(operand.strip().strip("{}"), ",")]


def _call(name: str, *arguments: str) -> str:
    return f"::fourfold::ptx::{name}({', '.join(arguments)});"


def _assignment(destination: str, call: str) -> str:
    return call if destination == "_" else f"{_value(destination)} = {call}"


def _pointer(operand: str) -> str:
    """Return C++ for a global address in brackets."""
    return f"(const void*)({_value(operand.strip()[1:-1].strip())})"


def _map_and_box(operand: str, dimensions: str) -> tuple[str, str]:
    """Split `[%1, {%3, %4}]` into the map and the box's start: the number of coordinates, and these, column first."""
    pointer, box = split(operand.strip()[1:-1], ",")
    start = _elements(box)
    if len(start) != int(dimensions):
        raise ValueError(operand)
    return _pointer(f"[{pointer}]"), f"{{{dimensions}, {{{', '.join(f'int({at})' for at in start)}}}}}"


def _load(match: re.Match, o: list[str]) -> str:
    pointer, start = _map_and_box(o[1], match[1])
    return _call("load_box", _address(o[0]), pointer, _address(o[2]), start)


def _copy(match: re.Match, o: list[str]) -> str:
    to, pointer, size, *rest = o
    [read] = rest or [size]
    return _call("copy_async", _address(to), _pointer(pointer), _value(size), _value(read))


def _store(match: re.Match, o: list[str]) -> str:
    pointer, start = _map_and_box(o[0], match[1])
    return _call("store_box", pointer, _address(o[1]), start)


def _wgmma(match: re.Match, o: list[str]) -> str:
    registers = _elements(o[0])
    columns, in_registers = int(match[1]), o[1].startswith("{")
    # Only operands in shared memory may be transposed.
    if len(registers) != columns // 2 or len(o) != 8 - in_registers:
        raise ValueError(o)
    scales = ""
    if in_registers:
        if len(_elements(o[1])) != 4:
            raise ValueError(o)
        values = _elements(o[1])
        places = (f"std::is_lvalue_reference_v<decltype({value})> ? &{value} : nullptr" for value in values)
        scales = f"const unsigned a[] = {{{', '.join(values)}}}; const void* const places[] = {{{', '.join(places)}}}; "
    b, add, a_sign, b_sign, *transposed = map(_value, o[2:])
    a, a_registers = ("0", "a, places") if in_registers else (_value(o[1]), "nullptr, nullptr")
    a_transposed, b_transposed = ["0", *transposed][-2:]
    operands = a_registers, a, b, add, a_sign, b_sign, a_transposed, b_transposed
    return scales + _wgmma_call("float", "BFLOAT16" if match[2] == "bf16" else "FLOAT16", registers, *operands)


def _wgmma_int8(match: re.Match, o: list[str]) -> str:
    registers = _elements(o[0])
    # Integers have no signs, and are adjacent along the terms.
    if len(registers) != int(match[1]) // 2 or len(o) != 4:
        raise ValueError(o)
    return _wgmma_call("int", "INT8", registers, "nullptr, nullptr", *map(_value, o[1:]), "1", "1", "0", "0")


def _wgmma_call(kind: str, elements: str, registers: list[str], *operands: str) -> str:
    listed = ", ".join(f"static_cast<{kind}*>(&{register})" for register in registers)
    elements = f"::fourfold::ptx::Elements::{elements}"
    return f"void* const d[] = {{{listed}}}; {_call('wgmma', str(len(registers) * 2), elements, 'd', *operands)}"


def _mma(match: re.Match, o: list[str]) -> str:
    d, a, b, c = map(_elements, o)
    if [len(registers) for registers in (d, a, b, c)] != [4, 4, 2, 4]:
        raise ValueError(o)
    arrays = f"const float c[] = {{{', '.join(c)}}}; const unsigned a[] = {{{', '.join(a)}}}, b[] = {{{', '.join(b)}}};"
    listed = ", ".join(f"&{register}" for register in d)
    bfloat16 = "true" if match[1] == "bf16" else "false"
    return f"{arrays} float* const d[] = {{{listed}}}; {_call('mma', bfloat16, 'd', 'a', 'b', 'c', _SITE)}"


def _load_matrices(match: re.Match, o: list[str]) -> str:
    registers, count = _elements(o[0]), int(match[1])
    if len(registers) != count:
        raise ValueError(o)
    listed = ", ".join(f"&{register}" for register in registers)
    call = _call("load_matrices", str(count), "true" if match[2] else "false", "d", _address(o[1]), _SITE)
    return f"unsigned* const d[] = {{{listed}}}; {call}"


def _compare(match: re.Match, o: list[str]) -> str:
    sign = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}[match[1]]
    kind = ("long long" if match[2] == "s" else "unsigned long long") if match[3] == "64" else match[2]
    kind = {"s": "int", "u": "unsigned", "b": "unsigned"}.get(kind, kind)
    return f"{_value(o[0])} = ({kind})({_value(o[1])}) {sign} ({kind})({_value(o[2])});"


def _wait(match: re.Match, o: list[str]) -> str:
    name = "mbarrier_wait_parity" if match[2] else "mbarrier_wait_phase"
    return _assignment(o[0], _call(name, _address(o[1]), _value(o[2]), "true" if match[1] == "try" else "false"))


def _barrier(match: re.Match, o: list[str]) -> str:
    waits = "false" if match[1] == "arrive" else "true"
    return _call("named_barrier", _value(o[0]), _value(o[1]) if len(o) > 1 else "0", waits)


def _arrive(match: re.Match, o: list[str]) -> str:
    if match[1]:
        return _assignment(o[0], _call("mbarrier_arrive_expecting", _address(o[1]), _value(o[2])))
    return _assignment(o[0], _call("mbarrier_arrive", _address(o[1]), _value(o[2]) if len(o) > 2 else "1"))


_Make = Callable[[re.Match, list[str]], str]
_SHARED, _ORDER = r"(?:\.shared(?:::cta|::cluster)?)?", r"(?:\.(?:release|acquire|relaxed)\.cta)?"
_BULK = r"cp\.async\.bulk\.tensor\.([23])d"
_INSTRUCTIONS: tuple[tuple[str, _Make], ...] = (
    (rf"mbarrier\.init{_SHARED}\.b64", lambda m, o: _call("mbarrier_init", _address(o[0]), _value(o[1]))),
    (rf"mbarrier\.inval{_SHARED}\.b64", lambda m, o: _call("mbarrier_invalidate", _address(o[0]))),
    (rf"mbarrier\.arrive(\.expect_tx)?{_ORDER}{_SHARED}\.b64", _arrive),
    (
        rf"mbarrier\.expect_tx(?:\.relaxed\.cta)?{_SHARED}\.b64",
        lambda m, o: _call("mbarrier_expect", _address(o[0]), _value(o[1])),
    ),
    (rf"mbarrier\.(try|test)_wait(\.parity)?{_ORDER}{_SHARED}\.b64", _wait),
    (r"fence\.mbarrier_init\.release\.cluster", lambda m, o: _call("fence_mbarrier_init")),
    (r"fence\.proxy\.async(?:\.shared::cta)?", lambda m, o: _call("fence_proxy_async")),
    (rf"{_BULK}\.shared::(?:cluster|cta)\.global(?:\.tile)?\.mbarrier::complete_tx::bytes", _load),
    (rf"{_BULK}\.global\.shared::cta(?:\.tile)?\.bulk_group", _store),
    (r"cp\.async\.bulk\.commit_group", lambda m, o: _call("commit_bulk")),
    (
        r"cp\.async\.bulk\.wait_group(\.read)?",
        lambda m, o: _call("wait_bulk", _value(o[0]), "true" if m[1] else "false"),
    ),
    (rf"cp\.async\.c[ag]{_SHARED}\.global(?:\.L2::(?:64|128|256)B)?", _copy),
    (r"cp\.async\.commit_group", lambda m, o: _call("commit_copies")),
    (r"cp\.async\.wait_group", lambda m, o: _call("wait_copies", _value(o[0]))),
    (r"cp\.async\.wait_all", lambda m, o: _call("wait_all_copies")),
    (r"prefetch\.tensormap", lambda m, o: ";"),
    (r"(?:bar|barrier)(?:\.cta)?\.(sync|arrive)(?:\.aligned)?", _barrier),
    (r"wgmma\.fence\.sync\.aligned", lambda m, o: _call("wgmma_fence")),
    (r"wgmma\.commit_group\.sync\.aligned", lambda m, o: _call("wgmma_commit")),
    (r"wgmma\.wait_group\.sync\.aligned", lambda m, o: _call("wgmma_wait", _value(o[0]))),
    (r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(bf16|f16)\.\2", _wgmma),
    (r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k32\.s32\.s8\.s8", _wgmma_int8),
    (r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(bf16|f16)\.\1\.f32", _mma),
    (r"ldmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared(?:::cta)?\.b16", _load_matrices),
    (r"setmaxnreg\.(?:inc|dec)\.sync\.aligned\.u32", lambda m, o: _call("set_registers", _value(o[0]))),
    (
        r"st\.shared(?:::cta)?\.([bufs])(16|32|64)",
        lambda m, o: (
            f"auto word = {_value(o[1])}; " + _call("store_shared", _address(o[0]), "&word", str(int(m[2]) // 8))
        ),
    ),
    (
        r"ld\.shared(?:::cta)?\.([bufs])(16|32|64)",
        lambda m, o: _call("load_shared", f"&{_value(o[0])}", _address(o[1]), str(int(m[2]) // 8)),
    ),
    (r"ex2\.approx\.ftz\.f32", lambda m, o: f"{_value(o[0])} = " + _call("exp2_approximate", _value(o[1]))),
    (r"setp\.(eq|ne|lt|le|gt|ge)\.([bsu])(32|64)", _compare),
    (r"selp\.[bsu](?:32|64)", lambda m, o: f"{_value(o[0])} = {_value(o[3])} ? {_value(o[1])} : {_value(o[2])};"),
    (r"mov\.[bsu](?:32|64)", lambda m, o: f"{_value(o[0])} = {_value(o[1])};"),
    (r"bra(?:\.uni)?", lambda m, o: f"goto {o[0]};"),
)
