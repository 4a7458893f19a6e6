"""Files of cases: the arrays, parameters and layouts of one call, as NumPy's archives, which hold no code."""

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from fourfold.numerics.dtypes import DTYPES, INTEGERS, QUANTISED
from fourfold.operations.case import Case

SUFFIX = ".case.npz"
_FORMAT, _ABOUT = 1, "about"
_INPUT = "input "
_DTYPES = {**DTYPES, **QUANTISED, **INTEGERS}


class BadCaseFile(ValueError):
    """A file is missing, is damaged, or holds no case."""


@dataclass(frozen=True, kw_only=True)
class CaseFile:
    """A case and the operation that it is of.

    Attributes:
        operation: the name of the operation.
        dtype: the name of the tested dtype.
        case: the case.
        results: what a call gave for it, by name; empty if nothing is known.
        message: why the case was kept.
    """

    operation: str
    dtype: str
    case: Case
    results: Mapping[str, np.ndarray] = field(default_factory=dict)
    message: str = ""

    def encode(self) -> bytes:
        """Return the content of the file.

        Raises:
            TypeError: a parameter is not a number, text, None, or a list or tuple of these.
        """
        case = self.case
        arrays = {f"{_INPUT}{name}": array for name, array in case.inputs.items()}
        arrays |= {"grad_output": case.grad_output, **self.results}
        header = {
            "format": _FORMAT,
            "operation": self.operation,
            "dtype": self.dtype,
            "parameters": {name: _plain(value) for name, value in case.parameters.items()},
            "layouts": dict(case.layouts),
            "dtypes": {name: array.dtype.name for name, array in arrays.items()},
            "message": self.message,
        }
        text = np.frombuffer(json.dumps(header).encode(), np.uint8)
        content = io.BytesIO()
        # The types of ml_dtypes, which NumPy's files do not support, are stored as bits.
        bits = {name: a.view(f"u{a.itemsize}") if a.dtype.kind not in "biuf" else a for name, a in arrays.items()}
        np.savez(content, allow_pickle=False, **{_ABOUT: text, **bits})
        return content.getvalue()

    @classmethod
    def decode(cls, content: bytes) -> Self:
        """Return the case of a file's content.

        Raises:
            BadCaseFile: the content is not that of `encode`.
        """
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as archive:
                contents = {name: archive[name] for name in archive.files}
            header = json.loads(contents.pop(_ABOUT).tobytes())
            if header["format"] != _FORMAT:
                raise BadCaseFile(f"expected format {_FORMAT}, found {header['format']}")
            arrays = {name: array.view(_DTYPES[header["dtypes"][name]].numpy) for name, array in contents.items()}
            inputs = {n.removeprefix(_INPUT): arrays.pop(n) for n in [*arrays] if n.startswith(_INPUT)}
            parameters = {name: _value(value) for name, value in header["parameters"].items()}
            case = Case(inputs, arrays.pop("grad_output"), parameters, header["layouts"])
            fields = {name: str(header[name]) for name in ("operation", "dtype", "message")}
            if fields["dtype"] not in DTYPES:
                raise BadCaseFile(f"expected one of the dtypes {', '.join(DTYPES)}, found {fields['dtype']!r}")
            return cls(case=case, results=arrays, **fields)
        except BadCaseFile:
            raise
        except Exception as error:  # zipfile, zlib, NumPy and JSON each raise their own
            raise BadCaseFile(f"{type(error).__name__}: {error}") from error

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Return the case of a file.

        Raises:
            BadCaseFile: the file is missing, is damaged, or holds no case. The message names it.
        """
        try:
            return cls.decode(Path(path).read_bytes())
        except OSError as error:
            raise BadCaseFile(f"case {path}: {error.strerror}") from None
        except BadCaseFile as error:
            raise BadCaseFile(f"case {path}: expected a file that fourfold.monitor wrote: {error}") from error


def _plain(value: Any) -> Any:
    """Return a parameter as JSON, a tuple as a dictionary."""
    if isinstance(value, tuple):
        return {"tuple": [_plain(item) for item in value]}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if value is not None and not isinstance(value, bool | int | float | str):
        raise TypeError(f"a file cannot hold a parameter of type {type(value).__name__}")
    return value


def _value(plain: Any) -> Any:
    """Return the parameter that `_plain` made JSON."""
    if isinstance(plain, dict):
        return tuple(_value(item) for item in plain["tuple"])
    return [_value(item) for item in plain] if isinstance(plain, list) else plain
