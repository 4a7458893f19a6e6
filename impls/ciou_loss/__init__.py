"""The operation ``ciou_loss`` on every backend."""
