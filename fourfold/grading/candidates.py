"""Submissions to be graded: each is one line of a file, or one mapping."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from fourfold.candidates.load.kernelbench_problems import SMALL
from fourfold.operations.claims import Claims

TORCH, TRITON, CUDA, KERNELBENCH = LANGUAGES = ("torch", "triton", "cuda", "kernelbench")
# The limits of a candidate: the seconds of all stages together, and the bytes of its own memory.
SECONDS, BYTES = 600.0, 4 << 30


class BadCandidate(ValueError):
    """A line or a mapping is no candidate. The message names the field."""


@dataclass(frozen=True, kw_only=True)
class Submission:
    """One kernel to be graded.

    Attributes:
        id: its name among the others.
        operation: the name of the operation that it computes: a known one, or one that `definition` defines. A
            solution of KernelBench has none.
        source: its text.
        path: the file of the text. The source can import its neighbours if the file exists.
        language: "torch", "triton", "cuda" or "kernelbench".
        function: its name in the source; by default that of the operation. For a `.cu` source the launch, such as
            ``softmax_kernel<<<rows, 256>>>(x, out, rows, cols)``.
        definition: the text of a Python file that declares the operation by `fourfold.operation`. It is trusted.
        problem: the text of the problem, for a solution of KernelBench. It is trusted, too.
        sizes: values in place of the problem's own global variables, or "small".
        claims: its claims, by name; see `fourfold.Claims`.
        seconds: the time limit of all stages together.
        bytes: the memory limit of its process.
    """

    id: str
    operation: str = ""
    source: str = ""
    path: str = ""
    language: str = TORCH
    function: str = ""
    definition: str = ""
    problem: str = ""
    sizes: Mapping[str, Any] | str = field(default_factory=dict)
    claims: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = SECONDS
    bytes: int = BYTES

    @classmethod
    def of(cls, data: Any, folder: Path = Path()) -> "Submission":
        """Build a candidate from a mapping, with the texts of the files that it names.

        Args:
            data: a mapping with `id`, `source` or `path`, and other fields. `definition` and `problem` may be paths.
                `operation` may be ``FILE.py:NAME``, which gives both the operation and the definition.
            folder: the base of relative paths.

        Raises:
            BadCandidate: `data` is not a mapping with these fields, or a file cannot be read.
        """
        if not isinstance(data, Mapping):
            raise BadCandidate(f"a candidate must be a mapping of names, not {type(data).__name__}")
        names = [f.name for f in fields(cls)]
        for name in data:
            if name not in names:
                raise BadCandidate(f"{name} is no field of a candidate: there are {', '.join(names)}")
        present = {name: value for name, value in data.items() if value is not None}
        for name in ("id", "operation", "source", "path", "language", "function", "definition", "problem"):
            if not isinstance(present.get(name, ""), str):
                raise BadCandidate(f"{name} must be text, not {present[name]!r}")
        if not present.get("id"):
            raise BadCandidate("id is missing")
        if bool(present.get("source")) == bool(present.get("path")):
            raise BadCandidate("either source or path must be given")
        submission = cls(**present)._with_texts(folder)
        submission._check()
        return submission

    def _with_texts(self, folder: Path) -> "Submission":
        """Return a copy with the texts of the files that it names."""
        texts: dict[str, str] = {}
        if self.path:
            file = (folder / self.path).resolve()
            texts |= {"source": _text("path", file), "path": str(file)}
        file_name, colon, name = self.operation.rpartition(":")
        if colon:
            texts |= {"definition": _text("operation", folder / file_name), "operation": name}
        for key in ("definition", "problem"):
            text = getattr(self, key)
            if text.endswith(".py") and "\n" not in text:
                texts[key] = _text(key, folder / text)
        return replace(self, **texts)  # type: ignore[arg-type]

    def _check(self) -> None:
        if self.language not in LANGUAGES:
            raise BadCandidate(f"language must be one of {', '.join(LANGUAGES)}, not {self.language!r}")
        if self.language == KERNELBENCH and not self.problem:
            raise BadCandidate("problem is missing, which a solution of KernelBench is of")
        if self.language != KERNELBENCH and not self.operation:
            raise BadCandidate("operation is missing")
        if self.language == CUDA and "<<<" not in self.function:
            raise BadCandidate("function must be a launch, as softmax_kernel<<<rows, 256>>>(x, out, rows, cols)")
        for name in ("seconds", "bytes"):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int | float) or not number > 0:
                raise BadCandidate(f"{name} must be a number above 0, not {number!r}")
        for name, accepted in (("sizes", (SMALL,)), ("claims", ())):
            value = getattr(self, name)
            if not isinstance(value, Mapping) and value not in accepted:
                raise BadCandidate(f"{name} must be a mapping, not {value!r}")
        try:
            self.stated_claims()
        except (ValueError, TypeError) as error:
            raise BadCandidate(f"claims: {error}") from None

    def stated_claims(self) -> Claims | None:
        """Return its claims, or None if it states none here. A kernel of a `.cu` file has no gradients."""
        claim = {"gradients": False, **self.claims} if self.language == CUDA else dict(self.claims)
        if not claim:
            return None
        if isinstance(claim.get("sizes"), Mapping):  # JSON has no tuples
            claim["sizes"] = {n: tuple(pair) if isinstance(pair, list) else pair for n, pair in claim["sizes"].items()}
        return Claims.of(claim)

    def key(self, settings: Mapping[str, Any]) -> str:
        """Return a key that candidates share if they are judged in the same way, whatever their ids."""
        content = {**asdict(self), "id": "", "path": ""}
        text = json.dumps([content, dict(settings)], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @property
    def file_name(self) -> str:
        """Return the name for a file of its source; by its name, a candidate does not recognize its judge."""
        stem = re.sub(r"\W", "_", self.operation) or "model"
        return Path(self.path).name or f"{stem}_kernel.{'cu' if self.language == CUDA else 'py'}"


def _text(field_name: str, file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadCandidate(f"{field_name}: {file} cannot be read: {error}") from None


def numbered_lines(file: Path) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each line that is not empty; the value is an error if the line is no JSON."""
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield number, json.loads(line)
                except ValueError as error:
                    yield number, BadCandidate(f"no JSON: {error}")
