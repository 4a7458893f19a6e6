"""The NumPy oracles: one module an operation, which defines the truth that every backend is held to."""
