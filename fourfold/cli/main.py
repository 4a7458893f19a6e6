"""The command ``fourfold``: one parser, and for each subcommand a module that is imported when it runs."""

import argparse
import contextlib
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import fourfold
from fourfold.cli.parser import STANDARD_OUTPUT, Parser
from fourfold.cli.settings import BadSettings, ProjectSettings
from fourfold.operations.registry import did_you_mean


class Command(NamedTuple):
    """A subcommand.

    Attributes:
        what: its description.
        options: the module and the function that adds its options to a parser.
        run: the module whose `command` takes the parsed options and returns the exit code.
    """

    what: str
    options: tuple[str, str]
    run: str


COMMANDS = {
    "tour": Command(
        "verify two kernels that come with this package, a right one and a wrong one, and say what to do next",
        ("fourfold.cli.tour", "add_options"),
        "fourfold.cli.tour",
    ),
    "init": Command(
        "write a test file for a kernel of yours, and a workflow for GitHub that runs it",
        ("fourfold.cli.init", "add_options"),
        "fourfold.cli.init",
    ),
    "list": Command(
        "list the known operations, or the kernels and operations of a file",
        ("fourfold.cli.listing", "add_options"),
        "fourfold.cli.listing",
    ),
    "verify": Command(
        "run every check of an operation on your kernel",
        ("fourfold.cli.verify", "add_options"),
        "fourfold.cli.verify",
    ),
    "bench": Command(
        "time a kernel of yours beside torch and torch.compile, and say whether it has become slower than a saved run",
        ("fourfold.cli.bench", "add_options"),
        "fourfold.cli.bench",
    ),
    "grade": Command(
        "judge thousands of untrusted kernels, on one machine or on many",
        ("fourfold.cli.options", "add_grade"),
        "fourfold.cli.grade",
    ),
    "report": Command(
        "write pages from saved results of verify, grade and bench, and an index of them",
        ("fourfold.cli.options", "add_report"),
        "fourfold.cli.report",
    ),
    "accuracy": Command(
        "measure the rounding errors of kernels in ulp, beside those of torch and of other libraries",
        ("fourfold.cli.options", "add_accuracy"),
        "fourfold.cli.accuracy",
    ),
    "resources": Command(
        "compile kernels without a GPU, and compare the registers, spills, shared memory and instructions that they"
        " need with another revision",
        ("fourfold.cli.options", "add_resources"),
        "fourfold.cli.resources",
    ),
    "sanitize": Command(
        "run a script with Triton kernels on the CPU, though it was written for a GPU, and report memory errors and"
        " races; exit with 1 where there is an error, or the script fails",
        ("fourfold.sanitize.command", "add_options"),
        "fourfold.sanitize.command",
    ),
    "explain": Command(
        "explain a check, a kind of verdict or an operation",
        ("fourfold.cli.explain", "add_options"),
        "fourfold.cli.explain",
    ),
    "mcp": Command(
        "serve verify, sanitize, bench and explain to a program, by the Model Context Protocol",
        ("fourfold.cli.mcp", "add_options"),
        "fourfold.cli.mcp",
    ),
    "mutate": Command(
        "make small mistakes in kernels, one at a time, and see whether the checks reject each",
        ("fourfold.mutation.options", "add_options"),
        "fourfold.cli.mutate",
    ),
}


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    words = sys.argv[1:] if words is None else words
    name, *arguments = words or ["--help"]
    if name not in COMMANDS:
        return about(name, [*words])
    args = parse(name, arguments)
    to_errors = getattr(args, "json", None) == STANDARD_OUTPUT
    with contextlib.redirect_stdout(sys.stderr) if to_errors else contextlib.nullcontext():
        return importlib.import_module(COMMANDS[name].run).command(args)


def parse(name: str, words: Sequence[str]) -> argparse.Namespace:
    """Return the options of a command; settings of the project are their defaults."""
    summary, (module, function), _ = COMMANDS[name]
    parser = Parser(prog=f"fourfold {name}", description=summary[0].upper() + summary[1:] + ".")
    getattr(importlib.import_module(module), function)(parser)
    try:
        return parser.parse(ProjectSettings.of(Path.cwd()).words(parser.names, words))
    except BadSettings as error:
        parser.error(str(error))


def about(name: str, words: Sequence[str]) -> int:
    """Print the help or the version; exit with 2 for an unknown command."""
    parser = Parser(prog="fourfold", description="Is a GPU kernel right, on every shape, dtype and layout?")
    parser.add_argument("--version", action="version", version=f"fourfold {fourfold.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)
    for command_name, command in COMMANDS.items():
        commands.add_parser(command_name, help=command.what)
    if not name.startswith("-"):
        parser.error(f"there is no command {name}{did_you_mean(name, COMMANDS)}")
    parser.parse(["--help"] if name == "--help" else words)
    return 0


if __name__ == "__main__":
    sys.exit(main())
