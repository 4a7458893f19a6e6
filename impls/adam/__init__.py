"""The operation ``adam`` on every backend."""
