"""Messages between processes: dataclasses as JSON, and the bytes of tensors' memory.

A message names its class and has the fields of that class. Received data is never unpickled, evaluated or imported. A
message in another format raises `Malformed`.
"""

import dataclasses
import functools
import json
import math
import os
import socket
import struct
import time
import typing
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, UnionType
from typing import Any

# The longest text of a message, and the most bytes of a storage that is copied.
MOST_TEXT = 1 << 26
MOST_BYTES = 1 << 30
# The most descriptors, and the most storages in a message.
MOST_DESCRIPTORS, MOST_STORAGES = 64, 1 << 12
_LENGTH = struct.Struct(">Q")
_KIND = "kind"
# The types of parsed JSON for a type of a field, where they are not the type itself.
_JSON: Mapping[Any, tuple[type, ...]] = {float: (float, int), tuple: (list,), Mapping: (dict,)}
_NOTHING: Mapping[int, bytes] = MappingProxyType({})


class Malformed(Exception):
    """A message of the other side has another format than described here."""


class Ended(Exception):
    """The other side closed the connection."""


def encode(message: Any) -> str:
    """Return JSON of a dataclass whose fields are JSON, dataclasses, or lists, tuples and dictionaries of these."""
    return json.dumps(message, default=_to_mapping)


def _to_mapping(message: Any) -> dict[str, Any]:
    fields = dataclasses.fields(message)
    return {_KIND: type(message).__name__, **{field.name: getattr(message, field.name) for field in fields}}


def decode(kind: Any, value: Any) -> Any:
    """Return the value of a type that JSON encodes.

    Args:
        kind: a dataclass, a JSON type, a list, tuple or dictionary of types, or a union of types.
        value: the parsed JSON.

    Raises:
        Malformed: it encodes no such value.
    """
    origin, arguments = _parts(kind)
    if origin is None:
        if type(value) in _JSON.get(kind, (kind,)) or kind is Any:
            return value
        kind_name = value.get(_KIND) if isinstance(value, dict) else None
        if isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind_name == kind.__name__:
            types = _types(kind)
            if value.keys() - {_KIND} == types.keys():
                return kind(**{name: decode(types[name], value[name]) for name in types})
    elif origin in (typing.Union, UnionType):
        return decode(_member(kind, value), value)
    elif origin is list and isinstance(value, list):
        return [decode(arguments[0], item) for item in value]
    elif origin is tuple and isinstance(value, list):
        members = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        if len(members) == len(value):
            return tuple(map(decode, members, value))
    elif origin in (dict, Mapping) and isinstance(value, dict):
        return {name: decode(arguments[1], item) for name, item in value.items()}
    raise Malformed(f"expected {getattr(kind, '__name__', kind)}, got {_describe(value)}")


@functools.cache
def _parts(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return typing.get_origin(kind), typing.get_args(kind)


def _describe(value: Any) -> str:
    kind_name = value.get(_KIND) if isinstance(value, dict) else None
    return f"a malformed {kind_name}" if isinstance(kind_name, str) else f"{value!r:.100}"


def _member(union: Any, value: Any) -> Any:
    """Return the member of a union that JSON names, or has the type of."""
    classes, plain_kinds = _members(union)
    kind_name = value.get(_KIND) if isinstance(value, dict) else None
    member = classes.get(kind_name) if isinstance(kind_name, str) else None
    if member is None and (member := plain_kinds.get(type(value))) is None:
        raise Malformed(f"expected {union}, got {_describe(value)}")
    return member


@functools.cache
def _members(union: Any) -> tuple[dict[str, Any], dict[type, Any]]:
    """Return the dataclasses of a union by name, and its other members by the type of their JSON."""
    classes: dict[str, Any] = {}
    plain_kinds: dict[type, Any] = {}
    for member in typing.get_args(union):
        if dataclasses.is_dataclass(member):
            classes[member.__name__] = member  # type: ignore[union-attr]
        else:
            plain = typing.get_origin(member) or member
            for type_of_json in _JSON.get(plain, (plain,)):
                plain_kinds.setdefault(type_of_json, member)
    return classes, plain_kinds


@functools.cache
def _types(kind: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields, even where its module is hidden: its `__init__` knows the module."""
    types = typing.get_type_hints(kind.__init__)  # type: ignore[misc]
    return {field.name: types[field.name] for field in dataclasses.fields(kind)}


class Connection:
    """A connection that sends and receives messages.

    Args:
        end: one end of a pair of connected sockets, or its descriptor.
        clock: the clock of the deadline, in seconds.

    Attributes:
        deadline: the time at which sending or receiving fails.
    """

    def __init__(self, end: socket.socket | int, clock: Callable[[], float] = time.monotonic) -> None:
        self.end = socket.socket(fileno=end) if isinstance(end, int) else end
        self.deadline, self._clock = math.inf, clock

    @classmethod
    def pair(cls) -> tuple["Connection", "Connection"]:
        """Return both ends of a connection."""
        first, second = socket.socketpair()
        return cls(first), cls(second)

    def fileno(self) -> int:
        """Return the descriptor of this end."""
        return self.end.fileno()

    def within(self, seconds: float) -> "Connection":
        """Set the deadline to some seconds from now."""
        self.deadline = self._clock() + seconds
        return self

    def send(self, message: Any, storages: Mapping[int, bytes] = _NOTHING, files: Sequence[int] = ()) -> None:
        """Send a message, the contents of storages by number, and descriptors of files.

        Raises:
            Ended: the other side has gone.
            TimeoutError: the deadline has passed.
        """
        text = encode([message, [[number, len(content)] for number, content in storages.items()]]).encode()
        try:
            self._limit()
            socket.send_fds(self.end, [_LENGTH.pack(len(text))], files)
            for part in (text, *storages.values()):
                self._limit()
                self.end.sendall(part)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise Ended from error

    def receive(self, kind: Any) -> Any:
        """Receive a message of a type, which comes without storages: see `receive_with_storages`."""
        message, _, files = self.receive_with_storages(kind)
        for file in files:
            os.close(file)
        return message

    def receive_with_storages(
        self, kind: Any, sizes: Mapping[int, int] | None = None
    ) -> tuple[Any, dict[int, bytes], list[int]]:
        """Receive a message of a type, the contents of storages and descriptors.

        Args:
            kind: a dataclass, or a union of dataclasses.
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
        message, sizes_of_storages = decode(tuple[kind, list[tuple[int, int]]], text)
        storages: dict[int, bytes] = {}
        for number, size in sizes_of_storages:
            if number in storages or not 0 <= size <= MOST_BYTES or (sizes or {}).get(number, size) != size:
                raise Malformed(f"storage {number} with {size} bytes")
            if len(storages) == MOST_STORAGES:
                raise Malformed(f"more than {MOST_STORAGES} storages")
            storages[number] = self._bytes(size)
        return message, storages, files

    def close(self) -> None:
        """Close this end."""
        self.end.close()

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

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
        received = bytearray()
        while len(received) < count:
            self._limit()
            try:
                part = self.end.recv(min(count - len(received), 1 << 20))
            except ConnectionResetError as error:
                raise Ended from error
            if not part:
                raise Ended
            received += part
        return bytes(received)

    def _limit(self) -> None:
        if self.deadline == math.inf:
            self.end.settimeout(None)
            return
        seconds = self.deadline - self._clock()
        if seconds <= 0:
            raise TimeoutError
        self.end.settimeout(seconds)
