"""The messages between the judge and a candidate's process: JSON, and the bytes of tensors' memory.

Received data is never unpickled, evaluated or imported. A message in another format raises `Malformed`.

Both sides hold the same storages, by number. A storage has the same bytes on both sides whenever a message has arrived:
each side sends those that changed. So strides, gaps, redzones and aliases are the same on both sides, and later writes
of one side do not change the other's memory.
"""

import ctypes
import json
import math
import socket
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fourfold.compat import torch_internals

# The longest text of a message, and the most bytes of a storage that is copied.
MOST_TEXT = 1 << 26
MOST_BYTES = 1 << 30
# The most storages in a message, descriptors, and outputs of a call.
MOST_STORAGES, MOST_DESCRIPTORS, MOST_RESULTS = 1 << 12, 64, 64
_LENGTH = struct.Struct(">Q")


class Malformed(Exception):
    """A message of the other side has another format than described here."""


class Ended(Exception):
    """The other side closed the connection."""


class Unsendable(TypeError):
    """A value cannot be sent to another process."""


class Connection:
    """A connection that sends and receives messages.

    Args:
        end: one end of a pair of connected sockets.
    """

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self.deadline = math.inf

    def send(self, text: Mapping[str, Any], storages: Mapping[int, bytes], files: Sequence[int] = ()) -> None:
        """Send a message, the contents of storages by number, and descriptors of files.

        Raises:
            Ended: the other side has gone.
            TimeoutError: the deadline has passed.
        """
        spelled = json.dumps({**text, "storages": [[number, len(held)] for number, held in storages.items()]}).encode()
        try:
            self._limit()
            socket.send_fds(self.end, [_LENGTH.pack(len(spelled))], files)
            for part in (spelled, *storages.values()):
                self._limit()
                self.end.sendall(part)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise Ended from error

    def receive(self, sizes: Mapping[int, int] | None = None) -> tuple[dict[str, Any], dict[int, bytes], list[int]]:
        """Receive a message, the contents of storages and descriptors.

        Args:
            sizes: the size in bytes of each known storage, which must not change.

        Raises:
            Ended: the other side has gone.
            TimeoutError: the deadline has passed.
            Malformed: the message has another format.
        """
        length, files = self._start()
        if length > MOST_TEXT:
            raise Malformed(f"a message of {length} bytes")
        try:
            text = json.loads(self._bytes(length))
        except (ValueError, RecursionError) as error:
            raise Malformed("a message that is no JSON") from error
        if not isinstance(text, dict):
            raise Malformed(f"a {type(text).__name__} in place of a message")
        storages = {}
        for number, size in pairs_of_numbers(text.get("storages")):
            if number in storages or not 0 <= size <= MOST_BYTES or (sizes or {}).get(number, size) != size:
                raise Malformed(f"storage {number} with {size} bytes")
            storages[number] = self._bytes(size)
        return text, storages, files

    def close(self) -> None:
        """Close this end."""
        self.end.close()

    def _start(self) -> tuple[int, list[int]]:
        self._limit()
        try:
            data, files, _, _ = socket.recv_fds(self.end, _LENGTH.size, MOST_DESCRIPTORS)
        except ConnectionResetError as error:
            raise Ended from error
        if not data:
            raise Ended
        data += self._bytes(_LENGTH.size - len(data))
        return _LENGTH.unpack(data)[0], list(files)

    def _bytes(self, count: int) -> bytes:
        found = bytearray()
        while len(found) < count:
            self._limit()
            try:
                part = self.end.recv(min(count - len(found), 1 << 20))
            except ConnectionResetError as error:
                raise Ended from error
            if not part:
                raise Ended
            found += part
        return bytes(found)

    def _limit(self) -> None:
        if self.deadline == math.inf:
            self.end.settimeout(None)
            return
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self.end.settimeout(left)


def pairs_of_numbers(found: Any) -> list[tuple[int, int]]:
    """Check and return a list of pairs of integers.

    Raises:
        Malformed: the list has another form.
    """
    if not isinstance(found, list) or len(found) > MOST_STORAGES:
        raise Malformed("no list of storages")
    for pair in found:
        if not isinstance(pair, list) or len(pair) != 2 or not all(type(number) is int for number in pair):
            raise Malformed("a storage without number and size")
    return [(number, size) for number, size in found]


# ---- memory


def contents(storage: torch.UntypedStorage) -> bytes:
    """Return the bytes of a storage, without calling an operator of torch, which a mode would see."""
    size = storage.nbytes()
    return ctypes.string_at(storage.data_ptr(), size) if size else b""


def put(storage: torch.UntypedStorage, held: bytes) -> None:
    """Overwrite a storage."""
    if held:
        ctypes.memmove(storage.data_ptr(), held, len(held))


def changed(storages: Iterable[tuple[int, torch.UntypedStorage]], last: dict[int, bytes]) -> dict[int, bytes]:
    """Return the storages that differ from the other side's copies, and update the record of those copies.

    Args:
        storages: by number.
        last: the contents on the other side, by number.
    """
    found = {}
    for number, storage in storages:
        held = contents(storage)
        if last.get(number) != held:
            found[number] = last[number] = held
    return found


