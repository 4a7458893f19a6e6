"""Python's private parts."""

import threading

from fourfold.compat import uses


@uses("threading._DummyThread")
def is_foreign(thread: threading.Thread) -> bool:
    """Whether a thread was started by other means than `threading`, and called Python.

    Python makes an object for it then, whose class has no public name. It is never seen to end.
    """
    return isinstance(thread, threading._DummyThread)
