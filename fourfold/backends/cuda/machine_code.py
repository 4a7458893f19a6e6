"""The hash of a compiled kernel, over exactly those sections of a cubin that determine what the kernel does."""

import hashlib
import struct
from collections.abc import Iterator
from typing import NamedTuple

_RELA, _NOBITS = 4, 8
_FUNCTION = 2
_ENTRY = 0x10  # in a symbol's st_other: it is a kernel, not a device function
# Entries of `.nv.info`: the form with a length, and the kinds that are read here.
_WITH_LENGTH = 4
_REGISTERS, _CLUSTER = 0x2F, 0x3D
_DATA = (".nv.constant", ".nv.global", ".rodata", ".nv.shared")


class _Section(NamedTuple):
    name: str
    kind: int
    content: bytes
    size: int
    concerns: int  # of relocations: the number of the section that they change


class _Symbol(NamedTuple):
    name: str
    info: int
    other: int
    section: int
    value: int
    size: int


def code_sha256(cubin: bytes, kernel: str) -> str:
    """Return the hash of a kernel's machine code, the device functions beside it, constants, data and relocations.

    Two kernels with the same hash run the same instructions on the same data. The hash does not cover the number of
    registers of a thread or the size of a cluster: `allocation` returns these. It omits names, paths and debug
    information, so it is the same wherever the file was compiled. Data that several kernels of a file share belong to
    the hash of each.

    Args:
        cubin: the compiled file, in ELF.
        kernel: the kernel's mangled name.

    Raises:
        ValueError: the file is no 64-bit ELF file, or has no such kernel.
    """
    sections, symbols = _read_elf(cubin)
    if f".text.{kernel}" not in (section.name for section in sections):
        raise ValueError(f"the cubin has no kernel {kernel}")
    entries = {symbol.name for symbol in symbols if symbol.info & 15 == _FUNCTION and symbol.other & _ENTRY}
    other_suffixes = tuple(f".{name}" for name in entries - {kernel})
    contents: list[bytes] = []

    def add(*parts: object) -> None:
        hashed = hashlib.sha256()
        for part in parts:
            data = part if isinstance(part, bytes) else str(part).encode()
            hashed.update(struct.pack("<Q", len(data)) + data)
        contents.append(hashed.digest())

    def role(section: _Section) -> str | None:
        """Return a section's role for the kernel, without function names, or None if it does not concern the kernel."""
        if not section.name.startswith((".text.", *_DATA)) or section.name.endswith(other_suffixes):
            return None
        owner = "kernel" if section.name.endswith(f".{kernel}") else "file"
        return (
            f"{owner} {section.name.split('.')[1]} {'.'.join(section.name.split('.')[2:3]) if owner == 'file' else ''}"
        )

    for section in sections:
        if section.kind == _RELA:
            concerned = sections[section.concerns]
            if role(concerned) is not None:
                changed = hashlib.sha256(concerned.content).digest()
                for place, info, addend in struct.iter_unpack("<QQq", section.content):
                    symbol = symbols[info >> 32]
                    add(changed, place, info & 0xFFFFFFFF, addend, *_target(symbol, sections))
        elif (owner := role(section)) is not None:
            is_text = section.name.startswith(".text.")
            add("text" if is_text else owner, section.name == f".text.{kernel}", section.size, section.content)
    # A compiler with several threads writes sections in the order in which it finishes them.
    return hashlib.sha256(b"".join(sorted(contents))).hexdigest()


class Allocation(NamedTuple):
    """The resources that a kernel's code requests beside its instructions.

    Attributes:
        registers: per thread.
        cluster: blocks per cluster along x, y and z, if `__cluster_dims__` fixes them; else empty.
    """

    registers: int
    cluster: tuple[int, ...]


def allocation(cubin: bytes, kernel: str) -> Allocation:
    """Return the number of registers of a kernel's thread, and the cluster that its source fixes.

    Args:
        cubin: the compiled file, in ELF.
        kernel: the kernel's mangled name.

    Raises:
        ValueError: the file is no 64-bit ELF file, or lacks this information.
    """
    sections, symbols = _read_elf(cubin)
    file_entries, kernel_entries = (
        [entry for section in sections if section.name == name for entry in _entries(section.content)]
        for name in (".nv.info", f".nv.info.{kernel}")
    )
    registers = [
        count
        for kind, payload in file_entries
        if kind == _REGISTERS
        for place, count in struct.iter_unpack("<II", payload)
        if symbols[place].name == kernel
    ]
    if not registers:
        raise ValueError(f"the cubin does not tell the registers of {kernel}")
    clusters = [struct.unpack("<3I", payload) for kind, payload in kernel_entries if kind == _CLUSTER]
    return Allocation(registers[0], clusters[0] if clusters else ())


def _entries(info: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the kind and the content of each entry of a section `.nv.info`."""
    at = 0
    while at + 4 <= len(info):
        form, kind, value = struct.unpack_from("<BBH", info, at)
        length = value if form == _WITH_LENGTH else 0
        yield kind, info[at + 4 : at + 4 + length]
        at += 4 + length


def _target(symbol: _Symbol, sections: list[_Section]) -> tuple[object, ...]:
    """Return a relocation's target: a place in a section, by its content, or a function of the driver, by its name."""
    if not 0 < symbol.section < len(sections):
        return (symbol.name,)
    section = sections[symbol.section]
    return symbol.value, symbol.size, section.size, hashlib.sha256(section.content).digest()


def _read_elf(cubin: bytes) -> tuple[list[_Section], list[_Symbol]]:
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError("it is no cubin: no 64-bit ELF file")
    sections = list(_sections(cubin))
    return sections, list(_symbols(sections))


def _sections(cubin: bytes) -> Iterator[_Section]:
    (offset,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_bytes, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, offset + i * entry_bytes) for i in range(count)]
    for name, kind, _, _, start, size, _, info, _, _ in headers:
        content = b"" if kind == _NOBITS else cubin[start : start + size]
        yield _Section(_text(cubin, headers[names][4] + name), kind, content, size, info & 0xFFFFFF)


def _symbols(sections: list[_Section]) -> Iterator[_Symbol]:
    table, names = (next(s.content for s in sections if s.name == name) for name in (".symtab", ".strtab"))
    for name, info, other, section, value, size in struct.iter_unpack("<IBBHQQ", table):
        yield _Symbol(_text(names, name), info, other, section, value, size)


def _text(data: bytes, start: int) -> str:
    return data[start : data.index(0, start)].decode()