# ---- values

# The kinds of tensors other than leaves of autograd's graph: made for inference, a view, the result of an operation.
INFERENCE, VIEW, RESULT = "for inference", "view", "result"


class AsResult(torch.autograd.Function):
    """An autograd function that makes a tensor the result of an operation, in its own memory."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, held: list[torch.Tensor]) -> torch.Tensor:
        """Return the tensor, passed in a list to hide it from autograd."""
        return held[0]

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[None, None]:
        """Return nothing: the gradient is requested at the tensor itself."""
        return None, None


def made_as(tensor: torch.Tensor) -> str:
    """Return how an argument tensor was made; "" for a leaf."""
    if tensor.is_inference():
        return INFERENCE
    if tensor.is_leaf:
        return ""
    return VIEW if torch_internals.shares_a_base(tensor) else RESULT


def of_tensor(tensor: torch.Tensor, number: int) -> dict[str, Any]:
    """Return the description of a tensor, given the number of its storage."""
    return {
        "storage": number,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "strides": list(tensor.stride()),
        "offset": tensor.storage_offset(),
    }


def as_tensor(said: Any, storages: Mapping[int, torch.UntypedStorage]) -> torch.Tensor:
    """Return the tensor of a description.

    Raises:
        Malformed: the storage does not exist, or is too short for the shape.
    """
    if not isinstance(said, dict):
        raise Malformed("no tensor where there should be one")
    number, offset = said.get("storage"), said.get("offset")
    shape, strides = _sizes(said.get("shape")), _sizes(said.get("strides"))
    dtype = dtype_of(said.get("dtype"))
    if len(shape) != len(strides) or len(shape) > 64 or type(offset) is not int or offset < 0:
        raise Malformed(f"a tensor of shape {shape}, strides {strides} and offset {offset!r}")
    storage = storages.get(number) if type(number) is int else None
    if storage is None:
        raise Malformed(f"a tensor of storage {number!r}, which there is not")
    reach = 0 if 0 in shape else 1 + offset + sum((size - 1) * stride for size, stride in zip(shape, strides))
    if reach * dtype.itemsize > storage.nbytes():
        raise Malformed(f"a tensor {shape} with strides {strides} in a storage of {storage.nbytes()} bytes")
    if 0 in shape:
        offset = 0
    with torch.no_grad():
        return torch.empty(0, dtype=dtype).set_(storage, offset, shape, strides)


def _sizes(found: Any) -> list[int]:
    if not isinstance(found, list) or not all(type(size) is int and size >= 0 for size in found):
        raise Malformed(f"{found!r} in place of sizes")
    return found


def dtype_of(name: Any) -> torch.dtype:
    """Return the dtype with a name.

    Raises:
        Malformed: the name is not one of a dtype.
    """
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype) or found.is_complex:
        raise Malformed(f"there is no dtype {name!r}")
    return found


def as_value(said: Any, storages: Mapping[int, torch.UntypedStorage]) -> Any:
    """Return the argument that `spelled` encoded."""
    if not isinstance(said, dict):
        return said
    ((kind, of),) = said.items()
    if kind == "tensor":
        how = of.get("made")
        with torch.inference_mode(how == INFERENCE):
            tensor = as_tensor(of, storages).requires_grad_(bool(of.get("needs_gradient")))
        if how == VIEW:
            return tensor.view_as(tensor)
        return AsResult.apply(torch.zeros((), requires_grad=True), [tensor.detach()]) if how == RESULT else tensor
    if kind == "array":
        return as_tensor(of, storages).numpy()
    if kind == "without memory":
        return torch.empty_strided(of["shape"], of["strides"], dtype=dtype_of(of["dtype"]), device="meta")
    if kind == "dtype":
        return dtype_of(of)
    if kind == "dict":
        return {key: as_value(value, storages) for key, value in of}
    values = [as_value(value, storages) for value in of]
    return tuple(values) if kind == "tuple" else values


def spelled(value: Any, number_of: Any) -> Any:
    """Encode an argument of a call as JSON.

    Args:
        value: a tensor, an array, a number, a string, None, a dtype, or a list, tuple or dictionary of these.
        number_of: returns the number of a tensor's storage.

    Raises:
        Unsendable: the value has another type.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        if value.is_meta:
            return {"without memory": of_tensor(value, 0)}
        if type(value) is torch.Tensor and value.layout == torch.strided and value.is_cpu and not value.is_neg():
            return {"tensor": of_tensor(value, number_of(value))}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        tensor = torch.from_numpy(np.array(value, order="C"))
        return {"array": of_tensor(tensor, number_of(tensor))}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, list | tuple):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [spelled(each, number_of) for each in value]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": [[key, spelled(each, number_of)] for key, each in value.items()]}
    raise Unsendable(f"a {type(value).__name__} cannot be sent to the process of a candidate")


def printable(text: str) -> str:
    """Replace characters that could control a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)
