"""The operators of matmul, which Triton and CUDA C++ share except for the launches."""

from collections.abc import Callable, Hashable
from typing import Any

import torch

from fourfold.backends.signature import signature_of
from fourfold.backends.tuning import Configuration, Tuner

from .torch_eager import matmul as definition

# Kernels take an activation as a number.
ACTIVATION_NUMBERS = {"none": 0, "relu": 1, "leaky_relu": 2}


# Products with fewer multiplications than this end too soon for configurations to differ by much.
LITTLE_WORK = 512 * 512 * 512
# The least number of terms that programs share where a result is small, and the most tiles of such a result.
MANY_TERMS, MOST_SHARED = 256, 1024


def run_fastest(
    tuner: Tuner,
    device: torch.device,
    extents: tuple[int, int, int],
    kind: tuple[Hashable, ...],
    fits: Callable[[Configuration], bool],
    default: Callable[[], Configuration],
    run: Callable[[Configuration], None],
) -> None:
    """Run the configuration that `Tuner.choose` chooses for a product of these extents and anything else in `kind`.

    Extents above one power of 2 and up to the next are of one kind.
    """
    m, n, k = extents
    classes = [(extent - 1).bit_length() if extent else -1 for extent in extents]
    run(tuner.choose(device, (*kind, *classes), fits, default, run, worthwhile=m * n * k >= LITTLE_WORK))


def one_axis_dense(matrix: torch.Tensor) -> int | None:
    """Return the axis whose elements are adjacent, or None if TMA cannot take the address or the other axis' stride."""
    if matrix.data_ptr() % 16 or 0 in matrix.shape:
        return None
    for axis in (1, 0):
        apart = matrix.stride(1 - axis)
        # With a single row its stride has no effect, but it must still be one that TMA accepts.
        if matrix.stride(axis) == 1 and apart >= matrix.shape[axis] and apart * matrix.element_size() % 16 == 0:
            return axis
    return None


def dense_rows(
    matrix: torch.Tensor, dense: int | None, padded: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, bool]:
    """Return a matrix as TMA takes it, whose rows are dense: itself, or its transpose.

    Args:
        matrix: not empty, with any strides.
        dense: its `one_axis_dense`.
        padded: copies a matrix to rows that begin at multiples of 16 bytes. It is asked where TMA takes neither.

    Returns:
        it, and whether it is the transpose.
    """
    transposed = dense == 0 if dense is not None else matrix.stride(0) == 1 != matrix.stride(1)
    rows = matrix.t() if transposed else matrix
    return rows if dense is not None else padded(rows), transposed


def padded_row(matrix: torch.Tensor) -> int:
    """Return the elements of a row, padded so that each row begins at a multiple of 16 bytes, or 128 if rows are long.

    Lines of the cache have 128 bytes.
    """
    columns, size = matrix.shape[1], matrix.element_size()
    unit = (128 if columns * size > 1024 else 16) // size
    return -(-columns // unit) * unit


SIGNATURE = signature_of(definition)
MATMUL = SIGNATURE.operator(
    lambda a, b, activation, negative_slope: a.new_empty((a.shape[0], b.shape[1])),
    saves=("a", "b", "output", "activation", "negative_slope"),
    saves_if={"output": lambda a, b, activation, negative_slope: activation != "none"},
    repeats=True,
)


def register_matmul(
    backend: str,
    product: Callable[..., torch.Tensor],
    activation_backward: Callable[..., torch.Tensor],
    setting: Callable[[], Hashable] = lambda: None,
) -> Callable[..., Any]:
    """Register ``matmul_<backend>`` and its gradient.

    Args:
        backend: part of the operator's name.
        product: maps ``(a, b, activation, negative_slope)`` to activation(a @ b), contiguous.
        activation_backward: maps ``(grad_output, output, activation, negative_slope)`` to the gradient of the product
            in the dtype of the output, with dense rows that begin at multiples of 16 bytes. It goes by the sign of the
            output.
        setting: returns what the launches depend on beside the arguments.
    """

    def backward(
        grad_output: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        output: torch.Tensor | None,
        activation: str,
        negative_slope: float,
        needs_a: bool,
        needs_b: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        grad = grad_output
        if output is not None:
            grad = activation_backward(grad_output, output, activation, negative_slope)
        return (
            product(grad, b.t(), "none", 0.0) if needs_a else a.new_empty(0),
            product(a.t(), grad, "none", 0.0) if needs_b else b.new_empty(0),
        )

    return SIGNATURE.checked(MATMUL.register(backend, product, backward, setting))
