"""Labelled candidates: kernels of this repository, mutants of them, wrong kernels of the gallery, and hostile ones."""

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fourfold.mutation import known
from fourfold.mutation.options import EQUIVALENT
from fourfold.mutation.sources import mutants_of_files, reached, sources

ROOT = Path(__file__).parents[2]
IMPLS = ROOT / "impls"
OPERATIONS = ("softmax", "vector_add", "layer_norm", "giou", "giou_loss", "giou_loss_ragged", "matmul")
# Those whose kernels in CUDA C++ are one file, beside what several operations share.
IN_CUDA = ("softmax", "vector_add", "layer_norm")
RIGHT, WRONG = "right", "wrong"
# What each candidate may take. A wrong one that no early check finds goes through nearly all of them.
SECONDS = 300
Labelled = tuple[str, dict[str, Any]]  # the label, and the candidate


def candidates(count: int, seed: int) -> list[Labelled]:
    """So many candidates: a twelfth are right, a twentieth are hostile, the others have one mistake each."""
    chance = random.Random(seed)
    right, hostile, planted = list(_right()), list(_hostile()), list(_planted())
    many_right, many_hostile, many_planted = count // 12, count // 20, count // 10
    found = [*_some(right, many_right, chance), *_some(hostile, many_hostile, chance)]
    found += _some(planted, many_planted, chance)
    in_cuda, in_triton = (list(_mutants(language, chance)) for language in ("cuda", "triton"))
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
    """A module of impls/ as a file that may lie anywhere."""
    text = re.sub(r"^from \.(\w+) import", rf"from fourfold.impls.{operation}.\1 import", text, flags=re.MULTILINE)
    return re.sub(r"^from \.\.([\w.]+) import", r"from fourfold.impls.\1 import", text, flags=re.MULTILINE)


def _in_cuda(operation: str, kernel: str) -> str:
    """The module that launches an operation's kernels, with the text of the kernels in it."""
    text = _absolute((IMPLS / operation / "cuda_kernel.py").read_text(), operation)
    kernel = re.sub(r'#include "([\w/]+\.cuh)"', lambda found: _included(operation, found), kernel)
    written = f"import tempfile\nSOURCE = Path(tempfile.mkdtemp()) / 'cuda_kernel.cu'\nSOURCE.write_text({kernel!r})\n"
    return text.replace('SOURCE = Path(__file__).parent / "cuda_kernel.cu"\n', written)


def _included(operation: str, found: re.Match) -> str:
    beside = IMPLS / operation / found[1]
    return f'#include "{beside if beside.is_file() else IMPLS / found[1]}"'


def _right() -> Iterator[Labelled]:
    """The kernels themselves, each a few times: with a remark that makes it another text."""
    for operation in OPERATIONS:
        for time in range(4):
            remark = f"\n# {time}\n"
            for language in ("torch", "triton"):
                file = "torch_eager" if language == "torch" else "triton_kernel"
                text = _absolute((IMPLS / operation / f"{file}.py").read_text(), operation) + remark
                yield RIGHT, _candidate(f"right {operation} {language} {time}", operation, text, language)
        if operation in IN_CUDA:
            text = _in_cuda(operation, (IMPLS / operation / "cuda_kernel.cu").read_text())
            yield RIGHT, _candidate(f"right {operation} cuda", operation, text, "torch")


def _mutants(language: str, chance: random.Random) -> Iterator[Labelled]:
    """Half of the mutants that the checks are known to reject."""
    entries = known.read(EQUIVALENT)
    for operation in OPERATIONS:
        if language == "cuda" and operation not in IN_CUDA:
            continue
        texts = sources(operation, language)
        of_operation = reached(operation, language, texts)
        own = {file: text for file, text in texts.items() if Path(file).parts[0] == operation}
        mutants = [m for m in mutants_of_files(own, language) if (m.file, m.function) in of_operation]
        listed, _ = known.classified(entries, mutants, {})
        for number, mutant in enumerate(mutants):
            if mutant.identity in listed or chance.random() > 0.5:
                continue
            name = f"mutant {operation} {language} {number}: {mutant.operator}, line {mutant.line}"
            if language == "triton" and mutant.file.endswith("triton_kernel.py"):
                yield WRONG, _candidate(name, operation, _absolute(mutant.text, operation), "triton")
            elif language == "cuda" and mutant.file.endswith("cuda_kernel.cu"):
                yield WRONG, _candidate(name, operation, _in_cuda(operation, mutant.text), "torch")


def _planted() -> Iterator[Labelled]:
    """Wrong kernels of the gallery that a check of `fourfold.verify` rejects on the CPU."""
    from tests.known_wrong.test_known_wrong import FAULTS

    for fault in FAULTS:
        check = getattr(fault.check, "__name__", "law")
        seen = check in ("forward_agrees", "backward_agrees", "memory_is_respected", "repeats_bit_for_bit", "law")
        odd = fault.only_on == "cuda" or fault.documented or fault.poisoned or fault.record
        if odd or not seen or fault.seen_by or fault.dtype != "float32" or fault.language != "torch":
            continue
        source = (
            f"import importlib, sys\nsys.path.insert(0, {str(ROOT)!r})\n"
            f"from tests.known_wrong.test_known_wrong import FAULTS\n"
            f"fault = next(f for f in FAULTS if (f.operation, f.name) == {(fault.operation, fault.name)!r})\n"
            "kernel = fault.make()\n"
        )
        name = f"planted {fault.operation} {fault.name}"
        yield WRONG, _candidate(name, fault.operation, source, "torch", "kernel")


def _hostile() -> Iterator[Labelled]:
    """Kernels that attack what judges them. Each is of no use, so all are wrong."""
    from tests.known_wrong.test_hostile import FAILS, HOSTILE

    for place in FAILS:
        file, function = place.split(":")
        source = f"import sys\nsys.path.insert(0, {str(HOSTILE)!r})\n" + (HOSTILE / f"{file}.py").read_text()
        candidate = _candidate(f"hostile {file} {function}", "vector_add", source, "torch", function)
        yield WRONG, {**candidate, "seconds": 60}
