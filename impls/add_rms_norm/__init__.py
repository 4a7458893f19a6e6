"""The operation ``add_rms_norm`` on every backend."""
