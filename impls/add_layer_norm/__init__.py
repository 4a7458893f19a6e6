"""The operation ``add_layer_norm`` on every backend."""
