"""The lines of a `.cu` file that ran on the CPU.

A traced build calls the runtime at the head of each block of instructions. A line ran if one of its instructions is in
a block that ran. The compiler adds jumps to code that reports faults: they do not end a block, and that code is not a
block.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from typing import NamedTuple

from fourfold.backends.cuda.emulator.build import Built

_CALL = "<__sanitizer_cov_trace_pc>"
# The functions that report a fault do not return.
_FAULT = "<__ubsan_handle"
_INSTRUCTION = re.compile(r"^ *([0-9a-f]+):\t(\S+)(.*)$")


class Line(NamedTuple):
    """A line of a file's function, whether it ran, and whether the compiled function that contains it was called.

    An inlined function also exists as a separate copy, which is never called.
    """

    file: str
    line: int
    function: str
    ran: bool
    called: bool


def lines(built: Built, has_returned_to: Callable[[int], int]) -> Iterator[Line]:
    """Yield the lines of a traced build.

    Args:
        built: the compiled shared object.
        has_returned_to: whether the runtime was called from before an address.
    """
    blocks = [(symbol, block, bool(has_returned_to(block[0]))) for symbol, block in _blocks(built) if block]
    places = _places(built, sorted({address for _, block, _ in blocks for address in block}))
    called_functions = {symbol for symbol, _, ran in blocks if ran}
    for symbol, block, ran in blocks:
        for place in dict.fromkeys(places[address] for address in block if address in places):
            yield Line(*place, ran, symbol in called_functions)


def _blocks(built: Built) -> Iterator[tuple[str, list[int]]]:
    """Yield the function of each block, and the addresses from the call of the runtime to a jump."""
    command = ["objdump", "-d", "--no-show-raw-insn", str(built.path)]
    block: list[int] | None = None
    symbol = ""
    for text in subprocess.run(command, capture_output=True, text=True).stdout.splitlines():
        instruction = _INSTRUCTION.match(text)
        if instruction is None or _CALL in text:
            if block:
                yield symbol, block
            block = [] if instruction is not None else None
            symbol = text if instruction is None and text.endswith(">:") else symbol
            continue
        if block is None:
            continue
        block.append(int(instruction[1], 16))
        if instruction[2] == "jmp" or instruction[2].startswith("ret") or _FAULT in text:
            yield symbol, block
            block = None


def _places(built: Built, addresses: list[int]) -> dict[int, tuple[str, int, str]]:
    """Return the innermost place of each instruction in the kernel's own files: the file, the line and the function."""
    command = ["addr2line", "-aifCe", str(built.path)]
    lines = "".join(f"{address:#x}\n" for address in addresses)
    output = subprocess.run(command, input=lines, capture_output=True, text=True).stdout.splitlines()
    places: dict[int, tuple[str, int, str]] = {}
    address, function = 0, ""
    for text in output:
        if text.startswith("0x"):
            address, function = int(text, 16), ""
        elif not function:
            function = text
        else:
            place = re.fullmatch(r"(.*):(\d+)(?: \(discriminator \d+\))?", text)
            if address not in places and place and os.path.realpath(place[1]) in built.source_files:
                file, line = os.path.realpath(place[1]), int(place[2])
                if (file, line) not in built.ptx and line:
                    places[address] = file, line, _name(function)
            function = ""
    return places


def _name(function: str) -> str:
    """Return the name of a function without its return type, its template arguments and its parameters."""
    words = re.match(r"(?:.*?[ :])?(~?\w+)\s*[<(]", re.sub(r"\(anonymous namespace\)::", "", function))
    return words[1] if words else function
