"""The operation ``vector_add`` on every backend."""
