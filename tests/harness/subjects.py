"""Subjects of checks, made by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fourfold import backends
from fourfold.backends.cuda.compile import cache_folder
from fourfold.checks.records import operations
from fourfold.checks.search import Subject
from fourfold.numerics.dtypes import DTYPES, DType
from fourfold.operations.record import Operation


def subject_of(
    operation: Operation | str,
    implementation: Callable[..., Any] | None = None,
    dtype: DType | str = "float32",
    **fields: Any,
) -> Subject:
    """Return a subject on the CPU: an implementation as a candidate, or without one the operation's on `backend`.

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


def cache_with_runtime(folder: Path) -> Path:
    """Make a cache without kernels that shares the runtime of the emulation, which takes 8 s to compile."""
    folder.mkdir()
    (folder / "cuda_on_cpu_runtime").symlink_to(cache_folder("cuda_on_cpu_runtime"))
    return folder
