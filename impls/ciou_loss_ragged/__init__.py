"""The operation ``ciou_loss_ragged`` on every backend."""
