"""The operators of attention: the same on Triton and CUDA C++ but for the launches."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from fourfold.backends.operators import empty_gradients
from fourfold.backends.signature import signature_of

from . import torch_eager
from .torch_eager import scale_of


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that kernels compute in."""
    return torch.promote_types(dtype, torch.float32)


def _fake(q: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=compute_dtype(q.dtype))


RESULTS = "(Tensor output, Tensor lse)"
SIGNATURE, WITH_LSE = signature_of(torch_eager.attention), signature_of(torch_eager.attention_with_lse)
ATTENTION = SIGNATURE.operator(
    _fake,
    RESULTS,
    saves=("q", "k", "v", "q_offsets", "k_offsets", "slopes", "output", "lse", "causal", "scale", "window"),
    gradients={"q": "q", "k": "k", "v": "v"},
    repeats=True,
    public=0,
)
# The same with a gradient of both results.
ATTENTION_WITH_LSE = replace(
    ATTENTION, schema=WITH_LSE.schema("attention_with_lse", RESULTS), cotangents=("lse",), public=None
)


class Call(NamedTuple):
    """What the kernels of a call are launched with.

    Attributes:
        q: ``[total_q, heads, columns]``; the columns of a head are neighbours in all three.
        k: ``[total_k, kv_heads, columns]``.
        v: like k.
        q_offsets: ``[batch + 1]``, without gaps, or None: there is one sequence.
        k_offsets: like q_offsets.
        causal: whether a query sees no later keys.
        scale: of the scores.
        left: how many keys before its own place a query sees; -1: all.
        right: the same of those after it. A causal query sees none.
        slopes: ``[heads]``, without gaps; None: nothing is added to the scores.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_offsets: torch.Tensor | None
    k_offsets: torch.Tensor | None
    causal: bool
    scale: float
    left: int = -1
    right: int = -1
    slopes: torch.Tensor | None = None

    @property
    def is_windowed(self) -> bool:
        """Whether the kernels of a window are launched."""
        return self.left >= 0 or self.right >= 0

    @property
    def window(self) -> tuple[int, int]:
        """How many keys before and after its place a query sees; of any number, more than there are."""
        most = len(self.q) + len(self.k)
        left, right = (most if n < 0 else min(n, most) for n in (self.left, self.right))
        return left, 0 if self.causal else right

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return 1 if self.q_offsets is None else len(self.q_offsets) - 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """total_q, total_k, batch, heads and kv_heads."""
        return len(self.q), len(self.k), self.batch, self.q.shape[1], self.k.shape[1]

    @property
    def strides(self) -> tuple[int, ...]:
        """Of q, k and v from token to token and from head to head."""
        return *self.q.stride()[:2], *self.k.stride()[:2], *self.v.stride()[:2]

    def tiles(self, total: int, rows: int) -> int:
        """Return the largest number of tiles of this many rows that the tokens of all sequences need.

        Sequence s has those from ``offsets[s] // rows + s`` on, which the kernels find without a sum over all lengths.
        """
        return total // rows + self.batch


def rows(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor, copied unless the columns of a head are neighbours."""
    return x if x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous()


def has_whole_vectors(*tensors: torch.Tensor) -> bool:
    """Return whether all heads consist of whole vectors of 16 bytes."""
    width = 16 // tensors[0].element_size()
    strides = (n for x in tensors for n in (*x.stride()[:-1], x.shape[-1]))
    return not any(n % width for n in strides) and not any(x.data_ptr() % 16 for x in tensors)


def register(
    backend: str,
    forward: Callable[[Call, torch.Tensor, torch.Tensor], None],
    backward: Callable[..., None],
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Register ``attention_<backend>`` and ``attention_with_lse_<backend>``, and return the functions that call them.

    Args:
        backend: part of the operators' names.
        forward: ``(call, output, lse)`` writes the output, and the logarithms of the sums of exponentials
            ``[heads, total_q]``. There are tokens, heads and sequences.
        backward: ``(call, grad_output, grad_lse, output, lse, delta, grad_q, grad_k, grad_v)`` writes the gradients,
            those that are not None, and may keep the row sums of dO * O, less grad_lse, in delta, which is as lse is.
            grad_lse is contiguous, or None: it is 0.

    Returns:
        `torch_eager.attention` and `torch_eager.attention_with_lse` on this backend.
    """

    def call_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: Any) -> Call:
        q_offsets, k_offsets, causal, scale, (left, right), slopes = given
        q_offsets, k_offsets, slopes = (None if x is None else x.contiguous() for x in (q_offsets, k_offsets, slopes))
        k_offsets = q_offsets if k_offsets is None else k_offsets
        # A window that ends at the query's own place is a causal mask.
        causal, right = causal or right == 0, -1 if causal or right == 0 else right
        return Call(rows(q), rows(k), rows(v), q_offsets, k_offsets, causal, scale_of(q, scale), left, right, slopes)

    def run_forward(q: torch.Tensor, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        output, lse = _fake(q)
        if output.numel():
            forward(call_of(q, *given), output, lse)
        return output, lse

    def run_backward(
        grad_output: torch.Tensor,
        grad_lse: torch.Tensor | None,
        *saved: Any,
    ) -> tuple[torch.Tensor, ...]:
        q, k, v, q_offsets, k_offsets, slopes, output, lse, causal, scale, window, *needs = saved
        gradients = empty_gradients((q, k, v), needs)
        call = call_of(q, k, v, q_offsets, k_offsets, causal, scale, window, slopes)
        if call.batch and q.shape[1]:
            wanted = (x if needed else None for x, needed in zip(gradients, needs))
            of_lse = None if grad_lse is None else grad_lse.contiguous()
            backward(call, rows(grad_output), of_lse, output, lse, torch.empty_like(lse), *wanted)
            return gradients
        return tuple(x.zero_() for x in gradients)

    def run_backward_of_output(grad_output: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
        return run_backward(grad_output, None, *rest)

    # Only the second operator has a gradient of lse.
    output_alone = ATTENTION.register(backend, run_forward, run_backward_of_output)
    with_lse = ATTENTION_WITH_LSE.register(backend, run_forward, run_backward)
    return SIGNATURE.checked(output_alone), WITH_LSE.checked(with_lse)
