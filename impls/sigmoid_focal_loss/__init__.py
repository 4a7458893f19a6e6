"""The operation ``sigmoid_focal_loss`` on every backend."""
