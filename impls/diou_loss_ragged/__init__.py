"""The operation ``diou_loss_ragged`` on every backend."""
