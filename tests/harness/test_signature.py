"""A signature checks the arguments of calls in any form, and of operations whose tensors have other axes."""

import re
from typing import Any

import pytest
import torch

from fourfold import divisors, values
from fourfold.backends.signature import Signature, flag, number, offsets, one_of, signature, signature_of, tensor


@signature(x=tensor("... cols"), weight=tensor("cols"))
def shifted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x - weight."""
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
        """Return x / (1 + exp(-x)).

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
        Signature(shifted, {"x": tensor("..."), "eps": values(1e-6)})
    with pytest.raises(ValueError, match="x must be a tensor, and not optional"):
        Signature(shifted, {"x": tensor("...", optional=True), "weight": tensor("...")})
    with pytest.raises(ValueError, match="the values of weight must not depend on sizes"):
        Signature(shifted, {"x": tensor("cols"), "weight": divisors("cols")})
    with pytest.raises(ValueError, match="no tensor has the axis 'rows', which is the total of weight"):
        Signature(shifted, {"x": tensor("cols"), "weight": offsets("segments", total="rows")})


def test_the_total_of_offsets_may_be_an_axis_of_a_later_tensor() -> None:
    @signature(x=tensor("n"), ends=offsets("segments", total="rows", most="rows"), rows=tensor("rows", optional=True))
    def parts(x: torch.Tensor, ends: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        return x

    assert torch.equal(parts(X[0], torch.tensor([0, 3]), WEIGHT), X[0])
    with pytest.raises(ValueError, match="ends must rise from 0 to 3, the size of rows"):
        parts(X[0], torch.tensor([0, 4]), WEIGHT)
    with pytest.raises(ValueError, match="ends needs the size of rows, but no tensor with this axis was given"):
        parts(X[0], torch.tensor([0, 3]))


def _not_all_alike(x: torch.Tensor, *_: Any) -> None:
    if x.numel() and not torch.compiler.is_compiling() and bool((x == x.reshape(-1)[0]).all()):
        raise ValueError("x must not be constant")


@signature(
    _not_all_alike,
    x=tensor("... cols"),
    at=tensor("... picks", dtype=("int64", "int32"), high="cols"),
    ends=offsets("segments", total="cols"),
    scale=tensor("picks", optional=True),
    share=number(0.5, least=0, most=1),
    order=one_of("up", "down"),
    strict=flag(),
)
def gathered(
    x: torch.Tensor,
    at: torch.Tensor,
    ends: torch.Tensor,
    scale: torch.Tensor | None = None,
    share: float = 0.5,
    order: str = "up",
    strict: bool = False,
) -> torch.Tensor:
    """Return share * x[at]."""
    return share * x.gather(-1, at.long())


GIVEN = {"x": torch.arange(6.0).reshape(2, 3), "at": torch.tensor([[0, 2], [1, 1]]), "ends": torch.tensor([0, 1, 3])}


@pytest.mark.parametrize(
    ("changed", "error", "said"),
    [
        ({"at": torch.ones(2, 2)}, TypeError, "at must be a tensor of int64 or int32, not torch.float32"),
        ({"at": torch.tensor([[0, 3], [1, 1]])}, ValueError, "at must be from 0 to 2, where cols is 3, not 0 to 3"),
        ({"at": torch.tensor([[0, 2]])}, ValueError, "at must be [..., picks]"),
        ({"at": GIVEN["at"].to("meta")}, ValueError, "at must be on the device of x"),
        ({"ends": torch.tensor([0, 4])}, ValueError, "ends must rise from 0 to 3"),
        ({"ends": torch.tensor([0, 2, 1, 3])}, ValueError, "ends must rise from 0 to 3"),
        ({"ends": torch.tensor([0])}, ValueError, "ends must have a sample for the 3 rows of cols, not none"),
        ({"scale": torch.ones(3)}, ValueError, "scale must be [picks], where picks is 2, not [3]"),
        ({"scale": torch.ones(2).double()}, TypeError, "scale must have the dtype of x"),
        ({"share": 1.5}, ValueError, "share must be finite and at least 0 and at most 1, not 1.5"),
        ({"share": "1"}, TypeError, "share must be a number, not str"),
        ({"order": "sideways"}, ValueError, "order must be one of up, down, not 'sideways'"),
        ({"order": 1}, TypeError, "order must be a str, not int"),
        ({"strict": 1}, TypeError, "strict must be a bool, not int"),
        ({"x": torch.ones(2, 3)}, ValueError, "x must not be constant"),
    ],
)
def test_parameters_integers_and_tensors_that_may_be_left_out_are_checked(
    changed: dict[str, Any], error: type[Exception], said: str
) -> None:
    assert torch.equal(gathered(**GIVEN), 0.5 * torch.tensor([[0.0, 2.0], [4.0, 4.0]]))
    assert torch.equal(gathered(**GIVEN, scale=torch.ones(2), share=1), torch.tensor([[0.0, 2.0], [4.0, 4.0]]))
    with pytest.raises(error, match=re.escape(said)):
        gathered(**{**GIVEN, **changed})


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_call_may_leave_arguments_out(dynamic: bool) -> None:
    torch.compiler.reset()
    compiled = torch.compile(gathered, fullgraph=True, dynamic=dynamic, backend="eager")
    for segments in (1, 3):
        ends = torch.tensor([0, *[2] * (segments - 1), 3])
        given = {**GIVEN, "ends": ends}
        assert torch.equal(compiled(*given.values(), strict=True), gathered(**given))


def test_operations_have_code_objects_of_their_own_whose_compiled_versions_are_limited() -> None:
    assert shifted.__code__ is not gathered.__code__
    assert gathered.__code__.co_name == "gathered"


@signature(
    x=tensor("n", dtype=torch.float8_e4m3fn),
    scale=tensor("n", dtype="float32"),
    longest=tensor("longest", dtype="float32", optional=True),
    ends=offsets("segments", total="n", most="longest", optional=True),
    step=number(1, 2, least=1),
    share=number(0.5, None, least=0, below=1),
    dtype=one_of(torch.float32, torch.float16),
)
def widened(
    x: torch.Tensor,
    scale: torch.Tensor,
    longest: torch.Tensor | None = None,
    ends: torch.Tensor | None = None,
    step: int = 1,
    share: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """scale * x."""
    return (scale * x.float()).to(dtype)


FEW = {"x": torch.ones(4).to(torch.float8_e4m3fn), "scale": torch.ones(4)}
PARTS = {"ends": torch.tensor([0, 1, 4]), "longest": torch.ones(3)}


@pytest.mark.parametrize(
    ("changed", "error", "said"),
    [
        ({"x": torch.ones(4)}, TypeError, "x must be a tensor of float8_e4m3fn, not torch.float32"),
        ({"scale": torch.ones(4).double()}, TypeError, "scale must be a tensor of float32, not torch.float64"),
        ({"scale": torch.ones(4, device="meta")}, ValueError, "scale must be on the device of x"),
        ({"scale": None}, TypeError, "scale must be a tensor of float32, not NoneType"),
        ({**PARTS, "longest": torch.ones(2)}, ValueError, "at most 2 rows, the size of longest, not 3 as to sample 1"),
        ({**PARTS, "longest": torch.ones(1)}, ValueError, "at most 1, the size of longest, but 2 samples have 4 of n"),
        ({"step": 0}, ValueError, "step must be at least 1, not 0"),
        ({"step": 1.5}, TypeError, "step must be an int, not float"),
        ({"share": 1.0}, ValueError, "share must be finite and at least 0 and below 1, not 1.0"),
        ({"share": "1"}, TypeError, "share must be a number or None, not str"),
        ({"dtype": torch.float64}, ValueError, "dtype must be one of torch.float32, torch.float16, not torch.float64"),
        ({"dtype": "float32"}, TypeError, "dtype must be a dtype, not str"),
    ],
)
def test_dtypes_integers_and_optional_parameters_are_checked(
    changed: dict[str, Any], error: type[Exception], said: str
) -> None:
    assert torch.equal(widened(**FEW), torch.ones(4))
    assert torch.equal(widened(**FEW, **PARTS, share=0.5), torch.ones(4))
    with pytest.raises(error, match=re.escape(said)):
        widened(**{**FEW, **changed})


def test_the_schema_names_the_types_of_all_arguments() -> None:
    schema = signature_of(gathered).operator(torch.empty_like, "(Tensor output, Tensor kept)").schema
    arguments = "Tensor x, Tensor at, Tensor ends, Tensor? scale, float share, str order, bool strict"
    assert schema == f"gathered({arguments}) -> (Tensor output, Tensor kept)"
    arguments = "Tensor x, Tensor scale, Tensor? longest, Tensor? ends, int step, float? share, ScalarType dtype"
    assert signature_of(widened).schema("widened_cpu") == f"widened_cpu({arguments}) -> Tensor output"
