"""Cells of candidates known to be wrong, shared among the workers of a run.

Other checks of such a cell take a few small cases. On a GPU, where Triton would compile for each case, they are not
made.
"""

from pathlib import Path

from fourfold.engine.cells import Cell


class WrongCells:
    """A set of wrong cells.

    Args:
        folder: an existing folder in which the workers of a run mark wrong cells; None without workers.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._cells: set[Cell] = set()

    def add(self, cell: Cell) -> None:
        """Add a wrong cell."""
        self._cells.add(cell)
        if self._folder is not None:
            self._file(self._folder, cell).touch()

    def __contains__(self, cell: Cell) -> bool:
        return cell in self._cells or (self._folder is not None and self._file(self._folder, cell).exists())

    def _file(self, folder: Path, cell: Cell) -> Path:
        return folder / f"wrong-{cell}"
