"""Tables as plain lines. Columns are as wide as their cells: nothing is cut, and a narrow terminal wraps a line."""

import io
from collections.abc import Iterable, Sequence

# Columns that no line reaches.
WIDEST = 10_000


def table_lines(rows: Iterable[Sequence[str]], right_aligned: Sequence[int] = ()) -> list[str]:
    """Return the rows of a table as lines without trailing space.

    Args:
        rows: the cells of each row, the head first. Short rows end early.
        right_aligned: the numbers of the columns whose cells end at the same place.
    """
    from rich.console import Console  # 0.1 s, which an import of the engine need not take
    from rich.table import Table
    from rich.text import Text

    lines = list(rows)
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    for column in range(max(map(len, lines), default=0)):
        table.add_column(justify="right" if column in right_aligned else "left", no_wrap=True)
    for row in lines:
        table.add_row(*map(Text, row))
    console = Console(file=io.StringIO(), width=WIDEST)
    console.print(table)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
