"""The record of ciou_loss_ragged: mean CIoU loss over a batch whose target boxes are concatenated."""

from fourfold.oracles import ciou_loss_ragged as oracle
from hypothesis import strategies as st

from fourfold.numerics.dtypes import DType
from fourfold.operations.case import Case

from . import ciou_loss, giou_loss_ragged
from .boxes import pairs_of_one_aspect


def smooth(dtype: DType) -> st.SearchStrategy[Case]:
    """Return pairs of one aspect, as in ciou_loss."""
    return giou_loss_ragged.smooth(dtype, pairs_of_one_aspect)


operation = giou_loss_ragged.record(
    ciou_loss.operation,
    oracle,
    flops=(60, 140),
    source="Zheng et al., Distance-IoU Loss, AAAI 2020",
    smooth=smooth,
)
