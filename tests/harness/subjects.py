"""Subjects of checks, made by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fourfold import backends
from fourfold.backends.cuda.compile import cache_folder
from fourfold.checks.forward import forward_agrees
from fourfold.checks.records import operations
from fourfold.checks.search import Search, Subject
from fourfold.numerics.dtypes import DTYPES, DType
from fourfold.operations.record import Operation

# The fields of a compiled kernel.
KERNEL = {
    "name": "k",
    "arch": "sm_90a",
    "registers": 64,
    "spill_store_bytes": 0,
    "spill_load_bytes": 0,
    "shared_bytes": 1024,
    "code_sha256": "a",
    "instruction_counts": {"LDG": 4, "FFMA": 8, "BAR": 1},
}


def subject_of(
    operation: Operation | str,
    implementation: Callable[..., Any] | None = None,
    dtype: DType | str = "float32",
    **fields: Any,
) -> Subject:
    """Return a subject on the CPU: an implementation as a candidate, or else the operation's own on `backend`.

    Laws that relate the operation to another one find the same implementation, or the other one's on that backend.

    Args:
        operation: the record, or the name of a known one.
        implementation: the candidate.
        dtype: its dtype, or the name of it.
        fields: other fields of the subject.
    """
    record = operations()[operation] if isinstance(operation, str) else operation
    backend = fields.pop("backend", "candidate")
    found = implementation or backends.load(record.name, backend)

    def sibling(name: str) -> tuple[Operation, Callable[..., Any]]:
        return (record, found) if implementation else (operations()[name], backends.load(name, backend))

    fields = {
        "dtype": DTYPES[dtype] if isinstance(dtype, str) else dtype,
        "device": "cpu",
        "sibling": sibling,
        **fields,
    }
    return Subject(operation=record, backend=backend, implementation=found, **fields)


def agrees(
    operation: Operation, kernel: Callable[..., Any], *checks: Callable[[Subject, Search], None], examples: int = 4
) -> None:
    """Run checks of a kernel with few cases: forward by default."""
    for check in checks or (forward_agrees,):
        check(subject_of(operation, kernel), Search(examples=examples, seed=0, shrinks=False, seeks_claims=False))


def cache_with_runtime(folder: Path) -> Path:
    """Make a cache without kernels that shares the runtime of the emulation, which takes 8 s to compile."""
    folder.mkdir()
    (folder / "cuda_on_cpu_runtime").symlink_to(cache_folder("cuda_on_cpu_runtime"))
    return folder
