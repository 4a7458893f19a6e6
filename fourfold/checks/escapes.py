"""A kernel that raises an order to end in place of an error, as ``sys.exit`` does, fails its check and ends nothing."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import hypothesis
import pytest


class Escape(AssertionError):
    """A call raised what is not derived from Exception."""


# What goes through as it is: errors, a test's own end, as at its time limit, and Hypothesis's way to end an example.
_PASSED_ON: tuple[type[BaseException], ...] = (Exception, pytest.fail.Exception, hypothesis.errors.StopTest)
_ctrl_c = threading.Event()


@contextlib.contextmanager
def held(*but: type[BaseException]) -> Iterator[None]:
    """Within it, what would end the run is an error; but for a Ctrl-C of the user's, once `hear_ctrl_c` was called.

    Args:
        but: what else goes through as it is.

    Raises:
        Escape: SystemExit, GeneratorExit, KeyboardInterrupt or the like was raised.
    """
    try:
        yield
    except _PASSED_ON + but:
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and _ctrl_c.is_set():
            raise
        said = f": {error}" if str(error) else ""
        escape = Escape(f"the call raised {type(error).__name__}{said}")
        raise escape.with_traceback(error.__traceback__) from None


def hear_ctrl_c() -> None:
    """From here on a KeyboardInterrupt of the user's is told from one that a kernel raises."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        _ctrl_c.set()
        raise KeyboardInterrupt

    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
