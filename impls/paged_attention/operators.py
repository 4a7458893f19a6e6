"""The operator of paged_attention: the same on Triton and CUDA C++ but for the launches."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fourfold.backends import operators
from fourfold.backends.launch import cdiv, multiprocessors
from fourfold.backends.signature import signature_of

from ..attention.operators import has_whole_vectors
from .torch_eager import paged_attention as definition

# The most blocks for each multiprocessor, the least tokens of a split of the longest sequence, and the most splits.
BLOCKS, LEAST_TOKENS, MOST_SPLITS = 16, 128, 64
# Without tensor cores tokens take longer.
LEAST_WIDE_TOKENS = 32


class Call(NamedTuple):
    """What the kernels of a call are launched with. There are sequences, heads and columns.

    Attributes:
        q: ``[sequences, heads, columns]``, without gaps.
        k_cache: ``[pages, page_size, kv_heads, columns]``; the columns are neighbours.
        v_cache: like k_cache.
        page_table: ``[sequences, pages_per_sequence]``, without gaps.
        lengths: ``[sequences]``, without gaps.
        output: ``[sequences, heads, columns]``.
        sums: ``[sequences, heads, splits, columns]``, in the dtype that is computed in: the sums of the values of a
            split, times exponentials. Empty without splits, as the two below.
        largest: ``[sequences, heads, splits]``, the largest score of a split.
        totals: ``[sequences, heads, splits]``, the sum of the exponentials of scores less the largest one.
        scale: of the scores.
        splits: the parts of equal size that the tokens of each sequence are split into, as far as they last.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    page_table: torch.Tensor
    lengths: torch.Tensor
    output: torch.Tensor
    sums: torch.Tensor
    largest: torch.Tensor
    totals: torch.Tensor
    scale: float
    splits: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """pages, page_size, pages_per_sequence, heads, kv_heads and columns."""
        return *self.k_cache.shape[:2], self.page_table.shape[1], self.q.shape[1], *self.k_cache.shape[2:]

    @property
    def strides(self) -> tuple[int, ...]:
        """Of k_cache and v_cache from page to page, from token to token and from head to head."""
        return *self.k_cache.stride()[:3], *self.v_cache.stride()[:3]

    @property
    def has_whole_vectors(self) -> bool:
        """Whether all heads consist of whole vectors of 16 bytes."""
        return has_whole_vectors(self.q, self.k_cache, self.v_cache)

    def blocks(self, heads: int) -> int:
        """Return the number of blocks, each with up to `heads` heads of a group."""
        kv_heads = self.k_cache.shape[2]
        return len(self.q) * kv_heads * cdiv(self.q.shape[1] // kv_heads, heads) * self.splits


def register(
    backend: str, launch: Callable[[Call], None], least_tokens: int = LEAST_TOKENS, resident: int = 0
) -> Callable[..., Any]:
    """Register ``paged_attention_<backend>``, and return it with checks of its arguments.

    Args:
        backend: part of the operator's name.
        launch: writes ``call.output``.
        least_tokens: of a split, unless multiprocessors then have less than `resident` blocks each.
        resident: blocks that a multiprocessor runs at once.
    """

    def fake(q: torch.Tensor, *_: Any) -> torch.Tensor:
        return q.new_empty(q.shape)

    def run(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        page_table: torch.Tensor,
        lengths: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        output = fake(q)
        if not output.numel():
            return output
        sequences, heads, columns = q.shape
        tokens = page_table.shape[1] * k_cache.shape[1]
        blocks, most = sequences * k_cache.shape[2], multiprocessors(q.device)
        least = LEAST_TOKENS if q.element_size() == 2 else LEAST_WIDE_TOKENS
        # On the CPU cases are short.
        long_enough = max(tokens // (least_tokens if q.is_cuda else least), resident * most // blocks)
        splits = max(min(cdiv(BLOCKS * most, blocks), long_enough, tokens // least, MOST_SPLITS), 1)
        shape = (sequences, heads, splits if splits > 1 else 0)
        compute = torch.promote_types(q.dtype, torch.float32)
        sums, largest, totals = (q.new_empty(s, dtype=compute) for s in ((*shape, columns), shape, shape))
        k_cache, v_cache = (x if x.stride(3) == 1 else x.contiguous() for x in (k_cache, v_cache))
        given = q.contiguous(), k_cache, v_cache, page_table.contiguous(), lengths.contiguous(), output
        launch(Call(*given, sums, largest, totals, scale, splits))
        return output

    signature = signature_of(definition)
    operator = operators.define(signature.schema(f"paged_attention_{backend}"), run, fake, repeats=True)
    return signature.checked(operators.bypass_dispatcher(operator))


def depends_on_batch(dtype: str, device: str) -> str | None:
    """Say what the bits of a sample depend on beside the sample."""
    return "the more sequences there are, the fewer parts each is split into"
