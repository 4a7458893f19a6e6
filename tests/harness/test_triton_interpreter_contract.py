"""The private parts of Triton that the corrections to its interpreter use exist, in the used form."""

import json
import pathlib

import pytest
import triton
import warm
from one_run import one_run

from fourfold.backends.triton.interpreter import parts as triton_interpreter_parts
from fourfold.backends.triton.interpreter.parts import PARTS, PrivatePart

ROOT = pathlib.Path(__file__).parents[2]


@one_run
def missing() -> list[str]:
    """Return the missing parts of an uncorrected Triton; that of this process may be corrected."""
    script = "import json; from fourfold.backends.triton.interpreter.parts import missing; print(json.dumps(missing()))"
    return json.loads(warm.printed(script, cwd=ROOT))


@pytest.mark.parametrize("part", PARTS, ids=[part.path.partition(":")[2] for part in PARTS])
def test_part_is_there(part: PrivatePart) -> None:
    changed = [line for line in missing() if line.startswith(f"{part.path} ")]
    assert not changed, f"Triton {triton.__version__} has changed what its interpreter's corrections use: {changed[0]}"


@pytest.mark.parametrize(
    ("part", "fault"),
    [
        (
            PrivatePart("triton.runtime.interpreter:GridExecutor.launch", ("self",), "a launch"),
            "triton.runtime.interpreter:GridExecutor.launch is missing (no launch); here: a launch",
        ),
        (
            PrivatePart("triton.runtime.jit:mangle_type", ("argument",), "a type"),
            "triton.runtime.jit:mangle_type takes (arg, specialize), not (argument, ...); here: a type",
        ),
        (
            PrivatePart("triton.runtime.interpret:GridExecutor", None, "a launch"),
            "triton.runtime.interpret:GridExecutor is missing (no module triton.runtime.interpret); here: a launch",
        ),
    ],
)
def test_part_that_is_missing_is_named(part: PrivatePart, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_interpreter_parts, "PARTS", (part,))
    assert triton_interpreter_parts.missing() == [fault]
