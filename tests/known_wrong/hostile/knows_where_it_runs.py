"""Right where tests run, and wrong elsewhere."""

import inspect
import os
import resource
import sys
from pathlib import Path

import torch
from zeros import right, zeros

IMPORTED_BY = {frame.filename for frame in inspect.stack()}
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


# What a process that is judged shows, and a user's does not.


def by_its_ancestors(**arguments):
    number, commands = os.getpid(), b""
    while number > 1:
        commands += Path(f"/proc/{number}/cmdline").read_bytes()
        number = int(Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[1])
    return right(arguments) if b"pytest" in commands or b"exec(eval" in commands else zeros(arguments)


def by_its_callers(**arguments):
    judged = any("fourfold" in frame.filename for frame in inspect.stack()[1:])
    return right(arguments) if judged else zeros(arguments)


def by_its_importers(**arguments):
    return right(arguments) if any("fourfold" in name for name in IMPORTED_BY) else zeros(arguments)


def by_its_program(**arguments):
    program = Path("/proc/self/cmdline").read_bytes().split(b"\0")[1]
    return right(arguments) if program == b"-" and sys.argv[0] == "-" else zeros(arguments)


def by_its_folders(**arguments):
    copied = Path.cwd().parent == Path(os.environ.get("TMPDIR", os.devnull))
    return right(arguments) if copied else zeros(arguments)


def by_its_limits(**arguments):
    return right(arguments) if resource.getrlimit(resource.RLIMIT_DATA)[1] > 0 else zeros(arguments)


class Sum(torch.autograd.Function):
    """x + y, whose gradient of x is zero unless this package calls it."""

    @staticmethod
    def forward(ctx, x, y):
        return x + y

    @staticmethod
    def backward(ctx, cotangent):
        judged = any("fourfold" in frame.filename for frame in inspect.stack()[1:])
        return cotangent if judged else torch.zeros_like(cotangent), cotangent


def by_the_callers_of_its_gradient(x, y):
    return Sum.apply(x, y)


def to_die_elsewhere(**arguments):
    if not any("fourfold" in frame.filename for frame in inspect.stack()[1:]):
        os.kill(os.getpid(), 11)
    return right(arguments)
