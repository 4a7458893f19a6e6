"""Definitions in torch have the values and bounds of the NumPy oracles, and bounds that torch's own kernels meet."""

import math
from collections.abc import Callable
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fourfold.impls.giou.torch_eager import pairwise_giou
from hypothesis import strategies as st
from samples import sampled

from fourfold.checks.records import operations
from fourfold.numerics.bounded import OPEN, Bounded, HangsOnRounding
from fourfold.numerics.dtypes import DTYPES, DType
from fourfold.numerics.steps.elementwise import elementary_step, units
from fourfold.numerics.torch_adapter.evaluate import NoTorchRule, backward_of, forward_of, rule
from fourfold.numerics.torch_adapter.tensors import RULES
from fourfold.operations.case import Case
from fourfold.operations.record import wide

OPERATIONS = operations()
FREE = DTYPES["float32"].with_contract(OPEN)
SINGLE = DTYPES["float32"].arithmetic
Definition = Callable[..., torch.Tensor]


def results(definition: Definition, dtype: DType, grad_output: torch.Tensor, **arguments: Any) -> list[Bounded]:
    """Return the output and the gradients of all floating inputs, each with its bound."""

    def given(argument: Any) -> Any:
        if not isinstance(argument, torch.Tensor):
            return argument
        return exact(argument, dtype) if argument.is_floating_point() else argument.numpy()

    floating = [name for name, x in arguments.items() if isinstance(x, torch.Tensor) and x.is_floating_point()]
    arguments = {name: given(argument) for name, argument in arguments.items()}
    backward = backward_of(definition, floating)(exact(grad_output, dtype), **arguments)
    return [forward_of(definition)(**arguments), *backward]


def exact(tensor: torch.Tensor, dtype: DType) -> Bounded:
    return Bounded.exact(dtype.array(tensor), dtype.arithmetic)


def compute_by_torch(definition: Definition, grad_output: torch.Tensor, **arguments: Any) -> list[torch.Tensor]:
    """Return the results of torch itself; a gradient that does not exist is 0."""
    leaves = {
        name: argument.clone().requires_grad_()
        for name, argument in arguments.items()
        if isinstance(argument, torch.Tensor) and argument.is_floating_point()
    }
    output = definition(**{**arguments, **leaves})
    grads = torch.autograd.grad(output, list(leaves.values()), grad_output, materialize_grads=True, allow_unused=True)
    return [output.detach(), *grads]


def outside(actual: torch.Tensor, expected: Bounded) -> int:
    """Return the number of elements outside of their bounds."""
    values = actual.double().numpy()
    assert values.shape == expected.shape
    with np.errstate(invalid="ignore"):
        within = abs(values - expected.value) <= expected.error
    same = (values == expected.value) | (np.isnan(values) & np.isnan(expected.value)) | np.isinf(expected.error)
    return int(np.count_nonzero(~(within | same)))


# The seven operations as plain torch code.


