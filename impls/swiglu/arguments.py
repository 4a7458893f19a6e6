"""Argument checks of swiglu, the same for every backend."""

from typing import Any

from fourfold.backends.arguments import check_floating, check_same


def check_swiglu(gate: Any, up: Any) -> None:
    """Two floating-point tensors of one shape, dtype and device; else a TypeError or ValueError."""
    check_floating("gate", gate)
    check_same("up", up, "gate", gate)
