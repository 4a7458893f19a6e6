"""Processes of candidates from their judge's side: start, requests and end."""

import atexit
import contextlib
import itertools
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fourfold.candidates.process import protocol
from fourfold.candidates.process.first_process import (
    Crashed,
    FirstProcess,
    Unanswered,
    end_first_process,
    first_process,
)
from fourfold.instruments import sparse_memory
from fourfold.operations.blame import Blame
from fourfold.operations.outcomes import Kind, Unsupported
from fourfold.operations.refusals import OutOfTime
from fourfold.processes.child import SHOWN_CHARACTERS, Child, Death, printable
from fourfold.processes.messages import MOST_BYTES, Connection, Ended, Malformed

# The most entries of the working folder that a candidate sees, and the most bytes of a file in it.
MOST_ENTRIES, MOST_COPIED = 200, 1 << 20
# Seconds for a process to end after it closed its connection.
SECONDS_TO_END = 2.0


class TimedOut(Unanswered, OutOfTime):
    """The process did not answer in time, and was ended."""

    kind = Kind.TIMED_OUT


class AnsweredWrongly(Unanswered):
    """The process sent an invalid answer, and was ended."""


_sessions: "weakref.WeakSet[Session]" = weakref.WeakSet()


def end_candidates() -> None:
    """End every candidate's process and its children. The next call starts another."""
    for session in list(_sessions):
        session.end()


def end_all() -> None:
    """End every candidate's process, its children, and the first process."""
    end_candidates()
    end_first_process()


atexit.register(end_all)


def fork_first_process() -> FirstProcess:
    """Fork the first process of this process; return the fork, for a process that this one forks."""
    first = first_process()
    connection, peer = Connection.pair()
    with peer:
        started = first.ask(protocol.ForkFirst(), protocol.CandidateStarted, [peer.fileno()])
    child = Child(started.process, session=True, output=None)
    return FirstProcess(connection, child, first.variables)


