"""Threads that kernels leave behind: Python would wait for them forever, but a run must end."""

import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from weakref import WeakKeyDictionary

from fourfold.candidates.frames import is_of_a_library

# The time that threads have to end by themselves.
GRACE_SECONDS = 3.0


class LeftBehind:
    """The threads that began since this object was made, each with the test that it belongs to."""

    def __init__(self) -> None:
        self._former = frozenset(threading.enumerate())
        self._tests: WeakKeyDictionary[threading.Thread, str] = WeakKeyDictionary()

    def alive(self) -> list[threading.Thread]:
        """Return the new threads that Python waits for at exit."""
        return [thread for thread in threading.enumerate() if not thread.daemon and thread not in self._former]

    def note(self, test: str) -> None:
        """Assign new threads without an owner to a test, or to an import, that has just ended."""
        for thread in self.alive():
            self._tests.setdefault(thread, test)

    def end_without_them(self, code: Callable[[], int]) -> None:
        """End the process if threads are left some time after the main thread ended.

        Args:
            code: returns the exit code for the process.
        """
        if self.alive():
            threading.Thread(target=self._end, args=(code,), daemon=True).start()

    def _end(self, code: Callable[[], int]) -> None:
        threading.main_thread().join()  # it ends before Python waits for the others
        deadline = time.monotonic() + GRACE_SECONDS
        while (threads_left := self.alive()) and time.monotonic() < deadline:
            threads_left[0].join(deadline - time.monotonic())
        if threads_left:
            for description, count in Counter(map(self._describe, threads_left)).items():
                threads = "a thread" if count == 1 else f"{count} threads"
                print(f"\nThe run ends without {threads} {description}", file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code())

    def _describe(self, thread: threading.Thread) -> str:
        frame = sys._current_frames().get(thread.ident or 0)
        stack = traceback.extract_stack(frame) if frame else []
        frames = [frame for frame in stack if not is_of_a_library(frame)] or stack
        place = f", at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
        return f"that {self._tests.get(thread, 'a test')} has left behind{place}"
