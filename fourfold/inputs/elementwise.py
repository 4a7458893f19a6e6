"""Cases of elementwise operations: inputs and an output of one shape."""

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np
from hypothesis import strategies as st

from fourfold import backends
from fourfold.backends.signature import signature_of
from fourfold.inputs.arrays import (
    GENERATORS,
    arrays,
    cotangent,
    layouts_for,
    leading_axes,
    repeat_first,
    sizes,
    values,
)
from fourfold.numerics.dtypes import DType
from fourfold.operations.axes import LEADING
from fourfold.operations.case import Case
from fourfold.operations.declared_errors import Arguments
from fourfold.operations.record import Operation, Sized
from fourfold.operations.workloads import Make, tiled, whole


class Elementwise:
    """The cases and the workloads of any elementwise operation.

    Args:
        inputs: the kind of numbers in the named cases, one of `fourfold.operations.arguments.KINDS`, by input.

    Attributes:
        examples: the named cases: around the sizes of blocks, and in every layout.
        workloads: the workloads whose speed is recorded.
        batched: every input with its batch axis 0. A sample is one element.
    """

    def __init__(self, **inputs: str) -> None:
        self._kinds = inputs
        self.examples = self._examples()
        self.workloads = self._workloads()
        self.batched = dict.fromkeys(inputs, 0)

    def operation(self, name: str, oracle: ModuleType, special: str, **fields: Any) -> Operation:
        """Return the record of an elementwise operation, whose implementation in torch has a signature.

        Args:
            name: the operation's name.
            oracle: the module with its forward and backward.
            special: the name of the case of special numbers.
            fields: further fields of the record, such as laws.
        """
        signature = signature_of(backends.load(name, "torch"))
        arguments = Arguments(**signature.tensors)
        defaults: dict[str, Any] = {
            "forward": oracle.forward,
            "backward": oracle.backward,
            "source": signature.source,
            "differentiable": tuple(self._kinds),
            "cases": self.cases,
            "examples": {**self.examples, special: self.special_numbers},
            "batched": self.batched,
            "errors": arguments.errors,
            "axes": arguments.axes,
            "workloads": self.workloads,
            "sized": Sized({LEADING: 1}, lambda sizes: self.random(sizes[LEADING])),
        }
        return Operation(name=name, **{**defaults, **fields})

    def cases(self, dtype: DType, elements: int) -> st.SearchStrategy[Case]:
        """Return a strategy of cases with inputs of zero to three axes."""
        return _cases(tuple(self._kinds), dtype, elements)

    def random(self, *shape: int, **layouts: str) -> Callable[[DType], Case]:
        """Return a function that makes a case of random numbers."""

        def make(dtype: DType) -> Case:
            rng = np.random.default_rng(6)
            inputs = {name: values(rng, shape, dtype, kind) for name, kind in self._kinds.items()}
            inputs = {n: repeat_first(array) if layouts.get(n) == "expanded" else array for n, array in inputs.items()}
            grad_output = cotangent(rng, shape, dtype)
            if layouts.get("grad_output") == "expanded":
                grad_output = np.full_like(grad_output, -1.5)
            return Case(inputs, grad_output, layouts=layouts)

        return make

    def special_numbers(self, dtype: DType) -> Case:
        """Return a case of infinities, NaN, the largest and smallest numbers, signed zeros and 1, each with each."""
        largest, smallest = dtype.largest, dtype.smallest_subnormal
        special = np.array([np.inf, -np.inf, np.nan, largest, -largest, 0.0, -0.0, smallest, -smallest, 1.0])
        grids = (a.reshape(-1).astype(dtype.numpy) for a in np.meshgrid(*[special] * len(self._kinds)))
        inputs = dict(zip(self._kinds, grids))
        return Case(inputs, np.linspace(-2, 3, len(special) ** len(inputs)).astype(dtype.numpy))

    def _examples(self) -> Mapping[str, Callable[[DType], Case]]:
        random, names = self.random, list(self._kinds)
        last, all_names = names[-1], "both" if len(names) == 2 else "all"

        def laid_out(*layouts: str) -> dict[str, str]:
            """Return the layouts in turn, input by input."""
            return {name: layouts[i % len(layouts)] for i, name in enumerate(names)}

        in_turn = laid_out("axes_reversed", "transposed")
        examples = {
            "no_elements": random(0),
            "no_rows": random(0, 3),
            "one_number_without_axes": random(),
            "one_element": random(1),
            # The tail of the last block: one element short of a block and of two, one past them, and blocks in full.
            "one_short_of_a_block": random(1023),
            "a_block": random(1024),
            "one_past_a_block": random(1025),
            "blocks_and_a_tail": random(3 * 4096 + 5),
            "blocks_in_full": random(2, 4, 2048),
            f"{all_names}_misaligned": random(1027, **laid_out("misaligned")),
            f"{all_names}_transposed": random(33, 65, **laid_out("transposed")),
            "three_axes_each_in_another_order": random(3, 4, 5, **in_turn),
            "four_axes_each_in_another_order": random(3, 5, 2, 7, **in_turn),
            "five_axes_each_in_another_order": random(2, 3, 2, 3, 2, **in_turn),
            "a_row_for_all": random(7, 100, **{last: "expanded"}),
            "columns_apart": random(5, 33, **laid_out("sliced_columns", "sliced_rows")),
            "rows_one_element_too_wide": random(9, 64, **{names[0]: "cut_from_wider"}),
            "cotangent_misaligned": random(1027, grad_output="misaligned"),
            "cotangent_transposed": random(33, 65, grad_output="transposed"),
            "cotangent_of_a_sum": random(7, 100, grad_output="expanded"),
        }
        if len(names) > 1:
            # A pointer that is not a multiple of 16 bytes, beside others that are.
            examples["one_input_misaligned"] = random(1027, **{last: "misaligned"})
            examples["one_transposed"] = random(33, 65, **{last: "transposed"})
        return examples

    def _workloads(self) -> Mapping[str, Mapping[str, Make]]:
        small = whole(self.random(1 << 14))
        large = tiled(self.random(1 << 18), 1024, *self._kinds)
        ragged = tiled(self.random(33, 1001), 512, *self._kinds)
        return {
            "cpu": {"small": small, "ragged": whole(self.random(7, 1001))},
            "cuda": {"small": small, "large": large, "ragged": ragged},
        }


@st.composite
def _cases(draw: st.DrawFn, names: tuple[str, ...], dtype: DType, elements: int) -> Case:
    shape = draw(leading_axes(draw(sizes(elements))))
    inputs = {name: draw(arrays(dtype, shape)) for name in names}
    grad_output = cotangent(draw(GENERATORS), shape, dtype)
    layouts = draw(layouts_for(*names, "grad_output"))
    for place, name in enumerate(names):
        if layouts[name] == "expanded":
            # The input has one row for all, or one column.
            inputs[name] = repeat_first(inputs[name], -(place % 2))
    if layouts["grad_output"] == "expanded":
        grad_output = repeat_first(grad_output)
    return Case(inputs=inputs, grad_output=grad_output, layouts=layouts)
