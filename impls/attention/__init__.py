"""The operation ``attention`` on every backend."""
