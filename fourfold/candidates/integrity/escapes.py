"""Containment of kernels that raise an order to exit, such as ``sys.exit``: the check fails, and the run goes on."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

import pytest

from fourfold.operations.not_reached import NotReached
from fourfold.operations.refusals import Escape, escape_of

__all__ = ["Escape", "convert_escapes", "hear_ctrl_c"]

_ctrl_c = threading.Event()
# Interrupts within this number of seconds count as one: a shell's `timeout` sends two, to a process and to its group.
ONE_INTERRUPT = 1.0


@contextlib.contextmanager
def convert_escapes(*but: type[BaseException]) -> Iterator[None]:
    """Turn exceptions that would end the run into an error, except the user's Ctrl-C after `hear_ctrl_c`.

    A test's own failure, such as at its time limit, propagates unchanged, and so does `NotReached`.

    Args:
        but: further exceptions that propagate unchanged.

    Raises:
        Escape: SystemExit, GeneratorExit, KeyboardInterrupt or the like was raised.
    """
    try:
        yield
    except BaseException as error:
        is_of_the_user = isinstance(error, KeyboardInterrupt) and _ctrl_c.is_set()
        if isinstance(error, (Exception, NotReached, *but)) or type(error) is pytest.fail.Exception or is_of_the_user:
            raise
        raise escape_of(error) from None


def hear_ctrl_c() -> None:
    """Distinguish a KeyboardInterrupt of the user from one that a kernel raises, from now on.

    A second one shortly after is ignored: it would interrupt the end of the run and lose its results.
    """
    first = -ONE_INTERRUPT

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal first
        _ctrl_c.set()
        current = time.monotonic()
        if current - first >= ONE_INTERRUPT:
            first = current
            raise KeyboardInterrupt

    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
