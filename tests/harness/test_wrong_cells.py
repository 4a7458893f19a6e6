"""Every worker checks a candidate that is known to be wrong only briefly."""

from pathlib import Path

from fourfold.engine.cells import Cell
from fourfold.pytest_plugin.wrong_cells import WrongCells

ONE, OTHER = Cell("softmax", "candidate", "float32"), Cell("softmax", "candidate", "float64")


def test_what_one_worker_has_found_out_is_known_to_the_others(tmp_path: Path) -> None:
    found, asked, alone = WrongCells(tmp_path), WrongCells(tmp_path), WrongCells(None)
    found.add(ONE)
    alone.add(OTHER)
    assert ONE in found
    assert ONE in asked
    assert OTHER not in asked
    assert OTHER in alone
    assert ONE not in alone
