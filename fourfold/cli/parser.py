"""The parser of every command: argparse, as pytest has it, with rich's help and a suggestion for what is misspelt.

pytest's options are argparse's, and so are those of this project's plugin. With the same library, one description of an
option serves ``pytest -p fourfold`` and ``fourfold verify``, which passes options on that it does not know.
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from rich_argparse import RichHelpFormatter

from fourfold.operations.registry import did_you_mean

# The value of --json without a file.
STANDARD_OUTPUT = Path("/dev/stdout")


class Help(RichHelpFormatter):
    """The help of a command, as its author wrote it: square brackets are no markup, and titles keep their case."""

    text_markup = help_markup = False
    group_name_formatter = str.capitalize


class Parser(argparse.ArgumentParser):
    """A parser that names the nearest option for an unknown one."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(formatter_class=Help, allow_abbrev=False, **settings)
        self._words: Sequence[str] = ()

    @property
    def names(self) -> list[str]:
        """Return the long names of the options."""
        return re.findall(r"--[a-z-]+", self.format_help())

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse the words of a command; unknown ones go to `passed` where the command passes words on."""
        self._words = words
        args, remainder = self.parse_known_args(words)
        if not hasattr(args, "passed"):
            if remainder:
                self.error(f"unrecognized arguments: {' '.join(remainder)}")
        else:
            args.passed += remainder
        args.words, args.error = [*words], self.error
        return args

    def error(self, message: str) -> NoReturn:
        """Exit with 2 and a message, which also names the nearest option for each unknown one."""
        options, names = (word.partition("=")[0] for word in self._words if word.startswith("--")), self.names
        unknown = ((word, did_you_mean(word, names)) for word in options if word not in names)
        closest = [f"no such option: {word}{close}" for word, close in unknown if close]
        self.exit(2, "\n".join([f"{self.prog}: error: {message}", *closest, f"see {self.prog} --help\n"]))


class Passed(argparse.Action):
    """An option that is passed to pytest unchanged, joined with its value."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Store the option joined with its value."""
        option = option_string or ""
        separator = "=" if option.startswith("--") else ""
        namespace.passed = [*namespace.passed, option if values == [] else f"{option}{separator}{values}"]


def passing(add: Any) -> Any:
    """Return a function that adds an option as `add` does, for pytest to read."""

    def add_option(*names: str, action: str = "", type: Any = None, default: Any = None, **settings: Any) -> None:
        nargs = {"nargs": 0} if action == "store_true" else {}
        add(*names, action=Passed, dest="passed", default=[], **nargs, **settings)

    return add_option


def add_json(parser: argparse.ArgumentParser, content: str) -> None:
    """Add the option --json. If the JSON goes to standard output, `main` sends all other text to standard error."""
    parser.add_argument(
        "--json",
        type=lambda text: STANDARD_OUTPUT if text == "-" else Path(text),
        nargs="?",
        const=STANDARD_OUTPUT,
        metavar="FILE",
        help=f"write {content} to this file as JSON; to standard output without FILE",
    )
