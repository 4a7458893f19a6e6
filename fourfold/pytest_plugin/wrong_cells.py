"""The cells of candidates that are known to be wrong: what one worker finds out is for all of them.

Other checks of such a cell look at a few small cases. On a GPU, where Triton would compile for each of them, they are
not made.
"""

from pathlib import Path

from fourfold.engine.cells import Cell


class WrongCells:
    """A set of cells.

    Args:
        folder: an existing one, where the workers of a run leave what they have found out; None without workers.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._cells: set[Cell] = set()

    def add(self, cell: Cell) -> None:
        """A cell is wrong."""
        self._cells.add(cell)
        if self._folder is not None:
            self._file(self._folder, cell).touch()

    def __contains__(self, cell: Cell) -> bool:
        return cell in self._cells or (self._folder is not None and self._file(self._folder, cell).exists())

    def _file(self, folder: Path, cell: Cell) -> Path:
        return folder / f"wrong-{cell}"
