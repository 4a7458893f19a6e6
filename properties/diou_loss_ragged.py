"""The record of diou_loss_ragged: mean DIoU loss over a batch whose target boxes are concatenated."""

from fourfold.oracles import diou_loss_ragged as oracle

from . import diou_loss, giou_loss_ragged

operation = giou_loss_ragged.record(
    diou_loss.operation,
    oracle,
    flops=(36, 100),
    source="Zheng et al., Distance-IoU Loss, AAAI 2020",
)
