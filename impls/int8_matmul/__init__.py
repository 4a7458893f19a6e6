"""The operation ``int8_matmul`` on every backend: scaled_matmul's kernels, with a scale for each row."""
