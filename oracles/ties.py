"""Derivatives at a tie, where a function has a kink: at equal operands of a maximum, at a clamp's limit, at relu's 0.

There every convex combination of the one-sided derivatives is a generalised gradient, and so counts as right.
Source: F. H. Clarke, Optimization and Nonsmooth Analysis, 1983, section 1.2.
"""

from typing import Any

# A NumPy array, or anything that follows NumPy's array protocols.
Array = Any


def tie_derivative(choice: Array, low: Array, high: Array) -> Array:
    """Return the derivative at a tie: `choice`, the one that the implementations of this library document.

    Args:
        choice: the documented derivative.
        low: one one-sided derivative.
        high: the other one.

    Returns:
        `choice`. On arrays that carry an error bound, the bound admits every value from `low` to `high`, unless only
            the documented choice is allowed.
    """
    between = getattr(choice, "between", None)
    return choice if between is None else between(low, high)
