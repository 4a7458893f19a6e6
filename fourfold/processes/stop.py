"""The end of a run by Ctrl-C, SIGTERM or SIGHUP, in the process that the user has started."""

import atexit
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from fourfold.processes.child import SIGNALS, Child
from fourfold.processes.family import adopt_orphans, kill_descendants

# Seconds that a run has to end by itself before its descendants are killed.
GRACE_SECONDS = 1.0


class Stop:
    """A context that answers Ctrl-C, SIGTERM and SIGHUP in the main thread of a process that starts others.

    The first signal requests an orderly end. The descendants of this process are killed after `GRACE_SECONDS`, or when
    this process ends, if that is earlier. Later signals are ignored: they would interrupt the end of the run.

    Args:
        relays: whether to interrupt the child of `fork` instead of raising KeyboardInterrupt in this process.

    Attributes:
        signal: the first signal; None before it.
    """

    def __init__(self, relays: bool = False) -> None:
        self.relays = relays
        self.signal: int | None = None
        self._child: Child | None = None
        self._former: dict[int, Any] = {}

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():  # other threads cannot handle signals
            former = {number: signal.getsignal(number) for number in SIGNALS}
            # A signal that is ignored, as under `nohup`, stays ignored.
            self._former = {number: handler for number, handler in former.items() if handler is not signal.SIG_IGN}
        for number in self._former:
            signal.signal(number, self._hear)
        return self

    def __exit__(self, *raised: object) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            return
        self.signal = number
        adopt_orphans()
        atexit.register(self._end)
        # A timer instead of a thread, which could not start if the signal interrupted the start of another thread.
        signal.signal(signal.SIGALRM, lambda *_: kill_descendants())
        signal.setitimer(signal.ITIMER_REAL, GRACE_SECONDS)
        if not self.relays:
            raise KeyboardInterrupt
        if self._child is not None:
            self._child.interrupt()

    def _end(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)  # Python removes the handler at exit
        kill_descendants()

    @property
    def status(self) -> int:
        """Return the exit status of a command that the signal ended, by the convention of shells."""
        return 128 + (self.signal or signal.SIGINT)

    def fork(self, work: Callable[[], object], **options: Any) -> Child:
        """Fork a child as `Child.fork`, which handles signals as this process did before."""
        self._child = child = Child.fork(work, session=False, handlers=self._former, **options)
        if self.signal is not None:  # the signal may have come before the child
            child.kill()
        return child
