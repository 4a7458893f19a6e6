"""The steps of running error analysis: the rules by which errors propagate through NumPy's functions."""
