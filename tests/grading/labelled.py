"""Labelled candidates: kernels of this repository, mutants of them, wrong kernels of the gallery, and hostile ones."""

import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fourfold.mutation import known
from fourfold.mutation.options import EQUIVALENT
from fourfold.mutation.sources import mutants_of_files, reachable_functions, sources

ROOT = Path(__file__).parents[2]
IMPLS = ROOT / "impls"
OPERATIONS = ("softmax", "vector_add", "layer_norm", "giou", "giou_loss", "giou_loss_ragged", "matmul")
# The operations whose kernels in CUDA C++ are one file, apart from shared headers.
IN_CUDA = ("softmax", "vector_add", "layer_norm")
RIGHT, WRONG = "right", "wrong"
# The time limit of each candidate. A wrong one that no early check rejects goes through nearly all of them.
SECONDS = 300
Labelled = tuple[str, dict[str, Any]]  # the label, and the candidate


def candidates(count: int, seed: int, of: Sequence[str] = OPERATIONS) -> list[Labelled]:
    """Return candidates for some operations, drawn by a seed.

    A twelfth are right, a twentieth are hostile, a fiftieth crash, hang or take all memory, and the others have one
    mistake each.
    """
    chance = random.Random(seed)
    found = _some(list(_right(of, 4 + count // 100)), count // 12, chance)
    found += _some(list(_hostile()), count // 20, chance)
    found += _some(list(_deadly(of)), count // 50, chance)
    found += _some([each for each in _planted_kernels() if each[1]["operation"] in of], count // 10, chance)
    in_cuda, in_triton = (list(_mutants(language, of)) for language in ("cuda", "triton"))
    found += _some(in_cuda, count // 20, chance)
    found += _some(in_triton, count - len(found), chance)
    chance.shuffle(found)
    return found


def _some(all_of_them: list[Labelled], count: int, chance: random.Random) -> list[Labelled]:
    return chance.sample(all_of_them, min(count, len(all_of_them)))


def _candidate(name: str, operation: str, source: str, language: str, function: str = "") -> dict[str, Any]:
    given = {"id": name, "operation": operation, "source": source, "language": language, "seconds": SECONDS}
    return {**given, "function": function} if function else given


def _absolute(text: str, operation: str) -> str:
    """Return a module of impls/ as a file that may lie anywhere, with the same lines.

    A candidate must not import the reference, so a line that does becomes one that executes its text.
    """

    def executed(found: re.Match) -> str:
        names = re.findall(r"(\w+) as (\w+)", found[2])
        text = f"exec({_text(found[1] or operation, 'torch_eager')!r})"
        return "; ".join([text, *(f"{new} = {old}" for old, new in names)])

    text = re.sub(r"^from \.(?:\.(\w+)\.)?torch_eager import (.+)$", executed, text, flags=re.MULTILINE)
    text = re.sub(r"^from \.(\w+) import", rf"from fourfold.impls.{operation}.\1 import", text, flags=re.MULTILINE)
    return re.sub(r"^from \.\.([\w.]+) import", r"from fourfold.impls.\1 import", text, flags=re.MULTILINE)


def _text(operation: str, module: str) -> str:
    return _absolute((IMPLS / operation / f"{module}.py").read_text(), operation)


def _cuda_module(operation: str, kernel: str) -> str:
    """Return the module that launches an operation's kernels, with the text of the kernels in it."""
    text = _text(operation, "cuda_kernel")
    kernel = re.sub(r'#include "([\w/]+\.cuh)"', lambda found: _included(operation, found), kernel)
    written = f"import tempfile\nSOURCE = Path(tempfile.mkdtemp()) / 'cuda_kernel.cu'\nSOURCE.write_text({kernel!r})\n"
    return text.replace('SOURCE = Path(__file__).parent / "cuda_kernel.cu"\n', written)


def _included(operation: str, found: re.Match) -> str:
    beside = IMPLS / operation / found[1]
    return f'#include "{beside if beside.is_file() else IMPLS / found[1]}"'


def _right(of: Sequence[str], times: int) -> Iterator[Labelled]:
    """Yield the kernels themselves, each a few times, with a comment that makes its text unique."""
    for operation in of:
        for time in range(times):
            remark = f"\n# {time}\n"
            for language in ("torch", "triton"):
                text = _text(operation, "torch_eager" if language == "torch" else "triton_kernel") + remark
                yield RIGHT, _candidate(f"right {operation} {language} {time}", operation, text, language)
        if operation in IN_CUDA:
            text = _cuda_module(operation, (IMPLS / operation / "cuda_kernel.cu").read_text())
            yield RIGHT, _candidate(f"right {operation} cuda", operation, text, "torch")


def _mutants(language: str, of: Sequence[str]) -> Iterator[Labelled]:
    """Yield the mutants that the checks are known to reject."""
    entries = known.read_list(EQUIVALENT)
    for operation in of:
        if language == "cuda" and operation not in IN_CUDA:
            continue
        texts = sources(operation, language)
        of_operation = reachable_functions(operation, language, texts)
        own = {file: text for file, text in texts.items() if Path(file).parts[0] == operation}
        mutants = [m for m in mutants_of_files(own, language) if (m.file, m.function) in of_operation]
        listed, _ = known.classify(entries, mutants, {})
        for number, mutant in enumerate(mutants):
            if mutant.identity in listed:
                continue
            name = f"mutant {operation} {language} {number}: {mutant.operator}, line {mutant.line}"
            if language == "triton" and mutant.file.endswith("triton_kernel.py"):
                yield WRONG, _candidate(name, operation, _absolute(mutant.text, operation), "triton")
            elif language == "cuda" and mutant.file.endswith("cuda_kernel.cu"):
                yield WRONG, _candidate(name, operation, _cuda_module(operation, mutant.text), "torch")


def _planted_kernels() -> Iterator[Labelled]:
    """Yield wrong kernels of the gallery that a check of `fourfold.verify` rejects on the CPU."""
    from tests.known_wrong.test_known_wrong import FAULTS

    for number, fault in enumerate(FAULTS):
        check = getattr(getattr(fault.check, "func", fault.check), "__name__", "law")
        seen = check in ("forward_agrees", "backward_agrees", "memory_is_respected", "repeats_bit_for_bit", "law")
        odd = fault.only_on == "cuda" or fault.documented or fault.poisoned or fault.record
        if odd or not seen or fault.seen_by or fault.dtype != "float32" or fault.language != "torch":
            continue
        source = (
            f"import importlib, sys\nsys.path.insert(0, {str(ROOT)!r})\n"
            f"from tests.known_wrong.test_known_wrong import FAULTS\n"
            f"kernel = FAULTS[{number}].make()\n"
        )
        name = f"planted {fault.operation} {number} {fault.name}"
        yield WRONG, _candidate(name, fault.operation, source, "torch", "kernel")


# Code that kills a process or a machine, by kind: a call of a right kernel executes it.
DEADLY = {
    "crashing": ("os.kill(os.getpid(), 11)", "ctypes.string_at(1)", "os.abort()"),
    "hanging": ("threading.Event().wait()", "[None for _ in iter(int, 1)]", "os.read(os.pipe()[0], 1)"),
    "eating memory": ("[bytearray(1 << 26) for _ in iter(int, 1)]", "b'x' * (1 << 40)", "torch.ones(1 << 38)"),
}

ENDING = """
import ctypes, functools, itertools, os, threading
import torch
_calls, _right = itertools.count(1), {name}

@functools.wraps(_right)
def {name}(*args, **kwargs):
    if next(_calls) >= 3: {end}
    return _right(*args, **kwargs)
"""


def _deadly(of: Sequence[str]) -> Iterator[Labelled]:
    """Yield right kernels that crash, hang or take all memory from the third call on."""
    for operation in of:
        text = _text(operation, "torch_eager")
        for kind, ends in DEADLY.items():
            for number, end in enumerate(ends):
                source = text + ENDING.format(name=operation, end=end)
                candidate = _candidate(f"{kind} {operation} {number}", operation, source, "torch")
                yield WRONG, {**candidate, "seconds": 30}


def _hostile() -> Iterator[Labelled]:
    """Yield kernels that attack their judge. None computes, so all are wrong."""
    from tests.known_wrong.test_hostile import FAILS, HOSTILE

    for place in FAILS:
        file, function = place.split(":")
        source = f"import sys\nsys.path.insert(0, {str(HOSTILE)!r})\n" + (HOSTILE / f"{file}.py").read_text()
        candidate = _candidate(f"hostile {file} {function}", "vector_add", source, "torch", function)
        yield WRONG, {**candidate, "seconds": 60}
