"""The options of ``fourfold mutate``. This module does not import torch."""

import argparse
from pathlib import Path

import fourfold

DESCRIPTION = "Make small mistakes in kernels, one at a time, and see whether the checks reject each, on the CPU."
EQUIVALENT = Path(fourfold.__file__).parents[1] / "tests" / "known_wrong" / "equivalent_mutants.toml"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("kernel", nargs="?", metavar="FILE:FUNCTION", help="your function that launches Triton kernels; needs --as")
    add("--as", dest="operation", metavar="OPERATION", help="what it computes, as softmax or FILE.py:OPERATION")
    add("--op", metavar="NAME", help="an operation of the library, whose kernels are mutated")
    add("--backend", choices=("cuda", "triton"), default="triton", help="the language of the library's kernels")
    add("--candidate", metavar="OP=FILE:FUNCTION", help="Triton kernels in a file of yours instead")
    add("--file", action="append", metavar="FILE", help="only mutants of this file of impls/ (repeatable)")
    add("--function", action="append", metavar="NAME", help="only mutants of this function (repeatable)")
    add("--not-operator", action="append", default=[], metavar="NAME", help="no mutants of this kind (repeatable)")
    add("--operator", action="append", metavar="NAME", help="only mutants of this kind (repeatable)")
    add("--dtype", action="append", metavar="NAME", help="only this dtype (repeatable)")
    add("--examples", type=int, default=25, metavar="N", help="generated cases of each dtype")
    add("--again", type=Path, metavar="REPORT", help="only the survivors of this report")
    add("--sample", type=int, metavar="N", help="this many mutants, chosen at random")
    add("--seed", type=int, default=0, metavar="N", help="of the choice")
    add("--jobs", type=int, default=1, metavar="N", help="mutants tried at a time")
    add("--quick", action="store_true", help="only the checks that reject most; then --again the rest")
    add("--report", type=Path, metavar="FILE", help="write everything to this file as JSON")
    add("--known", type=Path, default=EQUIVALENT, metavar="FILE", help="the list of equivalent mutants")
    add("--list", action="store_true", help="print the mutants without trying them")
