"""Planted faults that a single call on fresh tensors does not show."""

import dataclasses
import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from fourfold.impls.giou.torch_eager import in_compute_dtype
from fourfold.impls.softmax.torch_eager import softmax as softmax_in_torch
from fourfold.properties import softmax as softmax_properties

from fourfold.backends.signature import signature_of
from fourfold.checks.backward import backward_agrees
from fourfold.checks.batches import many_samples_are_alike, the_batch_does_not_matter
from fourfold.checks.compiler import compiler_accepts
from fourfold.checks.forward import forward_agrees
from fourfold.checks.history import history_does_not_matter, late_inputs_are_waited_for
from fourfold.checks.offsets import offsets_may_pass_32_bits
from fourfold.checks.saved_tensors import backward_is_of_the_call
from fourfold.checks.search import Search, Subject

from .edits import OFFSETS_OF_ROWS, Edits
from .planted import Check, Fault, Implementation, one_pair
from .planted_softmax import OF_ALL

Tensor = torch.Tensor
Key = Callable[[Tensor], Any]
# Results of fewer elements are not kept.
WORTH_KEEPING = 64


def right(x: Tensor) -> Tensor:
    return x.softmax(-1)


def gradient(grad: Tensor, y: Tensor) -> Tensor:
    return y * (grad - (grad * y).sum(-1, keepdim=True))


