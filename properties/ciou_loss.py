"""The record of ciou_loss: mean CIoU loss over the valid rows of a padded batch."""

from collections.abc import Iterator

from fourfold.oracles import ciou_loss as oracle
from hypothesis import strategies as st

from fourfold.numerics.dtypes import DType
from fourfold.operations.case import Case
from fourfold.operations.record import Evaluate, Relation
from fourfold.operations.relations import between

from . import giou_loss
from .boxes import pairs_of_one_aspect
from .diou_loss import LAWS, examples


def smooth(dtype: DType) -> st.SearchStrategy[Case]:
    """Draw pairs of one aspect, where v and alpha are 0: elsewhere the gradient, with constant alpha, is no slope."""
    return giou_loss.smooth(dtype, pairs_of_one_aspect)


def never_below_diou_loss(evaluate: Evaluate, case: Case, dtype: DType) -> Iterator[Relation]:
    """ciou_loss is at least diou_loss."""
    yield between(evaluate(case).output - evaluate(case, operation="diou_loss").output, 0, float("inf"))


operation = giou_loss.record(
    "ciou_loss",
    oracle,
    *LAWS,
    never_below_diou_loss,
    flops=(60, 140),
    source="Zheng et al., Distance-IoU Loss, AAAI 2020",
    examples=examples,
    smooth=smooth,
)
