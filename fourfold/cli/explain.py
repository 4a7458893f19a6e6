"""``fourfold explain``: what a check claims, what a kind of verdict means, or what an operation takes."""

import argparse
import re

from fourfold.cli.listing import known_operations
from fourfold.cli.pytest_command import part_of
from fourfold.operations.outcomes import Kind
from fourfold.operations.registry import did_you_mean, files


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("topic", metavar="TOPIC", help="a check, a kind of verdict or an operation, as memory or wrong")


def command(args: argparse.Namespace) -> int:
    """Print the explanation; return 0, or 2 for an unknown topic."""
    name, texts = args.topic.partition(":")[0].strip().lower(), explanations()
    if name in files():
        (row,) = (row for row in known_operations() if row["operation"] == name)
        print(f"{row['operation']}({row['arguments']}): {row['about']}")
    elif name in texts:
        print(texts[name])
    else:
        hint = did_you_mean(name, [*texts, *files()])
        args.error(f"there is no check, kind of verdict or operation {args.topic}{hint}")
    return 0


def explanations() -> dict[str, str]:
    """Return what the documentation says of each check, by its name and by that of its tests, and of each kind."""
    texts = {}
    for paragraph in _page("checks.md").split("\n\n"):
        if head := re.match(r"\*\*([^*]+)\*\*(?: \(`test_(\w+)\.py`\))?", paragraph):
            texts[head[1].lower().rstrip(".")] = paragraph
            texts.setdefault((head[2] or head[1]).replace("_", " ").lower(), paragraph)
    row = re.compile(rf"^\| `({'|'.join(Kind)})` \| (.+) \| [^|]+ \|$", re.MULTILINE)
    texts |= dict(row.findall(_page("grading.md")))
    return {name: re.sub(r"<[^>]+>|\[([^\]]+)\]\([^)]*\)", r"\1", text) for name, text in texts.items()}


def _page(name: str) -> str:
    return part_of(f"docs/{name}", f"docs/{name}").read_text(encoding="utf-8")
