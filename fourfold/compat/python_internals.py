"""Python's private parts."""

import threading

from fourfold.compat import uses


@uses("threading._DummyThread")
def is_foreign(thread: threading.Thread) -> bool:
    """Return whether a thread was not started by `threading`, but called Python.

    Python creates an object for such a thread, whose class has no public name and which never ends.
    """
    return isinstance(thread, threading._DummyThread)
