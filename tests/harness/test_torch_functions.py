"""torch's own functions are accepted, each against a plain definition, and three plausible faults of each are not."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from samples import sampled
from torch.nn import functional as F

import fourfold
from fourfold import Claims, Verdict, tensor

DTYPES = ("bfloat16", "float32")
Function = Callable[..., torch.Tensor]


@fourfold.operation(x=tensor("... cols"), tried=False)
def softmax(x):
    powers = torch.exp(x - x.amax(-1, keepdim=True))
    return powers / powers.sum(-1, keepdim=True)


@fourfold.operation(
    x=tensor("... cols"), weight=tensor("cols"), bias=tensor("cols"), sizes={"cols": (2, None)}, tried=False
)
def layer_norm(x, weight, bias):
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5) * weight + bias


@fourfold.operation(
    x=tensor("rows cols"), weight=tensor("cols"), bias=tensor("cols"), sizes={"cols": (1, 3)}, tried=False
)
def layer_norm_of_few(x, weight, bias):
    return F.layer_norm(x, x.shape[-1:], weight, bias)


@fourfold.operation(x=tensor("... cols"), weight=tensor("cols"), tried=False)
def rms_norm(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


@fourfold.operation(
    logits=tensor("rows classes"),
    target=tensor("rows", dtype="int64", high="classes", also=(-100,)),
    sizes={"classes": (1, None)},
    tried=False,
)
def cross_entropy(logits, target):
    kept = target != -100
    logs = logits - torch.logsumexp(logits, -1, keepdim=True)
    chosen = logs.gather(-1, target.clamp(min=0)[:, None])[:, 0]
    return -torch.where(kept, chosen, 0.0).sum() / kept.sum()


@fourfold.operation(
    q=tensor("batch heads queries dim"),
    k=tensor("batch heads keys dim"),
    v=tensor("batch heads keys dim"),
    # Without samples or heads torch 2.11 divides by zero on the CPU, which ends the process.
    sizes={"batch": (1, None), "heads": (1, None), "dim": (1, 64), "keys": (1, None), "queries": (1, None)},
    tried=False,
)
def attention(q, k, v):
    return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v


@fourfold.operation(x=tensor("..."), tried=False)
def gelu(x):
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


@fourfold.operation(x=tensor("..."), tried=False)
def silu(x):
    return x * torch.sigmoid(x)


@fourfold.operation(x=tensor("... cols"), tried=False)
def cumsum(x):
    return torch.cumsum(x, -1)


# For words without numbers the gradient reads foreign memory on a GPU (torch 2.11).
@fourfold.operation(
    weight=tensor("words dim"),
    index=tensor("rows", dtype="int64", high="words"),
    sizes={"words": (1, None), "dim": (1, None)},
    tried=False,
)
def embedding(weight, index):
    return weight[index]


@fourfold.operation(
    x=tensor("batch channels size"),
    weight=tensor("channels"),
    bias=tensor("channels"),
    sizes={"channels": range(4, 33, 4), "size": (2, None), "batch": (1, None)},
    tried=False,
)
def group_norm(x, weight, bias):
    groups = x.reshape(x.shape[0], 4, -1)
    centred = groups - groups.mean(-1, keepdim=True)
    normal = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5)
    return normal.reshape(x.shape) * weight[:, None] + bias[:, None]


@fourfold.operation(
    x=tensor("batch inner size"),
    weight=tensor("outer inner 3"),
    sizes={"size": (3, None), "inner": (1, 16), "outer": (1, 16)},
    tried=False,
)
def conv1d(x, weight):
    return torch.einsum("bisk,oik->bos", x.unfold(-1, 3, 1), weight)


@fourfold.operation(x=tensor("... cols"), sizes={"cols": (1, None)}, tried=False)
def logsumexp(x):
    largest = x.amax(-1, keepdim=True)
    return (largest + torch.log(torch.exp(x - largest).sum(-1, keepdim=True)))[..., 0]


@dataclass(frozen=True)
class Entry:
    """One of torch's functions.

    Attributes:
        definition: the right results.
        function: torch's.
        faults: the same, wrong in one way each.
        claims: limits beyond finite numbers of ordinary size.
    """

    definition: Any
    function: Function
    faults: tuple[Function, ...]
    claims: dict[str, Any] = field(default_factory=dict)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5, mean: bool = True, count: int = 0) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True) if mean else x
    squares = centred.square().sum(-1, keepdim=True) / (x.shape[-1] - count)
    return centred * torch.rsqrt(squares + eps) * weight


ENTRIES = {
    "softmax": Entry(
        softmax,
        lambda x: F.softmax(x, -1),
        (
            lambda x: F.softmax(x, 0) if x.ndim > 1 else F.softmax(x, -1),
            lambda x: F.softmax(x * 1.01, -1),
            lambda x: F.softmax(x, -1) * (1 - 2**-6),
        ),
    ),
    "layer_norm": Entry(
        layer_norm,
        lambda x, weight, bias: F.layer_norm(x, x.shape[-1:], weight, bias),
        (
            lambda x, weight, bias: _norm(x, weight) - bias,
            lambda x, weight, bias: _norm(x, weight, count=1) + bias,
            lambda x, weight, bias: _norm(x, weight, eps=1e-3) + bias,
        ),
        # On the CPU the gradients of weight and bias are summed in the half type.
        {"dtypes": ("float32",)},
    ),
    "rms_norm": Entry(
        rms_norm,
        lambda x, weight: F.rms_norm(x, x.shape[-1:], weight, 1e-5),
        (
            lambda x, weight: _norm(x, weight),
            lambda x, weight: _norm(x, torch.ones_like(weight), mean=False),
            lambda x, weight: _norm(x, weight, eps=1e-2, mean=False),
        ),
    ),
    "cross_entropy": Entry(
        cross_entropy,
        F.cross_entropy,
        (
            lambda logits, target: F.cross_entropy(logits, target.clamp(min=0)),
            lambda logits, target: F.cross_entropy(logits, target, reduction="sum") / max(len(target), 1),
            lambda logits, target: F.cross_entropy(logits, target, label_smoothing=0.01),
        ),
    ),
    "attention": Entry(
        attention,
        F.scaled_dot_product_attention,
        (
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=1.0),
            lambda q, k, v: F.scaled_dot_product_attention(q, k.flip(-2), v),
        ),
        # On the CPU some gradients of queries have 1.2 times the error that rounding each step may cause. On a GPU
        # torch 2.11 fails if queries are misaligned ("misaligned address"), and the process can no longer use its GPU.
        {"dtypes": ("float32",), "aligned": True},
    ),
    "gelu": Entry(
        gelu,
        F.gelu,
        (lambda x: F.gelu(x, approximate="tanh"), lambda x: x * torch.sigmoid(1.702 * x), lambda x: F.relu(x)),
    ),
    "silu": Entry(
        silu,
        F.silu,
        (lambda x: x * F.hardsigmoid(x), lambda x: x.clamp(min=-4) * torch.sigmoid(x), lambda x: F.silu(x * 1.02)),
    ),
    "cumsum": Entry(
        cumsum,
        lambda x: torch.cumsum(x, -1),
        (
            lambda x: torch.cumsum(x, -1) - x,
            lambda x: torch.cumsum(x.flip(-1), -1).flip(-1),
            lambda x: torch.cumsum(x, 0 if x.ndim else -1),
        ),
        # On a GPU the sums of half types are taken in the half type.
        {"dtypes": ("float32",)},
    ),
    "embedding": Entry(
        embedding,
        lambda weight, index: F.embedding(index, weight),
        (
            lambda weight, index: F.embedding(index, weight, padding_idx=0),
            lambda weight, index: F.embedding(index, weight, scale_grad_by_freq=True),
            lambda weight, index: F.embedding((index - 1).clamp(min=0), weight),
        ),
        # On the CPU the gradient of a word is summed in the half type.
        {"dtypes": ("float32",)},
    ),
    "group_norm": Entry(
        group_norm,
        lambda x, weight, bias: F.group_norm(x, 4, weight, bias),
        (
            lambda x, weight, bias: F.group_norm(x, 2, weight, bias),
            lambda x, weight, bias: F.group_norm(x, 4, weight),
            lambda x, weight, bias: F.group_norm(x, 4, weight, bias, eps=1e-2),
        ),
    ),
    "conv1d": Entry(
        conv1d,
        lambda x, weight: F.conv1d(x, weight),
        (
            lambda x, weight: F.conv1d(x, weight.flip(-1)),
            lambda x, weight: F.conv1d(x, weight, padding=1)[..., 1:-1] * 0.99,
            lambda x, weight: F.conv1d(x, weight, padding=1)[..., :-2],
        ),
        # On the CPU subnormal factors of half types count as 0.
        {"dtypes": ("float32",)},
    ),
    "logsumexp": Entry(
        logsumexp,
        lambda x: torch.logsumexp(x, -1),
        (
            lambda x: torch.log(torch.exp(x.clamp(max=4)).sum(-1)),
            lambda x: torch.logsumexp(x, -1) + 0.02,
            lambda x: x.amax(-1) + torch.log1p(torch.exp(x - x.amax(-1, keepdim=True)).sum(-1) - 0.99),
        ),
        # The gradient is exp(x - y) with y rounded to the half type: from 8 on it is off by a bit of y.
        {"dtypes": ("float32",)},
    ),
}


# The checks that do not concern the results.
AROUND = ("history", "interleaving", "graph", "many calls", "modes", "autocast", "threads")


def judged(entry: Entry, function: Function, device: str, *only: str) -> Verdict:
    claimed = {"dtypes": DTYPES, "finite": True, "largest": 1e3, "accuracy": "storage", **entry.claims}
    # On a GPU torch adds up some gradients in any order.
    claims = Claims(**{"deterministic": device == "cpu", **claimed})
    return fourfold.verify(function, entry.definition, claims=claims, device=device, examples=5, seed=1, only=only)


@pytest.mark.parametrize("name", sampled(ENTRIES, "layer_norm"))
def test_torchs_function_is_accepted(name: str, device: str) -> None:
    verdict = judged(ENTRIES[name], ENTRIES[name].function, device, "forward", "backward", *AROUND)
    assert verdict.passed, str(verdict)
    # torch rounds intermediates of half types; in float32 there is no other grade.
    assert {o.grade for o in verdict.outcomes if o.dtype == "float32"} == {"exact"}


@pytest.mark.full(but=1)
@pytest.mark.parametrize(
    ("name", "fault"),
    # The default profile takes one fault of each function.
    [
        pytest.param(name, n, marks=() if n == place % 3 else pytest.mark.full)
        for place, name in enumerate(ENTRIES)
        for n in range(3)
    ],
)
def test_plausible_faults_are_rejected(name: str, fault: int, device: str) -> None:
    verdict = judged(ENTRIES[name], ENTRIES[name].faults[fault], device, "forward", "backward")
    assert verdict.grade == "wrong", str(verdict)


def test_a_norm_that_scales_before_it_subtracts_is_accepted_even_of_one_number(device: str) -> None:
    """torch's norm does so on the CPU: then the deviation of one number is not exactly 0."""

    def kernel(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], weight, bias)

    only = ["forward", "backward"]
    verdict = fourfold.verify(kernel, layer_norm_of_few, device=device, dtypes=["float32"], only=only, seed=1)
    assert verdict.passed, verdict


