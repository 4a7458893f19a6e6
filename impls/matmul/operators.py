"""The operators of matmul, which Triton and CUDA C++ share except for the launches."""

from collections.abc import Callable, Hashable, Iterable
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
# The number of matrices that one launch copies to rows that begin at multiples of 16 bytes.
MOST_COPIES = 3


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
    matrices: Iterable[tuple[torch.Tensor, int | None]], padded: Callable[..., list[torch.Tensor]]
) -> list[tuple[torch.Tensor, bool]]:
    """Return matrices as TMA takes them, whose rows are dense: themselves, or their transposes.

    Args:
        matrices: each, not empty, with any strides, and its `one_axis_dense`.
        padded: copies matrices to rows that begin at multiples of 16 bytes. It gets those that TMA takes neither way.

    Returns:
        for each, the matrix, and whether it is the transpose.
    """
    found, copied = [], []
    for matrix, dense in matrices:
        transposed = dense == 0 if dense is not None else matrix.stride(0) == 1 != matrix.stride(1)
        rows = matrix.t() if transposed else matrix
        if dense is None:
            copied.append(rows)
        found.append((None if dense is None else rows, transposed))
    copies = iter(padded(*copied))
    return [(next(copies) if rows is None else rows, transposed) for rows, transposed in found]


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
    padded: Callable[..., list[torch.Tensor]],
    takes_maps: Callable[[torch.device], bool],
    setting: Callable[[], Hashable] = lambda: None,
) -> Callable[..., Any]:
    """Register ``matmul_<backend>`` and its gradient.

    Args:
        backend: part of the operator's name.
        product: maps ``(a, b, activation, negative_slope)`` to activation(a @ b), contiguous.
        padded: maps up to three matrices to copies whose rows begin at multiples of 16 bytes, in one launch. With an
            ``output``, the first copy is the gradient through the ``activation``, a number of `ACTIVATION_NUMBERS`,
            with ``negative_slope``, in the dtype of the output. It goes by the sign of the output.
        takes_maps: whether products of half types on a device take tensor maps.
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
        factors = {"grad": grad_output} | ({"b": b} if needs_a else {}) | ({"a": a} if needs_b else {})
        work = grad_output.numel() * a.shape[1]
        pays = work >= (LITTLE_WORK if a.is_cuda else 1) and a.itemsize == 2 and takes_maps(a.device)
        # The gradient through the activation, and what no map can describe, in one launch.
        copied = [
            name
            for name, factor in factors.items()
            if (pays and one_axis_dense(factor) is None) or (name == "grad" and output is not None)
        ]
        number = ACTIVATION_NUMBERS[activation]
        copies = padded(*(factors[n] for n in copied), output=output, activation=number, negative_slope=negative_slope)
        factors |= zip(copied, copies, strict=True)
        grad, a, b = factors["grad"], factors.get("a", a), factors.get("b", b)
        return (
            product(grad, b.t(), "none", 0.0) if needs_a else a.new_empty(0),
            product(a.t(), grad, "none", 0.0) if needs_b else b.new_empty(0),
        )

    return SIGNATURE.checked(MATMUL.register(backend, product, backward, setting))
