"""The operation ``rope`` on every backend."""
