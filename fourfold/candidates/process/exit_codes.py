"""What the exit code of a process says."""

import signal


def spelled(code: int) -> str:
    """An exit code, or the negative number of the signal that a process died of, in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    return f"died of {signal.Signals(-code).name}" + (", as where memory runs out" if code == -signal.SIGKILL else "")
