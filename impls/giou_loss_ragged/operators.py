"""The operators of giou_loss_ragged, which Triton and CUDA C++ share except for the launches."""

from fourfold.backends.operators import Operator

GIOU_LOSS_RAGGED = Operator(
    schema="giou_loss_ragged(Tensor pred, Tensor target, Tensor offsets, float eps) -> Tensor loss",
    fake=lambda pred, target, offsets, eps: pred.new_empty(()),
    saves=("pred", "target", "offsets", "eps"),
    gradients={"pred": "pred", "target": "target"},
)
