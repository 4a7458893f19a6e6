"""The steps of running error analysis: how errors go through each of NumPy's functions."""
