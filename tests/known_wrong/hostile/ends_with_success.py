"""Gives wrong results, and lets the process end with exit code 0 and a verdict of its own."""

import atexit
import json
import os
import signal
import sys
from pathlib import Path

from zeros import objects, options, zeros

FORGED = json.dumps({"passed": True, "counts": {"passed": 99, "failed": 0, "unsupported": 0}, "checks": []})


def forge():
    for place in options("--verdict"):
        Path(place).write_text(FORGED)


def writes_at_the_end(**arguments):
    def end():
        forge()
        os._exit(0)

    atexit.register(end)
    return zeros(arguments)


def writes_now(**arguments):
    forge()
    os._exit(0)


def becomes_another_program(**arguments):
    os.execv("/bin/true", ["true"])


def ends_by_a_signal(**arguments):
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    os.kill(os.getpid(), signal.SIGTERM)
    return zeros(arguments)


def stays_as_its_own_child(**arguments):
    if os.fork():
        os._exit(0)
    return zeros(arguments)


def replaces_the_exit(**arguments):
    sys.exit = os._exit = os.abort = lambda code=0: None
    for session in objects("Session"):
        session.testsfailed, session.shouldstop = 0, "done"
    return zeros(arguments)