def normalized_by(norm: Callable[..., torch.Tensor]) -> Any:
    """Return an operation whose definition is one of torch's norms of channels."""

    def definition(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return norm(x, weight, bias)

    sizes = {"channels": range(4, 33, 4), "size": (2, None), "batch": (1, None)}
    return fourfold.operation(
        x=tensor("batch channels size"), weight=tensor("channels"), bias=tensor("channels"), sizes=sizes
    )(definition)


def test_a_group_of_one_number_is_its_bias_and_wrong_groups_fail(device: str) -> None:
    @fourfold.operation(
        x=tensor("batch channels size"),
        weight=tensor("channels"),
        bias=tensor("channels"),
        sizes={"channels": [4, 8], "size": (1, None), "batch": (2, None)},
    )
    def grouped(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.group_norm(x, 4, weight, bias)

    def is_right(groups: Callable[[int], int]) -> bool:
        def kernel(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            return torch.group_norm(x, groups(x.shape[1] * x.shape[2]), weight, bias)

        only = ["forward", "backward"]
        return fourfold.verify(kernel, grouped, device=device, dtypes=["float32"], only=only, seed=1).passed

    assert is_right(lambda size: 4)
    assert not is_right(lambda size: 2 if size == 4 else 4)


@pytest.mark.full
@pytest.mark.parametrize(
    "norm",
    [
        lambda x, weight, bias: F.group_norm(x, 4, weight, bias),
        lambda x, weight, bias: F.batch_norm(x, None, None, weight, bias, training=True),
    ],
    ids=["group_norm", "batch_norm"],
)
def test_torchs_norm_is_right_by_itself_also_where_its_steps_overflow(norm: Any, device: str) -> None:
    """It multiplies by the weight before it subtracts the mean: with an infinite weight it gives NaN for infinity."""

    def kernel(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return norm(x, weight, bias)

    verdict = fourfold.verify(kernel, normalized_by(norm), device=device, dtypes=["float32"], seed=4)
    assert verdict.passed, verdict
