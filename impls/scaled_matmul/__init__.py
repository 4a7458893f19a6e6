"""The operation ``scaled_matmul`` on every backend."""
