"""The records of the operations are strict: no meaningless result passes for a right one, in any dtype."""

import hypothesis
import pytest

from fourfold.checks.impostors import accepted_impostors
from fourfold.numerics.dtypes import DTYPES
from fourfold.operations.case import Case
from fourfold.operations.record import Operation
from fourfold.pytest_plugin.failures import SELECTION

# A plain run takes one dtype.
PARAMETERS = [pytest.param(name, marks=() if name == "float32" else pytest.mark.full) for name in DTYPES]
# Enough cases that some have the same shape, because another case's result serves as an impostor. They are small,
# because even simple cases must reject impostors.
GENERATED, ELEMENTS = 60, 64


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give each test every known operation; of several outputs each by itself."""
    known = metafunc.config.stash[SELECTION].operations.values()
    each = {of.name: of for operation in known for of in (operation.outputs.values() or [operation])}
    metafunc.parametrize("operation", each.values(), ids=each)


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
def test_generated_cases_reject_every_impostor(operation: Operation, dtype: str) -> None:
    found = accepted_impostors(operation, DTYPES[dtype], generate_cases(operation, dtype))
    assert not found, "\n".join(map(str, found))


@pytest.mark.full(but=12)
@pytest.mark.parametrize("dtype", PARAMETERS)
def test_examples_reject_every_impostor(operation: Operation, dtype: str) -> None:
    examples = (make(DTYPES[dtype]) for make in operation.examples.values())
    found = accepted_impostors(operation, DTYPES[dtype], examples)
    assert not found, "\n".join(map(str, found))
