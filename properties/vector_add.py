"""The record of vector_add: elementwise sum of two arrays of one shape."""

from collections.abc import Iterator

import numpy as np
from fourfold.oracles import vector_add as oracle

from fourfold.inputs.elementwise import Elementwise
from fourfold.numerics.dtypes import DType
from fourfold.operations.case import Case
from fourfold.operations.record import Evaluate, Relation
from fourfold.operations.relations import equals_exactly, law

SUMMANDS = Elementwise(x="normal", y="spread")
random_case = SUMMANDS.random
the_order_of_the_terms_does_not_matter = law(
    "the_order_of_the_terms_does_not_matter",
    lambda output, case, _: (output(case), output(case.with_inputs(x=case["y"], y=case["x"]))),
    exact=True,
)
adding_zero_changes_nothing = law(
    "adding_zero_changes_nothing",
    lambda output, case, wide: (output(case.with_inputs(y=np.zeros_like(case["y"]))), wide["x"]),
    exact=True,
)
# x + (-x) is 0, or NaN where x is not finite.
a_number_and_its_negative_cancel = law(
    "a_number_and_its_negative_cancel",
    lambda output, case, x: (output(case.with_inputs(y=-case["x"])), np.where(np.isfinite(x["x"]), 0, np.nan)),
    exact=True,
)


def gradients_are_the_cotangent(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """The gradients of x and y are both the cotangent, to the last bit."""
    for gradient in evaluate(case).gradients.values():
        yield equals_exactly(gradient, case.grad_output.astype(dtype.wide))


laws = (
    the_order_of_the_terms_does_not_matter,
    adding_zero_changes_nothing,
    a_number_and_its_negative_cancel,
    gradients_are_the_cotangent,
)
operation = SUMMANDS.operation("vector_add", oracle, special="special_sums", laws=laws)