def softmax(
    forward: Callable[[Tensor], Tensor] = right,
    backward: Callable[[Tensor, Tensor], Tensor] = gradient,
    compute: Callable[[Tensor], Tensor] = in_compute_dtype,
    guarded: bool = True,
) -> Implementation:
    """Return softmax with some steps changed.

    Unless `guarded`, the output is kept without save_for_backward, and autograd cannot detect a change to it.
    """

    class Softmax(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            y = forward(compute(x)).to(x.dtype)
            ctx.kept = None if guarded else y.detach()
            ctx.save_for_backward(*[y] * guarded)
            return y

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            y = ctx.saved_tensors[0] if guarded else ctx.kept
            return backward(compute(grad), compute(y)).to(y.dtype)

    def implementation(x: Tensor) -> Tensor:
        signature_of(softmax_in_torch).check(x)
        return Softmax.apply(x)

    return implementation


def cached(key: Key, step: Callable[..., Tensor], handed_out: Callable[[Tensor], Tensor] = Tensor.clone) -> Callable:
    """Return a step that caches its results by a key of its first argument."""
    kept: dict[Any, Tensor] = {}

    def of(*tensors: Tensor) -> Tensor:
        if tensors[0].numel() < WORTH_KEEPING:
            return step(*tensors)
        known = (key(tensors[0]), tensors[0].shape)
        if known not in kept:
            kept[known] = step(*tensors)
        return handed_out(kept[known])

    return of


def by_values(x: Tensor) -> bytes:
    return x.detach().contiguous().numpy(force=True).tobytes()


def into_one_buffer(step: Callable[..., Tensor]) -> Callable:
    """Return a step that writes all results of one shape into the same buffer."""
    buffers: dict[Any, Tensor] = {}

    def of(*tensors: Tensor) -> Tensor:
        result = step(*tensors)
        if result.numel() < WORTH_KEEPING:
            return result
        return buffers.setdefault(result.shape, torch.empty_like(result)).copy_(result).detach()

    return of


def finished_by_a_thread(x: Tensor) -> Tensor:
    """Return at once, while a thread still computes the result."""
    result = right(x)
    if result.numel() < WORTH_KEEPING:
        return result
    promised = torch.zeros_like(result)

    def finish() -> None:
        time.sleep(0.02)
        promised.copy_(result)

    threading.Thread(target=finish, name="finisher").start()
    return promised


class Lazy(torch.Tensor):
    """A tensor subclass, which may hide more than a plain tensor shows."""


def of_a_kind_of_its_own(**tensors: Tensor) -> Tensor:
    return softmax()(**tensors).as_subclass(Lazy)


def on_a_stream_of_its_own(step: Callable[..., Tensor]) -> Callable:
    """Return a step that runs on another stream and does not wait for the caller's stream."""

    def of(*tensors: Tensor) -> Tensor:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            result = step(*tensors)
        torch.cuda.current_stream().wait_stream(stream)
        return result

    return of


def nan_in_the_last_column_taken_for_the_lowest(x: Tensor) -> Tensor:
    """Take a NaN in the last column for -inf, the fill value of a masked tail."""
    if x.shape[-1] < 3:
        return right(x)
    return right(torch.cat([x[..., :-1], x[..., -1:].nan_to_num(-torch.inf, torch.inf, -torch.inf)], -1))


def rows_of_zero_cotangents_skipped(grad: Tensor, y: Tensor) -> Tensor:
    """Return 0 for rows with a grad_output of 0, although 0 times a non-finite number is NaN.

    That is wrong for this repository's own softmax, by its documentation. Other kernels may do so: where autograd has
    NaN, their gradient is unspecified (docs/bounds.md).
    """
    return torch.where((grad == 0).all(-1, keepdim=True), 0, gradient(grad, y))


def rows_past_65535_unwritten(x: Tensor) -> Tensor:
    """Leave rows past 65535 unwritten, as a grid that is truncated at its limit does."""
    output = right(x)
    output[65535:] = 0
    return output


def rows_past_65536_repeated(x: Tensor) -> Tensor:
    """Repeat rows past 65536, as a 16-bit row index does."""
    output = right(x)
    output[65536:] = output.flip(0)[: max(0, len(x) - 65536)]
    return output


def sixteen_bits_of_samples(check: Callable[..., None], subject: Subject, search: Search) -> None:
    check(subject, search, samples=70_000)


def claiming_bits(check: Check, subject: Subject, search: Search) -> None:
    """Run a check on an implementation that claims the same bits in every batch."""
    check(dataclasses.replace(subject, depends_on_batch=None), search)


def summed_in_pieces_by_the_batch(x: Tensor) -> Tensor:
    """Sum in shorter parts the more rows there are, as a kernel does that divides a fixed block among its rows."""
    terms = (x - x.amax(-1, keepdim=True)).exp() if x.numel() else x
    length = max(1, 64 // max(1, x[..., :1].numel()))
    return terms / sum(piece.sum(-1, keepdim=True) for piece in terms.split(length, -1))


def _fault(name: str, check: Check, says: str, make: Callable[[], Implementation], **more: Any) -> Fault:
    return Fault(name, "softmax", make, check=check, says=says, **more)


TWO = {"right_on": "two_columns"}
# The named examples have a non-finite grad_output in a row, but no tiny grad_output.
PLAIN = {"examples": {"two_columns": softmax_properties.examples["two_columns"]}, "search": 300}
MANY = functools.partial(sixteen_bits_of_samples, many_samples_are_alike)
LATE = r"on a stream whose inputs come late \(a kernel must be launched on torch's current stream\): "
WRITTEN, CHANGED = (
    "after other values were written into its inputs: ",
    "of the call on new tensors was changed by the call",
)
COMPILER: dict[str, Any] = {"check": compiler_accepts, "says": "Triton's compiler refuses", "only_on": "cpu"}
GIOU = {"says": r"with axis \d of boxes[12] 2.31 elements long: output", "right_on": one_pair}
batch, history, late = the_batch_does_not_matter, history_does_not_matter, late_inputs_are_waited_for
FAULTS = (
    _fault(
        "nan_in_the_last_column_taken_for_the_lowest", forward_agrees, r"output.* is .*expected nan",
        lambda: softmax(forward=nan_in_the_last_column_taken_for_the_lowest), **TWO,
    ),
    _fault(
        "rows_of_zero_cotangents_skipped", backward_agrees, r"gradient of x.* is 0\.0, expected nan",
        lambda: softmax(backward=rows_of_zero_cotangents_skipped), **TWO,
    ),
    _fault(
        "infinite_cotangent_cut_off", backward_agrees, "gradient of x",
        lambda: softmax(backward=lambda grad, y: gradient(grad.clamp(-1e30, 1e30), y)), **TWO, **PLAIN,
    ),
    _fault("output_kept_unguarded", backward_is_of_the_call, "after the output was", lambda: softmax(guarded=False)),
    Edits("vector_add", "triton")("lambda_in_a_kernel", "return x + y => return (lambda u: u)(x) + y", **COMPILER),
    Edits("giou", "triton")("triton_offsets_in_32_bits", OFFSETS_OF_ROWS, check=offsets_may_pass_32_bits, **GIOU),
    *(
        _fault(
            name, MANY, r"output of samples \d+ to \d+ is not that of the first",
            functools.partial(softmax, forward=step), search=50,
        )
        for name, step in (("grid_cut_off", rows_past_65535_unwritten), ("rows_wrap_around", rows_past_65536_repeated))
    ),
    Edits("softmax", "torch")(
        "largest_of_all_rows", OF_ALL, check=batch, says=r"output of samples \d+ to \d+ among all \d+\[", **TWO
    ),
    _fault(
        "summed_in_pieces_by_the_batch", functools.partial(claiming_bits, batch),
        r"output of samples .* elements differ from those of them alone",
        lambda: softmax(forward=summed_in_pieces_by_the_batch), search=50, **TWO,
    ),
    *(
        _fault(
            f"cached_by_{name}", history, f"{WRITTEN}output",
            lambda key=key: softmax(forward=cached(key, right), compute=lambda x: x), **TWO,
        )
        for name, key in (("address", Tensor.data_ptr), ("identity", id))
    ),
    _fault(
        "gradient_cached_by_address", history, f"{WRITTEN}gradient of x",
        lambda: softmax(backward=cached(Tensor.data_ptr, gradient)), **TWO,
    ),
    _fault(
        "cache_hands_out_what_it_keeps", history, "output is what was written into a former result",
        lambda: softmax(forward=cached(by_values, right, Tensor.detach)), **TWO,
    ),
    _fault(
        "one_buffer_for_all_results", history, f"output {CHANGED} after other values",
        lambda: softmax(forward=into_one_buffer(right)), **TWO,
    ),
    _fault(
        "one_buffer_for_all_gradients", history, f"gradient of x {CHANGED} after other values",
        lambda: softmax(backward=into_one_buffer(gradient)), **TWO,
    ),
    _fault(
        "finished_by_a_thread", history, "output changed after the call had returned, by finisher",
        lambda: softmax(forward=finished_by_a_thread), **TWO,
    ),
    _fault(
        "a_kind_of_tensor_of_its_own", forward_agrees, "output is a Lazy, a kind of tensor of its own",
        lambda: of_a_kind_of_its_own,
    ),
    _fault(
        "forward_on_a_stream_of_its_own", late, f"{LATE}output",
        lambda: softmax(forward=on_a_stream_of_its_own(right)), only_on="cuda",
    ),
    _fault(
        "backward_on_a_stream_of_its_own", late, f"{LATE}gradient of x",
        lambda: softmax(backward=on_a_stream_of_its_own(gradient)), only_on="cuda",
    ),
)  # fmt: skip
