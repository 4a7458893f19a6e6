"""The operation ``giou_loss`` on every backend."""
