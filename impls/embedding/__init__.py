"""The operation ``embedding`` on every backend."""
