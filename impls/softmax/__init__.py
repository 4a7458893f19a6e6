"""The operation ``softmax`` on every backend."""
