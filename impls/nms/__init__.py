"""The operation ``nms`` on every backend."""
