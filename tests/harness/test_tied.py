"""Parameters and axes tied to sizes: groups that divide channels, the longest sample, axes such as 2*dim."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from drawing import collect
from subjects import agrees, subject_of

import fourfold
from fourfold import divisors, offsets, operation, tensor, tied
from fourfold.checks.parameters import defaults_are_the_definitions
from fourfold.checks.search import Search
from fourfold.declaration.definition import DefinedOperation
from fourfold.numerics.dtypes import DTYPES
from fourfold.operations import axes as notation
from fourfold.operations.case import Case
from fourfold.operations.outcomes import Failure
from fourfold.operations.record import sizes_of

FLOAT32 = DTYPES["float32"]


@operation(
    x=tensor("batch channels space"),
    weight=tensor("channels"),
    groups=divisors("channels"),
    sizes={"batch": (0, 4), "channels": (1, 64), "space": (4, 64)},
    tried=False,
)
def group_norm(x: Any, weight: Any, groups: int = 4) -> Any:
    y = x.reshape(x.shape[0], groups, -1)
    mean = y.mean(-1, keepdim=True)
    y = (y - mean) * torch.rsqrt((y - mean).square().mean(-1, keepdim=True) + 1e-5)
    return y.reshape(x.shape) * weight[:, None]


@operation(packed=tensor("rows 2*dim"), sizes={"rows": (0, 129)}, tried=False)
def swiglu(packed: Any) -> Any:
    gate, up = packed.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


@operation(
    q=tensor("group*heads seq dim"),
    k=tensor("heads keys dim"),
    sizes={"group": (1, 8), "heads": (0, 4), "seq": (0, 33), "keys": (0, 33), "dim": (1, 65)},
    tried=False,
)
def scores(q: Any, k: Any) -> Any:
    return q @ k.repeat_interleave(len(q) // max(len(k), 1), 0).mT


@operation(
    x=tensor("tokens dim"),
    starts=offsets("batch", total="tokens"),
    longest=tied(lambda starts: max(starts.diff().tolist(), default=0)),
    tried=False,
)
def padded(x: Any, starts: Any, longest: int) -> Any:
    rows = starts[:-1, None] + torch.arange(longest)
    inside = rows < starts[1:, None]
    return torch.where(inside[..., None], x[torch.where(inside, rows, 0)], 0.0)


@operation(x=tensor("... cols"), scale=tensor("cols/4"), tried=False)
def scaled_blocks(x: Any, scale: Any) -> Any:
    return x * scale.repeat_interleave(4)[: x.shape[-1]]


def cases_of(made: DefinedOperation, count: int = 24) -> list[Case]:
    return [*(make(FLOAT32) for make in made.examples.values()), *collect(made.cases(FLOAT32, 1024), count)]


# ---- axes


def test_products_of_sizes_give_shapes_and_are_solved_for_the_one_unknown_size() -> None:
    axes = {"q": notation.parse("batch group*heads 2*dim+1"), "k": notation.parse("batch heads dim")}
    sizes = {"batch": 2, "group": 3, "heads": 5, "dim": 4}
    shapes = {name: notation.shape(each, sizes) for name, each in axes.items()}
    assert shapes == {"q": (2, 15, 9), "k": (2, 5, 4)}
    assert notation.sizes(axes, shapes) == (sizes, None)
    for wrong in ((2, 16, 9), (2, 15, 8), (2, 15, 11)):
        assert notation.sizes(axes, {**shapes, "q": wrong})[1] is not None, wrong
    assert notation.names(axes["q"]) == ("batch", "group", "heads", "dim")


def test_blocks_of_a_size_are_as_many_as_it_begins() -> None:
    axes = {"scale": notation.parse("rows 2*cols/4+1"), "x": notation.parse("rows cols")}
    for cols, blocks in ((0, 0), (1, 1), (2, 1), (3, 2), (8, 4), (9, 5)):
        shapes = {"scale": (3, blocks + 1), "x": (3, cols)}
        assert {name: notation.shape(each, {"rows": 3, "cols": cols}) for name, each in axes.items()} == shapes
        assert notation.sizes(axes, shapes) == ({"rows": 3, "cols": cols}, None)
        assert notation.sizes(axes, {**shapes, "scale": (3, blocks)})[1] == "scale"
    assert notation.last(axes.values()) == ("cols",)
    with pytest.raises(ValueError, match="cols/0"):
        notation.parse("cols/0")


@pytest.mark.parametrize(
    "made",
    [padded, *(pytest.param(each, marks=pytest.mark.full) for each in (swiglu, scores, group_norm, scaled_blocks))],
    ids=lambda made: made.name,
)
def test_sizes_agree_and_are_empty_one_and_many(made: DefinedOperation) -> None:
    seen = []
    for case in cases_of(made):
        seen.append(sizes_of(made, case))  # raises where they do not agree
        assert case.grad_output.shape == made(**case.tensors(FLOAT32, "cpu"), **case.parameters).shape
    for axis in {*fourfold.operations.claims.axes_of(made)} - {"..."}:
        found = {sizes[axis] for sizes in seen if axis in sizes}
        least = made.declaration.allowed[axis].nearest(0)
        assert {least, made.declaration.allowed[axis].nearest(129)} <= found, axis


@pytest.mark.full
def test_inputs_with_products_stay_within_the_elements_asked_for() -> None:
    for made in (swiglu, scores):
        for case in collect(made.cases(FLOAT32, 512), 30):
            assert max(array.size for array in case.inputs.values()) <= 512


def test_a_claim_limits_the_axis_in_a_product() -> None:
    only = fourfold.Claims(sizes={"dim": 16}).restrict(swiglu)
    assert {case["packed"].shape[1] % 32 for case in cases_of(only, 20)} == {0}


# ---- parameters


def test_groups_divide_channels_and_are_one_all_and_between() -> None:
    found = [(case["x"].shape[1], case.parameters["groups"]) for case in cases_of(group_norm)]
    assert all(channels % groups == 0 for channels, groups in found)
    several = [(channels, groups) for channels, groups in found if channels > 8]
    assert any(groups == 1 for _, groups in several)
    assert any(groups == channels for channels, groups in several)
    assert len({groups for channels, groups in several if 1 < groups < channels}) >= 3


def test_a_default_that_does_not_divide_is_the_largest_divisor_below() -> None:
    groups = {make(FLOAT32)["x"].shape[1]: make(FLOAT32).parameters["groups"] for make in group_norm.examples.values()}
    assert groups[64] == 4
    assert groups[1] == 1


def test_the_longest_sample_is_that_of_each_case() -> None:
    found = cases_of(padded)
    for case in found:
        assert case.parameters["longest"] == max([0, *(case["starts"][1:] - case["starts"][:-1])])
        other = case.with_inputs(**padded.other_integers(case))
        assert padded.allows(other)
    assert {0, 1} < {case.parameters["longest"] for case in found}
    assert not padded.allows(found[0].with_parameters(longest=10**6))


def test_an_example_without_the_parameter_gets_it() -> None:
    @operation(x=tensor("rows channels"), groups=divisors("channels", 2, 4), sizes={"channels": range(4, 65, 4)},
               examples={"own": {"x": [[1.0] * 8]}, "given": {"x": [[1.0] * 8], "groups": 2}})  # fmt: skip
    def by_groups(x: Any, groups: int) -> Any:
        return x.unflatten(-1, (groups, -1)).sum(-1)

    made = {name: by_groups.examples[name](FLOAT32).parameters["groups"] for name in ("own", "given")}
    assert made["given"] == 2
    assert made["own"] in (2, 4)


# ---- kernels


@triton.jit
def group_norm_kernel(x_ptr, weight_ptr, out_ptr, channels, groups, space, BLOCK: tl.constexpr):
    """A program normalizes one group of one sample."""
    size = channels // groups * space
    at = tl.arange(0, BLOCK)
    inside = at < size
    x = tl.load(x_ptr + tl.program_id(0) * size + at, mask=inside, other=0.0).to(tl.float32)
    x = tl.where(inside, x - tl.sum(x) / size, 0.0)
    channel = tl.program_id(0) % groups * (channels // groups) + at // space
    weight = tl.load(weight_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + tl.program_id(0) * size + at, x * tl.rsqrt(tl.sum(x * x) / size + 1e-5) * weight, mask=inside)


def by_triton(x: Any, weight: Any, groups: int = 4, wrong: bool = False) -> Any:
    x, weight, out = x.contiguous(), weight.contiguous(), torch.empty(x.shape, dtype=x.dtype)
    channels, space = x.shape[1:]
    # The wrong kernel has room for a group of a power of two of channels only.
    block = (channels & -channels if wrong else triton.next_power_of_2(channels)) * triton.next_power_of_2(space)
    if x.numel():
        group_norm_kernel[(len(x) * groups,)](x, weight, out, channels, groups, space, BLOCK=block)
    return out


def test_a_right_group_norm_passes_and_one_without_room_for_odd_groups_fails() -> None:
    agrees(group_norm, by_triton)
    with pytest.raises(Failure, match="output"):
        agrees(group_norm, lambda x, weight, groups=4: by_triton(x, weight, groups, wrong=True))


def test_the_default_is_checked_where_it_divides() -> None:
    with pytest.raises(Failure, match="its default is 2, the definition's is 4"):
        defaults_are_the_definitions(
            subject_of(group_norm, lambda x, weight, groups=2: group_norm(x, weight, groups), FLOAT32),
            Search(examples=4, seed=0, shrinks=False, seeks_claims=False),
        )
    defaults_are_the_definitions(subject_of(group_norm, group_norm.definition, FLOAT32), Search(examples=4, seed=0))


@pytest.mark.full
def test_gate_and_up_interleaved_fail() -> None:
    def halves(packed: Any) -> Any:
        dim = packed.shape[1] // 2
        return torch.nn.functional.silu(packed[:, :dim]) * packed[:, dim:]

    agrees(swiglu, halves)
    with pytest.raises(Failure, match="output"):
        agrees(swiglu, lambda packed: torch.nn.functional.silu(packed[:, ::2]) * packed[:, 1::2])


def test_a_kernel_that_repeats_heads_in_another_order_fails() -> None:
    agrees(scores, lambda q, k: (q.unflatten(0, (len(k), -1)) @ k.mT[:, None]).flatten(0, 1) if len(k) else q @ k.mT)
    with pytest.raises(Failure, match="output"):
        agrees(scores, lambda q, k: q @ k.repeat(len(q) // len(k) if len(k) else 1, 1, 1).mT)


def test_a_kernel_with_a_buffer_for_short_samples_fails() -> None:
    def by_copies(x: Any, starts: Any, longest: int, most: int = 1 << 30) -> Any:
        out = x.new_zeros(len(starts) - 1, longest, x.shape[1])
        for row, begin, end in zip(out, starts.tolist(), starts.tolist()[1:]):
            row[: min(end - begin, most)] = x[begin : min(end, begin + most)]
        return out

    agrees(padded, by_copies)
    with pytest.raises(Failure, match="output"):
        agrees(padded, lambda x, starts, longest: by_copies(x, starts, longest, 64))


@operation(x=tensor("total cols"), ends=offsets("batch", total="total", optional=True))
def weighed(x: Any, ends: Any = None) -> Any:
    """Each row times the number of rows of its sample, all being one sample without offsets."""
    counts = torch.tensor([len(x)]) if ends is None else ends.diff()
    return x * counts.repeat_interleave(counts)[:, None]


@pytest.mark.parametrize("absent", [False, True])
def test_a_kernel_that_is_wrong_with_or_without_optional_offsets_fails(absent: bool) -> None:
    agrees(weighed, lambda x, ends=None: weighed.definition(x, ends))
    with pytest.raises(Failure, match="output"):
        agrees(weighed, lambda x, ends=None: x if (ends is None) == absent else weighed.definition(x, ends))
