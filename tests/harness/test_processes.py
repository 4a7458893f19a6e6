"""Child processes and the messages between processes."""

import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import warm

from fourfold.processes.child import SHOWN_CHARACTERS, Child, Death, Limits
from fourfold.processes.messages import Connection, Ended, Malformed, decode, encode


@dataclass(frozen=True)
class Leaf:
    name: str
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Tree:
    share: float
    leaves: list[tuple[str, Leaf | int | None]]
    named: Mapping[str, bool]
    open: Any = None
    more: list[int] | dict[str, int] | None = None


TREE = Tree(0.5, [("a", Leaf("x", (1, 2))), ("b", 3), ("c", None)], {"d": True}, {"e": [1]}, [1])


def test_a_message_arrives_as_it_was_sent() -> None:
    assert decode(Tree, json.loads(encode(TREE))) == TREE
    assert decode(Leaf | Tree, json.loads(encode(Tree(1, [], {})))) == Tree(1, [], {})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"share": "0.5"}, "expected float, got '0.5'"),
        ({"share": True}, "expected float, got True"),
        ({"leaves": {}}, "expected list, got {}"),
        ({"leaves": [["a"]]}, "expected tuple"),
        ({"leaves": [["a", True]]}, "got True"),
        ({"leaves": [["a", {"kind": "Leaf", "name": "x"}]]}, "got a malformed Leaf"),
        ({"leaves": [["a", {"kind": "Leaf", "name": "x", "sizes": [True]}]]}, "expected int, got True"),
        ({"leaves": [["a", {"kind": "Tree"}]]}, "got a malformed Tree"),
        ({"named": {"d": 1}}, "expected bool, got 1"),
        ({"more": [1.5]}, "expected int, got 1.5"),
        ({"more": "none"}, "got 'none'"),
        ({"other": 1}, "expected Tree, got a malformed Tree"),
        ({"kind": "Leaf"}, "expected Tree, got a malformed Leaf"),
    ],
)
def test_a_message_of_another_type_is_malformed(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(Malformed) as caught:
        decode(Tree, json.loads(encode(TREE)) | changes)
    assert says in str(caught.value)


def test_a_deadline_is_that_of_the_given_clock() -> None:
    own, other = Connection.pair()
    now = [100.0]
    patient = Connection(own.end, clock=lambda: now[0]).within(50.0)
    other.send(TREE)
    assert patient.receive(Tree) == TREE
    now[0] = 150.0
    with pytest.raises(TimeoutError):
        patient.receive(Tree)
    other.close()
    with pytest.raises(Ended):
        own.receive(Tree)


def fail() -> None:
    sys.stderr = sys.__stderr__  # past pytest's capture
    raise LookupError("\x1b[31mlost")


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def write_much() -> None:
    os.write(1, b"a" * SHOWN_CHARACTERS + b"the end")


def spin() -> None:
    while True:
        pass


def allocate() -> None:
    sys.stderr = sys.__stderr__
    bytearray(1 << 34)


@pytest.mark.parametrize(
    ("work", "code", "cause", "printed"),
    [
        (lambda: 7, 7, "ended with exit code 7", ""),
        (lambda: None, 0, "ended with exit code 0", ""),
        (fail, 1, "ended with exit code 1", "LookupError: ?[31mlost"),
        (kill_itself, -signal.SIGSEGV, "died of SIGSEGV", ""),
        (write_much, 0, "ended with exit code 0", "aathe end"),
        (spin, -signal.SIGXCPU, "died of SIGXCPU", ""),
        (allocate, 1, "ended with exit code 1", "MemoryError"),
    ],
)
def test_a_death_has_its_cause_and_the_last_words(work: Any, code: int, cause: str, printed: str) -> None:
    child = Child.fork(work, printed=True, limits=Limits(processor=1, memory=8 << 30))
    death = child.wait()
    assert death is not None
    assert (death.code, death.cause) == (code, cause)
    assert death.printed.endswith(printed)
    assert len(death.printed) <= SHOWN_CHARACTERS
    assert child.poll() is death
    assert str(death).startswith(cause)


@pytest.mark.parametrize("code", [0, 3])
def test_a_spawned_process_exits_with_what_main_returns(code: int, tmp_path: Path) -> None:
    (tmp_path / "returns.py").write_text("def main(code):\n    print('said')\n    return int(code) or None\n")
    child = Child.spawn("returns", code, environment=warm.variables(PYTHONPATH=str(tmp_path)), printed=True)
    assert child.wait() == Death(code, "said")


def ends_soon(process: int) -> bool:
    """Return whether a process ends within seconds; whoever adopted it may not have reaped it."""
    gone, _ = psutil.wait_procs([psutil.Process(process)] if psutil.pid_exists(process) else [], 5)
    return bool(gone) or not psutil.pid_exists(process) or psutil.Process(process).status() == psutil.STATUS_ZOMBIE


def test_a_child_that_runs_is_killed_with_the_processes_of_its_session() -> None:
    own, other = Connection.pair()

    def start_another() -> None:
        other.send(Leaf("pid", (Child.fork(signal.pause, session=False).pid,)))
        signal.pause()

    with own, other:
        child = Child.fork(start_another)
        (grandchild,) = own.receive(Leaf).sizes
    assert child.wait(0.05) is None
    assert child.kill() == Death(-signal.SIGKILL)
    assert ends_soon(grandchild)


def test_a_wait_ends_by_the_given_clock() -> None:
    ticks = iter([0.0, 1.0, 1e9])
    child = Child.fork(signal.pause, clock=lambda: next(ticks))
    assert child.wait(100.0) is None
    child.kill()


def test_a_fork_of_its_parent_can_kill_a_child_and_not_wait_for_it() -> None:
    child = Child.fork(signal.pause)
    other = Child.fork(lambda: 0 if child.kill() is None else 1)
    assert other.wait() == Death(0)
    assert child.wait() == Death(-signal.SIGKILL)


def test_a_child_ends_with_its_parent() -> None:
    own, other = Connection.pair()

    def start_another() -> None:
        other.send(Leaf("pid", (Child.fork(signal.pause).pid,)))

    with own, other:
        Child.fork(start_another).wait()
        (grandchild,) = own.receive(Leaf).sizes
    assert ends_soon(grandchild)
