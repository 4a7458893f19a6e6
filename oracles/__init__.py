"""The NumPy oracles: one module per operation, which defines the results that every backend must give."""
