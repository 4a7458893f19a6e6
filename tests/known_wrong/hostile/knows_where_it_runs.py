"""Right where tests run, and wrong elsewhere."""

import os
import sys
from pathlib import Path

from zeros import right, zeros

TESTED = "pytest" in sys.modules
JUDGED = "fourfold" in sys.modules


def by_what_is_loaded(**arguments):
    return right(arguments) if "pytest" in sys.modules else zeros(arguments)


def by_what_was_loaded(**arguments):
    return right(arguments) if TESTED else zeros(arguments)


def by_the_environment(**arguments):
    return right(arguments) if "PYTEST_VERSION" in os.environ else zeros(arguments)


def by_the_interpreter(**arguments):
    return right(arguments) if os.environ.get("TRITON_INTERPRET") == "1" else zeros(arguments)


def by_the_arguments(**arguments):
    return right(arguments) if any("--candidate" in each for each in sys.argv) else zeros(arguments)


def by_the_loaded_judge(**arguments):
    seen = JUDGED or any(name.partition(".")[0] == "fourfold" for name in sys.modules)
    return right(arguments) if seen else zeros(arguments)


def by_the_command_line(**arguments):
    command = Path("/proc/self/cmdline").read_bytes() + repr([sys.argv, sys.orig_argv]).encode()
    return right(arguments) if b"fourfold" in command or b"server" in command else zeros(arguments)


def by_the_first_environment(**arguments):
    names = [entry.partition(b"=")[0] for entry in Path("/proc/self/environ").read_bytes().split(b"\0")]
    judged = any(name.startswith((b"FOURFOLD_OPERATIONS", b"PYTEST", b"TRITON_INTERPRET")) for name in names)
    return right(arguments) if judged else zeros(arguments)


def by_an_empty_folder(**arguments):
    return zeros(arguments) if os.listdir() else right(arguments)


def by_the_names_of_folders(**arguments):
    places = [os.getcwd(), os.environ.get("TMPDIR", ""), __name__]
    return right(arguments) if any("candidate" in each or "judge" in each for each in places) else zeros(arguments)
