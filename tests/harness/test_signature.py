"""A signature checks the arguments of calls in any form, and of operations whose tensors have other axes."""

import re
from typing import Any

import pytest
import torch

from fourfold import values
from fourfold.backends.signature import Signature, signature, signature_of, tensor


@signature(x=tensor("... cols"), weight=tensor("cols"))
def shifted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x - weight."""
    return x - weight


X, WEIGHT = torch.ones(2, 3), torch.full((3,), 2.0)


@pytest.mark.parametrize("given", [((X, WEIGHT), {}), ((X,), {"weight": WEIGHT}), ((), {"weight": WEIGHT, "x": X})])
def test_arguments_may_be_given_by_position_and_by_name(given: tuple[tuple, dict[str, Any]]) -> None:
    assert torch.equal(shifted(*given[0], **given[1]), X - WEIGHT)
    assert torch.equal(signature_of(shifted).checked(lambda x, weight: x - weight)(*given[0], **given[1]), X - WEIGHT)


@pytest.mark.parametrize(
    ("given", "named", "error", "said"),
    [
        ((X,), {}, TypeError, "'weight'"),
        ((X, WEIGHT), {"eps": 1.0}, TypeError, "'eps'"),
        ((X, WEIGHT, WEIGHT), {}, TypeError, "too many"),
        ((X, 2.0), {}, TypeError, "weight must be a tensor, not float"),
        ((X, WEIGHT.double()), {}, TypeError, "weight must have the dtype of x"),
        ((X, WEIGHT.to("meta")), {}, ValueError, "weight must be on the device of x"),
        ((X, torch.ones(4)), {}, ValueError, "weight must be [cols], where cols is 3, not [4]"),
        ((X, torch.ones(1, 3)), {}, ValueError, "weight must be [cols], where cols is 3, not [1, 3]"),
        ((torch.ones(()), WEIGHT), {}, ValueError, "x must be [..., cols], not []"),
    ],
)
def test_a_bad_argument_is_named(given: tuple, named: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=re.escape(said)):
        shifted(*given, **named)


def test_the_operator_and_the_source_follow() -> None:
    def swish(x: torch.Tensor) -> torch.Tensor:
        """x / (1 + exp(-x)).

        Source: Ramachandran et al., 2017.
        """
        return x

    found = Signature(swish, {"x": tensor("...")})
    assert found.operator(torch.empty_like).schema == "swish(Tensor x) -> Tensor output"
    assert found.source == "Ramachandran et al., 2017"
    with pytest.raises(TypeError, match="swish has no signature"):
        signature_of(swish)


def test_a_signature_that_is_not_the_functions_is_refused() -> None:
    with pytest.raises(TypeError, match="shifted takes x, weight, and not x, eps"):
        Signature(shifted, {"x": tensor("..."), "eps": values(1e-6)})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="weight must be a tensor of the tested dtype"):
        Signature(shifted, {"x": tensor("..."), "weight": tensor("...", optional=True)})
