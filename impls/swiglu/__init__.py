"""The operation ``swiglu`` on every backend."""
