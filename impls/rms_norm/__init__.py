"""The operation ``rms_norm`` on every backend."""
