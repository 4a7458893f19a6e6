"""The operation ``layer_norm`` on every backend."""
