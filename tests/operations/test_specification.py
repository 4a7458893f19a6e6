"""The records of the operations are strict: no meaningless result passes for a right one, in any dtype."""

import hypothesis
import pytest

from fourfold.checks.impostors import accepted_impostors
from fourfold.checks.records import operations
from fourfold.numerics.dtypes import DTYPES
from fourfold.operations.case import Case
from fourfold.operations.record import Operation

# Of several outputs each by itself.
OPERATIONS = {of.name: of for operation in operations().values() for of in (operation.outputs.values() or [operation])}
# A plain run takes one dtype.
PARAMETERS = [pytest.param(name, marks=() if name == "float32" else pytest.mark.full) for name in DTYPES]
# Enough cases that some have the same shape, because another case's result serves as an impostor. They are small,
# because even simple cases must reject impostors.
GENERATED, ELEMENTS = 60, 64


def generate_cases(operation: Operation, dtype: str) -> list[Case]:
    drawn: list[Case] = []

    @hypothesis.settings(
        max_examples=GENERATED,
        phases=[hypothesis.Phase.generate],
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(operation.cases(DTYPES[dtype], ELEMENTS))
    def keep(case: Case) -> None:
        drawn.append(case)

    keep()
    return drawn


@pytest.mark.full(but=12)
@pytest.mark.parametrize("dtype", PARAMETERS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_generated_cases_reject_every_impostor(name: str, dtype: str) -> None:
    found = accepted_impostors(OPERATIONS[name], DTYPES[dtype], generate_cases(OPERATIONS[name], dtype))
    assert not found, "\n".join(map(str, found))


@pytest.mark.full(but=12)
@pytest.mark.parametrize("dtype", PARAMETERS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_examples_reject_every_impostor(name: str, dtype: str) -> None:
    examples = (make(DTYPES[dtype]) for make in OPERATIONS[name].examples.values())
    found = accepted_impostors(OPERATIONS[name], DTYPES[dtype], examples)
    assert not found, "\n".join(map(str, found))