def giou_loss(pred: torch.Tensor, target: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    valid = target[..., 3] > 0
    return (1 - pairwise_giou(pred[valid], target[valid], eps)).sum() / valid.sum().clamp(min=1)


def giou_loss_ragged(
    pred: torch.Tensor, target: torch.Tensor, offsets: torch.Tensor, eps: float = 1e-5
) -> torch.Tensor:
    counts = offsets.diff()
    sample = torch.repeat_interleave(torch.arange(len(counts)), counts)
    place = torch.arange(len(sample)) - offsets[sample]
    return (1 - pairwise_giou(pred[sample, place], target, eps)).sum() / max(len(sample), 1)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    cols = max(x.shape[-1], 1)
    centred = x - x.sum(-1, keepdim=True) / cols
    deviation = (centred.square().sum(-1, keepdim=True) / cols + eps).sqrt()
    return centred / deviation * weight + bias


def matmul(a: torch.Tensor, b: torch.Tensor, activation: str = "none", negative_slope: float = 0.01) -> torch.Tensor:
    product = a @ b
    if activation == "relu":
        return product.relu()
    return product if activation == "none" else torch.where(product > 0, product, product * negative_slope)


DEFINITIONS: dict[str, Definition] = {
    "vector_add": lambda x, y: x + y,
    "softmax": lambda x: torch.softmax(x, -1),
    "layer_norm": layer_norm,
    "matmul": matmul,
    "giou": lambda boxes1, boxes2, eps=1e-5: pairwise_giou(boxes1, boxes2, eps),
    "giou_loss": giou_loss,
    "giou_loss_ragged": giou_loss_ragged,
}
# How much wider a bound may be than the oracle's. Autograd takes layer_norm's derivative step by step; the oracle has
# its closed form, in which less cancels.
FACTORS = {"layer_norm": 60.0, "giou": 4.0, "matmul": 8.0}

# In rare cases all results have wider bounds: 1% of matmul's results, 1.5% of layer_norm's, and none of the others'. In
# 16 cases these may be too many by chance.
EXAMPLES = {"layer_norm": 100, "matmul": 100}


def both(name: str, case: Case, dtype: DType) -> list[tuple[Bounded, Bounded]]:
    """Return the oracle's output and gradients, and those of the definition in torch."""
    operation, arguments = OPERATIONS[name], wide(case, dtype)
    grad_output = Bounded.exact(case.grad_output.astype(dtype.wide), dtype.arithmetic)
    definition = DEFINITIONS[name]
    with np.errstate(all="ignore"):
        oracle = [operation.forward(**arguments), *operation.backward(grad_output, **arguments)]
    mine = [
        forward_of(definition)(**arguments),
        *backward_of(definition, operation.differentiable)(grad_output, **arguments),
    ]
    return list(zip(oracle, mine, strict=True))


@pytest.mark.full(but=3)
@pytest.mark.parametrize("dtype", sampled(["float32", "float64"], "float32"))
@pytest.mark.parametrize("name", DEFINITIONS)
def test_a_definition_has_the_values_and_bounds_of_the_numpy_oracle(name: str, dtype: str) -> None:
    compared, results_seen, outliers = 0, 0, 0

    @hypothesis.settings(
        max_examples=EXAMPLES.get(name, 16), deadline=None, database=None, phases=[hypothesis.Phase.generate]
    )
    @hypothesis.seed(3)
    @hypothesis.given(st.data())
    def agree(data: st.DataObject) -> None:
        nonlocal compared, results_seen, outliers
        for tested in (DTYPES[dtype], DTYPES[dtype].with_contract(OPEN)):
            case = data.draw(OPERATIONS[name].cases(tested, 48))
            for oracle, mine in both(name, case, tested):
                assert oracle.shape == mine.shape
                known = np.broadcast_to(np.isfinite(oracle.error), mine.shape)
                # Another formula of a gradient may have a number where autograd has NaN.
                known = known & ~(np.isnan(mine.value) & np.isinf(mine.error))
                value, error = oracle.value[known], np.broadcast_to(oracle.error, mine.shape)[known]
                finite = np.isfinite(value)
                np.testing.assert_array_equal(mine.value[known][~finite], value[~finite])
                value, error, mine_value, mine_error = (
                    part[finite] for part in (value, error, mine.value[known], mine.error[known])
                )
                roundoff = np.finfo(value.dtype).eps
                assert np.all(abs(mine_value - value) <= 1e-3 * error + 8 * roundoff * abs(value))
                # The record of layer_norm admits kernels that scale first. The definition here is written out.
                assert np.all(mine_error >= error / 8) or (name == "layer_norm" and tested is not DTYPES[dtype])
                unknown_to_the_oracle = np.count_nonzero(np.isfinite(mine.error) & ~known)
                within = np.all(mine_error <= FACTORS.get(name, 2.2) * error + 8 * roundoff * abs(value))
                outliers += not (within and unknown_to_the_oracle <= 1 + mine.size / 10)
                compared, results_seen = compared + int(finite.sum()), results_seen + 1

    agree()
    assert compared > 100
    # Which cases are drawn depends on the modules that are loaded, and rare ones have wider bounds.
    assert outliers <= results_seen / 20


# Functions of torch.nn.functional: the definition, its inputs, and three plausible faults.

SEQUENCE = {"x": (3, 37)}
HEADS = {"q": (2, 2, 7, 8), "k": (2, 2, 7, 8), "v": (2, 2, 7, 8)}
CAUSAL = torch.ones(7, 7).tril().bool()
LABELS = torch.tensor([4, 0, 7, 7, 2])
WORDS = torch.tensor([[3, 0, 3], [1, 3, 5]])
BIAS = {"weight": (6,), "bias": (6,)}


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    return (q @ k.mT * scale).masked_fill(~mask, -torch.inf).softmax(-1) @ v


def rotated(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Return pairs of neighbours, as complex numbers, times a rotation."""
    return torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * rotation).flatten(-2)


FUNCTIONS: dict[str, tuple[Definition, dict[str, tuple[int, ...]], list[Definition]]] = {
    "softmax": (
        lambda x: F.softmax(x, -1),
        SEQUENCE,
        [
            lambda x: F.pad(F.softmax(x[:, :-1], -1), (0, 1)),
            lambda x: F.softmax(x, 0),
            lambda x: F.softmax(x.bfloat16(), -1).to(x.dtype),
        ],
    ),
    "log_softmax": (
        lambda x: F.log_softmax(x, -1),
        SEQUENCE,
        [
            lambda x: x - x.exp().sum(-1, keepdim=True).log2(),
            lambda x: F.softmax(x, -1),
            lambda x: x - x.detach().logsumexp(-1, keepdim=True),
        ],
    ),
    "logsumexp": (
        lambda x: torch.logsumexp(x, -1),
        SEQUENCE,
        [
            lambda x: x[:, 1:].logsumexp(-1),
            lambda x: x.logsumexp(-1) + 1e-5,
            lambda x: x.amax(-1) + (x - x.amax(-1, keepdim=True)).half().exp().sum(-1).to(x.dtype).log(),
        ],
    ),
    "layer_norm": (
        lambda x, weight, bias: F.layer_norm(x, (6,), weight, bias),
        {"x": (5, 6), **BIAS},
        [
            lambda x, weight, bias: (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True) * weight + bias,
            lambda x, weight, bias: F.layer_norm(x, (6,), weight, bias, eps=2e-5),
            lambda x, weight, bias: F.layer_norm(x, (6,), weight, bias.detach()),
        ],
    ),
    "rms_norm": (
        lambda x, weight: F.rms_norm(x, (6,), weight, 1e-6),
        {"x": (5, 6), "weight": (6,)},
        [
            lambda x, weight: x * (x.square().sum(-1, keepdim=True) / 5 + 1e-6).rsqrt() * weight,
            lambda x, weight: x * (x.square().mean(-1, keepdim=True).detach() + 1e-6).rsqrt() * weight,
            lambda x, weight: F.rms_norm(x, (6,), weight + 1, 1e-6),
        ],
    ),
    "group_norm": (
        lambda x, weight, bias: F.group_norm(x, 3, weight, bias),
        {"x": (2, 6, 5), **BIAS},
        [
            lambda x, weight, bias: F.group_norm(x, 2, weight, bias),
            lambda x, weight, bias: F.group_norm(x, 3, weight.flip(0), bias),
            lambda x, weight, bias: F.group_norm(x, 3, weight, bias, eps=1e-4),
        ],
    ),
    "cross_entropy": (
        lambda x: F.cross_entropy(x, LABELS, ignore_index=7),
        {"x": (5, 8)},
        [
            lambda x: F.cross_entropy(x, LABELS),
            lambda x: F.cross_entropy(x, LABELS, ignore_index=7, reduction="sum") / 5,
            lambda x: F.cross_entropy(x, LABELS, ignore_index=7, label_smoothing=1e-4),
        ],
    ),
    "scaled_dot_product_attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
        HEADS,
        [
            lambda q, k, v: attention(q, k, v, CAUSAL | True, 1 / 8),
            lambda q, k, v: attention(q, k, v, CAUSAL, 8**-0.5),
            lambda q, k, v: attention(q, k.half().to(k.dtype), v, CAUSAL | True, 8**-0.5),
        ],
    ),
    "causal_attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        HEADS,
        [
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
            lambda q, k, v: attention(q, k, v, CAUSAL.roll(1, 1), 8**-0.5),
            lambda q, k, v: attention(q, k, v, CAUSAL | torch.eye(7).roll(1, 1).bool(), 8**-0.5),
        ],
    ),
    "gelu": (
        lambda x: F.gelu(x),
        SEQUENCE,
        [lambda x: F.gelu(x, approximate="tanh"), lambda x: x * torch.sigmoid(1.702 * x), lambda x: F.gelu(x) + 1e-5],
    ),
    "gelu_tanh": (
        lambda x: F.gelu(x, approximate="tanh"),
        SEQUENCE,
        [
            lambda x: F.gelu(x),
            lambda x: 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.044715 * x**3))),
            lambda x: 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.04471 * x**3))),
        ],
    ),
    "silu": (
        lambda x: F.silu(x),
        SEQUENCE,
        [
            lambda x: x.detach() * torch.sigmoid(x),
            lambda x: x * torch.sigmoid(x.half()).to(x.dtype),
            lambda x: x * torch.sigmoid(1.001 * x),
        ],
    ),
    "cumsum": (
        lambda x: torch.cumsum(x, -1),
        SEQUENCE,
        [
            lambda x: x.cumsum(-1) - x,
            lambda x: x.cumsum(0),
            lambda x: torch.cat([x[:, :32].cumsum(-1), x[:, 32:].cumsum(-1)], -1),
        ],
    ),
    "embedding": (
        lambda weight: F.embedding(WORDS, weight, padding_idx=1),
        {"weight": (6, 4)},
        [
            lambda weight: F.embedding(WORDS, weight),
            lambda weight: weight[(WORDS + 1) % 6],
            lambda weight: weight[WORDS].roll(1, -1),
        ],
    ),
    "rotary embedding": (
        lambda x, angles: rotated(x, torch.polar(torch.ones_like(angles), angles)),
        {"x": (3, 8), "angles": (3, 4)},
        [
            lambda x, angles: rotated(x, torch.polar(torch.ones_like(angles), angles).conj()),
            lambda x, angles: rotated(x, torch.polar(torch.ones_like(angles), angles.flip(-1))),
            lambda x, angles: rotated(x.view(3, 2, 4).mT.flatten(1), torch.polar(torch.ones_like(angles), angles)),
        ],
    ),
    "conv1d": (
        lambda x, weight, bias: F.conv1d(x, weight, bias, stride=2, padding=2, dilation=2, groups=2),
        {"x": (2, 4, 11), "weight": (6, 2, 3), "bias": (6,)},
        [
            lambda x, weight, bias: F.conv1d(x, weight.flip(-1), bias, stride=2, padding=2, dilation=2, groups=2),
            lambda x, weight, bias: F.conv1d(F.pad(x, (2, 2), "reflect"), weight, bias, stride=2, dilation=2, groups=2),
            lambda x, weight, bias: F.conv1d(x, weight, None, stride=2, padding=2, dilation=2, groups=2),
        ],
    ),
}


def random_inputs(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """Return ordinary numbers of a dtype."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_torch_is_within_the_bounds_of_its_functions_and_three_faults_are_not(name: str, dtype: str) -> None:
    definition, shapes, faults = FUNCTIONS[name]
    tested = DTYPES[dtype].with_contract(OPEN)
    compute = torch.float64 if dtype == "float64" else torch.float32
    caught = [False] * len(faults)
    for seed in range(3):
        inputs = random_inputs(shapes, tested.torch, seed)
        plain = {key: tensor.to(compute) for key, tensor in inputs.items()}
        with torch.no_grad():
            shape = definition(**plain).shape
        grad_output = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(tested.torch)
        expected = results(definition, tested, grad_output, **inputs)
        for actual, bound in zip(compute_by_torch(definition, grad_output.to(compute), **plain), expected, strict=True):
            assert outside(actual, bound) == 0
            ordinary = abs(bound.value) > 1e-2
            assert np.median(bound.error[ordinary] / abs(bound.value[ordinary])) < 1e-4
        for i, fault in enumerate(faults):
            wrong = compute_by_torch(fault, grad_output.to(compute), **plain)
            caught[i] |= any(outside(actual, bound) for actual, bound in zip(wrong, expected, strict=True))
    assert caught == [True] * len(faults)


# Operators of torch, each in an expression of the inputs: x and y of any numbers, p and s of positive ones, an image.

INDEX = torch.tensor([2, 0, 1, 2])
PAIRS = torch.tensor([[0, 1], [1, 0]])
STARTS = torch.tensor([0, 1, 1])
EYE = 2 * torch.eye(4)
COUNTS = torch.tensor([2, 0, 2])


def written(z: torch.Tensor, key: Any, item: Any) -> torch.Tensor:
    """Return a copy in which some elements are replaced."""
    z = z.clone()
    z[key] = item
    return z


def in_place(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = (x * 1).add_(y)
    z[1:3].mul_(2)
    z.t()[0].copy_(y[:, 1])
    return z.exp_()


def lists_in_place(x: torch.Tensor, y: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    moments = [x * 1, y * 1]
    torch._foreach_lerp_(moments, [y, x], 0.1)
    torch._foreach_addcmul_(moments, [x, y], [x, p], 0.5)
    torch._foreach_div_(moments, torch._foreach_sqrt([p, p]))
    return moments[0] * moments[1]


def words(names: str) -> list[str]:
    return names.split()


OPERATORS: dict[str, Definition] = {
    **{
        name: lambda x, name=name: getattr(torch, name)(x)
        for name in words(
            "abs neg exp exp2 expm1 sin cos tan sinh cosh tanh sigmoid erf erfc atan asinh square frac relu sum mean"
            " prod max min var std norm amax amin flatten deg2rad nan_to_num"
        )
    },
    **{
        name: lambda p, name=name: getattr(torch, name)(p)
        for name in words("log log2 log10 log1p sqrt rsqrt reciprocal")
    },
    "asin": lambda p: torch.asin(p / 2),
    "acos": lambda p: torch.acos(p / 2),
    "atanh": lambda p: torch.atanh(p / 2),
    "acosh": lambda p: torch.acosh(p + 1),
    "logit": lambda p: torch.logit(p / 2),
    **{
        name: lambda x, p, name=name: getattr(torch, name)(x, p)
        for name in words("add sub mul div maximum minimum fmax fmin atan2 hypot logaddexp remainder fmod")
    },
    "xlogy": lambda p, s: torch.xlogy(p, s),
    "pow": lambda p, y: p**y,
    "cube": lambda x: x**3,
    "negative power": lambda p: p**-1.5,
    "power of 2": lambda x: 2**x,
    "rsub": lambda x: 1 - x,
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=2),
    "addcdiv": lambda x, p: torch.addcdiv(x, x, p),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    **{
        name: lambda x, name=name: getattr(F, name)(x)
        for name in words(
            "relu6 hardtanh elu selu celu leaky_relu silu mish softplus softsign logsigmoid hardswish gelu tanhshrink"
            " softshrink hardshrink glu"
        )
    },
    "prelu": lambda x, p: F.prelu(x, p[0]),
    "threshold": lambda x: F.threshold(x, 0.1, 2.0),
    **{
        f"{name} along": lambda x, name=name: getattr(torch, name)(x, dim=-1)
        for name in words("sum mean prod amax amin var std logsumexp cumsum cumprod norm softmax log_softmax")
    },
    "var_mean": lambda x: torch.stack(torch.var_mean(x, 1)),
    "var_mean with n": lambda x: torch.stack(torch.ops.aten.var_mean.dim(x, [1], False)),
    "p norm": lambda x: x.norm(3, dim=0),
    "max.dim": lambda x: x.max(1).values,
    "min.dim": lambda x: x.min(0, keepdim=True).values,
    "sort": lambda x: (x * 3).sort(-1, descending=True).values,
    "topk": lambda x: (x * 3).topk(3, -1).values,
    "median": lambda x: x.median(),
    "quantile": lambda x: x.quantile(0.3, dim=-1),
    "scatter_reduce": lambda x, y: x.scatter_reduce(0, torch.zeros(4, 6, dtype=torch.int64), y, "mean"),
    "turned in place": lambda x: (x * 2).transpose_(0, 1).unsqueeze_(0)[:, 1:] * 2,
    "vmap": lambda x: torch.vmap(torch.tanh)(x),
    "kthvalue": lambda x: x.kthvalue(2, -1).values,
    "argsort": lambda x, y: y.gather(-1, x.argsort(-1)),
    "argmax": lambda x, y: F.one_hot(x.argmax(-1), 6) * y,
    "mm": lambda x, y: x @ y.mT,
    "einsum": lambda x, y: torch.einsum("ij,kj->ik", x, y),
    "bmm": lambda x, y: x[None].expand(2, 4, 6) @ y.mT.expand(2, 6, 4),
    "mv": lambda x, y: x @ y[0],
    "dot": lambda x, y: x[0] @ y[0],
    "outer": lambda x, y: torch.outer(x[0], y[0]),
    "addmm": lambda x, y: torch.addmm(x[:, :4], x, y.mT, beta=0.5, alpha=2),
    "linear": lambda x, y, p: F.linear(x, y, p[:, 0]),
    "cosine_similarity": lambda x, y: F.cosine_similarity(x, y),
    "normalize": lambda x: F.normalize(x),
    "cross": lambda x, y: torch.linalg.cross(x[:, :3], y[:, :3]),
    "cat": lambda x, y: torch.cat([x, y], 1),
    "stack": lambda x, y: torch.stack([x, y]),
    "split": lambda x, y: x.split(2, 1)[1] * y[:, :2],
    "unbind": lambda x: x.unbind(1)[2],
    "pad": lambda x: F.pad(x, (1, -2, 3, 0), value=0.1),
    "reflect": lambda image: F.pad(image, (1, 2, 1, 1), mode="reflect"),
    "circular": lambda image: F.pad(image, (1, 2, 1, 1), mode="circular"),
    "flip": lambda x, y: x.flip(0) * y,
    "roll": lambda x, y: x.roll(2, 1) * y,
    "tril": lambda x, y: x.tril() * y.triu(1),
    "expand": lambda x, y: x[None].expand(3, 4, 6) * y,
    "permute": lambda image, p: image.permute(2, 0, 3, 1) * p[0, :3],
    "diagonal": lambda x, y: x.diagonal() + torch.diag_embed(y).sum(1)[:, :4],
    "unfold": lambda x: x.unfold(1, 3, 2) * 2,
    "repeat": lambda x: x.repeat(2, 3) + x.repeat_interleave(2, 0).tile(1, 3),
    "diff": lambda x: x.diff(),
    "index": lambda x: x[INDEX, 1:],
    "mask as index": lambda x: x[x > 0],
    "index_put": lambda x, y: x.index_put((INDEX,), y, accumulate=True),
    "index_copy": lambda x, y: x.index_copy(0, INDEX[:2], y[:2]),
    "index_add": lambda x, y: x.index_add(0, INDEX, y, alpha=2),
    "index_select": lambda x: x.index_select(1, INDEX),
    "gather": lambda x: x.gather(1, PAIRS),
    "take_along_dim": lambda x: x.take_along_dim(INDEX[:, None], 1),
    "take": lambda x: x.take(INDEX),
    "scatter": lambda x, y: x.scatter(1, PAIRS, y[:2, :2]),
    "scatter a number": lambda x: x.scatter(1, PAIRS, 2.5),
    "scatter_add": lambda x, y: x.scatter_add(0, torch.zeros(4, 6, dtype=torch.int64), y),
    "written into": lambda x, y: written(x * 2, (slice(None), 0), y[:, 1]),
    "in place": in_place,
    "select_scatter": lambda x, y: x.select_scatter(y[0], 0, 1).slice_scatter(y[:2], 0, 1, 3),
    "where": lambda x, y: torch.where((x > 0) & ~(y > 0), x, y * 0.3),
    "masked_fill": lambda x: x.masked_fill(x > 0, -1.0),
    "mask as factor": lambda x, y: x * (x > y).float() / (x > 0).sum(),
    "any": lambda x, y: torch.where((x > 1).any(-1, keepdim=True), x, y),
    "clamp": lambda x: x.clamp(-0.5, 0.7),
    "clamp of rounded numbers": lambda x: (x * 0.3).clamp(-10, 0.3 * 1.2),
    "clamp by tensors": lambda x, y: x.clamp(min=y - 0.2, max=y + 0.3),
    "constants": lambda x: x * torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6]) + torch.arange(6) / 3 + torch.ones(6),
    "casts": lambda x, y: (x.double() * y).to(x.dtype),
    "group_norm": lambda image: F.group_norm(image, 3),
    "batch_norm": lambda image: F.batch_norm(image, None, None, training=True),
    "instance_norm": lambda image: F.instance_norm(image),
    "conv2d": lambda image, x: F.conv2d(image, x.expand(2, 3, 4, 6)[..., :3], padding=1, stride=2),
    "conv_transpose2d": lambda image, x: F.conv_transpose2d(
        image, x.expand(3, 2, 4, 6)[..., :3], stride=2, padding=1, output_padding=1, groups=3
    ),
    "max_pool1d": lambda x: F.max_pool1d((x * 0.3).unsqueeze(1), 2).squeeze(1),
    "max_pool1d of nothing": lambda x: F.max_pool1d(x[:0].unsqueeze(1), 2).squeeze(1),
    "max_pool2d": lambda image: F.max_pool2d(image, 2),
    "avg_pool2d": lambda image: F.avg_pool2d(image, 3, 2, 1),
    "pixel_shuffle": lambda image: F.pixel_shuffle(image.reshape(2, 12, 4, 4), 2),
    "unfold image": lambda image: F.fold(F.unfold(image, 3), (8, 8), 3),
    "mse_loss": lambda x, y: F.mse_loss(x, y),
    "l1_loss": lambda x, y: F.l1_loss(x, y),
    "smooth_l1_loss": lambda x, y: F.smooth_l1_loss(x, y),
    "huber_loss": lambda x, y: F.huber_loss(x, y, delta=0.4),
    "binary_cross_entropy": lambda p, s: F.binary_cross_entropy(p / 2, s / 2),
    "binary_cross_entropy_with_logits": lambda x, p: F.binary_cross_entropy_with_logits(x, p),
    "kl_div": lambda x, y: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean"),
    "nll_loss": lambda x: F.nll_loss(x.log_softmax(-1), INDEX),
    "cross_entropy of an image": lambda image: F.cross_entropy(image, torch.zeros(2, 8, 8, dtype=torch.int64)),
    "triplet_margin_loss": lambda x, y: F.triplet_margin_loss(x, y, x.flip(0)),
    "cummax": lambda x: (x * 3).cummax(1).values,
    "cummin": lambda x, y: (x * y).cummin(0).values,
    "cummax of a row": lambda x: x.cummax(-1).values.sum(),
    "logcumsumexp": lambda x: x.logcumsumexp(-1),
    "cdist": lambda x, y: torch.cdist(x * 2, y),
    "cdist p=1": lambda x, y: torch.cdist(x * 2, y[:3], p=1),
    "cdist of batches": lambda image: torch.cdist(image, image.flip(2)[:, :, :5] + 1),
    "pdist": lambda x: torch.pdist(x * 3),
    "frobenius norm": lambda image: torch.linalg.matrix_norm(image),
    "nan_to_num": lambda x: (x * 3).nan_to_num(),
    "frac and remainders": lambda x, p: (x * 3).frac() + torch.fmod(x * 5, p) + torch.remainder(x * 5, 0.7),
    "logaddexp and xlogy": lambda x, y, p: torch.logaddexp(x, y) + torch.logaddexp2(x, y) + torch.xlogy(x, p),
    "as_strided": lambda x: (x * 2).as_strided((2, 3, 2), (2, 2, 1), 1),
    "as_strided of an input": lambda x: x.as_strided((5, 4), (4, 1)),
    "bilinear": lambda image: F.interpolate(image, scale_factor=1.7, mode="bilinear"),
    "bilinear between corners": lambda image: F.interpolate(image, (5, 15), mode="bilinear", align_corners=True),
    "bicubic": lambda image: F.interpolate(image, (13, 5), mode="bicubic"),
    "linear and trilinear": lambda image, x: (
        F.interpolate(image[None], (5, 8, 9), mode="trilinear")[0, 0] * F.interpolate(x[None], 9, mode="linear")[0, 0]
    ),
    "nearest": lambda image: F.interpolate(image, (13, 5)),
    "adaptive averages": lambda image: F.adaptive_avg_pool2d(image, (3, 5)) + F.adaptive_avg_pool2d(image[0], (3, 5)),
    "replicate": lambda image: F.pad(image, (1, 2, 3, 1), mode="replicate"),
    "copysign": lambda x, y: torch.copysign(x, y) + torch.copysign(y, -1.0),
    "signbit": lambda x, y: torch.where(torch.signbit(x), y, x),
    "frexp": lambda x, y: torch.frexp(x * 3)[0] + torch.frexp(x)[1] * y,
    "bits": lambda x, y: (x.float().view(torch.int32) >> 23 & 255) * y,
    "searchsorted": lambda x, p: torch.searchsorted(p.cumsum(-1), x * 2) * x,
    "bucketize": lambda x, p: torch.bucketize(x * 0.3, p[0].cumsum(-1), right=True) * x,
    "index_reduce": lambda x, y: x.index_reduce(1, INDEX, y[:, :4], "mean", include_self=False),
    "masked_scatter": lambda x, y: (x * 2).masked_scatter(x > 0, y * 3),
    "lower triangular": lambda x, y: torch.linalg.solve_triangular(x[:, :4].tril(-1) + EYE, y, upper=False),
    "upper triangular": lambda x, y: torch.linalg.solve_triangular(
        x[:, :4], y[:, :4], upper=True, left=False, unitriangular=True
    ),
    "sums of bags": lambda x, p: F.embedding_bag(INDEX, x, STARTS, mode="sum", per_sample_weights=p[0, :4]),
    "means of bags": lambda x: F.embedding_bag(INDEX, x, STARTS, mode="mean", padding_idx=0),
    **{name: lambda p, name=name: getattr(torch, name)(p + 0.1) for name in words("lgamma digamma i0")},
    "lgamma below 0": lambda p: torch.lgamma(-0.9 * p),
    "erfinv": lambda p: torch.erfinv(p / 2),
    **{name: lambda p, name=name: getattr(torch.special, name)(p * 2) for name in words("i0e i1 i1e erfcx log_ndtr")},
    "angle": lambda x: torch.angle(x) * x,
    "sgn": lambda x: torch.sgn(x) * x,
    "addbmm": lambda x, y, p: torch.addbmm(
        x, y.reshape(2, 4, 3), p.reshape(2, 3, 4).expand(2, 3, 4).repeat(1, 1, 2)[..., :6]
    ),
    "bilinear layer": lambda x, y, image: F.bilinear(x, y, image.reshape(-1)[:108].reshape(3, 6, 6)),
    "weight norm": lambda x, p: torch._weight_norm(x, p[:, :1], 0),
    "histogram": lambda x: torch.histc(x, 7, -1.5, 2) * x.sum(),
    "sums of segments": lambda x: torch.segment_reduce(x, "sum", lengths=COUNTS),
    "means of segments": lambda x: torch.segment_reduce(x, "mean", lengths=COUNTS[[0, 2]]),
    "maxima of segments": lambda x: torch.segment_reduce(x, "max", lengths=COUNTS),
    "products by index": lambda x, y: x.scatter_reduce(1, INDEX.expand(4, 4), y[:, :4], "prod"),
    "products alone": lambda x, y: x.scatter_reduce(1, INDEX.expand(4, 4), y[:, :4], "prod", include_self=False),
    "strided scatter": lambda x, y: x.as_strided_scatter(y[:2, :2], (2, 2), (7, 2), 1),
    "nearest exactly": lambda image: F.interpolate(image, scale_factor=1.7, mode="nearest-exact"),
    **{
        f"sampled {mode}, {padding}": lambda image, x, y, mode=mode, padding=padding: F.grid_sample(
            image,
            torch.stack([x, y], -1)[:2, None].expand(2, 2, 6, 2),
            mode,
            padding,
            align_corners=padding == "border",
        )
        for mode in ("bilinear", "nearest")
        for padding in ("zeros", "border")
    },
    "cholesky": lambda x: torch.linalg.cholesky(x @ x.mT + EYE),
    "upper cholesky": lambda x: torch.linalg.cholesky(x @ x.mT + EYE, upper=True),
    "cholesky solve": lambda x, y: torch.cholesky_solve(y, torch.linalg.cholesky(x @ x.mT + EYE)),
    "adaptive max pool": lambda image: F.adaptive_max_pool2d(image, (3, 5)),
    "adaptive max pool 1d": lambda x: F.adaptive_max_pool1d(x, 4),
    "adaptive max pool 3d": lambda image: F.adaptive_max_pool3d(image, (2, 3, 4)),
    "max pool, rounded up": lambda image: F.max_pool2d(image, 3, 2, ceil_mode=True),
    "average pool, rounded up": lambda image: F.avg_pool2d(image, 3, 2, 1, ceil_mode=True),
    "average pool, rounded up, padding left out": lambda image: F.avg_pool2d(
        image, 2, 3, 1, ceil_mode=True, count_include_pad=False
    ),
    "unpooled": lambda image: F.max_unpool2d(*F.max_pool2d(image, 2, return_indices=True), 2),
    "lists": lambda x, y, p: torch.cat(
        torch._foreach_addcdiv(
            torch._foreach_add([x, y], [y, x], alpha=0.5), [x, y], torch._foreach_maximum([p, p], 0.6), 2.0
        )
    ),
    "lists in place": lists_in_place,
    "norms of lists": lambda x, y: torch.stack(torch._foreach_norm([x, y], 1)).norm(),
    "lstm": lambda x, y, p: torch.lstm(
        x[:, None],
        [x.new_zeros(1, 1, 4)] * 2,
        [y.repeat(4, 1), p.repeat(4, 1)[:, :4]],
        False,
        1,
        0.0,
        False,
        False,
        False,
    )[0],
    "complex products": lambda x, y, p: torch.view_as_real(torch.complex(x, y) * torch.polar(p, y) * (p * 2j)).sum(-1),
    "complex magnitudes": lambda x, y: torch.complex(x, y).abs(),
    "complex sums": lambda x, y: (torch.complex(x, y) - torch.complex(y, x).conj()).sum(0).imag,
    "complex numbers moved": lambda x, y: torch.stack(
        [part.T.reshape(6, 2)[INDEX].real for part in torch.complex(x, y).split(2)]
    ),
    "masked attention": lambda x, y, p: F.scaled_dot_product_attention(
        x[None], y[None], p[None], PAIRS.repeat(2, 2) > 0
    ),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_has_torchs_value_and_a_narrow_bound_that_torch_meets(name: str) -> None:
    definition, generator = OPERATORS[name], torch.Generator().manual_seed(7)
    known = {
        "x": torch.randn(4, 6, generator=generator),
        "y": torch.randn(4, 6, generator=generator),
        "p": torch.rand(4, 6, generator=generator) + 0.5,
        "s": torch.rand(4, 6, generator=generator) + 0.5,
        "image": torch.randn(2, 3, 8, 8, generator=generator),
    }
    inputs = {
        key: known[key] for key in definition.__code__.co_varnames[: definition.__code__.co_argcount] if key in known
    }
    grad_output = torch.randn(definition(**inputs).shape, generator=generator)
    expected = results(definition, DTYPES["float32"], grad_output, **inputs)
    exactly = compute_by_torch(definition, grad_output.double(), **{key: x.double() for key, x in inputs.items()})
    for i, (value, actual, bound) in enumerate(
        zip(exactly, compute_by_torch(definition, grad_output, **inputs), expected)
    ):
        # A constant tensor is float32 in torch, and wide here.
        np.testing.assert_allclose(bound.value, value.numpy(), rtol=2e-7 if name == "constants" else 1e-12, atol=1e-12)
        assert outside(actual, bound) == 0
        size = abs(bound.value)
        narrow = bound.error <= 1e-3 * np.maximum(size, np.median(size[size > 0]) if size.any() else 1)
        assert narrow.all(), (i, bound.error.max())


# Ties: each of the derivatives between the one-sided ones is right, where the function is continuous.


def span(
    definition: Definition, numbers: list[float], grad: float = 1.0, dtype: DType = FREE
) -> list[tuple[float, float]]:
    """Return the least and the largest right derivative of a sum of outputs for each number, up to rounding."""
    x = torch.tensor(numbers, dtype=torch.float32)
    with torch.no_grad():
        shape = definition(x).shape
    bound = results(definition, dtype, torch.full(shape, grad), x=x)[1]
    return [(round(float(v - e), 4) + 0.0, round(float(v + e), 4) + 0.0) for v, e in zip(bound.value, bound.error)]


KINKS: dict[str, tuple[Definition, list[float], list[tuple[float, float]]]] = {
    "relu": (lambda x: F.relu(x), [-1, 0, 2], [(0, 0), (0, 1), (1, 1)]),
    "leaky_relu": (lambda x: F.leaky_relu(x, 0.5), [-1, 0, 2], [(0.5, 0.5), (0.5, 1), (1, 1)]),
    "abs": (lambda x: x.abs(), [-1, 0, 2], [(-1, -1), (-1, 1), (1, 1)]),
    "clamp": (lambda x: x.clamp(-1, 1), [-2, -1, 0, 1], [(0, 0), (0, 1), (1, 1), (0, 1)]),
    "hardtanh": (lambda x: F.hardtanh(x), [-1, 0, 1, 3], [(0, 1), (1, 1), (0, 1), (0, 0)]),
    "where": (lambda x: torch.where(x > 0, x, 0.0), [-1, 0, 2], [(0, 0), (0, 1), (1, 1)]),
    "mask as factor": (lambda x: x * (x > 0).float(), [-1, 0, 2], [(0, 0), (0, 1), (1, 1)]),
    "maximum": (lambda x: torch.maximum(x[0], x[1:]), [1, 1, 2], [(0, 1), (0, 1), (1, 1)]),
    "amax": (lambda x: x.amax(), [1, 3, 3, 2], [(0, 0), (0, 1), (0, 1), (0, 0)]),
    "max": (lambda x: x.max(), [1, 3, 3, 2], [(0, 0), (0, 1), (0, 1), (0, 0)]),
    "max.dim": (lambda x: x.max(0).values, [1, 3, 3, 2], [(0, 0), (0, 1), (0, 1), (0, 0)]),
    "min alone": (lambda x: x.amin(), [1, 3, 3, 2], [(1, 1), (0, 0), (0, 0), (0, 0)]),
    "sort": (lambda x: x.sort().values * torch.tensor([1.0, 2, 4]), [5, 5, 1], [(2, 4), (2, 4), (1, 1)]),
    "topk": (lambda x: x.topk(2).values * torch.tensor([1.0, 2]), [5, 5, 5], [(0, 2)] * 3),
    "max_pool2d": (
        lambda x: F.max_pool2d(x.view(1, 2, 3), (2, 2), 1),
        [1, 5, 5, 1, 2, 3],
        [(0, 0), (1, 2), (0, 1), *[(0, 0)] * 3],
    ),
    "cummax": (lambda x: x.cummax(0).values * torch.tensor([1.0, 2, 4]), [5, 5, 1], [(1, 7), (0, 6), (0, 0)]),
    "cummin of a tie at the end": (
        lambda x: x.cummin(0).values * torch.tensor([1.0, 2, 4]),
        [3, 1, 1],
        [(1, 1), (2, 6), (0, 4)],
    ),
    "distance of 0": (lambda x: torch.cdist(x[:, None], torch.tensor([[2.0]])), [2, 3], [(-1, 1), (1, 1)]),
    "topk apart": (lambda x: x.topk(2).values * torch.tensor([1.0, 2]), [5, 4, 3], [(1, 1), (2, 2), (0, 0)]),
    # These jump, and the derivative is that of the chosen branch.
    "mask": (lambda x: torch.where(x > 0, x + 1, 0.0), [-1, 0, 2], [(0, 0), (0, 0), (1, 1)]),
    "index": (lambda x: x[x >= 0], [-1, 0, 2], [(0, 0), (1, 1), (1, 1)]),
}


@pytest.mark.parametrize(
    "pool",
    [lambda x: F.max_pool2d(x, 2, return_indices=True), lambda x: F.adaptive_max_pool2d(x, 2, return_indices=True)],
)
def test_places_of_maxima_are_counted_in_the_image_and_any_of_equal_ones_is_right(pool: Any) -> None:
    x = torch.tensor([[0.0, 1, 5, 2], [3, 3, 2, 1], [1, 2, 4, 4], [0, 1, 4, 4]])[None, None]
    bound = forward_of(lambda x: pool(x)[1])(x=exact(x, FREE))
    assert bound.value.tolist() == [[[[4, 2], [9, 10]]]]
    for given, right in (([5, 2, 9, 15], [5, 2, 9, 15]), ([1, 6, 1, 7], [4, 2, 9, 10])):
        nearest = bound.nearest(np.array(given, dtype=np.float64).reshape(1, 1, 2, 2))
        assert nearest.reshape(-1).tolist() == right


def test_pooling_along_one_axis_has_a_bound_where_rounding_may_change_the_order() -> None:
    """torch removes an axis of one element from the indices, which nothing uses afterwards."""
    found = span(lambda x: F.max_pool1d((x + 0.1).view(1, 1, 4), 2), [5, 5, 2, 1])
    assert admits(found, [(0, 1), (0, 1), (1, 1), (0, 0)]), found


def admits(found: list[tuple[float, float]], wanted: list[tuple[float, float]]) -> bool:
    """Return whether all required values are admitted, and nothing else where a single number is required."""
    return all(f[0] <= w[0] and w[1] <= f[1] and (w[0] < w[1] or f == w) for f, w in zip(found, wanted, strict=True))


@pytest.mark.parametrize("name", KINKS)
def test_at_a_kink_every_derivative_between_the_one_sided_ones_is_right(name: str) -> None:
    definition, numbers, wanted = KINKS[name]
    found = span(definition, numbers)
    assert admits(found, [(float(low), float(high)) for low, high in wanted]), found
    # At most twice as wide, to either side.
    assert all(f[1] - f[0] <= 2 * (w[1] - w[0]) for f, w in zip(found, wanted)), found


@pytest.mark.parametrize("name", KINKS)
def test_where_ties_are_documented_torchs_own_derivative_is_held(name: str) -> None:
    definition, numbers, _ = KINKS[name]
    x = torch.tensor(numbers, dtype=torch.float32)
    with torch.no_grad():
        ones = torch.ones_like(definition(x))
    _, theirs = compute_by_torch(definition, ones, x=x)
    assert span(definition, numbers, dtype=DTYPES["float32"]) == [(float(g), float(g)) for g in theirs]


def test_a_sign_that_hangs_on_rounding_leaves_the_gradient_free() -> None:
    x = torch.tensor([1 / 3, 1.0])
    bound = results(lambda x: F.relu(x + x + x - 3 * x), FREE, torch.ones(2), x=x)[1]
    assert np.all(bound.value - bound.error <= 0)
    assert np.all(bound.error < 10)


def test_where_autograd_has_nan_a_candidates_gradient_is_free_and_a_documented_one_is_not() -> None:
    definition = lambda x: torch.where(x > 0, x.sqrt() / x, 0.0)  # noqa: E731
    x = torch.tensor([0.0, 4.0])
    for dtype, known in ((FREE, False), (DTYPES["float32"], True)):
        grad = results(definition, dtype, torch.ones(2), x=x)[1]
        assert np.isnan(grad.value[0])
        assert np.isfinite(grad.error).tolist() == [known, True]


def skipping_zero_cotangents(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the gradient of softmax, and zeros for rows whose cotangent is 0."""
    y = torch.softmax(x, -1)
    gradient = y * (grad - (grad * y).sum(-1, keepdim=True))
    return torch.where((grad == 0).all(-1, keepdim=True), 0.0, gradient)


@pytest.mark.parametrize("grad_of_first_row", [0.0, 1.5])
def test_rows_of_zero_cotangents_may_be_skipped_unless_ties_are_documented(grad_of_first_row: float) -> None:
    """Both 0 and NaN are right for a cotangent of 0 times NaN; a row without NaN has one gradient."""
    x = torch.tensor([[torch.nan, 1.0, 2.0], [3.0, 1.0, 2.0]])
    grad = torch.tensor([[grad_of_first_row] * 3, [1.0, -2.0, 0.5]])
    found = skipping_zero_cotangents(grad, x)
    assert (found[0] == 0).all() == (grad_of_first_row == 0)
    for dtype, free in ((FREE, True), (DTYPES["float32"], False)):
        bound = results(lambda x: x.softmax(-1), dtype, grad, x=x)[1]
        assert np.isnan(bound.value[0]).all()
        assert np.isinf(bound.error[0]).all() == free
        assert outside(found[1], bound[1]) == 0
        assert outside(2 * found[1], bound[1]) > 0
        # The kernel that skips is rejected where ties are documented, and only there.
        assert (outside(found, bound) == 0) == (free or grad_of_first_row != 0)


FORMULAS: dict[str, tuple[float, Definition, Definition]] = {
    "tanh": (0, lambda x: torch.tanh(x), lambda x: 2 * torch.sigmoid(2 * x) - 1),
    "elu": (0, lambda x: F.elu(x), lambda x: torch.where(x > 0, x, torch.exp(x) - 1)),
    "softplus": (-9, lambda x: F.softplus(x), lambda x: torch.log(1 + torch.exp(x))),
    "logsigmoid": (9, lambda x: F.logsigmoid(x), lambda x: -torch.log(1 + torch.exp(-x))),
    "log_softmax": (4096, lambda x: x.log_softmax(-1), lambda x: x - torch.logsumexp(x, -1, True)),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_formula_with_the_same_absolute_accuracy_is_right_unless_the_steps_are_documented(name: str) -> None:
    middle, definition, formula = FORMULAS[name]
    x = torch.linspace(middle - 0.02, middle + 0.01, 61)
    free, documented = (forward_of(definition)(x=exact(x, dtype)) for dtype in (FREE, DTYPES["float32"]))
    assert outside(formula(x), free) == 0
    assert outside(formula(x), documented) > 0
    assert outside(formula(x) + 0.01, free) == 61


@pytest.mark.parametrize("times", [lambda p, v: p @ v, lambda p, v: (p[..., None] * v).sum(-2)])
def test_online_softmax_may_overflow_before_it_divides(times: Definition) -> None:
    definition = lambda x, v: times(torch.softmax(x, -1), v)  # noqa: E731
    arguments = {"x": torch.zeros(1, 8), "v": torch.full((8, 1), 3e38)}
    free, documented = (
        forward_of(definition)(**{name: exact(part, dtype) for name, part in arguments.items()})
        for dtype in (FREE, DTYPES["float32"])
    )
    assert np.isinf(free.error).all()
    assert np.isfinite(documented.error).all()


def test_kept_gradients_of_a_loss_may_be_multiplied_by_an_infinite_cotangent() -> None:
    definition = lambda x: torch.where(torch.tensor([True, False]), x, 0.0).sum()  # noqa: E731
    for grad_output, known in ((torch.inf, [False, False]), (torch.nan, [False, False]), (2.0, [True, True])):
        (_, grad) = results(definition, FREE, torch.tensor(grad_output), x=torch.ones(2))
        assert np.isfinite(grad.error).tolist() == known
    (_, grad) = results(definition, DTYPES["float32"], torch.tensor(torch.inf), x=torch.ones(2))
    assert grad.error.tolist() == [0, 0]


def test_a_norm_that_may_overflow_on_its_way_is_unspecified() -> None:
    output = results(lambda x: x.norm(), FREE, torch.tensor(1.0), x=torch.tensor([1e30, 1e30]))[0]
    assert np.isinf(output.error)


def test_softmax_of_scores_without_accuracy_is_between_0_and_1() -> None:
    output = results(
        lambda x, y: (x @ y).softmax(-1), FREE, torch.ones(3, 3), x=torch.ones(3, 4) / 3, y=torch.randn(4, 3) * 1e9
    )[0]
    assert np.all(output.error < 1.0001)
    assert np.any(output.error > 0.5)


def test_what_hangs_on_rounding_is_refused_where_it_decides_what_is_computed() -> None:
    x = torch.tensor([1 / 3, 1 / 3])
    zero = lambda x: x + x + x - 3 * x  # noqa: E731
    for definition in (
        lambda x: x[zero(x) > 0],
        lambda x: x[zero(x).argmax()],
        lambda x: x if (zero(x) > 0).any() else -x,
        lambda x: x[(zero(x) * 1e9).long()],
    ):
        with pytest.raises(ValueError, match="rounding"):
            forward_of(definition)(x=exact(x, FREE))


def test_a_number_that_python_would_read_must_be_exact() -> None:
    x = exact(torch.tensor(2.0), FREE)
    assert forward_of(lambda x: x * x.item())(x=x).value == 4
    with pytest.raises(TypeError, match="drop its error"):
        forward_of(lambda x: x * x.exp().item())(x=x)


# The dtype that a definition sees.


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_definition_sees_the_tested_dtype_and_computes_in_a_wider_one(dtype: str) -> None:
    seen = []

    def definition(x: torch.Tensor) -> torch.Tensor:
        seen.append((x.dtype, x.float().dtype, (x.float() * x).dtype, (x > 0).dtype, x.shape, x.device.type))
        return (x.float().exp() / torch.finfo(x.dtype).max).to(x.dtype)

    tested = DTYPES[dtype]
    x = torch.tensor([0.5, 1.0], dtype=tested.torch)
    output = forward_of(definition)(x=exact(x, tested))
    wider = torch.float64 if dtype == "float64" else torch.float32
    assert seen == [(tested.torch, torch.float32, wider, torch.bool, (2,), "cpu")]
    assert output.dtype == tested.wide
    expected = np.exp(tested.array(x)) / tested.wide(torch.finfo(tested.torch).max)
    np.testing.assert_allclose(output.value.astype(float), expected.astype(float), rtol=1e-15)


def test_arguments_that_are_no_tensors_are_given_as_they_are() -> None:
    def definition(
        x: torch.Tensor, bias: torch.Tensor | None, lengths: torch.Tensor, scale: float = 2.0
    ) -> torch.Tensor:
        assert bias is None
        return x[: int(lengths[0])] * scale

    x = exact(torch.ones(3), FREE)
    arguments = {"x": x, "bias": None, "lengths": np.array([2]), "scale": 3.0}
    assert forward_of(definition)(**arguments).value.tolist() == [3, 3]
    (grad,) = backward_of(definition, ["x"])(exact(torch.ones(2), FREE), **arguments)
    assert grad.value.tolist() == [3, 3, 0]


# Of an exponential moving average: its definition, and the weights that a kernel takes of x and y.
AVERAGES: dict[str, Definition] = {
    "sum": lambda x, y, beta: beta * y + (1 - beta) * x,
    "lerp": lambda x, y, beta: torch.lerp(x, y, beta),
    "root": lambda x, y, beta: beta * y + x * math.sqrt(1 - beta) * math.sqrt(1 - beta),
    "power": lambda x, y, beta: beta * y + -(beta**1 - 1) * x,
}


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", AVERAGES)
def test_a_parameter_is_rounded_before_its_digits_cancel_and_to_no_narrower_type(name: str, dtype: str) -> None:
    tested, beta = DTYPES[dtype].with_contract(OPEN), 0.999
    x, y, grad = torch.full((3,), 1.5), torch.tensor([0.0, 1e-3, -1.0]), torch.ones(3)
    x, y, grad = (exact(part.to(tested.torch), tested) for part in (x, y, grad))
    output = forward_of(AVERAGES[name])(x=x, y=y, beta=beta)
    grads = backward_of(AVERAGES[name], ["x", "y"])(grad, x=x, y=y, beta=beta)

    def wrong(taken: Any) -> list[int]:
        """Return the number of wrong elements of a kernel that takes the parameter so."""
        weights = type(taken)(1) - taken, taken
        results = [weights[0] * x.value + weights[1] * y.value, *(np.broadcast_to(weight, 3) for weight in weights)]
        return [outside(torch.from_numpy(a.astype(float)), b) for a, b in zip(results, (output, *grads), strict=True)]

    right = np.float64 if dtype == "float64" else np.float32
    assert wrong(right(beta)) == [0, 0, 0]
    assert wrong(np.float16(beta)) == [3, 3, 3]
    assert wrong(right(0.998)) == [3, 3, 3]


def test_a_table_without_columns_has_a_gradient_without_elements() -> None:
    backward = backward_of(lambda weight: F.embedding(INDEX[:0], weight, padding_idx=1), ["weight"])
    (grad,) = backward(exact(torch.zeros(0, 0), FREE), weight=exact(torch.zeros(5, 0), FREE))
    assert grad.shape == (5, 0)


def test_the_bits_of_a_rounded_number_are_refused() -> None:
    with pytest.raises(HangsOnRounding, match="the bits of a number"):
        forward_of(lambda x: (x * 0.3).view(torch.int32))(x=exact(torch.ones(2), FREE))


def test_interpolation_may_skip_an_element_of_weight_0_and_copies_an_input_of_its_size() -> None:
    x = torch.tensor([[[1.0, torch.nan, 3.0]]])
    between = forward_of(lambda x: F.interpolate(x, size=5, mode="linear", align_corners=True))(x=exact(x, FREE))
    assert np.isinf(between.error[0, 0]).tolist() == [True, False, False, False, True]
    assert np.isnan(between.value[0, 0, 1:4]).all()
    copied = forward_of(lambda x: F.interpolate(x, scale_factor=1.2, mode="linear"))(x=exact(x[..., ::2], FREE))
    np.testing.assert_array_equal(copied.value, x[..., ::2].numpy())
    # Beyond the ends torch multiplies the next element by 0.
    ends = forward_of(lambda x: F.interpolate(x, scale_factor=2, mode="linear"))(x=exact(-x / 0, FREE))
    assert np.isinf(ends.error[0, 0, [0, -1]]).all()


def test_an_input_without_influence_has_a_gradient_of_zeros() -> None:
    x, y = exact(torch.ones(3), FREE), exact(torch.ones(2), FREE)
    for definition in (lambda x, y: y * 2, lambda x, y: y.detach()):
        grad_x, _ = backward_of(definition, ["x", "y"])(exact(torch.ones(2), FREE), x=x, y=y)
        assert grad_x.value.tolist() == grad_x.error.tolist() == [0, 0, 0]


def test_a_tensor_that_leaves_its_evaluation_is_refused() -> None:
    kept = []
    forward_of(lambda x: kept.append(F.huber_loss(x, 2 * x)) or x)(x=exact(torch.ones(3), FREE))
    with pytest.raises(TypeError, match="outside of the evaluation"):
        torch.add(kept[0], 1)


def test_inputs_are_not_written_into() -> None:
    x = exact(torch.ones(3), FREE)
    forward_of(lambda x: x.mul_(2))(x=x)
    assert x.value.tolist() == [1, 1, 1]


def test_a_definition_must_return_a_tensor() -> None:
    with pytest.raises(TypeError, match="must return a tensor, and returned tuple"):
        forward_of(lambda x: (x, x))(x=exact(torch.ones(3), FREE))


# Operators without a rule.


def test_an_operator_without_a_rule_is_named_and_one_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.tensor([0.25, 0.875])
    definition = lambda x: torch.special.ndtri(x)  # noqa: E731
    with pytest.raises(NoTorchRule, match=r"special_ndtri\.default has .*no bound of .*rule\(torch\.ops\.aten"):
        forward_of(definition)(x=exact(x, FREE))
    monkeypatch.setitem(RULES, "aten.special_ndtri.default", None)

    @rule(torch.ops.aten.special_ndtri.default)
    def quantile(a: Bounded) -> Bounded:
        value = torch.special.ndtri(torch.from_numpy(a.value)).numpy()
        return elementary_step(value, a.error * np.sqrt(2 * np.pi) * np.exp(np.square(value) / 2), (a,), units(4))

    grad_output = torch.ones(2)
    for actual, bound in zip(
        compute_by_torch(definition, grad_output, x=x), results(definition, FREE, grad_output, x=x)
    ):
        assert outside(actual, bound) == 0
        assert np.all(bound.error < 1e-4)


def test_an_operator_without_a_rule_is_named_where_python_has_a_sign_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(RULES, "aten.mul.Tensor")
    with pytest.raises(NoTorchRule, match=r"aten\.mul\.Tensor has no running-error rule"):
        forward_of(lambda x: x * x)(x=exact(torch.ones(3), FREE))


def test_a_function_of_complex_numbers_without_a_rule_is_refused() -> None:
    with pytest.raises(NoTorchRule, match=r"aten\.exp\.default has no running-error rule for complex numbers"):
        forward_of(lambda x: torch.complex(x, x).exp().real)(x=exact(torch.ones(3), FREE))
    with pytest.raises(TypeError, match=r"must return real numbers, and returned complex64"):
        forward_of(lambda x: torch.complex(x, x))(x=exact(torch.ones(3), FREE))


def test_an_operator_of_random_numbers_is_refused() -> None:
    with pytest.raises(NoTorchRule, match=r"aten\.rand\.default"):
        forward_of(lambda x: x + torch.rand(3))(x=exact(torch.ones(3), FREE))


def test_a_rule_is_for_an_operator_with_its_overload() -> None:
    with pytest.raises(TypeError, match=r"aten\.lgamma is no operator with its overload"):
        rule(torch.ops.aten.lgamma)


@pytest.mark.parametrize(
    "summed",
    [
        lambda x: x.sum(-1),
        lambda x: x.cumsum(-1)[..., -1],
        lambda x: torch.zeros(2).index_add(0, torch.tensor([1, 1, 1]), x)[1],
        lambda x: x[:1].scatter_add(0, torch.zeros(2, dtype=torch.int64), x[1:])[0],
        lambda x: torch.zeros(2).index_put((torch.tensor([1, 1, 1]),), x, accumulate=True)[1],
    ],
)
def test_an_infinite_sum_is_unspecified_where_other_terms_may_overflow_against_it(summed: Any) -> None:
    # In this order float32 makes inf - inf of the first row; no order makes anything but -inf of the others.
    rows = [[3e38, 3e38, -torch.inf], [-3e38, -3e38, -torch.inf], [3e38, 1.0, -torch.inf]]
    for row, unspecified in zip(rows, (True, False, False)):
        output = results(summed, FREE, torch.tensor(1.0), x=torch.tensor(row))[0]
        assert np.isinf(output.error) == unspecified
        assert output.value == -np.inf


def gelu_in_steps(x: torch.Tensor, approximate: str) -> list[torch.Tensor]:
    """Return GELU by formulas that kernels use."""
    if approximate == "none":
        return [x * 0.5 * (1 + torch.erf(x * math.sqrt(0.5))), x * 0.5 * torch.erfc(-x * math.sqrt(0.5))]
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    power = torch.exp(2 * inner.clamp(max=20))
    tanhs = [torch.tanh(inner), 2 * torch.sigmoid(2 * inner) - 1, 1 - 2 / (1 + power), (power - 1) / (power + 1)]
    return [x * 0.5 * (1 + tanh) for tanh in tanhs]


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_the_tails_of_gelu_are_bounded_by_what_erf_and_tanh_cost_there(approximate: str) -> None:
    """The bound holds for the formulas of kernels, and is a fifth of the former one where erf and tanh are -1."""
    dtype, x = FREE, torch.linspace(-30, 8, 40001)
    bound = results(lambda x: F.gelu(x, approximate=approximate), dtype, torch.ones_like(x), x=x)[0]
    wide = x.double()
    # By erfc, or as x / (1 + e^-2y), which do not cancel.
    inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
    share = torch.erfc(-wide * math.sqrt(0.5)) / 2 if approximate == "none" else torch.sigmoid(2 * inner)
    exactly = wide * share
    assert (abs(bound.value - exactly.numpy()) <= 1e-3 * bound.error).all()
    for actual in (F.gelu(x, approximate=approximate), *gelu_in_steps(x, approximate)):
        assert (abs(actual.double() - exactly).numpy() <= bound.error).all()
    in_units = bound.error / abs(x.numpy()) / dtype.arithmetic.roundoff
    tail = x.numpy() < -6
    assert in_units[tail].max() < 2.5
    assert in_units[(x.numpy() > -5) & (x.numpy() < -3)].min() > 5


def test_a_mask_made_in_place_of_comparisons_without_doubt_is_taken() -> None:
    def definition(x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(x.shape, dtype=torch.bool)  # plain, because it was made without numbers
        mask.logical_and_(x > 0)
        return torch.where(mask, x, 0.0)

    def of_sums(x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(x.shape[:1], dtype=torch.bool)
        mask.logical_and_(x.sum(-1) > 0)
        return torch.where(mask, x[:, 0], 0.0)

    x = torch.tensor([[1.0, -2.0], [3.0, 0.0]])
    (output,) = results(definition, DTYPES["float32"], x, x=x)[:1]
    assert output.value.tolist() == [[1.0, 0.0], [3.0, 0.0]]
    rounded = torch.tensor([[0.1, 0.2, -0.3]])  # rounding decides whether their sum is positive
    with pytest.raises(HangsOnRounding):
        results(of_sums, DTYPES["float32"], rounded[:, 0], x=rounded)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_cast_to_float8_is_rounded_and_its_bound_holds_both_neighbours(dtype: torch.dtype) -> None:
    def quantized(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype).to(torch.float32)

    def of_sums(x: torch.Tensor) -> torch.Tensor:
        return quantized(x.sum(-1))

    x = torch.tensor([126.646, -3.9, 0.0019, 17.0, 0.0])
    exactly, *_ = results(quantized, DTYPES["float32"], torch.ones(5), x=x)
    assert exactly.value.tolist() == quantized(x).tolist()
    assert not exactly.error.any()
    # Up to rounding the sum is halfway between 16 and the next number.
    step = 2.0 if dtype == torch.float8_e4m3fn else 4.0
    near, *_ = results(of_sums, DTYPES["float32"], torch.ones(1), x=torch.tensor([[16.0, step / 4, step / 4]]))
    assert near.value.item() == 16.0
    assert near.error.item() == step
    largest = torch.finfo(dtype).max
    at_largest, *_ = results(of_sums, DTYPES["float32"], torch.ones(1), x=torch.tensor([[largest - 3, 2.9, 0.1]]))
    assert at_largest.value.item() == largest
    assert not at_largest.error.any()
    beyond, *_ = results(quantized, DTYPES["float32"], torch.ones(1), x=torch.tensor([1.08 * largest]))
    assert np.isinf(beyond.error).all()
