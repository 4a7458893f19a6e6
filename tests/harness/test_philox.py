"""Dropout with a seed: a definition has the bits of Philox as Triton and cuRAND define it."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from subjects import agrees

from fourfold import operation, philox, rand, tensor, values
from fourfold.checks.backward import backward_agrees
from fourfold.numerics.dtypes import DTYPES
from fourfold.operations.outcomes import Failure

FLOAT32 = DTYPES["float32"]
SEEDS = (0, 42, 2**31 + 7, 2**33 + 5, 2**63 - 1)


@pytest.mark.parametrize(
    ("seed", "offset", "subsequence", "words"),
    [
        (0, 0, 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (-1, -1, -1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            0x299F31D0A4093822,
            0x85A308D3243F6A88 - (1 << 64),
            0x0370734413198A2E,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_words_are_the_published_ones(seed: int, offset: int, subsequence: int, words: tuple[int, ...]) -> None:
    """Source: philox4x32 with 10 rounds in kat_vectors of Random123."""
    found = philox(seed, torch.tensor([offset]), subsequence)
    assert tuple(int(word) for word in found) == words
    as_tensors = philox(torch.tensor([seed]), torch.tensor(offset), torch.tensor([[subsequence]]))
    assert [(word.shape, int(word)) for word in as_tensors] == [((1, 1), word) for word in words]


@triton.jit
def random_kernel(at_ptr, words_ptr, numbers_ptr, n, seed, BLOCK: tl.constexpr):
    """A program computes the random words and numbers of all offsets."""
    at = tl.arange(0, BLOCK)
    offset = tl.load(at_ptr + at, mask=at < n, other=0)
    a, b, c, d = tl.randint4x(seed, offset)
    tl.store(words_ptr + at, a, mask=at < n)
    tl.store(words_ptr + n + at, b, mask=at < n)
    tl.store(words_ptr + 2 * n + at, c, mask=at < n)
    tl.store(words_ptr + 3 * n + at, d, mask=at < n)
    tl.store(numbers_ptr + at, tl.rand(seed, offset), mask=at < n)


@pytest.mark.parametrize("seed", SEEDS)
def test_words_and_numbers_are_the_bits_of_triton(seed: int) -> None:
    ends = {
        torch.int32: [0, 1, 2**31 - 1, -1, -(2**31)],
        torch.int64: [0, 1, 2**31, 2**32 - 1, 2**32, 2**40 + 3, -1],
    }
    for dtype, few in ends.items():
        at = torch.cat([torch.tensor(few, dtype=dtype), torch.arange(500, dtype=dtype)])
        words, numbers = torch.empty(4, len(at), dtype=torch.int32), torch.empty(len(at))
        random_kernel[(1,)](at, words, numbers, len(at), seed, BLOCK=512)
        assert torch.equal(torch.stack(philox(seed, at)), words.long() & 0xFFFFFFFF)
        assert torch.equal(rand(seed, at).view(torch.int32), numbers.view(torch.int32))


@pytest.mark.full
def test_numbers_are_uniform_and_below_one() -> None:
    numbers = rand(1, torch.arange(1 << 16))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = torch.histc(numbers, 16, 0, 1) - 4096
    assert counts.abs().max() < 5 * 4096**0.5


# ---- a kernel


@operation(x=tensor("... cols"), p=values(0.1, 0.0), seed=values(42, 2**33 + 5), sizes={"...": (0, 4), "cols": (0, 90)})
def dropout(x: Any, p: float, seed: int) -> Any:
    kept = rand(seed, torch.arange(x.numel())).reshape(x.shape) >= p
    return torch.where(kept, x / (1 - p), 0.0)


@triton.jit
def dropout_kernel(x_ptr, out_ptr, n, p, seed, OF_BLOCK: tl.constexpr, BLOCK: tl.constexpr):
    """A program drops out elements of one block."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    kept = tl.rand(seed, at % BLOCK if OF_BLOCK else at) >= p
    tl.store(out_ptr + at, tl.where(kept, x / (1 - p), 0.0), mask=at < n)


class Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, p: float, seed: int, of_block: bool, seed_of_gradient: int) -> Any:
        ctx.given = p, seed_of_gradient, of_block, seed_of_gradient
        x, out = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
        if x.numel():
            grid = (triton.cdiv(x.numel(), 64),)
            dropout_kernel[grid](x, out, x.numel(), p, seed, OF_BLOCK=of_block, BLOCK=64)
        return out

    @staticmethod
    def backward(ctx: Any, grad_output: Any) -> Any:
        return Dropout.forward(ctx, grad_output, *ctx.given), None, None, None, None


def by_triton(x: Any, p: float, seed: int) -> Any:
    return Dropout.apply(x, p, seed, False, seed)


def test_a_right_dropout_passes_forward_and_backward() -> None:
    agrees(dropout, by_triton, backward_agrees)  # with the forward pass


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x, p, seed: Dropout.apply(x, p, seed, True, seed),
        lambda x, p, seed: Dropout.apply(x, p, seed & 0x7FFFFFFF, False, seed),
        lambda x, p, seed: by_triton(x, p, seed) * (1 - p),
        lambda x, p, seed: torch.nn.functional.dropout(x, p),
    ],
    ids=["offsets_of_a_block", "a_short_seed", "not_scaled", "torchs_generator"],
)
def test_wrong_dropouts_fail(wrong: Any) -> None:
    with pytest.raises(Failure, match="output"):
        agrees(dropout, wrong)


def test_a_gradient_with_other_elements_dropped_fails() -> None:
    with pytest.raises(Failure, match="gradient of x"):
        agrees(dropout, lambda x, p, seed: Dropout.apply(x, p, seed, False, seed ^ 1), backward_agrees)
