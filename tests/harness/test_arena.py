"""The arena puts guard bytes around every tensor of a call, and detects writes to them."""

import math
import re
from collections.abc import Callable

import pytest
import torch

from fourfold.backends import operators
from fourfold.instruments.redzones import POISONS, REDZONE_BYTES, Arena, poison_of
from fourfold.numerics.dtypes import bits
from fourfold.operations.layouts import LAYOUTS

TYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64]


def is_poison(tensor: torch.Tensor, poison: float) -> bool:
    expected = torch.full_like(tensor, poison_of(poison, tensor.dtype))
    return torch.equal(bits(tensor), bits(expected))


def around(tensor: torch.Tensor) -> torch.Tensor:
    """Return all bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


UNWRITTEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "empty": lambda x: torch.empty(x.shape, dtype=x.dtype),
    "empty_like": torch.empty_like,
    "new_empty": lambda x: x.new_empty(x.shape),
    "empty_strided": lambda x: torch.empty_strided((3, 5), (1, 4), dtype=x.dtype),
    "new_empty_strided": lambda x: x.new_empty_strided((3, 5), (10, 2)),
    "empty_permuted": lambda x: torch.empty_permuted((3, 5), (1, 0), dtype=x.dtype),
}
WRITTEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "zeros": lambda x: torch.zeros(x.shape, dtype=x.dtype),
    "zeros_like": torch.zeros_like,
    "new_zeros": lambda x: x.new_zeros(x.shape),
    "full": lambda x: torch.full((3, 5), 7, dtype=x.dtype),
    "ones_like": torch.ones_like,
    "clone": torch.clone,
    "contiguous": lambda x: x.t().contiguous(),
}


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", UNWRITTEN)
def test_what_is_allocated_unwritten_holds_poison(name: str, dtype: torch.dtype, poison: float) -> None:
    like = torch.arange(15).reshape(3, 5).to(dtype)
    plain = UNWRITTEN[name](like)
    with Arena(poison) as arena:
        allocated = UNWRITTEN[name](like)
    assert (allocated.shape, allocated.stride(), allocated.dtype) == (plain.shape, plain.stride(), plain.dtype)
    assert is_poison(allocated, poison)
    assert around(allocated).numel() >= 2 * REDZONE_BYTES + allocated.numel() * allocated.element_size()
    assert allocated.storage_offset() * allocated.element_size() == REDZONE_BYTES
    assert not list(arena.trespasses())


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_allocated_written_keeps_its_values_between_redzones(name: str) -> None:
    like = torch.arange(15.0).reshape(3, 5)
    with Arena(POISONS[0]) as arena:
        allocated = WRITTEN[name](like)
    assert torch.equal(allocated, WRITTEN[name](like))
    assert allocated.storage_offset() * allocated.element_size() == REDZONE_BYTES
    allocated.as_strided((1,), (1,), allocated.storage_offset() + 15).fill_(2)
    assert list(arena.trespasses())


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_keep_bits_strides_and_alignment(layout: str, dtype: torch.dtype, poison: float) -> None:
    for shape in ((), (5,), (0,), (3, 4), (2, 3, 4), (3, 0, 4)):
        given = LAYOUTS[layout](torch.arange(math.prod(shape)).reshape(shape).to(dtype))
        arena = Arena(poison)
        with arena:
            placed = arena.place("x", given)
        assert (placed.shape, placed.stride(), placed.dtype) == (given.shape, given.stride(), given.dtype)
        assert torch.equal(bits(placed), bits(given))
        if given.numel():
            assert placed.data_ptr() % 16 == given.data_ptr() % 16
        assert not list(arena.trespasses())


def test_gaps_between_the_elements_of_an_input_hold_poison() -> None:
    given = LAYOUTS["sliced_columns"](torch.arange(6.0).reshape(2, 3))
    placed = Arena(POISONS[1]).place("x", given)
    assert (placed.as_strided((2, 2), (9, 1), placed.storage_offset() + 1) == POISONS[1]).all()


@pytest.mark.parametrize(
    ("offset", "says"),
    [
        (-1, "wrote 1 elements before its input x"),
        (24, "wrote 1 elements past the end of its input x"),
        (0, "wrote 1 elements inside its input x"),
        (1, "wrote 1 elements inside its input x"),
    ],
    ids=["before", "past", "element", "gap"],
)
def test_writes_around_and_into_an_input_are_told_apart(offset: int, says: str) -> None:
    arena = Arena(POISONS[0])
    placed = arena.place("x", LAYOUTS["sliced_columns"](torch.zeros(2, 4)))
    placed.as_strided((1,), (1,), placed.storage_offset() + offset).fill_(3)
    assert list(arena.trespasses()) == [says]


@pytest.mark.parametrize(("offset", "where"), [(-4, "before"), (6, "past the end of")])
def test_writes_around_an_allocation_are_seen(offset: int, where: str) -> None:
    with Arena(POISONS[1]) as arena:
        allocated = torch.empty(2, 3)
        allocated.fill_(0)
        assert not list(arena.trespasses())
        allocated.as_strided((1,), (1,), allocated.storage_offset() + offset).fill_(3)
    (trespass,) = arena.trespasses()
    assert re.fullmatch(rf"wrote 1 elements {where} a tensor \[2, 3\] that it allocated", trespass)


def unwritten(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def by_this_repository() -> Callable[[torch.Tensor], torch.Tensor]:
    """Define an operator as the backends do, with a second operator for its backward pass."""
    forward = operators.define("arena_test(Tensor x) -> Tensor", unwritten, torch.empty_like)
    backward = operators.define("arena_test_backward(Tensor x) -> Tensor", unwritten, torch.empty_like)
    operators.differentiate(forward, lambda ctx, grad: backward(grad), lambda ctx, inputs, output: None)
    return forward


def by_torch_library() -> Callable[[torch.Tensor], torch.Tensor]:
    operator = torch.library.custom_op("fourfold_test::arena", unwritten, mutates_args=())
    operator.register_fake(torch.empty_like)
    operator.register_autograd(lambda ctx, grad: unwritten(grad))
    return operator


class OfAutograd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return unwritten(x)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        return unwritten(grad)


@pytest.mark.parametrize("make", [by_this_repository, by_torch_library, lambda: OfAutograd.apply])
def test_allocations_inside_of_operators_are_seen_forward_and_backward(make: Callable) -> None:
    operator = make()
    x = torch.zeros(3, 4, requires_grad=True)
    with Arena(POISONS[1]):
        output = operator(x)
        (gradient,) = torch.autograd.grad(output, x, torch.zeros(3, 4))
    for tensor in (output.detach(), gradient):
        assert is_poison(tensor, POISONS[1])
        assert tensor.storage_offset() * tensor.element_size() == REDZONE_BYTES


def test_tensors_of_two_devices_are_looked_at(device: str) -> None:
    """A module is often made on the CPU, and its weight replaced by one on a GPU."""
    if device == "cpu":
        pytest.skip("needs --device cuda")
    with Arena(1.0) as arena:
        on_gpu, on_cpu = torch.empty(3, device=device), torch.empty(3)
    assert on_gpu.device.type == "cuda"
    assert not list(arena.trespasses())
    on_cpu.as_strided((1,), (1,), on_cpu.storage_offset() - 1).zero_()
    assert len(list(arena.trespasses())) == 1
