"""The operation ``matmul`` on every backend."""
