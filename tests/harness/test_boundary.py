"""The claim that describes what a kernel refuses: the text, the JSON, a suite and the table of a run suggest it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fourfold
from fourfold.engine.verdict import Verdict
from fourfold.operations.boundary import Boundary
from fourfold.operations.claims import Claims

ROOT = Path(__file__).parents[2]
CASES = [
    # The refused cases, the accepted cases, and the claim.
    ([{"rank": 1}, {"rank": 3}], [{"rank": 2}], "ranks=(2,)"),
    ([{"dtype": "bfloat16"}], [{"dtype": "float32"}], "dtypes=('float32',)"),
    ([{"contiguous": False, "aligned": True}], [{"contiguous": True, "aligned": True}], "contiguous=True"),
    ([{"contiguous": False, "aligned": False}], [{"contiguous": False, "aligned": True}], "aligned=True"),
    (
        [{"size of cols": 65}, {"size of cols": 99}],
        [{"size of cols": 1}, {"size of cols": 64}],
        "sizes={'cols': (1, 64)}",
    ),
    ([{"size of cols": 3}, {"size of cols": 70}], [{"size of cols": 4}, {"size of cols": 96}], "sizes={'cols': 4}"),
    ([{"rank": 1}, {"rank": 2}], [{"rank": 2}], ""),
    ([{"contiguous": False}, {"contiguous": True}], [{"contiguous": True}], ""),
    ([{"rank": 1}], [], ""),
    ([], [{"rank": 1}], ""),
]


@pytest.mark.parametrize(("refused", "taken", "claim"), CASES)
def test_a_claim_leaves_out_what_was_refused(refused: list[Any], taken: list[Any], claim: str) -> None:
    boundary = Boundary()
    for traits in refused:
        boundary.add(traits, refused=True)
    for traits in taken:
        boundary.add(traits, refused=False)
    assert boundary.claim() == claim
    assert Boundary.of(json.loads(json.dumps(boundary.as_dict()))) == boundary
    Claims.parse(claim)


@fourfold.operation(x=fourfold.tensor("... cols"), weight=fourfold.tensor("cols"))
def scale(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return ``x * weight``."""
    return x * weight


def of_contiguous(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if not (x.is_contiguous() and weight.is_contiguous()):
        raise ValueError("x and weight must be contiguous")
    return x * weight


def of_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    assert x.ndim == 2
    return x * weight


def of_fours(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if x.shape[-1] % 4:
        raise ValueError(f"cols must be a multiple of 4, not {x.shape[-1]}")
    return x * weight


OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtypes": ["float32"],
    "examples": 12,
    "seed": 1,
    "only": ["forward", "memory", "sharing", "offsets", "repeatability"],
}


@pytest.mark.parametrize(
    ("kernel", "claim"),
    [
        pytest.param(of_contiguous, "contiguous=True", marks=pytest.mark.full),
        pytest.param(of_rows, "ranks=(2,)", marks=pytest.mark.full),
        (of_fours, "sizes={'cols': 4}"),
    ],
)
def test_with_the_suggested_claim_nothing_is_refused(kernel: Callable[..., torch.Tensor], claim: str) -> None:
    verdict = fourfold.verify(kernel, scale, claims=Claims(gradients=False), **OPTIONS)
    assert verdict.passed, str(verdict)
    assert verdict.suggested_claim == claim
    assert f"refused {verdict.refused_share:.0%} of the cases: the claim `{claim}` leaves out all of them" in str(
        verdict
    )
    said = json.loads(verdict.json())
    assert 0 < said["refused_share"] < 1
    assert said["suggested_claim"] == claim
    assert Verdict.from_json(verdict.json()) == verdict
    with_claim = fourfold.verify(kernel, scale, claims=Claims.parse(f"gradients=False, {claim}"), **OPTIONS)
    assert with_claim.passed
    assert not with_claim.refusals


SUITE = """
import fourfold
from fourfold import Claims, tensor

@fourfold.operation(x=tensor("... cols"), weight=tensor("cols"))
def scale(x, weight):
    return x * weight

def of_rows(x, weight):
    if x.ndim != 2:
        raise ValueError("x must have rows")
    return x * weight

def of_nothing(x, weight):
    raise NotImplementedError("no kernel yet")

def mistaken(x, weight):
    return x.no_such_attribute * weight

GIVEN = {"device": "cpu", "dtypes": ["float32"], "only": ["forward"], "claims": Claims(gradients=False), "examples": 6}
TestRows = fourfold.suite(of_rows, scale, **GIVEN)
TestNothing = fourfold.suite(of_nothing, scale, **GIVEN)
TestMistaken = fourfold.suite(mistaken, scale, **GIVEN)
"""


@pytest.mark.full
def test_a_suite_tells_of_refusals_and_fails_where_everything_is_refused(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(SUITE, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py"]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert "2 failed, 1 passed" in done.stdout, done.stdout
    assert "of the cases: the claim `ranks=(2,)` leaves out all of them" in done.stdout
    assert "ValueError: x must have rows" in done.stdout
    assert "nothing was verified: refused all" in done.stdout
    assert "AttributeError: 'Tensor' object has no attribute 'no_such_attribute'" in done.stdout
