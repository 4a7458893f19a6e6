"""The first stage: static checks of a candidate's text. Nothing of it runs."""

import ast
import re
from collections.abc import Collection, Iterator

from fourfold.backends.python_source import name_of
from fourfold.grading.candidates import CUDA, KERNELBENCH, Submission

# Modules that hold references or judge results, wherever they are imported from.
_REFERENCES = r"(fourfold\.)?oracles\b|fourfold\.(properties|checks|running|grading|strategies)\b"
# The library's implementations of an operation.
_IMPLEMENTATIONS = r"fourfold\.impls\.{}\.(torch_eager|triton_kernel|cuda_kernel)\b"


class Unparsable(Exception):
    """The text is no valid Python."""


def reaches(candidate: Submission, forbidden: Collection[str] = ()) -> Iterator[str]:
    """Yield each forbidden name that the source uses, with its line.

    A text can hide what it does, so this finds only careless uses. The later stages do not rely on it.

    Args:
        candidate: the candidate. Nothing is reported for kernels of a `.cu` file.
        forbidden: modules that it must not import, including their submodules.

    Raises:
        Unparsable: the source is no valid Python. The message has the line.
    """
    if candidate.language == CUDA:
        return
    try:
        tree = ast.parse(candidate.source)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        raise Unparsable(f"{candidate.file_name}{f':{line}' if line else ''}: {error}") from None
    references = re.compile(f"{_REFERENCES}|{_IMPLEMENTATIONS.format(re.escape(candidate.operation))}")
    own_classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    for node in ast.walk(tree):
        for name in _imported_modules(node):
            if references.match(name):
                yield f"line {node.lineno} imports {name}, which holds the reference"  # type: ignore[attr-defined]
            elif any(name == module or name.startswith(f"{module}.") for module in forbidden):
                yield f"line {node.lineno} imports {name}, which is forbidden"  # type: ignore[attr-defined]
        uses_model = isinstance(node, ast.Name) and node.id == "Model" and "Model" not in own_classes
        if uses_model and candidate.language == KERNELBENCH:
            yield f"line {node.lineno} uses Model, which is the problem's"  # type: ignore[attr-defined]


def _imported_modules(node: ast.AST) -> Iterator[str]:
    """Yield the modules that a statement imports, also those passed as text to ``importlib``."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and not node.level:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and name_of(node.func) in ("import_module", "__import__"):
        yield from (a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str))