class Session:
    """A candidate's process, from its start to its end.

    Args:
        most_bytes: the limit of its own memory.
        plain: whether it shows what a user's process shows: it works in the judge's working folder itself, it has no
            limits, and no ancestor of it is a judge unless that adopts orphans.

    Attributes:
        connection: the connection to it.
        folder: the folder of its files, among them its working folder, which is removed at its end.
        last: the contents of the storages that it holds, by number.
        forgotten, forgotten_calls, forgotten_objects: the numbers of storages, calls and tensors that are gone here,
            not yet reported to it.
    """

    def __init__(self, most_bytes: int, plain: bool = False) -> None:
        self.connection, peer = Connection.pair()
        self.folder = Path(tempfile.mkdtemp())
        work = Path.cwd() if plain else copy_folder(self.folder)
        self.first = first_process()
        with peer:
            start = protocol.StartCandidate(str(work), most_bytes, plain)
            self.process: int = self.first.ask(start, protocol.CandidateStarted, [peer.fileno()]).process
        _sessions.add(self)
        self.owner, self.over = os.getpid(), False
        self.asked = 0
        self.last: dict[int, bytes] = {}
        self.forgotten: list[int] = []
        self.forgotten_calls: list[int] = []
        self.forgotten_objects: list[int] = []
        self._num_storages = self._num_objects = 0
        self._objects: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}  # by id: a tensor and its number
        self._storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}  # by id: a storage and its number
        self._by_number: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    # ---- storages

    def number_of(self, tensor: torch.Tensor) -> int:
        """Return the number of a tensor's storage."""
        storage = tensor.untyped_storage()
        reference, number = self._storages.get(id(storage), (None, 0))
        if reference is None or reference() is not storage:
            self._num_storages += 1
            number = self._num_storages
            self.know(storage, number)
        return number

    def object_number(self, tensor: torch.Tensor) -> int:
        """Return the number of a tensor object, the same as long as the object lives."""
        reference, number = self._objects.get(id(tensor), (None, 0))
        if reference is None or reference() is not tensor:
            self._num_objects += 1
            number = self._num_objects
            self._objects[id(tensor)] = (weakref.ref(tensor), number)
            weakref.finalize(tensor, self.forgotten_objects.append, number).atexit = False
        return number

    def know(self, storage: torch.UntypedStorage, number: int) -> None:
        """Register a storage that the process now holds with the same contents."""
        self._storages[id(storage)] = (weakref.ref(storage), number)
        self._by_number[number] = weakref.ref(storage)
        weakref.finalize(storage, self.forgotten.append, number).atexit = False

    def living(self) -> dict[int, torch.UntypedStorage]:
        """Return the storages that still exist, by number."""
        pairs = ((number, reference()) for number, reference in list(self._by_number.items()))
        return {number: storage for number, storage in pairs if storage is not None}

    def forget(self) -> list[int]:
        """Return the numbers of storages that no longer exist."""
        storages, self.forgotten[:] = list(self.forgotten), []
        for number in storages:
            self._by_number.pop(number, None)
            self.last.pop(number, None)
        self._storages = {key: pair for key, pair in self._storages.items() if pair[1] in self._by_number}
        self._objects = {key: pair for key, pair in self._objects.items() if pair[0]() is not None}
        return storages

    # ---- requests

    def ask(self, request: Any, answer: Any, seconds: float) -> tuple[Any, dict[int, torch.UntypedStorage]]:
        """Return the process's answer, and the storages by number, with their contents there updated here.

        Args:
            request: one of the protocol's.
            answer: the type of the answer, or a union of types.
            seconds: the time limit.

        Raises:
            Unanswered: it gives no answer, or a malformed one, and is ended.
        """
        if self.over:
            raise Crashed("the candidate's process that made this call has ended since")
        try:
            with end_if_malformed(self):
                return self._exchange(request, answer, seconds)
        except Unanswered:
            raise
        except TimeoutError:
            self.end()
            raise TimedOut(f"timed out: the candidate did not answer within {seconds:g} s") from None
        except (Ended, OSError):
            raise Crashed(f"crashed: the candidate's process {self.cause()}") from None
        except protocol.Unsendable as error:
            self.end()
            raise NotSent(str(error)) from None
        except BaseException:  # such as a test's time limit: the next request would get this answer
            self.end()
            raise

    def _exchange(self, request: Any, answer: Any, seconds: float) -> tuple[Any, dict[int, torch.UntypedStorage]]:
        self.asked += 1
        self.connection.within(seconds)
        storages, storages_by_number = self.forget(), self.living()
        shared, files, copied = [], [], {}
        for number, storage in storages_by_number.items():
            file = sparse_memory.file_of(storage.data_ptr())
            if file is None:
                if storage.nbytes() > MOST_BYTES:
                    raise protocol.Unsendable(f"a tensor of {storage.nbytes()} bytes cannot be sent to a process")
                copied[number] = storage
            elif self.last.get(number) is None:
                self.last[number] = b""
                shared.append((number, storage.nbytes()))
                files.append(file)
        calls, self.forgotten_calls[:] = list(self.forgotten_calls), []
        objects, self.forgotten_objects[:] = list(self.forgotten_objects), []
        message = protocol.Request(self.asked, request, storages, calls, objects, shared)
        self.connection.send(message, protocol.changed_storages(copied.items(), self.last), files)
        sizes = {number: storage.nbytes() for number, storage in storages_by_number.items()}
        reply, contents, sent = self.connection.receive_with_storages(protocol.Answer, sizes)
        for file in sent:
            os.close(file)
        if reply.number != self.asked:
            raise Malformed(f"an answer to question {reply.number}, and this is {self.asked}")
        if not isinstance(reply.result, answer | protocol.Raised):
            raise Malformed(f"the answer {type(reply.result).__name__} to {type(request).__name__}")
        for number, content in contents.items():
            if number not in storages_by_number:
                if number >= 0:
                    raise Malformed(f"the contents of the unknown storage {number}")
                storages_by_number[number] = torch.UntypedStorage(len(content))
                self.know(storages_by_number[number], number)
            elif number not in copied:
                raise Malformed(f"the contents of storage {number}, which is shared")
            protocol.overwrite(storages_by_number[number], content)
        self.last |= contents
        return reply.result, storages_by_number

    def cause(self) -> str:
        """End the process; return the cause of its death."""
        death = self.end(SECONDS_TO_END)
        return str(death) if death.code is not None else f"closed its connection\n{death.printed}".rstrip()

    def end(self, seconds: float = 0.0) -> Death:
        """End the process, which has some seconds to end by itself; return its death, without a code if it did not."""
        if self.over:
            return Death(None)
        self.over = True
        self.connection.close()
        if self.owner != os.getpid():  # this process is a fork
            return Death(None)
        death = Death(None)
        if self.first.alive:
            with contextlib.suppress(Crashed):
                answer = self.first.ask(protocol.EndCandidate(self.process, seconds), protocol.CandidateEnded)
                death = Death(answer.code, printable(answer.printed))
        shutil.rmtree(self.folder, ignore_errors=True)
        return death


def copy_folder(parent: Path) -> Path:
    """Copy the small files of the working folder into a folder; return the copy.

    A kernel sees the folder that it sees elsewhere, and cannot change it by relative paths.
    """
    source = Path.cwd()
    copy = parent / (source.name or "work")
    copy.mkdir()
    for entry in itertools.islice(os.scandir(source), MOST_ENTRIES):
        with contextlib.suppress(OSError):
            if entry.is_dir():
                (copy / entry.name).mkdir()
            elif entry.is_file() and entry.stat().st_size <= MOST_COPIED:
                shutil.copy2(entry.path, copy / entry.name)
    return copy


@contextlib.contextmanager
def end_if_malformed(session: Session) -> Iterator[None]:
    """End the process if its answer is malformed.

    Raises:
        AnsweredWrongly: the answer is malformed. The message describes it.
    """
    try:
        yield
    except Malformed as error:
        session.end()
        message = printable(str(error))[:SHOWN_CHARACTERS]
        raise AnsweredWrongly(f"crashed: the candidate's process answered out of turn: {message}") from None


class NotSent(Unsupported):
    """A case cannot be sent to the process. This is not a refusal."""

    fourfold_blame = Blame.HARNESS
