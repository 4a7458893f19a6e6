"""The operation ``rowwise_scaled_matmul`` on every backend: scaled_matmul's kernels, with a scale for each row."""
