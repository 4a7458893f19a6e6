"""The JSON of verdicts, of runs and of grading conforms to docs/verdict.schema.json, without other properties."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import warm

import fourfold
from fourfold.engine.verdict import SCHEMA_VERSION, Verdict
from fourfold.grading.results import Graded
from fourfold.operations.outcomes import Kind, Status

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed: pip install -e '.[dev]'")
ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "docs" / "verdict.schema.json").read_text())
KERNELS = """
import torch


def right(x):
    if not x.is_contiguous():
        raise ValueError("x must be contiguous")
    return torch.softmax(x, -1)


def wrong(x):
    if x.shape[-1] == 2:
        raise ValueError("x must have other columns than two")
    numerator = torch.exp(x)
    return numerator / numerator.sum(-1, keepdim=True)
"""


def violations(said: Any) -> list[str]:
    """Return the violations of the schema in a document, including unknown properties."""
    strict = copy.deepcopy(SCHEMA)
    strict["additionalProperties"] = strict["$defs"]["check"]["additionalProperties"] = False
    return [error.message for error in jsonschema.Draft202012Validator(strict).iter_errors(said)]


def test_the_schema_is_one_and_names_every_outcome() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["properties"]["schema_version"]["const"] == SCHEMA_VERSION
    assert set(SCHEMA["$defs"]["kind"]["enum"]) == set(Kind)
    assert set(SCHEMA["$defs"]["check"]["properties"]["outcome"]["enum"]) == set(Status)
    assert violations({}) == [f"'{name}' is a required property" for name in SCHEMA["required"]]
    failed = {"check": "forward", "dtype": "float32", "outcome": "failed", "told": 1}
    assert len(violations({**dict.fromkeys(SCHEMA["required"], ""), "checks": [failed]})) > 2


@pytest.fixture(scope="module")
def verdicts() -> list[Verdict]:
    """Return the verdicts on a kernel that refuses and on a wrong one."""
    own: dict[str, Any] = {}
    exec(KERNELS, own)
    only = ["forward", "memory"]
    options: dict[str, Any] = {"only": only, "examples": 2, "seed": 1, "dtypes": ["float32"], "device": "cpu"}
    return [fourfold.verify(own[name], "softmax", **options) for name in ("right", "wrong")]


def test_a_verdict_is_as_the_schema_says_and_comes_back(verdicts: list[Verdict]) -> None:
    assert [verdict.kind for verdict in verdicts] == [Kind.RIGHT, Kind.WRONG]
    for verdict in verdicts:
        said = json.loads(verdict.json())
        assert not violations(said)
        assert bool(said["counts"]["failed"]) != verdict.passed
        assert Verdict.from_json(verdict.json()) == verdict


def test_a_line_of_grading_is_as_the_schema_says_and_comes_back(verdicts: list[Verdict]) -> None:
    for verdict in verdicts:
        graded = Graded.of(verdict, id="a", key="b", stage="full", worker="here", repeat="fourfold grade a")
        assert not violations(json.loads(graded.line()))
        assert Graded.from_json(graded.line()) == graded


@pytest.mark.full
def test_a_run_is_as_the_schema_says(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(KERNELS)
    environment = warm.variables("TRITON_INT", PYTHONPATH=str(ROOT))
    words = ["mine.py:wrong", "--as=softmax", "--device=cpu", "--dtype=float32", "--examples=2"]
    done = warm.run("fourfold", "verify", *words, "-k", "test_output_agrees", "--json", cwd=tmp_path, env=environment)
    said = json.loads(done.stdout)
    assert not violations(said)
    (check,) = said["checks"]
    assert (said["kind"], check["kind"], said["counts"]["failed"]) == ("wrong", "wrong", 1)
    assert check["refusals"].keys() == {"ValueError: x must have other columns than two"}
    assert 0 < check["refused_share"] < 1 < check["worst_error_over_bound"]
    assert check["counterexample"].startswith("Case(x=")
    assert check["repeat"].startswith("pytest ")
