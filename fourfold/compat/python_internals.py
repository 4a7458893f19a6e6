"""Python's private parts."""

import atexit
import threading

from fourfold.compat import uses


@uses("threading._DummyThread")
def is_foreign(thread: threading.Thread) -> bool:
    """Return whether a thread was not started by `threading`, but called Python.

    Python creates an object for such a thread, whose class has no public name and which never ends.
    """
    return isinstance(thread, threading._DummyThread)


@uses("threading._shutdown", "atexit._run_exitfuncs")
def handle_exit() -> None:
    """Wait for the threads that are no daemons and run the exit handlers, as Python does before it ends a process.

    `multiprocessing` calls both in the processes that it forks.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
