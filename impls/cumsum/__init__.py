"""The operation ``cumsum`` on every backend."""
