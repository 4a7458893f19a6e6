"""The progress of `fourfold.verify` on a terminal."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextlib.contextmanager
def display(planned: Sequence[tuple[str, str]]) -> Iterator[Callable[[str, str], object]]:
    """Show the running check if standard error is a terminal; yield a function that takes its name and dtype.

    The display has no thread of its own and leaves `sys.stdout` alone, so that it changes nothing for the kernel.

    Args:
        planned: the names and dtypes of the checks, in order.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda check, dtype: None
        return
    columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    alone: Any = {"auto_refresh": False, "redirect_stdout": False, "redirect_stderr": False, "transient": True}
    with Progress(*columns, console=console, **alone) as progress:
        task = progress.add_task("", total=len(planned))

        def tell(check: str, dtype: str) -> None:
            progress.update(task, completed=planned.index((check, dtype)), description=f"{check}, {dtype}")
            progress.refresh()

        yield tell
