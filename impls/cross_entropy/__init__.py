"""The operation ``cross_entropy`` on every backend."""
