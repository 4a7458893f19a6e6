"""The operation ``giou_loss_ragged`` on every backend."""
