"""The record of embedding: rows of a table by their numbers."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from fourfold.oracles import embedding as oracle
from hypothesis import strategies as st

from fourfold.declaration import definition
from fourfold.declaration.library import arguments_of
from fourfold.inputs.arrays import cotangent, values
from fourfold.numerics.bounded import Bounded
from fourfold.numerics.dtypes import DType
from fourfold.operations.arguments import tied
from fourfold.operations.case import Case
from fourfold.operations.record import Cost, Evaluate, Relation
from fourfold.operations.relations import equals_exactly, law, only
from fourfold.operations.workloads import Make, tiled, whole

ARGUMENTS = arguments_of("embedding")
errors = (*ARGUMENTS.errors, ARGUMENTS.wrong("past_the_rows", ValueError, "padding_idx", {"padding_idx": 2}))


def lookup(
    vocab: int, dim: int, *shape: int, padding_idx: int | None = None, rows: int | None = None, **layouts: str
) -> Callable[[DType], Case]:
    """Return a named case of random ids, of the first `rows` rows alone if given."""

    def make(dtype: DType) -> Case:
        rng = np.random.default_rng(31)
        inputs = {"table": values(rng, (vocab, dim), dtype, "normal"), "ids": rng.integers(0, rows or vocab, shape)}
        return Case(inputs, cotangent(rng, (*shape, dim), dtype), {"padding_idx": padding_idx}, layouts)

    return make


def skewed(vocab: int, dim: int, count: int) -> Callable[[DType], Case]:
    """Return a named case of ids whose frequencies fall as those of words do; row 0 has a fifth."""

    def make(dtype: DType) -> Case:
        case = lookup(vocab, dim, count)(dtype)
        shares = 1 / np.arange(2, vocab + 1)
        ids = np.random.default_rng(32).choice(vocab, count, p=[0.2, *(0.8 * shares / shares.sum())])
        return case.with_inputs(ids=ids)

    return make


examples: Mapping[str, Callable[[DType], Case]] = {
    "one_row_thousands_of_times": lookup(3, 5, 3001, rows=1),
    "each_row_some_times": lookup(20, 5, 500, padding_idx=3),
    "one_row_has_a_fifth": skewed(40, 5, 700),
    "few_rows_thousands_of_times": lookup(9, 4, 2, 2100, rows=3, padding_idx=1),
    # More ids than a kernel for few ids takes: https://github.com/pytorch/pytorch/issues/28716.
    "padding_past_768_ids": lookup(10, 8, 1, 769, padding_idx=0),
    "padding_in_the_last_row": lookup(7, 6, 40, padding_idx=6),
}


def smooth(dtype: DType) -> st.SearchStrategy[Case]:
    """Return few rows, none of padding, whose gradient is not the derivative."""
    few = st.integers(1, 4)
    return st.builds(lambda *sizes: lookup(*sizes)(dtype), few, few, few)


# ---- laws

rows_are_copied = law(
    "rows_are_copied", lambda output, case, wide: (output(case), wide["table"][case["ids"]]), exact=True
)


def ids_with_gradient(case: Case) -> np.ndarray:
    """Return a mask of the ids that have a gradient."""
    return case["ids"] != case.parameters["padding_idx"]


def gradients_add_up_to_the_cotangents(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """The rows of the gradient have the same sum as the cotangents of all ids but those of padding."""
    gradient = evaluate(case).gradients["table"]
    given = Bounded.exact(case.grad_output[ids_with_gradient(case)].astype(dtype.wide), gradient.arithmetic)
    yield Relation(np.sum(gradient, axis=0), np.sum(given, axis=0))


def rows_without_ids_have_no_gradient(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """A row that no id names, and that of padding, have a gradient of 0."""
    gradient = evaluate(case).gradients["table"]
    unnamed = ~np.isin(np.arange(len(case["table"])), case["ids"][ids_with_gradient(case)])
    yield equals_exactly(only(unnamed[:, None], gradient), 0)


# ---- the record


def cost(case: Case) -> tuple[Cost, Cost]:
    """Forward reads the ids, and each row of the table that they name once; it writes a row for each id.

    Backward reads the ids and the cotangent, and writes the table's gradient.
    """
    moved, table, ids = case.grad_output.nbytes, case["table"], case["ids"]
    used = len(np.unique(ids)) * table[:1].nbytes
    return Cost(moved + used + ids.nbytes, 0), Cost(moved + ids.nbytes + table.nbytes, case.grad_output.size)


workloads: Mapping[str, Mapping[str, Make]] = {
    "cpu": {"small": whole(lookup(100, 64, 16, 16)), "ragged": whole(lookup(37, 33, 7, 41))},
    "cuda": {
        "small": whole(lookup(1000, 256, 512)),
        "large": tiled(lookup(8192, 2048, 512), 32, "ids"),
        "repeated": tiled(lookup(64, 1024, 512), 32, "ids"),
        "skewed": tiled(skewed(256, 1024, 512), 32, "ids"),
        "ragged": tiled(lookup(1001, 333, 257), 32, "ids"),
    },
}


def _any_row(vocab: int) -> list[Any]:
    return [None, *sorted({0, vocab - 1})] if vocab else [None]


@definition.operation(
    **ARGUMENTS.declared | {"padding_idx": tied(_any_row)},
    forward=oracle.forward,
    backward=oracle.backward,
    examples=examples,
    smooth=smooth,
    batched={"ids": 0},
    laws=(rows_are_copied, gradients_add_up_to_the_cotangents, rows_without_ids_have_no_gradient),
    errors=errors,
    cost=cost,
    workloads=workloads,
    source="torch.nn.functional.embedding",
    name="embedding",
)
def operation(table: torch.Tensor, ids: torch.Tensor, padding_idx: int | None = None) -> torch.Tensor:
    """Return the rows of a table."""
    return torch.nn.functional.embedding(ids, table, padding_idx)
