"""The operation ``giou`` on every backend."""
