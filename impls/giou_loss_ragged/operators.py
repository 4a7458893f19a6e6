"""The operators of the ragged losses, which Triton and CUDA C++ share except for the launches."""

from fourfold.backends.operators import Operator


def operator_of(measure: str) -> Operator:
    """Return the operator of the mean loss by a measure of a pair: "giou", "diou" or "ciou"."""
    return Operator(
        schema=f"{measure}_loss_ragged(Tensor pred, Tensor target, Tensor offsets, float eps) -> Tensor loss",
        fake=lambda pred, target, offsets, eps: pred.new_empty(()),
        saves=("pred", "target", "offsets", "eps"),
        gradients={"pred": "pred", "target": "target"},
    )
