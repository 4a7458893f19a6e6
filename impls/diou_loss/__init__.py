"""The operation ``diou_loss`` on every backend."""
