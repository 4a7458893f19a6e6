"""The law of a mean or a sum over a batch: repeating the batch changes the result by a known factor."""

from collections.abc import Iterator

import numpy as np

from fourfold.numerics.dtypes import DType
from fourfold.operations import axes as notation
from fourfold.operations.axes import LEADING
from fourfold.operations.case import Case
from fourfold.operations.record import Evaluate, Law, Operation, Relation

TIMES = 3


def law_of(operation: Operation) -> Law:
    """Return the law of an operation with a `reduction`.

    Raises:
        ValueError: the reduction has another form, or names an axis that no input has.
    """
    kind, _, over = operation.reduction.partition(" over ")
    axes = {axis.strip() for axis in over.split(",")}
    parsed = {name: notation.parse(text) for name, text in operation.axes.items()}
    axis_names = {axis for a in parsed.values() for axis in (*notation.names(a), *a) if axis == LEADING or axis}
    if kind not in ("mean", "sum") or not axes <= axis_names:
        names = ", ".join(sorted(axis for axis in axis_names if axis.isidentifier() or axis == LEADING))
        raise ValueError(
            f'reduction of {operation.name} must be "mean over AXIS" or "sum over AXIS", where an axis is one of '
            f"{names}, not {operation.reduction!r}"
        )

    for name, tensor in parsed.items():
        for axis in tensor:
            if axis != LEADING and notation.split(axis).name is None and axes & set(notation.names((axis,))):
                raise ValueError(
                    f"reduction of {operation.name}: {name} has an axis {axis!r}, along which no batch can be repeated"
                )

    def relations(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
        repeated = {name: _place(parsed[name], axes) for name in case.inputs if name in parsed}
        inputs = {name: _repeat_input(array, repeated.get(name)) for name, array in case.inputs.items()}
        longer = case.with_inputs(**inputs)
        if not operation.allows(longer):
            return
        single_batch, repeated_batch = evaluate(case), evaluate(longer)
        factor = 1.0 if kind == "mean" else float(TIMES)
        yield Relation(repeated_batch.output, factor * single_batch.output)
        for name, gradient in single_batch.gradients.items():
            of_each = repeated_batch.gradients[name]
            place = repeated.get(name)
            if place is None:  # it takes part in the terms of every repetition
                yield Relation(of_each, factor * gradient)
                continue
            length = gradient.shape[place[0]]
            for time in range(TIMES):
                part = (slice(None),) * place[0] + (slice(time * length, (time + 1) * length),)
                yield Relation(float(TIMES) * of_each[part], factor * gradient)

    def a_repeated_batch_has_the_same_mean(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
        """A batch three times over has the same mean, and each repetition a third of the gradient."""
        yield from relations(evaluate, case, dtype)

    def a_repeated_batch_has_so_many_times_the_sum(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
        """A batch three times over has three times the sum, and each repetition the same gradient."""
        yield from relations(evaluate, case, dtype)

    return a_repeated_batch_has_the_same_mean if kind == "mean" else a_repeated_batch_has_so_many_times_the_sum


def _place(axes: notation.Axes, over: set[str]) -> tuple[int, int] | None:
    """Return an input's repeated axis, and by how much it is longer than the batch; None if no axis is repeated."""
    for place, axis in enumerate(axes):
        length = None if axis == LEADING else notation.split(axis)
        if (LEADING if length is None else length.name) in over:
            return place, 0 if length is None else length.more
    return None


def _repeat_input(array: np.ndarray, place: tuple[int, int] | None) -> np.ndarray:
    """Repeat an input along an axis. Offsets, which are one longer than the batch, continue instead."""
    if place is None:
        return array
    axis, offset = place
    if not offset:
        return np.concatenate([array] * TIMES, axis)
    steps = np.tile(np.diff(array), TIMES)
    return np.concatenate([array[:1], array[:1] + np.cumsum(steps)]).astype(array.dtype)
