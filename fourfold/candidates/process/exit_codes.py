"""Descriptions of the exit codes of processes."""

import signal


def spelled(code: int) -> str:
    """Describe an exit code, or the negative number of the signal that killed a process."""
    if code >= 0:
        return f"ended with exit code {code}"
    return f"died of {signal.Signals(-code).name}" + (", as where memory runs out" if code == -signal.SIGKILL else "")
